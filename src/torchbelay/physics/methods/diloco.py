"""DiLoCo: rounds of ordinary steps, and between two rounds one step of Nesterov momentum."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torchbelay.physics import arguments
from torchbelay.physics.brief import brief
from torchbelay.physics.coupling import Coupling, Inertia, watch
from torchbelay.physics.method import Gathering, Varies
from torchbelay.physics.scaling import Unscaled


@dataclass(frozen=True)
class diloco(Unscaled):
    """DiLoCo: every `every` steps SGD with Nesterov momentum μ and rate α steps w2 by d = w1* − w2; w1 restarts there.

        v' = μ·v + d,  w2' = w2 + α·((1+μ)·d + μ²·v),  w1' = w2'    at every `every`-th step
        nothing moves but w1                                        between

    In four numbers b = p = q = α(1+μ) and a = 1 − b at a sync, beside the velocity v of w2. With several workers
    (`Belay(..., workers=group)`) w1* is their mean.

    When to use it: for workers that can seldom talk to each other. With one worker it is Lookahead with momentum: over
    a round the weights keep α/(1−μ) of what the inner optimizer did, 7 times its motion by default.

    Reference: Douillard et al., "DiLoCo: Distributed low-communication training of language models", 2023, Algorithm 1.

    >>> method = diloco(every=3, lr=0.5, momentum=0.5)
    >>> method.coupling(2, 0.1).b, method.coupling(3, 0.1)
    (0.0, Coupling(a=0.25, b=0.75, p=0.75, q=0.75))
    """

    every: int = 500
    lr: float = 0.7
    momentum: float = 0.9

    varies: ClassVar[Varies] = "step"
    rhythm: ClassVar[bool] = True
    pulls: ClassVar[bool] = True
    gathering: ClassVar[Gathering] = "mean"
    unscaled: ClassVar[str] = "its rounds count steps and have no rate; choose `every` anew"

    __repr__ = brief

    def __post_init__(self) -> None:
        arguments.whole("every", self.every, low=1)
        arguments.keep(self, "momentum", low=0, high=1, open_low=False)
        arguments.keep(self, "lr", low=0)
        if self.lr >= self.max_stable_lr:
            raise ValueError(
                f"lr={self.lr!r} with momentum={self.momentum!r} is unstable: directions in which a round comes to "
                f"rest would overshoot more and more; use lr < {self.max_stable_lr:.4g}"
            )

    @property
    def max_stable_lr(self) -> float:
        """2(1+μ)/(1+2μ): the limit of α, in directions in which the inner optimizer reaches the minimum in a round.

        In other directions, and for an inner optimizer that does not overshoot, the limit is larger.
        """
        return 2 * (1 + self.momentum) / (1 + 2 * self.momentum)

    @property
    def period(self) -> int:
        """The number of steps in a round, `every`."""
        return self.every

    @property
    def effective_lr_scale(self) -> float:
        """What the weights keep, in the long run, of the inner optimizer's motion: α/(1−μ)."""
        return self.lr / (1 - self.momentum)

    @cached_property
    def inertia2(self) -> Inertia:
        """The motion of the velocity v at a sync; between two syncs it stands still."""
        mu = self.momentum
        return Inertia(carry=self.lr * mu**2, stay=mu, pull=1.0, push=1.0)

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling of this step; ignores the inner optimizer's `lr`."""
        if step % self.every:
            return watch(0.0)
        s = self.lr * (1 + self.momentum)
        return Coupling(1 - s, s, s, s)
