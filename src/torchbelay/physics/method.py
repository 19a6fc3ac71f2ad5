"""The averaging method: any object whose `coupling(step, lr)` returns the four numbers of a step.

A method may also have these attributes:

    varies    "never": the coupling is constant; "step": it depends on the step; "lr": on the learning rate as well
    rhythm    True if some steps are special (syncs, switches), so that `every` cannot thin the steps out
    pulls     True if the average changes the motion of the weights, at the first step or later
    period    the number of steps after which the couplings repeat, if they do
    law       the rate as a formula of the step (`Law`), if the average never pulls and such a formula exists
    memory    numbers that the method keeps of past learning rates (`Remembers`); checkpoints save them
    settled   a function like `coupling`, if θ is scheduled: the numbers of a θ that stands still at this step's
    horizon   the last step at which its schedules change, if they say
    scaled    a function of κ that returns the same average for a batch κ times as large
    inertia2  how a velocity of the average moves at each step that is not at rest (`coupling.Inertia`)
    gathering what the method does with several workers (`Gathering`); without it, it is for one alone

All are optional. Without `varies`, `coupling` is called at every step, which is always right. With `period` or `law` a
device can compute the numbers of a step itself, and the host does not wait for it.
"""

import copy
from functools import partial
from typing import ClassVar, Literal, NamedTuple, Protocol, Self, runtime_checkable

from .coupling import Coupling

Varies = Literal["never", "step", "lr"]
# With several workers: "spring", each hangs on the common average by a spring of its own; "mean", at a sync the mean of
# all workers takes the place of the weights.
Gathering = Literal["spring", "mean"]


class Law(NamedTuple):
    """The coupling b = q = max(floor, f(t)), a = 0, p = 1 of step t; b = q = 0 if `every` does not divide t.

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
    """An averaging method: any object that returns the four numbers of a step.

    >>> class EveryOther:
    ...     def coupling(self, step, lr):
    ...         b = 0.1 if step % 2 == 0 else 0.0
    ...         return Coupling(a=0.0, b=b, p=1.0, q=b)
    >>> isinstance(EveryOther(), Method)
    True
    """

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the four numbers of this step (counted from 1) at this learning rate."""


def settled(method: Method, step: int, lr: float) -> Coupling:
    """Return the coupling with the method's own θ: that of the weights which this step begins with.

    While θ moves, a/b of a step is not θ. Stability, and the centre z = (w1 + θ·w2)/(1 + θ), are matters of θ: after n
    steps, θ is that of step n + 1.

    >>> from torchbelay.physics import methods, schedules
    >>> fading = methods.centred(theta=schedules.linear(1.0, 0.0, steps=3), rate=0.5)
    >>> [settled(fading, t, 0.1).theta for t in (1, 2, 3)]
    [1.0, 0.5, 0.0]
    """
    own = getattr(method, "settled", None)
    found = method.coupling(step, lr) if own is None else own(step, lr)
    assert isinstance(found, Coupling)
    return found


def uncalled(thing: object) -> str | None:
    """Return the name of what makes methods (`Spring.ema`, a class), if it was given in place of a method; else None.

    >>> from torchbelay import Spring
    >>> uncalled(Spring.ema), uncalled(Spring.ema(decay=0.9))
    ('Spring.ema', None)
    """
    while isinstance(thing, partial):
        thing = thing.func
    ours = str(getattr(thing, "__module__", "")).startswith("torchbelay.physics.")
    return getattr(thing, "__qualname__", None) if ours or isinstance(thing, type) else None


class Remembers:
    """A method whose coupling depends on past learning rates.

    Called step by step, it remembers. Called for a step out of order, it takes the learning rate as constant.
    `memory` is (last step, …), empty at the start; `fresh()` returns a copy without memory.
    """

    memory: tuple[float, ...] = ()
    remembers: ClassVar[int]  # how many numbers `memory` has after the first call

    def fresh(self) -> Self:
        """Return a copy of this method without memory."""
        new = copy.copy(self)
        object.__setattr__(new, "memory", ())
        return new

    def remember(self, memory: tuple[float, ...]) -> None:
        """Set the memory, as loaded from a checkpoint."""
        object.__setattr__(self, "memory", tuple(memory))

    def past(self, step: int) -> tuple[float, ...] | None:
        """Return the memory of the steps before this one, or None if the last call was not for the step before."""
        return self.memory[1:] if self.memory and self.memory[0] == step - 1 else None
