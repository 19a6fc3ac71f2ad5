"""EMA: the exponential moving average of the weights."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from torchbelay.physics import arguments
from torchbelay.physics.coupling import Coupling, Follow, watch
from torchbelay.physics.method import Law, Varies

Warmup = Literal["ratio", "inverse-power"]


@dataclass(frozen=True)
class ema:
    """Exponential moving average with decay d: w2' = d·w2 + (1 − d)·w1*.

        a = 0, b = 1 − d, p = 1, q = b    (q = 0 with follow="before": w2' = d·w2 + (1 − d)·w1)

    Give the decay, or the half-life in steps (d = 2^(−1/half_life)), or in samples with the batch size. A warm-up
    lowers the decay of step t to the smaller of d and

        "ratio"            (1 + t)/(10 + t)           as in TensorFlow's ExponentialMovingAverage
        "inverse-power"    1 − (1 + t)^(−power)       as in Crowson's and Wang's packages

    When to use it: first. It leaves the training as it is; evaluate, sample and save the average.

    Reference: Patsenker, Li, Kluger, "Exponential weight averaging as damped harmonic motion", 2023, Eq. 1.

    >>> ema(0.9).coupling(1, 0.1)
    Coupling(a=0.0, b=0.09999999999999998, p=1.0, q=0.09999999999999998)
    >>> round(1 - ema(half_life_samples=500_000, batch_size=512).coupling(1, 0.1).b, 6)
    0.99929
    >>> [round(1 - ema(0.9999, warmup="ratio").coupling(t, 0.1).b, 3) for t in (1, 10, 1000)]
    [0.182, 0.55, 0.991]
    """

    decay: float | None = None
    half_life: float | None = None
    half_life_samples: float | None = None
    batch_size: int | None = None
    warmup: Warmup | None = None
    power: float = 2 / 3
    follow: Follow = "after"

    def __post_init__(self) -> None:
        given = arguments.exactly_one(
            decay=self.decay, half_life=self.half_life, half_life_samples=self.half_life_samples
        )
        if self.decay is not None:
            arguments.number("decay", self.decay, low=0, high=1)
        else:
            arguments.number(given, getattr(self, given), low=0)
        if (self.half_life_samples is None) != (self.batch_size is None):
            raise ValueError(
                f"half_life_samples={self.half_life_samples!r} and batch_size={self.batch_size!r} go together: "
                "batch_size counts the samples that one optimizer step sees"
            )
        if self.batch_size is not None:
            arguments.whole("batch_size", self.batch_size, low=1)
        arguments.share(given, getattr(self, given), self._rate())
        if self.warmup is not None:
            arguments.one_of("warmup", self.warmup, get_args(Warmup))
        arguments.number("power", self.power, low=0)
        arguments.one_of("follow", self.follow, get_args(Follow))

    @property
    def varies(self) -> Varies:
        """When the coupling changes: "never" without a warm-up, else "step"."""
        return "never" if self.warmup is None else "step"

    @property
    def law(self) -> Law | None:
        """The warm-up as a formula, if the average follows the stepped weights."""
        if self.warmup is None or self.follow == "before":
            return None
        if self.warmup == "ratio":
            return Law("power", exponent=1.0, scale=9.0, shift=10.0, floor=self._rate())
        return Law("power", exponent=self.power, shift=1.0, floor=self._rate())

    def _rate(self) -> float:
        """The weight of the new point after the warm-up, 1 − d."""
        if self.decay is not None:
            return 1 - self.decay
        steps = self.half_life if self.half_life is not None else (self.half_life_samples or 0) / (self.batch_size or 1)
        return -math.expm1(-math.log(2) / steps)

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling of this step; ignores `lr`."""
        rate = self._rate()
        if self.warmup == "ratio":
            rate = max(rate, 9 / (10 + step))
        elif self.warmup == "inverse-power":
            rate = max(rate, (1 + step) ** -self.power)
        return watch(rate, self.follow)
