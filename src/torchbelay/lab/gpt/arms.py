"""What is compared. Every arm is AdamW with the same warm-up; they differ in the schedule and in the spring.

`centred` moves its centre of mass by the whole of each step whatever θ is, so that arms of the same learning rate have
the same effective rate: θ = 0 at that rate is the EMA that is matched to BELAY (θ > 0). θ < 0 is Generalized Primal
Averaging, and schedule-free is its case c = 1/t.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torchbelay.physics.method import Method
from torchbelay.physics.methods import centred, ema, lookahead, schedule_free

Maker = Callable[[float], Method]  # makes a method of a given rate c


@dataclass(frozen=True)
class Arm:
    """A way to train; w1 and every average of it are results."""

    name: str
    theta: float | None = None  # if the arm is of the centre-of-mass family
    cosine: bool = False  # the learning rate falls to 0; otherwise it is constant after the warm-up
    beta1: float = 0.9
    method: Maker = lambda rate: ema(decay=1 - rate)
    spectators: Mapping[str, Maker] = field(default_factory=dict)

    def lr_at(self, step: int, steps: int, warmup: int) -> float:
        """Return the share of the nominal rate that a step takes, the first being 1.

        >>> round(Arm("cosine", cosine=True).lr_at(55, 100, warmup=10), 9), Arm("constant").lr_at(5, 100, warmup=10)
        (0.5, 0.5)
        """
        if step < warmup:
            return step / warmup
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / (steps - warmup)) if self.cosine else 1.0


# EMAs of the same run that only watch it, to see whether the rate is a good choice
WATCHING: Mapping[str, Maker] = {
    "EMA, twice the rate": lambda rate: ema(decay=1 - 2 * rate),
    "EMA, half the rate": lambda rate: ema(decay=1 - rate / 2),
}


def _of_theta(theta: float) -> Arm:
    name = f"θ = {theta:+g}".replace("-", "−")
    return Arm(name, theta, method=lambda rate: centred(theta=theta, rate=rate))


COSINE = Arm("cosine", cosine=True, spectators=WATCHING)
CONSTANT = Arm("constant", theta=0.0, spectators=WATCHING)
QUARTER, HALF, BELAY = _of_theta(-0.25), _of_theta(-0.5), _of_theta(0.25)
SCHEDULE_FREE = Arm("schedule-free", beta1=0.0, method=lambda _: schedule_free(beta=0.9))
LOOKAHEAD = Arm("Lookahead", method=lambda _: lookahead(k=5, alpha=0.5))
ARMS = {arm.name: arm for arm in (COSINE, CONSTANT, QUARTER, HALF, SCHEDULE_FREE, LOOKAHEAD, BELAY)}
