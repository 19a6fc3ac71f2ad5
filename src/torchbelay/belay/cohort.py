"""Parameters that move alike: their tensors as aligned lists, and the motion that each step has for them."""

from copy import copy
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from torchbelay.ops.place import Place
from torchbelay.ops.step import REST, Motion, Schedule, Swing
from torchbelay.physics.coupling import Coupling, Inertia
from torchbelay.physics.method import Method
from torchbelay.physics.spring import Spring
from torchbelay.physics.workers import gathering, share_of_each

LONGEST = 1 << 16  # steps of a period that are worth writing down in advance


@dataclass(eq=False)
class Cohort:
    """Tensors with one method, one start and one dtype, which one motion moves; a backend's `TensorGroup`."""

    method: Method
    group: int | None  # of the optimizer; None, for all groups, if the method does not need a learning rate
    born: int  # optimizer steps taken before the first step of these tensors
    every: int  # couple at every N-th step only
    workers: int = 1  # that share the average
    w1: list[Tensor] = field(default_factory=list)
    w2: list[Tensor] = field(default_factory=list)
    v1: list[Tensor] = field(default_factory=list)
    v2: list[Tensor] = field(default_factory=list)
    low: list[Tensor] = field(default_factory=list)  # with places, of averages of 24 bits
    places: list[Place] = field(default_factory=list)
    order: list[int] = field(default_factory=list)  # positions among all entries of the average

    @cached_property
    def varies(self) -> str:
        """What the coupling depends on: "never" (nothing), "step", "lr", or "unsaid"."""
        return varies(self.method)

    @cached_property
    def constant(self) -> bool:
        """Whether every step has the same motion."""
        return self.every == 1 and self.varies == "never"

    def motion(self, step: int, lr: float) -> Motion | None:
        """Return what the optimizer's step number `step` does to these tensors; None if it is not their turn."""
        if self.constant:
            return self._steady
        age = step - self.born
        if age % self.every:
            return None
        return self._steady if self.varies == "never" else self._motion(age, lr)

    @cached_property
    def _steady(self) -> Motion:
        """The motion of every step, or of every N-th one, if the coupling never varies."""
        return self._motion(self.every, 0.0)

    def _motion(self, age: int, lr: float) -> Motion:
        inertia1, inertia2 = inertias(self.method)
        if self.workers > 1:
            coupling = share_of_each(self.method, self.method.coupling(age, lr), self.workers, self.every)
        else:
            coupling = compounded(self.method, age, lr, self.every)
        if inertia2 is not None and coupling == REST.coupling:  # between two syncs velocities stand still
            return REST
        return Motion(coupling, _swing(self.v1, inertia1), _swing(self.v2, inertia2))

    @cached_property
    def schedule(self) -> Schedule | None:
        """All motions in advance; None if they depend on learning rates or on what the method remembers."""
        if self.varies == "never":
            return Schedule((*[REST] * (self.every - 1), self._steady))
        if self.every > 1 or self.varies != "step":
            return None
        law = getattr(self.method, "law", None)
        if law is not None:
            return Schedule((Motion(self.method.coupling(1, 0.0)),), law)
        period = getattr(self.method, "period", None)
        if period is None or period > LONGEST:
            return None
        return Schedule(tuple(self._motion(t, 0.0) for t in range(1, period + 1)))


def varies(method: Method) -> str:
    """Return what a method's coupling depends on; a method that does not say is asked at every step."""
    return str(getattr(method, "varies", "unsaid"))


def compounded(method: Method, age: int, lr: float, every: int) -> Coupling:
    """Return the coupling of step `age`, or of the last `every` steps as one."""
    if every > 1 and varies(method) == "never":
        return _asked(method, age, lr).compound(every)
    total = _asked(method, age - every + 1, lr)
    for step in range(age - every + 2, age + 1):
        total = total.then(_asked(method, step, lr))
    return total


def _asked(method: Method, step: int, lr: float) -> Coupling:
    """Return what a method says of a step; one that was right at its first step may not be at a later one."""
    found: object = method.coupling(step, lr)
    if not isinstance(found, Coupling):
        raise TypeError(
            f"{method!r}.coupling({step}, {lr}) returned {found!r}, not a Coupling; return one at every step"
        )
    return found


def regime(method: Method) -> str:
    """Return the kind of motion; for a method that is not a spring, its name."""
    return method.regime if isinstance(method, Spring) else type(method).__name__


def decay(method: Method, age: int, lr: float, every: int, workers: int = 1) -> float:
    """Return the share of itself that an average of that age kept at its last coupling; at its first, if none yet."""
    last = max(every, age // every * every)
    asked = copy(method)  # a copy: this question must not be remembered
    if workers == 1:
        return 1 - compounded(asked, last, lr, every).b
    each = share_of_each(asked, asked.coupling(last, lr), workers, every)
    return 1 - (workers if gathering(asked) == "spring" else 1) * each.b


def inertias(method: Method) -> tuple[Inertia | None, Inertia | None]:
    """Return how the velocities of the two masses move, at steps at which the coupling is not at rest."""
    return getattr(method, "inertia1", None), getattr(method, "inertia2", None)


def _swing(v: list[Tensor], inertia: Inertia | None) -> Swing | None:
    return Swing(v, inertia) if v and inertia is not None else None
