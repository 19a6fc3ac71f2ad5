"""The centre-of-mass family: one rate, one effective learning rate, and θ alone differs."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self, get_args

from torchbelay.physics import arguments, schedules
from torchbelay.physics.brief import brief
from torchbelay.physics.coupling import Coupling, Follow
from torchbelay.physics.method import Varies
from torchbelay.physics.scaling import scaled_rate
from torchbelay.physics.schedules import Bounds, Schedule

# The numbers of a coupling grow with 1/(1 + θ), and so does what rounding leaves of w1 and w2: of the 16 digits of a
# float, 8 are lost here.
NEAREST = -1 + 1e-8

_THETA = Bounds(-1)
_RATE = Bounds(0, 1)
_SCHEDULED_RATE = Bounds(0, 1, open_high=False)  # of 1/t the first is 1


@dataclass(frozen=True)
class centred:
    """The centre-of-mass family: w2 is an EMA of the centre z at rate c, gradients are taken at z + θ·(z − w2).

        b = c/(1+θ), a = θ·b, p = 1 + θ(1−c), q = c    (p = 1 + θ, q = 0 with follow="before": a lagged EMA)

    z moves by the whole of u (effective learning rate 1), so that members differ in θ only. θ > 0 is BELAY's side
    (θ = m2/m1). θ = 0 is EMA. At −1 < θ < 0 gradients are taken between the average and z: that is Generalized Primal
    Averaging with μx = 1 − c and μy = −θ, of which schedule-free is the case c = 1/t.

    θ and the rate may be schedules. Step t begins at w1 = z + θ_t·(z − w2) and ends at z' + θ_{t+1}·(z' − w2'):

        b = c/(1+θ_t), a = (θ_t − G)/(1+θ_t), p = 1 + G, q = c    with G = θ_{t+1}(1−c)
                                                                  (p = 1 + θ_{t+1}, q = 0 with follow="before")

    While θ moves, a/b is not θ. `settled(step, lr)` has the numbers of a θ that stands still.
    The numbers grow with 1/(1+θ), so that a θ with 1 + θ < 1e-8 is refused.

    When to use it: with −1 < θ < 0, to survive a learning rate that is high. In experiments, to change the pull alone.

    Reference: this library; θ is `Coupling.theta`. θ < 0: Defazio et al., "Smoothing DiLoCo with primal averaging for
    faster training of LLMs", 2025.

    >>> from torchbelay.physics.methods import ema
    >>> centred(theta=0.0, rate=0.25).coupling(1, 0.1) == ema(0.75).coupling(1, 0.1)
    True
    >>> centred(theta=1.0, rate=0.25).coupling(1, 0.1)
    Coupling(a=0.125, b=0.125, p=1.75, q=0.25)
    >>> centred(theta=schedules.linear(1.0, 0.0, steps=3), rate=0.5).coupling(2, 0.1)
    Coupling(a=0.333..., b=0.333..., p=1.0, q=0.5)
    """

    theta: float | Schedule
    rate: float | Schedule
    follow: Follow = "after"

    effective_lr_scale: ClassVar[float] = 1.0  # z moves by the whole of u, whatever θ does

    __repr__ = brief

    def __post_init__(self) -> None:
        schedules.keep(self, "theta", _THETA)
        for step in {1, max(1, schedules.horizon(self.theta))}:
            self._theta(step)
        schedules.keep(self, "rate", _SCHEDULED_RATE if callable(self.rate) else _RATE)
        arguments.one_of("follow", self.follow, get_args(Follow))

    @property
    def varies(self) -> Varies:
        """When the coupling changes: "never" if θ and the rate are numbers, else "step"."""
        return "step" if callable(self.theta) or callable(self.rate) else "never"

    @property
    def pulls(self) -> bool:
        """Whether the average changes the motion of the weights, at the first step or later."""
        return callable(self.theta) or self.theta != 0

    @property
    def rhythm(self) -> bool:
        """Whether no step can be left out; a schedule of θ may begin at 0, where that does not show."""
        return callable(self.theta)

    @property
    def horizon(self) -> int:
        """The last step at which a schedule changes; 0 if there is none or it does not say."""
        return schedules.horizon(self.theta, self.rate)

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling of this step; ignores `lr`."""
        return self._coupling(step, self._theta(step + 1) if callable(self.theta) else self.theta)

    def settled(self, step: int, lr: float) -> Coupling:
        """Return the coupling as if θ were at every step what it is at this one."""
        return self._coupling(step, self._theta(step))

    def _theta(self, step: int) -> float:
        theta = schedules.at("theta", self.theta, step, _THETA)
        if theta >= NEAREST:
            return theta
        when = f"theta={self.theta!r} at step {step}: " if callable(self.theta) else ""
        raise ValueError(
            f"{when}theta={theta!r} is too near to -1: rounding would destroy the numbers of the coupling; use a theta "
            "of at least -0.99999999"
        )

    def _coupling(self, step: int, later: float) -> Coupling:
        """Return the coupling of a step that begins with its own θ and ends with θ = `later`."""
        theta, c = self._theta(step), schedules.at("rate", self.rate, step, _SCHEDULED_RATE)
        b = c / (1 + theta)
        kept = later * (1 - c)
        a = theta * b if later == theta else (theta - kept) / (1 + theta)
        if self.follow == "before":
            return Coupling(a, b, 1 + later, 0.0)
        return Coupling(a, b, 1 + kept, c)

    def scaled(self, kappa: float) -> Self:
        """Return the average for a batch κ times as large: c becomes 1 − (1 − c)^κ, and θ stays.

        Schedules count steps, so that the rule has no answer: they are refused.

        >>> centred(theta=-0.5, rate=0.5).scaled(2)
        centred(theta=-0.5, rate=0.75)
        """
        if callable(self.theta) or callable(self.rate):
            raise ValueError(
                f"{self!r}.scaled({kappa!r}) is not defined: its schedules count steps. Make them anew: numbers of "
                "steps divide by κ, rates become 1 − (1 − c)^κ, and θ stays"
            )
        return replace(self, rate=scaled_rate(self, self.rate, kappa))
