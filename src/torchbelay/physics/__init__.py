"""Springs, couplings and methods as plain numbers. Nothing in this folder imports torch or numpy."""

from .critical import critical
from .inner_momentum import theta_floor

__all__ = ["critical", "theta_floor"]
