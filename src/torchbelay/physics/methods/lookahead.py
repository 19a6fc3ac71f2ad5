"""Lookahead: k steps forward, one step back."""

from dataclasses import dataclass
from typing import ClassVar

from torchbelay.physics import arguments
from torchbelay.physics.brief import brief
from torchbelay.physics.coupling import Coupling, watch
from torchbelay.physics.method import Gathering, Varies
from torchbelay.physics.scaling import Unscaled


@dataclass(frozen=True)
class lookahead(Unscaled):
    """Lookahead: every `k` steps the slow weights w2 move by `alpha` of the way to w1, and w1 restarts from them.

        a = 1 − s, b = s, p = s, q = s    at every k-th step, with s = alpha
        a = 0,     b = 0, p = 1, q = 0    between

    The slow weights start as a copy of the weights. With several workers (`Belay(..., workers=group)`) their mean takes
    the place of w1 at a sync; with alpha = 1 that is local SGD.

    When to use it: to steady an inner optimizer that oscillates. Over a round the weights keep `alpha` of what the
    inner optimizer did, so its learning rate may need to rise.

    Reference: Zhang, Lucas, Ba, Hinton, "Lookahead optimizer: k steps forward, 1 step back", 2019, Algorithm 1.

    >>> lookahead(k=5, alpha=0.8).coupling(5, 0.1)
    Coupling(a=0.19999999999999996, b=0.8, p=0.8, q=0.8)
    """

    k: int = 6
    alpha: float = 0.5

    varies: ClassVar[Varies] = "step"
    rhythm: ClassVar[bool] = True
    pulls: ClassVar[bool] = True
    gathering: ClassVar[Gathering] = "mean"
    unscaled: ClassVar[str] = "its rounds count steps and have no rate; choose k anew"

    __repr__ = brief

    def __post_init__(self) -> None:
        arguments.whole("k", self.k, low=1)
        arguments.keep(self, "alpha", low=0, high=1, open_high=False)

    @property
    def period(self) -> int:
        """The number of steps in a round, k."""
        return self.k

    @property
    def effective_lr_scale(self) -> float:
        """The share of the inner optimizer's motion that the weights keep over a round: `alpha`."""
        return self.alpha

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling of this step; ignores `lr`."""
        s = self.alpha
        return watch(0.0) if step % self.k else Coupling(1 - s, s, s, s)
