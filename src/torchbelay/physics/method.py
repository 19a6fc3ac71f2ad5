"""What an averaging method is, and the few things that it may say about itself to those who apply it.

    varies    "never": the coupling is constant; "step": it depends on the step; "lr": on the learning rate too
    rhythm    True where some steps are special to the method itself (syncs, switches): it cannot be thinned out
    pulls     True where the weights will feel the average, though perhaps not at the first step
    period    the number of steps after which the couplings repeat, where they do
    law       the rate of an average that only watches as a formula of the step (`Law`), where it is one
    memory    numbers that a method keeps of past learning rates (`Remembers`); a checkpoint carries them

None of them is required: without `varies` a method is asked at every step, which is always right. `period` and `law`
let a device find the numbers of a step by itself, so that nobody has to wait for it.
"""

import copy
from typing import ClassVar, Literal, NamedTuple, Protocol, Self, runtime_checkable

from .coupling import Coupling

Varies = Literal["never", "step", "lr"]


class Law(NamedTuple):
    """b = q = max(floor, f(t)) at step t, a = 0, p = 1; nothing happens at steps that are no multiple of `every`.

    "power": f(t) = scale·(t + shift)^(−exponent). "relative": f(t) = 1 − (1 − 1/t)^exponent.
    """

    kind: Literal["power", "relative"]
    exponent: float
    scale: float = 1.0
    shift: float = 0.0
    floor: float = 0.0
    every: int = 1


@runtime_checkable
class Method(Protocol):
    """Anything that says how weights and average are coupled at a step.

    >>> class EveryOther:
    ...     def coupling(self, step, lr):
    ...         b = 0.1 if step % 2 == 0 else 0.0
    ...         return Coupling(a=0.0, b=b, p=1.0, q=b)
    >>> isinstance(EveryOther(), Method)
    True
    """

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the four numbers of this step (counted from 1) at this learning rate."""


class Remembers:
    """A method whose coupling depends on past learning rates.

    Ask it step by step and it remembers; ask it for a step out of order and it takes the learning rate for constant.
    `memory` is (last step, …), empty at the start; `fresh()` makes one without memory.
    """

    memory: tuple[float, ...] = ()
    remembers: ClassVar[int]  # how many numbers, once it has been asked

    def fresh(self) -> Self:
        """Return the same method, knowing nothing of any run."""
        new = copy.copy(self)
        object.__setattr__(new, "memory", ())
        return new

    def remember(self, memory: tuple[float, ...]) -> None:
        """Take over what a checkpoint kept."""
        object.__setattr__(self, "memory", tuple(memory))

    def past(self, step: int) -> tuple[float, ...] | None:
        """What was kept of the steps before this one; None if they were not asked for in order."""
        return self.memory[1:] if self.memory and self.memory[0] == step - 1 else None
