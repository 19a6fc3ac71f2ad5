"""EASGD: elastic averaging with one worker."""

from dataclasses import dataclass
from typing import ClassVar

from torchbelay.physics import arguments
from torchbelay.physics.brief import brief
from torchbelay.physics.coupling import Coupling
from torchbelay.physics.method import Varies
from torchbelay.physics.scaling import Unscaled


@dataclass(frozen=True)
class easgd(Unscaled):
    """Elastic averaging SGD with one worker: weights and centre attract each other by α.

        a = b = α, p = 1, q = 0

    Give α, or ρ for α = lr·ρ.

    When to use it: to compare with BELAY. EASGD applies the whole update to the weights; BELAY applies 1 − κ1 of it.

    Reference: Zhang, Choromanska, LeCun, "Deep learning with elastic averaging SGD", 2015, Eqs. 5 and 6.

    >>> easgd(0.1).coupling(1, 0.5), easgd(rho=0.1).coupling(1, 0.5).a
    (Coupling(a=0.1, b=0.1, p=1.0, q=0.0), 0.05)
    """

    alpha: float | None = None
    rho: float | None = None

    unscaled: ClassVar[str] = "it applies the whole update beside the pull, so that κ steps are not one larger step"

    __repr__ = brief

    def __post_init__(self) -> None:
        if arguments.exactly_one(alpha=self.alpha, rho=self.rho) == "alpha":
            assert self.alpha is not None
            arguments.number("alpha", self.alpha, low=0, high=1)
        else:
            assert self.rho is not None
            arguments.number("rho", self.rho, low=0)

    @property
    def varies(self) -> Varies:
        """When the coupling changes: "lr" if ρ was given, else "never"."""
        return "never" if self.rho is None else "lr"

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling at this learning rate; ignores `step`."""
        alpha = self.alpha if self.alpha is not None else lr * (self.rho or 0.0)
        if alpha >= 1:
            raise ValueError(f"rho={self.rho!r} at lr={lr!r} makes α = lr·rho = {alpha:.4g}, and α < 1 is needed")
        return Coupling(alpha, alpha, 1.0, 0.0)
