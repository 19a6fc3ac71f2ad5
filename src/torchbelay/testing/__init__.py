"""The contract suite that users run on their own models and optimizers. It needs no test framework."""

from .check import CONTRACTS, ContractError, Report, check

__all__ = ["CONTRACTS", "ContractError", "Report", "check"]
