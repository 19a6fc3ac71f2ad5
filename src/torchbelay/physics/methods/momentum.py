"""Momentum as a repulsive spring: heavy ball and Nesterov."""

from dataclasses import dataclass
from typing import ClassVar

from torchbelay.physics import arguments
from torchbelay.physics.coupling import Coupling
from torchbelay.physics.method import Remembers, Varies
from torchbelay.physics.scaling import Unscaled


@dataclass(frozen=True)
class _Momentum(Unscaled, Remembers):
    """The part that heavy ball and Nesterov share: the spring repels by μ·lr_t/lr_{t−1}, and b = 1."""

    momentum: float

    varies: ClassVar[Varies] = "lr"
    remembers: ClassVar[int] = 3  # step, lr, lr of the step before
    unscaled: ClassVar[str] = "w2 is a point of the step before, not an average"

    def __post_init__(self) -> None:
        arguments.keep(self, "momentum", low=0, high=1, open_low=False)

    def _repulsion(self, step: int, lr: float) -> float:
        """Return −μ·lr_t/lr_{t−1}; the ratio rescales the last displacement to this learning rate."""
        if self.memory and self.memory[0] == step:  # called again for the same step
            previous = self.memory[2]
        else:
            past = self.past(step)
            previous = past[0] if past is not None else lr
        self.remember((step, lr, previous))
        # After a step at lr = 0 the displacement is 0 and the velocity is lost: every finite factor gives the same.
        return -self.momentum * (lr / previous if previous else 1.0)


@dataclass(frozen=True)
class heavy_ball(_Momentum):
    """Heavy-ball momentum μ: w2 is w1 of the step before, and the spring repels.

        a = −μ·lr_t/lr_{t−1}, b = 1, p = 1, q = 0

    Around plain SGD it equals torch's SGD(momentum=μ) under every schedule of positive learning rates. A step at
    lr = 0 moves nothing; the velocity is a difference of weights, so that such a step loses it.

    When to use it: to study momentum as a coupling. To train with momentum, use the optimizer's own.

    Reference: Polyak, "Some methods of speeding up the convergence of iteration methods", 1964.

    >>> heavy_ball(0.9).coupling(1, 0.1)
    Coupling(a=-0.9, b=1.0, p=1.0, q=0.0)
    """

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling; if `lr` changes, call once per step and in order."""
        return Coupling(self._repulsion(step, lr), 1.0, 1.0, 0.0)


@dataclass(frozen=True)
class nesterov(_Momentum):
    """Nesterov's momentum μ: w2 is w1* of the step before, and the spring repels.

        a = −μ·lr_t/lr_{t−1}, b = 1, p = 1 + μ, q = 1

    Around plain SGD it equals torch's SGD(momentum=μ, nesterov=True) under every schedule of positive learning rates.
    A step at lr = 0 loses the velocity.

    When to use it: to study momentum as a coupling. To train with momentum, use the optimizer's own.

    Reference: Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013.

    >>> nesterov(0.5).coupling(1, 0.1)
    Coupling(a=-0.5, b=1.0, p=1.5, q=1.0)
    """

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling; if `lr` changes, call once per step and in order."""
        return Coupling(self._repulsion(step, lr), 1.0, 1 + self.momentum, 1.0)
