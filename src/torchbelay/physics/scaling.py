"""The EMA scaling rule: the same average for a batch κ times as large, which takes one step for κ of the old ones.

An average that closes the share c of its distance per step closes 1 − (1 − c)^κ in κ steps, at any real κ > 0. θ, which
says where gradients are taken, stays. `method.scaled(kappa)` applies the rule to those methods that it is defined for.

Reference: Busbridge et al., "How to scale your EMA", 2023.
"""

from typing import TYPE_CHECKING, ClassVar, NoReturn, Self

from . import arguments
from .coupling import closed

if TYPE_CHECKING:
    from .spring import Spring


class Unscaled:
    """A method that the EMA scaling rule is not defined for."""

    unscaled: ClassVar[str]  # why not

    def scaled(self, kappa: float) -> NoReturn:
        """Refuse: the EMA scaling rule is not defined for this method."""
        raise TypeError(f"{self!r}.scaled({kappa!r}) is not defined: {self.unscaled}")


class Scaleless:
    """A method whose weights depend on shares of the run alone, so that another batch size changes none of them."""

    def scaled(self, kappa: float) -> Self:
        """Return this very method: the EMA scaling rule keeps its numbers."""
        arguments.number("kappa", kappa, low=0)
        return self


def scaled_rate(method: object, rate: float, kappa: float) -> float:
    """Return 1 − (1 − c)^κ, the rate c of a method under the scaling rule; refuse what has none or rounds to 1.

    >>> scaled_rate("an average", 0.5, 2)
    0.75
    """
    factor = arguments.number("kappa", kappa, low=0)
    if rate > 1 and factor != factor // 1:
        raise ValueError(
            f"{method!r}.scaled({kappa!r}): it closes {rate:.4g} of the distance per step, past the other mass, and "
            "only a whole number of such steps can be made one; give a whole kappa"
        )
    new = closed(rate, factor)
    if rate < 1 <= new:
        raise ValueError(
            f"{method!r}.scaled({kappa!r}) keeps nothing of what the average was: (1 − {rate:.4g})^{factor:g} rounds "
            "to 0; use a smaller kappa"
        )
    return new


def scaled_stiffness(spring: "Spring", kappa: float) -> float:
    """Return the k of a velocity-free spring under the scaling rule; `Spring.scaled()` calls this."""
    if spring.has_velocity:
        raise TypeError(
            f"{spring!r}.scaled({kappa!r}) is not defined: its velocities move at every step; leave c1 and c2 out"
        )
    rate = spring.coupling().rate
    new = scaled_rate(spring, rate, kappa)
    return spring.k * (new / rate) if rate else spring.k
