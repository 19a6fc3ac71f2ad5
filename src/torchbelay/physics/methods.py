"""Every averaging method as a schedule of couplings: an object with `coupling(step, lr)`.

Steps count from 1. w1 are the weights that gradients are taken at, w2 is the average; u = w1* − w1 is the inner
optimizer's update. A method of your own needs `coupling(step, lr) -> Coupling` and nothing else (see `Method`).
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from . import arguments
from .coupling import Coupling
from .method import Law, Method, Remembers, Varies
from .spring import Follow, Spring

__all__ = [
    "Method",
    "belay",
    "centred",
    "easgd",
    "ema",
    "heavy_ball",
    "lookahead",
    "nesterov",
    "power_ema",
    "primal_averaging",
    "schedule_free",
    "swa",
    "switch_ema",
]

_FOLLOW = ("before", "after")


def _watch(b: float, follow: Follow = "after") -> Coupling:
    """Coupling of an average that only watches, at rate b."""
    return Coupling(0.0, b, 1.0, b if follow == "after" else 0.0)


def belay(k: float = 1.0, m1: float = 2000.0, m2: float = 500.0, *, follow: Follow = "before") -> Spring:
    """BELAY, velocity-free: a = κ1, b = κ2, p = 1 − κ1, q = 0 (q = κ2 with follow="after"), κi = k/(2·mi).

    Patsenker, Li, Kluger, "Exponential weight averaging as damped harmonic motion", 2023, Algorithm 1. The defaults are
    the paper's setting for MNIST. The same as `Spring(k, m1, m2)`, which also knows damping.

    >>> belay(k=1.0, m1=10.0, m2=20.0).coupling(1, 0.1)
    Coupling(a=0.05, b=0.025, p=0.95, q=0.0)
    """
    return Spring(k=k, m1=m1, m2=m2, follow=follow)


@dataclass(frozen=True)
class ema:
    """Exponential moving average with decay d: a = 0, b = 1 − d, p = 1, q = b (q = 0 with follow="before").

    Give the decay, or the half-life in steps (d = 2^(−1/half_life)), or in samples with the batch size. A warm-up
    lowers the decay of early steps to min(d, …): "ratio" by (1+t)/(10+t) (as in TensorFlow's
    ExponentialMovingAverage), "inverse-power" by 1 − (1+t)^(−power) (as in Crowson's and Wang's packages), t the step.

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
    warmup: Literal["ratio", "inverse-power"] | None = None
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
        if self.warmup is not None:
            arguments.one_of("warmup", self.warmup, ("ratio", "inverse-power"))
        arguments.number("power", self.power, low=0)
        arguments.one_of("follow", self.follow, _FOLLOW)

    @property
    def varies(self) -> Varies:
        """Constant without a warm-up."""
        return "never" if self.warmup is None else "step"

    @property
    def law(self) -> Law | None:
        """The warm-up as a formula, where the average follows the stepped weights."""
        if self.warmup is None or self.follow == "before":
            return None
        if self.warmup == "ratio":
            return Law("power", exponent=1.0, scale=9.0, shift=10.0, floor=self._new())
        return Law("power", exponent=self.power, shift=1.0, floor=self._new())

    def _new(self) -> float:
        """Weight of the new point once warm: 1 − d."""
        if self.decay is not None:
            return 1 - self.decay
        steps = self.half_life if self.half_life is not None else (self.half_life_samples or 0) / (self.batch_size or 1)
        return -math.expm1(-math.log(2) / steps)

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling; `lr` does not matter."""
        new = self._new()
        if self.warmup == "ratio":
            new = max(new, 9 / (10 + step))
        elif self.warmup == "inverse-power":
            new = max(new, (1 + step) ** -self.power)
        return _watch(new, self.follow)


@dataclass(frozen=True)
class swa:
    """Uniform average of the stepped weights: a = 0, b = 1/(n+1), p = 1, q = b, n averaged so far.

    Izmailov et al., "Averaging weights leads to wider optima and better generalization", 2018. Averages every
    step; every `every`-th one only (an epoch, say) if asked.

    >>> [swa().coupling(t, 0.1).b for t in (1, 2, 4)]
    [1.0, 0.5, 0.25]
    """

    every: int = 1

    varies: ClassVar[Varies] = "step"

    def __post_init__(self) -> None:
        arguments.whole("every", self.every, low=1)

    @property
    def rhythm(self) -> bool:
        """Has special steps where it does not take each."""
        return self.every > 1

    @property
    def law(self) -> Law:
        """1/n of the n-th point."""
        return Law("power", exponent=1.0, scale=float(self.every), every=self.every)

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling; `lr` does not matter."""
        return _watch(0.0 if step % self.every else self.every / step)


