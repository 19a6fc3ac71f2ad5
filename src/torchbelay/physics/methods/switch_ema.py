"""Switch EMA: an EMA that the weights return to."""

from dataclasses import dataclass
from typing import ClassVar

from torchbelay.physics import arguments
from torchbelay.physics.coupling import Coupling, watch
from torchbelay.physics.method import Varies
from torchbelay.physics.scaling import Unscaled


@dataclass(frozen=True)
class switch_ema(Unscaled):
    """EMA with decay d; every `every` steps (an epoch, for instance) the weights become the average.

        a = d, b = 1 − d, p = 1 − d, q = 1 − d    at every `every`-th step
        a = 0, b = 1 − d, p = 1,     q = 1 − d    between

    When to use it: to let the training itself continue from the average, at the cost of an ordinary EMA.

    Reference: Li et al., "Switch EMA: a free lunch for better flatness and sharpness", 2024, Algorithm 1.

    >>> switch_ema(decay=0.75, every=100).coupling(100, 0.1)
    Coupling(a=0.75, b=0.25, p=0.25, q=0.25)
    """

    decay: float
    every: int

    varies: ClassVar[Varies] = "step"
    rhythm: ClassVar[bool] = True
    pulls: ClassVar[bool] = True
    unscaled: ClassVar[str] = "the weights switch at steps of their own; give decay^κ, and choose `every` anew"

    def __post_init__(self) -> None:
        arguments.keep(self, "decay", low=0, high=1)
        arguments.whole("every", self.every, low=1)

    @property
    def period(self) -> int:
        """The number of steps in a round, `every`."""
        return self.every

    @property
    def effective_lr_scale(self) -> float:
        """The share of n steps' motion that an average started at the weights makes: 1 − d(1−dⁿ)/(n(1−d))."""
        d, n = self.decay, self.every
        return 1 - d * (1 - d**n) / (n * (1 - d))

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling of this step; ignores `lr`."""
        rate = 1 - self.decay
        return watch(rate) if step % self.every else Coupling(self.decay, rate, rate, rate)
