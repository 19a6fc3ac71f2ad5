"""Generalized primal averaging: gradients are taken between the average and the base iterate."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torchbelay.physics import arguments
from torchbelay.physics.coupling import Coupling
from torchbelay.physics.method import Varies


@dataclass(frozen=True)
class primal_averaging:
    """Generalized primal averaging: w1 is its y, w2 its x; its base iterate z is not stored.

        x' = μx·x + (1−μx)·z',  y = μy·x + (1−μy)·z
        a = −μy(1−μx)/(1−μy), b = (1−μx)/(1−μy), p = 1 − μx·μy, q = 1 − μx

    It is `centred` with θ = −μy and the rate 1 − μx, at the effective learning rate 1.

    When to use it: in place of schedule-free averaging, if the average should have a constant memory.

    Reference: Defazio, Mishchenko, Raman, Shi, Xiao, "Smoothing DiLoCo with primal averaging for faster training of
    LLMs", 2025.

    >>> primal_averaging(mu_x=0.75, mu_y=0.5).coupling(1, 0.1)
    Coupling(a=-0.25, b=0.5, p=0.625, q=0.25)
    """

    mu_x: float
    mu_y: float

    varies: ClassVar[Varies] = "never"

    def __post_init__(self) -> None:
        arguments.keep(self, "mu_x", low=0, high=1, open_low=False)
        arguments.keep(self, "mu_y", low=0, high=1, open_low=False)

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling; ignores `step` and `lr`."""
        x, y = self.mu_x, self.mu_y
        return Coupling(-y * (1 - x) / (1 - y), (1 - x) / (1 - y), 1 - y * x, 1 - x)

    def scaled(self, kappa: float) -> Self:
        """Return the average for a batch κ times as large: μx becomes μx^κ, and μy stays.

        >>> primal_averaging(mu_x=0.5, mu_y=0.75).scaled(2)
        primal_averaging(mu_x=0.25, mu_y=0.75)
        """
        return replace(self, mu_x=self.mu_x ** arguments.number("kappa", kappa, low=0))