@dataclass(frozen=True)
class power_ema:
    """Power-function average, a step of weight ∫τ^γ dτ over its time: a = 0, b = 1 − (1 − 1/t)^(γ+1), p = 1, q = b.

    Karras et al., "Analyzing and improving the training dynamics of diffusion models", 2024, §3. Give the exponent γ,
    or the width σ_rel of the average relative to the length of the run: σ_rel² = (γ+1)/((γ+2)²(γ+3)).

    >>> round(power_ema(sigma_rel=0.05).exponent, 2), round(power_ema(sigma_rel=0.10).exponent, 2)
    (16.97, 6.94)
    >>> power_ema(gamma=1.0).coupling(2, 0.1).b
    0.75
    """

    gamma: float | None = None
    sigma_rel: float | None = None

    varies: ClassVar[Varies] = "step"

    def __post_init__(self) -> None:
        if arguments.exactly_one(gamma=self.gamma, sigma_rel=self.sigma_rel) == "gamma":
            assert self.gamma is not None
            arguments.number("gamma", self.gamma, low=0, open_low=False)
        else:
            assert self.sigma_rel is not None
            # γ = 0, the uniform average, is the widest: σ_rel = 1/√12
            arguments.number("sigma_rel", self.sigma_rel, low=0, high=math.nextafter(12**-0.5, 1))

    @cached_property
    def exponent(self) -> float:
        """γ, given or solved from σ_rel (which falls steadily with γ) by bisection."""
        if self.gamma is not None:
            return self.gamma
        assert self.sigma_rel is not None
        low, high = 0.0, 1.0 / self.sigma_rel + 1  # σ_rel < 1/γ for every γ
        while (middle := (low + high) / 2) not in (low, high):
            wide = math.sqrt((middle + 1) / (middle + 3)) / (middle + 2) > self.sigma_rel
            low, high = (middle, high) if wide else (low, middle)
        return low

    @property
    def law(self) -> Law:
        """The formula above."""
        return Law("relative", exponent=self.exponent + 1)

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling; `lr` does not matter."""
        return _watch(1.0 if step == 1 else -math.expm1((self.exponent + 1) * math.log1p(-1 / step)))


@dataclass(frozen=True)
class easgd:
    """Elastic averaging with one worker: a = b = α, p = 1, q = 0. Give α, or ρ for α = lr·ρ.

    Zhang, Choromanska, LeCun, "Deep learning with elastic averaging SGD", 2015, Eqs. 5 and 6.

    >>> easgd(0.1).coupling(1, 0.5), easgd(rho=0.1).coupling(1, 0.5).a
    (Coupling(a=0.1, b=0.1, p=1.0, q=0.0), 0.05)
    """

    alpha: float | None = None
    rho: float | None = None

    def __post_init__(self) -> None:
        if arguments.exactly_one(alpha=self.alpha, rho=self.rho) == "alpha":
            assert self.alpha is not None
            arguments.number("alpha", self.alpha, low=0, high=1)
        else:
            assert self.rho is not None
            arguments.number("rho", self.rho, low=0)

    @property
    def varies(self) -> Varies:
        """With the learning rate if ρ was given."""
        return "never" if self.rho is None else "lr"

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling of this learning rate."""
        alpha = self.alpha if self.alpha is not None else lr * (self.rho or 0.0)
        if alpha >= 1:
            raise ValueError(f"rho={self.rho!r} at lr={lr!r} makes α = lr·rho = {alpha:.4g}, and α < 1 is needed")
        return Coupling(alpha, alpha, 1.0, 0.0)


