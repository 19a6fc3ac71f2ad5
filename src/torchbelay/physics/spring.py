"""Spring: two masses on a damped spring, the weights w1 (mass m1) and their average w2 (mass m2).

Notation is that of Algorithm 1 of "Exponential weight averaging as damped harmonic motion" (Patsenker, Li and
Kluger, 2023): κi = k·Δt²/(2·mi), α = 1 − κ1, β = 1 − κ2. The paper contradicts itself in places; docs/errata.md lists
them, with the choice made here and its reason.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar, Literal, get_args

from . import arguments
from .coupling import Coupling, Follow, Inertia
from .explain import explain, explain_instability
from .modes import Modes
from .run_length import Rule, rescale_k
from .scaling import scaled_stiffness
from .warnings import UnstableSpringWarning, warn

Force = Literal["derived", "printed"]
Regime = Literal["velocity-free", "overdamped", "critical", "underdamped", "unstable"]


@dataclass(frozen=True, repr=False)
class Spring:
    """Two masses on a damped spring; `coupling(step, lr)` makes it an averaging method.

    Args:
        k: spring constant, scales the pull on both masses.
        m1: mass of the model's weights; with `inf` the average never pulls them (EMA).
        m2: mass of the average.
        c1, c2: damping. None means 2·m/Δt, at which positions do not depend on the velocity and none is kept
            (velocity-free, the setting of every experiment in the paper). Each mass has its own.
        dt: time between two steps.
        follow: "before", the average follows the weights from before the step (Algorithm 1); "after", the weights
            that the optimizer has stepped (Eq. 1, and every EMA library).
        force: the velocity that the update adds: "derived", 2α/Δt times the update, or "printed", 1/(2αΔt) times it.
        allow_unstable: let `Belay` accept a spring whose free motion grows.

    >>> spring = Spring(k=1.0, m1=10.0, m2=20.0)
    >>> spring.alpha, spring.beta
    (0.95, 0.975)
    >>> round(spring.effective_lr_scale, 4), round(spring.max_stable_lr(curvature=202), 6)
    (0.3167, 0.010158)
    """

    k: float
    m1: float
    m2: float
    c1: float | None = None
    c2: float | None = None
    dt: float = 1.0
    follow: Follow = "before"
    force: Force = "derived"
    allow_unstable: bool = False

    varies: ClassVar[str] = "never"  # the coupling is the same at every step and learning rate
    gathering: ClassVar[str] = "spring"  # every worker hangs on the average by a spring like this one

    def __post_init__(self) -> None:
        for name in ("k", "dt"):
            arguments.keep(self, name, low=0)
        arguments.one_of("follow", self.follow, get_args(Follow))
        arguments.one_of("force", self.force, get_args(Force))
        for index in ("1", "2"):
            self._check_mass(index)
        if self.has_velocity and self.follow == "after":
            raise ValueError(
                "follow='after' with damping other than the default is not defined: Algorithm 1's velocities follow "
                "the weights from before the step; use follow='before', or leave c1 and c2 out"
            )
        if not self.is_stable:
            warn(f"{self} is unstable: {explain_instability(self, self._common_damping)}", UnstableSpringWarning)

    def __repr__(self) -> str:
        """Return the call that makes this spring; checkpoints compare it."""
        shown = [f for f in fields(self) if f.name in ("k", "m1", "m2") or getattr(self, f.name) != f.default]
        plain = [f.name for f in shown] == ["k", "m1", "m2", "follow"] and (self.m1, self.m2) == (math.inf, 1.0)
        if plain and 2 * (1 - self.beta) == self.k:
            return f"Spring.ema(decay={self.beta!r})"
        return f"Spring({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"

    def _check_mass(self, index: str) -> None:
        m = arguments.positive_or_inf("m" + index, getattr(self, "m" + index))
        arguments.store(self, "m" + index, m)
        kappa = self._kappa(m)
        if kappa >= 1:
            raise ValueError(
                f"κ{index} = k·dt²/(2·m{index}) = {kappa:.4g} with k={self.k!r}, m{index}={m!r}, dt={self.dt!r} is not "
                f"below 1: the step would jump past the other mass; use m{index} > {kappa * m:.6g} or "
                f"k < {2 * m / self.dt / self.dt:.6g}"
            )
        c = getattr(self, "c" + index)
        if c is not None and m == math.inf:
            if c != math.inf:
                raise ValueError(
                    f"c{index}={c!r} with m{index}=inf: an infinite mass has no velocity; leave c{index} out"
                )
            object.__setattr__(self, "c" + index, None)  # inf = 2·inf/dt is the default
        elif c is not None:
            arguments.keep(self, "c" + index, low=0, open_low=False)

    def _kappa(self, m: float) -> float:
        return 0.0 if m == math.inf else self.k * self.dt * self.dt / 2 / m

    def _delta(self, m: float, c: float | None) -> float:
        """Return δ = c·Δt/(2m), and exactly 1 if c is 2m/Δt up to rounding."""
        delta = 1.0 if c is None else c * self.dt / (2 * m)
        return 1.0 if math.isclose(delta, 1, rel_tol=1e-14) else delta

    # Constructors ------------------------------------------------------------------------------------------------

    @classmethod
    def ema(cls, decay: float | None = None, *, half_life: float | None = None) -> "Spring":
        """Return the ordinary EMA, w2' = decay·w2 + (1−decay)·w1*: a spring with m1 = inf (Eq. 1).

        `decay` is the weight of the old average; `half_life` is the number of steps until that weight is ½.

        >>> Spring.ema(decay=0.999).half_life
        692.8...
        """
        if arguments.exactly_one(decay=decay, half_life=half_life) == "half_life":
            assert half_life is not None
            new = -math.expm1(-math.log(2) / arguments.number("half_life", half_life, low=0))
            arguments.share("half_life", half_life, new)
        else:
            assert decay is not None
            new = arguments.share("decay", decay, 1 - arguments.number("decay", decay, low=0, high=1))
        # m2 = 1 and k = 2·new make κ2 equal `new` to the last bit, and so the average equal torch's.
        return cls(k=2 * new, m1=math.inf, m2=1.0, follow="after")

    @classmethod
    def for_steps(
        cls,
        T: float,  # noqa: N803 (the paper's symbol)
        *,
        m1: float,
        m2: float,
        k0: float = 1.0,
        T0: float = 1_000_000,  # noqa: N803
        rule: Rule = "printed",
    ) -> "Spring":
        """Return the setting (k0, m1, m2), tuned for T0 steps, rescaled to a run of T steps (§3.3, the k(T) rule).

        "printed" is the paper's k = k0·T0/T; "exact" keeps (1 − κ1 − κ2)^T and gives an average for every T.

        >>> Spring.for_steps(10_000, m1=2000.0, m2=500.0).k
        100.0
        >>> round(Spring.for_steps(10_000, m1=2000.0, m2=500.0, rule="exact").k, 3)
        94.0...
        """
        return cls(k=rescale_k(T, m1=m1, m2=m2, k0=k0, T0=T0, rule=rule), m1=m1, m2=m2)

    @classmethod
    def critical(cls, *, k: float, m1: float, m2: float, dt: float = 1.0) -> "Spring":
        """Return the spring damped so that w2 reaches w1 soonest without ringing: δ = ω − ω²/4.

        (The continuous spring has δ = ω.) The distance then shrinks by 1 − ω per step, not by 1 − ω²/2.

        >>> spring = Spring.critical(k=1.0, m1=2000.0, m2=500.0)
        >>> spring.regime, round(spring.half_life, 1), round(Spring(k=1.0, m1=2000.0, m2=500.0).half_life, 1)
        ('critical', 13.5, 554.2)
        """
        free = cls(k=k, m1=m1, m2=m2, dt=dt)
        delta = free.omega - free.omega**2 / 4
        damping = [None if m == math.inf else 2 * m * delta / dt for m in (m1, m2)]
        return replace(free, c1=damping[0], c2=damping[1])

    def matched_ema(self) -> "Spring":
        """Return the EMA to compare this spring with: the same averaging rate, no pull on the model.

        Run it at learning rate `effective_lr_scale`·η. The remaining difference is the effect of the pull itself (θ),
        not of a smaller step or a longer memory.

        >>> ema = Spring(k=1.0, m1=2000.0, m2=500.0).matched_ema()
        >>> ema.m1, round(ema.decay, 6)
        (inf, 0.99875)
        """
        if self.m2 == math.inf:
            raise ValueError(f"{self} holds its average still: no EMA does that; give m2 a finite value")
        rate = 1 - self.decay if self.has_velocity else self.coupling().rate
        if not 0 < rate < 1:
            raise ValueError(
                f"{self} closes {rate:.4g} of the distance per step; an EMA closes between 0 and 1: lower k"
            )
        return Spring(k=2 * rate, m1=math.inf, m2=1.0, follow=self.follow)

    def scaled(self, kappa: float) -> "Spring":
        """Return the spring for a batch κ times as large: c = κ1 + κ2 becomes 1 − (1 − c)^κ, and θ = m2/m1 stays.

        >>> Spring.ema(decay=0.5).scaled(2).beta
        0.25
        """
        return replace(self, k=scaled_stiffness(self, kappa))

    # The numbers of a step ---------------------------------------------------------------------------------------

    def coupling(self, step: int = 1, lr: float = 0.0) -> Coupling:
        """Return the four numbers of a step, the same at every step and learning rate.

        With velocities they are the part of Algorithm 1 without v; `inertia1` and `inertia2` are the rest.
        """
        return Coupling(self.kappa1, self.kappa2, 1 - self.kappa1, self.kappa2 if self.follow == "after" else 0.0)

    @cached_property
    def inertia1(self) -> Inertia | None:
        """The motion of the weights' velocity v1, or None if positions do not depend on it."""
        return self._inertia(self.m1, self._delta(self.m1, self.c1), self._force_scale / self.dt)

    @cached_property
    def inertia2(self) -> Inertia | None:
        """The motion of the average's velocity v2, or None if positions do not depend on it."""
        return self._inertia(self.m2, self._delta(self.m2, self.c2), 0.0)

    @property
    def _force_scale(self) -> float:
        """The factor s in s·u, the gain of v1·Δt from an update u."""
        return 2 * self.alpha if self.force == "derived" else 1 / (2 * self.alpha)

    def _inertia(self, m: float, delta: float, push: float) -> Inertia | None:
        if delta == 1:
            return None
        return Inertia(self.dt * (1 - delta), 1 - 2 * delta, self.k * self.dt / m, push)

    @property
    def has_velocity(self) -> bool:
        """Whether either mass keeps a velocity."""
        return self.inertia1 is not None or self.inertia2 is not None

    # Properties of the motion ------------------------------------------------------------------------------------

    @property
    def kappa1(self) -> float:
        """κ1 = k·Δt²/(2·m1), the share of the way to w2 that w1 is pulled per step."""
        return self._kappa(self.m1)

    @property
    def kappa2(self) -> float:
        """κ2 = k·Δt²/(2·m2), the share of the way to w1 that w2 moves per step."""
        return self._kappa(self.m2)

    @property
    def alpha(self) -> float:
        """α = 1 − κ1 of Algorithm 1."""
        return 1 - self.kappa1

    @property
    def beta(self) -> float:
        """β = 1 − κ2 of Algorithm 1."""
        return 1 - self.kappa2

    @property
    def theta(self) -> float:
        """θ = m2/m1: gradients are taken at z + θ·(z − w2), beyond the centre of mass z as seen from the average."""
        return 0.0 if self.m1 == math.inf else self.m2 / self.m1

    @property
    def omega(self) -> float:
        """ω·Δt with ω² = k(1/m1 + 1/m2), the phase that the undamped pair advances per step."""
        return math.sqrt(2 * (self.kappa1 + self.kappa2))

    @cached_property
    def _common_damping(self) -> float | None:
        """δ = c·Δt/(2m) if both masses, infinite ones aside, have the same, else None."""
        deltas = [self._delta(m, c) for m, c in ((self.m1, self.c1), (self.m2, self.c2)) if m < math.inf]
        return deltas[0] if deltas and math.isclose(deltas[0], deltas[-1], rel_tol=1e-12) else None

    @cached_property
    def _modes(self) -> Modes:
        """The modes of the step with velocities."""
        delta = self._delta(self.m1, self.c1), self._delta(self.m2, self.c2)
        return Modes.of((self.kappa1, self.kappa2), delta, self._force_scale, anchored=self.m2 == math.inf)

    @cached_property
    def _relative_modes(self) -> list[complex]:
        """ζ = λ − 1 of the motion of w2 − w1; if damping is unequal, of every mode but translation."""
        if not self.has_velocity:
            return [complex(-self.kappa1 - self.kappa2)]
        if self._common_damping is None:
            return self._modes.free()
        s = self._common_damping + self.omega**2 / 4
        fast = -s - complex((s - self.omega) * (s + self.omega)) ** 0.5
        return [fast, self.omega**2 / fast]  # not −s + …, which loses the digits of a slow mode

    @property
    def decay(self) -> float:
        """ρ, the factor by which the distance between w1 and w2 shrinks per step in the long run, without updates."""
        return max(abs(1 + zeta) for zeta in self._relative_modes)

    @property
    def is_stable(self) -> bool:
        """Whether free motion comes to rest: for equal δ if 0 < ω² < 4δ and δ < 1; at δ = 1 if ω² < 4."""
        delta = self._common_damping
        if not self.has_velocity:
            return 0 < self.omega**2 < 4
        if delta is not None:
            return 0 < self.omega**2 < 4 * delta and delta < 1
        return self._modes.comes_to_rest()

    @property
    def half_life(self) -> float:
        """The number of steps in which the distance between w1 and w2 halves: ln ½ / ln ρ."""
        if self.decay == 0:
            return 0.0
        # ρ² − 1 = 2·Re ζ + |ζ|² keeps the digits of a slow mode that ρ itself rounds away.
        growth = max(2 * zeta.real + abs(zeta) ** 2 for zeta in self._relative_modes)
        if growth >= 0:
            return math.inf
        return math.log(0.5) / (math.log(self.decay) if self.decay < 0.5 else math.log1p(growth) / 2)

    @property
    def regime(self) -> Regime:
        """The kind of motion: velocity-free, overdamped, critical, underdamped or unstable."""
        if not self.is_stable:
            return "unstable"
        if not self.has_velocity:
            return "velocity-free"
        if self._common_damping is not None:
            excess = self._common_damping + self.omega**2 / 4 - self.omega
            if abs(excess) <= 1e-9 * self.omega:
                return "critical"
            return "overdamped" if excess > 0 else "underdamped"
        ringing = any(abs(zeta.imag) > 1e-9 * abs(zeta) for zeta in self._relative_modes)
        return "underdamped" if ringing else "overdamped"

    @property
    def effective_lr_scale(self) -> float:
        """The long-run motion of both masses per step under a constant update of 1: a factor on the learning rate."""
        if not self.has_velocity:
            return self.coupling().effective_lr_scale
        if self.force == "derived" and self.m1 < math.inf:
            c1, c2 = (2 * m / self.dt if c is None else c for m, c in ((self.m1, self.c1), (self.m2, self.c2)))
            brake = (c1 + c2) * self.dt
            return 2 * self.alpha * self.m1 / brake if brake > 0 else math.inf
        return self._modes.drift()

    def max_stable_lr(self, curvature: float, momentum: float = 0.0) -> float:
        """Return the largest learning rate at which SGD with this spring is stable on a quadratic of this curvature.

        Velocity-free: 2(α+β)/(α(1+β))/h. With velocities: the rate at which a mode first leaves the unit circle.
        `momentum`: as for `Coupling.max_stable_lr`.

        >>> round(Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0).max_stable_lr(curvature=1.0), 3)
        0.471
        """
        if not self.has_velocity:
            return self.coupling().max_stable_lr(curvature, momentum)
        h = arguments.number("curvature", curvature, low=0)
        beta = arguments.number("momentum", momentum, low=0, high=1, open_low=False)
        return self._modes.with_momentum(beta).first_crossing() / h if self.is_stable else 0.0

    def explain(self) -> str:
        """Return a paragraph in plain words: the kind of spring, its memory, its learning rate, what to change."""
        return explain(self)
