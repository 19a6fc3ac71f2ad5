"""EASGD: elastic averaging, with one worker or several."""

from dataclasses import dataclass
from typing import ClassVar

from torchbelay.physics import arguments
from torchbelay.physics.brief import brief
from torchbelay.physics.coupling import Coupling, watch
from torchbelay.physics.method import Gathering, Varies
from torchbelay.physics.scaling import Unscaled


@dataclass(frozen=True)
class easgd(Unscaled):
    """Elastic averaging SGD: weights and centre attract each other by α.

        a = b = α, p = 1, q = 0    at every `every`-th step
        a = b = 0, p = 1, q = 0    between

    Give α, or ρ for α = lr·ρ. `every` is the paper's communication period τ. With several workers
    (`Belay(..., workers=group)`) all hang on one centre: w2' = w2 + α·Σ(w1_i − w2).

    When to use it: with several workers, which are each pulled to one average. With one worker, to compare with BELAY:
    EASGD applies the whole update to the weights, BELAY applies 1 − κ1 of it.

    Reference: Zhang, Choromanska, LeCun, "Deep learning with elastic averaging SGD", 2015, Eqs. 5, 6 and Algorithm 1.

    >>> easgd(0.1).coupling(1, 0.5), easgd(rho=0.1).coupling(1, 0.5).a
    (Coupling(a=0.1, b=0.1, p=1.0, q=0.0), 0.05)
    """

    alpha: float | None = None
    rho: float | None = None
    every: int = 1

    gathering: ClassVar[Gathering] = "spring"
    pulls: ClassVar[bool] = True
    unscaled: ClassVar[str] = "it applies the whole update beside the pull, so that κ steps are not one larger step"

    __repr__ = brief

    def __post_init__(self) -> None:
        if arguments.exactly_one(alpha=self.alpha, rho=self.rho) == "alpha":
            arguments.keep(self, "alpha", low=0, high=1)
        else:
            arguments.keep(self, "rho", low=0)
        arguments.whole("every", self.every, low=1)

    @property
    def varies(self) -> Varies:
        """When the coupling changes: "lr" if ρ was given; else "step" if some steps are no sync, or "never"."""
        if self.rho is not None:
            return "lr"
        return "never" if self.every == 1 else "step"

    @property
    def rhythm(self) -> bool:
        """Whether some steps are special: True unless every step is a sync."""
        return self.every > 1

    @property
    def period(self) -> int:
        """The number of steps from one sync to the next, `every`."""
        return self.every

    @property
    def effective_lr_scale(self) -> float:
        """The share of an update that the middle between weights and centre moves by: 1/2, whatever α and `every`."""
        return 0.5

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling of this step at this learning rate."""
        alpha = self.alpha if self.alpha is not None else lr * (self.rho or 0.0)
        if not 0 <= alpha < 1:
            raise ValueError(f"rho={self.rho!r} at lr={lr!r} makes α = lr·rho = {alpha:.4g}, and 0 ≤ α < 1 is needed")
        return watch(0.0) if step % self.every else Coupling(alpha, alpha, 1.0, 0.0)
