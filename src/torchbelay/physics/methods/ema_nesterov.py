"""EMA-Nesterov: Nesterov's extrapolation, along an average of the path instead of its last step."""

from dataclasses import dataclass
from typing import ClassVar

from torchbelay.physics import arguments, schedules
from torchbelay.physics.coupling import Coupling
from torchbelay.physics.method import Varies
from torchbelay.physics.scaling import Unscaled
from torchbelay.physics.schedules import Bounds, Schedule

_BETA = Bounds(0, 1, open_low=False)


@dataclass(frozen=True)
class ema_nesterov(Unscaled):
    """EMA-Nesterov: w2 is an EMA with decay γ of the stepped weights, and gradients are taken ahead of them by β.

        x' = w1*,  m' = γ·m + (1−γ)·(x' − x),  w1' = x' + β·m'    where m is the last move of w2, w2' − w2
        a = −β(1−γ), b = 1 − γ, p = 1 + β(1−γ), q = 1 − γ

    x are the authors' weights, at which a gradient step arrives; they are not stored. β may be a schedule. Step t ends
    ahead of its weights by β of step t + 1, where the next gradient is taken. At γ = 0 it is Nesterov's momentum β.

    When to use it: to accelerate an optimizer with little momentum of its own, if Nesterov's own momentum is too
    noisy. The authors fade β in after the warm-up, and out at the end. In the long run the weights move at 1/(1 − β) of
    the learning rate.

    Reference: Yau et al., "EMA-Nesterov: stabilizing Nesterov's lookahead for accelerated deep learning optimization",
    2026.

    >>> ema_nesterov(beta=0.5, gamma=0.75).coupling(1, 0.1)
    Coupling(a=-0.125, b=0.25, p=1.125, q=0.25)
    """

    beta: float | Schedule
    gamma: float

    unscaled: ClassVar[str] = "it extrapolates by β once per step, and κ extrapolations are not one"

    def __post_init__(self) -> None:
        schedules.keep(self, "beta", _BETA)
        arguments.keep(self, "gamma", low=0, high=1, open_low=False)

    @property
    def varies(self) -> Varies:
        """When the coupling changes: "never" if β is a number, else "step"."""
        return "step" if callable(self.beta) else "never"

    @property
    def pulls(self) -> bool:
        """Whether the average changes the motion of the weights, at the first step or later."""
        return callable(self.beta) or self.beta != 0

    @property
    def rhythm(self) -> bool:
        """Whether no step can be left out; a schedule may begin at 0, where that does not show."""
        return callable(self.beta)

    @property
    def horizon(self) -> int:
        """The last step at which a scheduled β changes; 0 if it is not scheduled or does not say."""
        return schedules.horizon(self.beta)

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling of this step; ignores `lr`."""
        return self._coupling(step + 1)

    def settled(self, step: int, lr: float) -> Coupling:
        """Return the coupling as if β were at every step what it is at this one."""
        return self._coupling(step)

    def _coupling(self, step: int) -> Coupling:
        """Return the coupling with the β of this step."""
        share = 1 - self.gamma
        ahead = schedules.at("beta", self.beta, step, _BETA) * share
        return Coupling(-ahead, share, 1 + ahead, share)
