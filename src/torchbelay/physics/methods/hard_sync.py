"""Hard sync: a target network, copied now and then."""

from dataclasses import dataclass
from typing import ClassVar

from torchbelay.physics import arguments
from torchbelay.physics.coupling import Coupling, watch
from torchbelay.physics.method import Law, Varies
from torchbelay.physics.scaling import Unscaled


@dataclass(frozen=True)
class hard_sync(Unscaled):
    """A target network: every `every` steps w2 becomes a copy of the weights, and it stands still between.

        a = 0, b = 1, p = 1, q = 1    at every `every`-th step
        a = 0, b = 0, p = 1, q = 0    between

    When to use it: for the targets of Q-learning. `ema` with a decay near 1 is the soft update, of which τ = 1 − decay.

    Reference: Mnih et al., "Human-level control through deep reinforcement learning", 2015, Algorithm 1.

    >>> [hard_sync(every=3).coupling(t, 0.1).b for t in (1, 2, 3, 4)]
    [0.0, 0.0, 1.0, 0.0]
    """

    every: int

    varies: ClassVar[Varies] = "step"
    unscaled: ClassVar[str] = "it copies at steps of its own and has no rate; choose `every` anew"

    def __post_init__(self) -> None:
        arguments.whole("every", self.every, low=1)

    @property
    def rhythm(self) -> bool:
        """Whether some steps are special: True unless every step is a sync."""
        return self.every > 1

    @property
    def law(self) -> Law:
        """The rate 1 at every `every`-th step, as a formula: however long the rhythm, it needs no table."""
        return Law("power", exponent=0.0, every=self.every)

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling of this step; ignores `lr`."""
        return watch(0.0 if step % self.every else 1.0)
