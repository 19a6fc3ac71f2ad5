"""The centre-of-mass family: one rate, one effective learning rate, and θ alone differs."""

from dataclasses import dataclass
from typing import ClassVar, get_args

from torchbelay.physics import arguments
from torchbelay.physics.coupling import Coupling, Follow
from torchbelay.physics.method import Varies


@dataclass(frozen=True)
class centred:
    """The centre-of-mass family: w2 is an EMA of the centre z at rate c, gradients are taken at z + θ·(z − w2).

        b = c/(1+θ), a = θ·b, p = 1 + θ(1−c), q = c    (p = 1 + θ, q = 0 with follow="before": a lagged EMA)

    z moves by the whole of u (effective learning rate 1), so that members differ in θ only. θ > 0 is BELAY's side
    (θ = m2/m1). θ = 0 is EMA. At −1 < θ < 0 gradients are taken between the average and z, as in schedule-free.

    When to use it: in experiments on the pull alone, at an equal averaging rate and an equal effective learning rate.

    Reference: this library; θ is `Coupling.theta`.

    >>> from torchbelay.physics.methods import ema
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
        arguments.one_of("follow", self.follow, get_args(Follow))

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling; ignores `step` and `lr`."""
        theta, c = self.theta, self.rate
        b = c / (1 + theta)
        if self.follow == "before":
            return Coupling(theta * b, b, 1 + theta, 0.0)
        return Coupling(theta * b, b, 1 + theta * (1 - c), c)