@dataclass(frozen=True)
class lookahead:
    """Every `k` steps slow weights move by `alpha` of their way to the fast ones, and these start again from them.

    With s for alpha: a = 1 − s, b = s, p = s, q = s at a sync; a = b = q = 0, p = 1 between. Slow weights start as a
    copy. Zhang, Lucas, Ba, Hinton, "Lookahead optimizer: k steps forward, 1 step back", 2019, Algorithm 1.

    >>> lookahead(k=5, alpha=0.8).coupling(5, 0.1)
    Coupling(a=0.19999999999999996, b=0.8, p=0.8, q=0.8)
    """

    k: int = 6
    alpha: float = 0.5

    varies: ClassVar[Varies] = "step"
    rhythm: ClassVar[bool] = True
    pulls: ClassVar[bool] = True

    def __post_init__(self) -> None:
        arguments.whole("k", self.k, low=1)
        arguments.number("alpha", self.alpha, low=0, high=math.nextafter(1, 2))

    @property
    def period(self) -> int:
        """A round."""
        return self.k

    @property
    def effective_lr_scale(self) -> float:
        """Over a whole round the weights keep `alpha` of what the inner optimizer did."""
        return self.alpha

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling; `lr` does not matter."""
        s = self.alpha
        return _watch(0.0) if step % self.k else Coupling(1 - s, s, s, s)


@dataclass(frozen=True)
class switch_ema:
    """EMA with decay d, and every `every` steps (an epoch, say) the weights become the average and go on from it.

    a = d, b = 1 − d, p = 1 − d, q = 1 − d at a switch; a = 0, p = 1 between. Li et al., "Switch EMA: a free lunch for
    better flatness and sharpness", 2024, Algorithm 1.

    >>> switch_ema(decay=0.75, every=100).coupling(100, 0.1)
    Coupling(a=0.75, b=0.25, p=0.25, q=0.25)
    """

    decay: float
    every: int

    varies: ClassVar[Varies] = "step"
    rhythm: ClassVar[bool] = True
    pulls: ClassVar[bool] = True

    def __post_init__(self) -> None:
        arguments.number("decay", self.decay, low=0, high=1)
        arguments.whole("every", self.every, low=1)

    @property
    def period(self) -> int:
        """A round."""
        return self.every

    @property
    def effective_lr_scale(self) -> float:
        """Over a round of n steps, what an average that starts at the weights gains on them: 1 − d(1−dⁿ)/(n(1−d))."""
        d, n = self.decay, self.every
        return 1 - d * (1 - d**n) / (n * (1 - d))

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling; `lr` does not matter."""
        new = 1 - self.decay
        return _watch(new) if step % self.every else Coupling(self.decay, new, new, new)


@dataclass(frozen=True)
class _Momentum(Remembers):
    """What heavy ball and Nesterov share: the spring repels by μ·lr_t/lr_{t−1}, and b = 1."""

    momentum: float

    varies: ClassVar[Varies] = "lr"
    remembers: ClassVar[int] = 3  # step, lr, lr of the step before

    def __post_init__(self) -> None:
        arguments.number("momentum", self.momentum, low=0, high=1, open_low=False)

    def _repulsion(self, step: int, lr: float) -> float:
        """Return −μ·lr_t/lr_{t−1}, which turns the last displacement into this learning rate's."""
        if self.memory and self.memory[0] == step:  # asked again for the same step
            previous = self.memory[2]
        else:
            past = self.past(step)
            previous = past[0] if past is not None else lr
        self.remember((step, lr, previous))
        # After a step at lr = 0 the displacement is 0 and its velocity lost: any finite factor gives the same.
        return -self.momentum * (lr / previous if previous else 1.0)


@dataclass(frozen=True)
class heavy_ball(_Momentum):
    """Momentum μ as a repulsive spring: a = −μ·lr_t/lr_{t−1}, b = 1, p = 1, q = 0. w2 is w1 of the step before.

    Equals torch's SGD(momentum=μ) around plain SGD, under any schedule of positive learning rates (a step at 0 moves
    nothing, and a velocity that is a difference of weights is lost with it). Polyak, "Some methods of
    speeding up the convergence of iteration methods", 1964.

    >>> heavy_ball(0.9).coupling(1, 0.1)
    Coupling(a=-0.9, b=1.0, p=1.0, q=0.0)
    """

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling; call once a step, in order, if `lr` changes."""
        return Coupling(self._repulsion(step, lr), 1.0, 1.0, 0.0)


@dataclass(frozen=True)
class nesterov(_Momentum):
    """Nesterov's momentum μ: a = −μ·lr_t/lr_{t−1}, b = 1, p = 1 + μ, q = 1. w2 is w1* of the step before.

    Equals torch's SGD(momentum=μ, nesterov=True) around plain SGD, under any schedule of positive learning rates
    (a step at 0 forgets the velocity). Sutskever et al., "On the importance of initialization and momentum in deep
    learning", 2013.

    >>> nesterov(0.5).coupling(1, 0.1)
    Coupling(a=-0.5, b=1.0, p=1.5, q=1.0)
    """

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling; call once a step, in order, if `lr` changes."""
        return Coupling(self._repulsion(step, lr), 1.0, 1 + self.momentum, 1.0)


