"""The contract suite that users run on their own models and optimizers. It needs no test framework."""

from .bench import mean_square as mean_square
from .contracts import CONTRACTS
from .contracts import WATCHING as WATCHING
from .suite import DEFAULT as DEFAULT
from .suite import ContractError, Report, check

__all__ = ["CONTRACTS", "ContractError", "Report", "check"]
