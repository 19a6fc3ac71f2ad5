"""The contract suite that users run on their own models, and `identify` for averaging code of others.

Neither needs a test framework.
"""

from .bench import mean_square as mean_square
from .contracts import CONTRACTS
from .contracts import WATCHING as WATCHING
from .identification import Identification, identify
from .suite import DEFAULT as DEFAULT
from .suite import ContractError, Report, check

__all__ = ["CONTRACTS", "ContractError", "Identification", "Report", "check", "identify"]
