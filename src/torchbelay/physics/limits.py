"""The two ends of EMA: decay 0, a copy of the weights, and decay 1, an average that stands still.

No spring is either of them: one would have to reach the weights in a single step, the other to have no force. The
methods are `ema(0.0)` and `ema(1.0)`; `Limit` has the words and numbers about them that `Spring` has about the others.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from .coupling import Coupling, watch


@dataclass(frozen=True)
class Limit:
    """EMA with decay 0 or 1, under the names that `Spring` uses.

    >>> Limit(0.0).half_life, Limit(1.0).half_life
    (0.0, inf)
    """

    decay: float

    m1: ClassVar[float] = math.inf
    m2: ClassVar[float] = 1.0
    c1: ClassVar[None] = None
    c2: ClassVar[None] = None
    dt: ClassVar[float] = 1.0
    follow: ClassVar[str] = "after"
    force: ClassVar[str] = "derived"
    regime: ClassVar[Literal["velocity-free"]] = "velocity-free"
    alpha: ClassVar[float] = 1.0
    kappa1: ClassVar[float] = 0.0
    theta: ClassVar[float] = 0.0
    effective_lr_scale: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if self.decay not in (0, 1):
            raise ValueError(f"decay={self.decay!r} is not an end; every other EMA is Spring.ema(decay={self.decay!r})")

    @property
    def k(self) -> float:
        """The spring constant that a spring would have, with m2 = 1: 2 or 0."""
        return 2 * self.kappa2

    @property
    def beta(self) -> float:
        """β = 1 − κ2, the decay."""
        return float(self.decay)

    @property
    def kappa2(self) -> float:
        """κ2, the share of the way to the weights that the average moves per step: 1 or 0."""
        return 1.0 - self.decay

    @property
    def half_life(self) -> float:
        """The number of steps in which the distance halves: 0 or infinity."""
        return math.inf if self.decay else 0.0

    def coupling(self, step: int = 1, lr: float = 0.0) -> Coupling:
        """Return the four numbers of a step, the same at every step and learning rate."""
        return watch(self.kappa2)

    def matched_ema(self) -> "Limit":
        """Return the EMA to compare this one with: itself."""
        return self

    def max_stable_lr(self, curvature: float, momentum: float = 0.0) -> float:
        """Return SGD's largest stable learning rate on a quadratic of this curvature: 2/h without momentum."""
        return self.coupling().max_stable_lr(curvature, momentum)

    def explain(self) -> str:
        """Return a paragraph in plain words.

        >>> print(Limit(1.0).explain())
        An average that stands still (EMA with decay 1): it never moves ...
        """
        rate = "The learning rate is what the optimizer says, and so is the stable range of SGD: ηh < 2 at curvature h."
        if self.decay:
            return (
                "An average that stands still (EMA with decay 1): it never moves from where it began, and it never "
                f"pulls the weights. It forgets nothing. {rate} To let it follow the weights lower the decay."
            )
        return (
            "A copy of the weights (EMA with decay 0): after every step the average is the weights themselves, and it "
            f"never pulls them. It remembers nothing. {rate} For a memory raise the decay."
        )
