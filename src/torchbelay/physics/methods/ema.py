"""EMA: the exponential moving average of the weights."""

import math
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

from torchbelay.physics import arguments, schedules
from torchbelay.physics.brief import brief
from torchbelay.physics.coupling import Coupling, Follow, watch
from torchbelay.physics.method import Law, Varies
from torchbelay.physics.schedules import Bounds, Schedule

Warmup = Literal["ratio", "inverse-power"]

_DECAY = Bounds(0, 1, open_low=False, open_high=False)
_POWER = 2 / 3  # of an inverse-power warm-up
_LARGEST = 700.0  # exp of it is still a float


@dataclass(frozen=True)
class ema:
    """Exponential moving average with decay d: w2' = d·w2 + (1 − d)·w1*.

        a = 0, b = 1 − d, p = 1, q = b    (q = 0 with follow="before": w2' = d·w2 + (1 − d)·w1)

    Give the decay, or the half-life in steps (d = 2^(−1/half_life)), or in samples with the batch size. The decay may
    be a schedule (`torchbelay.schedules.cosine(0.996, 1.0, steps)`, or any function of the step), and 0 and 1 are
    decays too: with 0 the average is a copy of the weights, with 1 it stands still.

    A warm-up, and EDM's `rampup_ratio` r, lower the decay of step t to the smallest of d and

        warmup="ratio"            (1 + t)/(10 + t)                    as in TensorFlow's ExponentialMovingAverage
        warmup="inverse-power"    1 − (1 + t/inv_gamma)^(−power)      as in Crowson's and Wang's packages
        rampup_ratio=r            2^(−1/(r·(t − 1))), 0 at step 1     the half-life is at most r of the steps so far

    but never below `min_decay`.

    These settings reproduce other packages, called after every optimizer step. U is their `update_after_step`, and
    `start` is the option of `Belay`: these packages copy the weights until step U + 1, and count from there.

        diffusers' EMAModel         ema(decay, warmup="ratio", min_decay=…), start=U+1
          with use_ema_warmup       ema(decay, warmup="inverse-power", inv_gamma=…, power=…, min_decay=…), start=U+1
        timm's ModelEmaV3           ema(decay), start=U+1; without update(step=…), start=0
          with use_warmup           ema(decay, warmup="inverse-power", inv_gamma=warmup_gamma, power=warmup_power,
                                    min_decay=…), start=U+1
        ema-pytorch's EMA           ema(beta, warmup="inverse-power", inv_gamma=…, power=…, min_decay=min_value),
                                    start=U+1, for update_every=1; ema(1.0) for beta=1
        k-diffusion's ema_update    ema(max_value, warmup="inverse-power", inv_gamma=…, power=…), start=start_at+1,
          with EMAWarmup            for min_value=0
        EDM's training loop         ema(half_life_samples=…, batch_size=…, rampup_ratio=0.05), start=0

    ema-pytorch applies its decay once per update: for update_every=N, give `Belay` every=N and `ema` the N-th root of
    that decay. With min_value > 0, EMAWarmup's decay is min_value from the first step on: give it as a function.

    When to use it: first. It leaves the training as it is; evaluate, sample and save the average.

    Reference: Patsenker, Li, Kluger, "Exponential weight averaging as damped harmonic motion", 2023, Eq. 1.
    `rampup_ratio`: Karras et al., "Elucidating the design space of diffusion-based generative models", 2022.

    >>> ema(0.9).coupling(1, 0.1)
    Coupling(a=0.0, b=0.09999999999999998, p=1.0, q=0.09999999999999998)
    >>> round(1 - ema(half_life_samples=500_000, batch_size=512).coupling(1, 0.1).b, 6)
    0.99929
    >>> [round(1 - ema(0.9999, warmup="ratio").coupling(t, 0.1).b, 3) for t in (1, 10, 1000)]
    [0.182, 0.55, 0.991]
    >>> teacher = ema(schedules.cosine(0.996, 1.0, steps=1000))
    >>> [round(1 - teacher.coupling(t, 0.1).b, 4) for t in (1, 500, 1000)]
    [0.996, 0.998, 1.0]
    """

    decay: float | Schedule | None = None
    half_life: float | None = None
    half_life_samples: float | None = None
    batch_size: int | None = None
    warmup: Warmup | None = None
    power: float = _POWER
    follow: Follow = "after"
    inv_gamma: float = 1.0
    min_decay: float = 0.0
    rampup_ratio: float | None = None

    __repr__ = brief

    def __post_init__(self) -> None:
        given = arguments.exactly_one(
            decay=self.decay, half_life=self.half_life, half_life_samples=self.half_life_samples
        )
        if self.decay is not None:
            schedules.keep(self, "decay", _DECAY)
        else:
            arguments.keep(self, given, low=0)
        if (self.half_life_samples is None) != (self.batch_size is None):
            raise ValueError(
                f"half_life_samples={self.half_life_samples!r} and batch_size={self.batch_size!r} go together: "
                "batch_size counts the samples that one optimizer step sees"
            )
        if self.batch_size is not None:
            arguments.whole("batch_size", self.batch_size, low=1)
        if self.decay != 0 and not callable(self.decay):
            arguments.share(given, getattr(self, given), self._rate(1))
        if self.warmup is not None:
            arguments.one_of("warmup", self.warmup, get_args(Warmup))
        arguments.keep(self, "power", low=0)
        arguments.one_of("follow", self.follow, get_args(Follow))
        self._check_warmup(given)

    def _check_warmup(self, given: str) -> None:
        """Refuse numbers of a warm-up that are out of range, or that nothing would use."""
        arguments.keep(self, "inv_gamma", low=0)
        for name, default in (("power", _POWER), ("inv_gamma", 1.0)):
            if (value := getattr(self, name)) != default and self.warmup != "inverse-power":
                raise ValueError(
                    f"{name}={value!r} belongs to warmup='inverse-power', and warmup={self.warmup!r}; leave {name} "
                    "out, or give that warm-up"
                )
        if self.rampup_ratio is not None:
            arguments.keep(self, "rampup_ratio", low=0)
        if not arguments.keep(self, "min_decay", **_DECAY._asdict()):
            return
        if self.varies == "never":
            raise ValueError(
                f"min_decay={self.min_decay!r} is the least decay of a warm-up or a schedule, and here is neither; "
                "leave it out, or give warmup or rampup_ratio"
            )
        if not callable(self.decay) and 1 - self.min_decay < self._rate(1):
            raise ValueError(
                f"min_decay={self.min_decay!r} is above the decay {1 - self._rate(1):.6g} that {given}="
                f"{getattr(self, given)!r} ends at; lower it"
            )

    @property
    def varies(self) -> Varies:
        """When the coupling changes: "never" if the decay is constant and does not warm up, else "step"."""
        constant = self.warmup is None and self.rampup_ratio is None and not callable(self.decay)
        return "never" if constant else "step"

    @property
    def horizon(self) -> int:
        """The last step at which a scheduled decay changes; 0 if it is not scheduled or does not say."""
        return schedules.horizon(self.decay)

    @property
    def law(self) -> Law | None:
        """The warm-up as a formula, if the average follows the stepped weights and nothing else changes its decay."""
        changed = callable(self.decay) or self.rampup_ratio is not None or self.min_decay
        if self.warmup is None or self.follow == "before" or changed:
            return None
        if self.warmup == "ratio":
            return Law("power", exponent=1.0, scale=9.0, shift=10.0, floor=self._rate(1))
        if abs(self.power * math.log(self.inv_gamma)) > _LARGEST:
            return None
        # (1 + t/γ)^(−power) = γ^power·(t + γ)^(−power)
        scale = self.inv_gamma**self.power
        return Law("power", exponent=self.power, scale=scale, shift=self.inv_gamma, floor=self._rate(1))

    def _rate(self, step: int) -> float:
        """The weight of the new point without a warm-up, 1 − d."""
        if self.decay is not None:
            return 1 - schedules.at("decay", self.decay, step, _DECAY)
        return -math.expm1(-math.log(2) / self._half_life)

    @property
    def _half_life(self) -> float:
        """The half-life in steps, given in steps or in samples."""
        return self.half_life if self.half_life is not None else (self.half_life_samples or 0) / (self.batch_size or 1)

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling of this step; ignores `lr`."""
        rate = self._rate(step)
        if self.warmup == "ratio":
            rate = max(rate, 9 / (10 + step))
        elif self.warmup == "inverse-power":
            rate = max(rate, (1 + step / self.inv_gamma) ** -self.power)
        if self.rampup_ratio is not None:
            rate = max(rate, 1.0 if step == 1 else -math.expm1(-math.log(2) / (self.rampup_ratio * (step - 1))))
        return watch(min(rate, 1 - self.min_decay) if self.min_decay else rate, self.follow)

    def scaled(self, kappa: float) -> Self:
        """Return the average for a batch κ times as large: d^κ, or the half-life divided by κ.

        `min_decay` becomes min_decay^κ, and `rampup_ratio`, a share of the run, stays. A half-life in samples becomes
        one in steps. A warm-up and a schedule count steps, so that the rule has no answer: they are refused.

        >>> ema(0.99).scaled(2)
        ema(decay=0.9801)
        """
        factor = arguments.number("kappa", kappa, low=0)
        if self.warmup is not None or callable(self.decay):
            what = "schedule of the decay" if callable(self.decay) else f"warmup={self.warmup!r}"
            raise ValueError(
                f"{self!r}.scaled({kappa!r}) is not defined: its {what} counts steps. Scale the end of it and choose "
                "its steps anew: numbers of steps divide by κ, decays become d^κ"
            )
        least = self.min_decay**factor
        if self.decay is None:
            return replace(
                self, half_life=self._half_life / factor, half_life_samples=None, batch_size=None, min_decay=least
            )
        new = float(self.decay) ** factor
        return replace(self, decay=new if 1 - new < 1 else 0.0, min_decay=least)
