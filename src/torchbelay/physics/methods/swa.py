"""SWA: the uniform average of the weights."""

from dataclasses import dataclass
from typing import ClassVar

from torchbelay.physics import arguments
from torchbelay.physics.brief import brief
from torchbelay.physics.coupling import Coupling, watch
from torchbelay.physics.method import Law, Varies
from torchbelay.physics.scaling import Scaleless


@dataclass(frozen=True)
class swa(Scaleless):
    """Stochastic weight averaging: the mean of the stepped weights, with n points averaged before this one.

        a = 0, b = 1/(n + 1), p = 1, q = b

    Takes every step into the mean, or only every `every`-th (one per epoch, for instance); b = 0 at the others.

    When to use it: in the last part of a training, at a constant or cyclic learning rate. Begin late: the mean never
    forgets a point.

    Reference: Izmailov et al., "Averaging weights leads to wider optima and better generalization", 2018.

    >>> [swa().coupling(t, 0.1).b for t in (1, 2, 4)]
    [1.0, 0.5, 0.25]
    """

    every: int = 1

    varies: ClassVar[Varies] = "step"

    __repr__ = brief

    def __post_init__(self) -> None:
        arguments.whole("every", self.every, low=1)

    @property
    def rhythm(self) -> bool:
        """Whether some steps are special: True unless every step is averaged."""
        return self.every > 1

    @property
    def law(self) -> Law:
        """The weight 1/n of the n-th point as a formula."""
        return Law("power", exponent=1.0, scale=float(self.every), every=self.every)

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling of this step; ignores `lr`."""
        return watch(0.0 if step % self.every else self.every / step)