@dataclass(frozen=True)
class primal_averaging:
    """Generalized primal averaging: w1 is its y, w2 its x, z the base iterate between the lines.

    a = −μy(1−μx)/(1−μy), b = (1−μx)/(1−μy), p = 1 − μx·μy, q = 1 − μx, from x' = μx·x + (1−μx)·z',
    y = μy·x + (1−μy)·z. Defazio, Mishchenko, Raman, Shi, Xiao, "Smoothing DiLoCo with primal averaging for faster
    training of LLMs", 2025.

    >>> primal_averaging(mu_x=0.75, mu_y=0.5).coupling(1, 0.1)
    Coupling(a=-0.25, b=0.5, p=0.625, q=0.25)
    """

    mu_x: float
    mu_y: float

    varies: ClassVar[Varies] = "never"

    def __post_init__(self) -> None:
        arguments.number("mu_x", self.mu_x, low=0, high=1, open_low=False)
        arguments.number("mu_y", self.mu_y, low=0, high=1, open_low=False)

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling, the same at every step."""
        x, y = self.mu_x, self.mu_y
        return Coupling(-y * (1 - x) / (1 - y), (1 - x) / (1 - y), 1 - y * x, 1 - x)


@dataclass(frozen=True)
class schedule_free(Remembers):
    """Schedule-free averaging: w1 is its y (gradients are taken there), w2 its x (evaluate this one).

    a = −β·c/(1−β), b = c/(1−β), p = 1 − β + β·c, q = c with c the weight of this step in x: its t^r·lr_max^w over the
    sum of all so far (1/t at a constant learning rate and r = 0), lr_max the largest learning rate seen. Around AdamW
    give that betas=(0, β2). Defazio et al., "The road less scheduled", 2024.

    >>> schedule_free(0.5).coupling(2, 0.1)
    Coupling(a=-0.5, b=1.0, p=0.75, q=0.5)
    """

    beta: float = 0.9
    r: float = 0.0
    weight_lr_power: float = 2.0

    varies: ClassVar[Varies] = "lr"
    remembers: ClassVar[int] = 5  # step, largest lr, sum of weights; and the last two before this step

    def __post_init__(self) -> None:
        arguments.number("beta", self.beta, low=0, high=1, open_low=False)
        arguments.number("r", self.r, low=0, open_low=False)
        arguments.number("weight_lr_power", self.weight_lr_power, low=0, open_low=False)

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling; call once a step, in order, if `lr` changes."""
        if self.memory and self.memory[0] == step:  # asked again for the same step
            lr_max, total = self.memory[3:]
        else:
            past = self.past(step)
            lr_max, total = past[:2] if past is not None else (lr, self._constant_total(step - 1, lr))
        best = max(lr_max, lr)
        weight = float(step**self.r * best**self.weight_lr_power)
        self.remember((step, best, total + weight, lr_max, total))
        c = weight / (total + weight) if total + weight else 0.0
        beta = self.beta
        return Coupling(-beta * c / (1 - beta), c / (1 - beta), 1 - beta + beta * c, c)

    def _constant_total(self, steps: int, lr: float) -> float:
        """Sum of the weights of that many steps at a constant learning rate."""
        counted = math.fsum(t**self.r for t in range(1, steps + 1)) if self.r else steps
        return float(counted * lr**self.weight_lr_power)


@dataclass(frozen=True)
class centred:
    """The centre-of-mass family: a lagged or ordinary EMA of z at this rate, gradients at z + θ·(z − w2).

    With c for rate: b = c/(1+θ), a = θ·b, p = 1 + θ(1−c), q = c; with follow="before" p = 1 + θ, q = 0. z moves by the
    whole of u (effective learning rate 1), so that only θ differs between members. θ > 0 is BELAY's side (θ = m2/m1),
    θ = 0 is EMA, −1 < θ < 0 lies between the average and z, as schedule-free does.

    >>> centred(theta=0.0, rate=0.25).coupling(1, 0.1) == ema(0.75).coupling(1, 0.1)
    True
    >>> centred(theta=1.0, rate=0.25).coupling(1, 0.1)
    Coupling(a=0.125, b=0.125, p=1.75, q=0.25)
    """

    theta: float
    rate: float
    follow: Follow = "after"

    varies: ClassVar[Varies] = "never"

    def __post_init__(self) -> None:
        arguments.number("theta", self.theta, low=-1)
        arguments.number("rate", self.rate, low=0, high=1)
        arguments.one_of("follow", self.follow, _FOLLOW)

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling, the same at every step."""
        theta, c = self.theta, self.rate
        b = c / (1 + theta)
        if self.follow == "before":
            return Coupling(theta * b, b, 1 + theta, 0.0)
        return Coupling(theta * b, b, 1 + theta * (1 - c), c)
