"""What one step asks of the tensors: a motion for each group of tensors that move alike."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchbelay.physics.coupling import Coupling, Inertia
from torchbelay.physics.method import Law

from .place import Place

Tensors = list[Tensor] | tuple[Tensor, ...]
# An optimizer group's learning rate (maybe a tensor on the device), betas (or momentum, dampening), eps, weight decay.
Hyper = tuple[float | Tensor, float, float, float, float]


class Swing(NamedTuple):
    """The velocities of one mass, and the numbers that move them."""

    v: Tensors
    inertia: Inertia


@dataclass(frozen=True)
class Motion:
    """What one step does to a group of tensors: the four numbers, and velocities if a mass has them.

    What follows from the numbers is computed once. A constant method has one motion for all of its steps.
    """

    coupling: Coupling
    swing1: Swing | None = None
    swing2: Swing | None = None

    @cached_property
    def numbers(self) -> tuple[float, float, float, float]:
        """(a, b, p, q)."""
        c = self.coupling
        return c.a, c.b, c.p, c.q

    @cached_property
    def swings(self) -> bool:
        """Whether either mass has velocities."""
        return self.swing1 is not None or self.swing2 is not None

    @cached_property
    def needs_copy(self) -> bool:
        """Whether the motion needs a copy of w1 from before the step."""
        return self.swings or self.coupling.needs_copy

    @cached_property
    def meets(self) -> bool:
        """Whether weights and average end in one place: where the average arrives, its velocity included."""
        return self.swing1 is None and self.coupling.meets

    @cached_property
    def pulls(self) -> bool:
        """Whether the weights feel the average."""
        return self.coupling.pulls or self.swing1 is not None or (self.swing2 is not None and self.meets)

    @cached_property
    def rests(self) -> bool:
        """Whether nothing moves at all."""
        return not self.swings and self.numbers == (0.0, 0.0, 1.0, 0.0)


REST = Motion(Coupling(0.0, 0.0, 1.0, 0.0))


@dataclass(frozen=True, eq=False)
class Schedule:
    """Every motion of a method that needs neither learning rates nor a step count from the host.

    `motions` are those of one period, from the first step on. A law, if given, takes their place. A period may be long,
    so that what holds for all of its motions is found once, not at every step.
    """

    motions: tuple[Motion, ...]
    law: Law | None = None

    @cached_property
    def needs_copy(self) -> bool:
        """Whether a motion needs a copy of w1 from before the step."""
        return any(motion.needs_copy for motion in self.motions)

    @cached_property
    def pulls(self) -> bool:
        """Whether the weights feel the average, at any step."""
        return any(motion.pulls for motion in self.motions)


class TensorGroup(Protocol):
    """Tensors that move alike, in aligned lists. The optimizer had taken `born` steps before their first.

    If averages have 24 bits, w2 and `low` are their two planes (`planes.py`), and `places` say where they belong.
    `order` are the positions of the tensors among those of all groups, the same on every worker; empty if they do not
    matter.
    """

    w1: list[Tensor]
    w2: list[Tensor]
    v1: list[Tensor]
    v2: list[Tensor]
    low: list[Tensor]
    places: list[Place]
    order: list[int]
    born: int


@dataclass
class Piece:
    """A part of a group, with copies of its averages elsewhere or in another form."""

    w1: list[Tensor]
    w2: list[Tensor]
    low: list[Tensor]
    places: list[Place]
    born: int
    v1: list[Tensor] = field(default_factory=list)  # velocities are those of the motion
    v2: list[Tensor] = field(default_factory=list)
    order: list[int] = field(default_factory=list)


class Move(NamedTuple):
    """What a step does to a group. The motion is None if only the device knows which one of the schedule it is."""

    group: TensorGroup
    motion: Motion | None
    schedule: Schedule | None = None

    @property
    def motions(self) -> tuple[Motion, ...]:
        """Every motion that may be applied without asking the host again."""
        return (self._known,) if self.schedule is None else self.schedule.motions

    @property
    def needs_copy(self) -> bool:
        """Whether a copy of w1 from before the step may be needed."""
        return (self.schedule or self._known).needs_copy

    @property
    def pulls(self) -> bool:
        """Whether the weights may feel the average."""
        return (self.schedule or self._known).pulls

    @property
    def _known(self) -> Motion:
        assert self.motion is not None
        return self.motion


class Count(Protocol):
    """The number of steps taken so far, kept on each device."""

    def on(self, device: torch.device) -> Tensor:
        """Return the count on that device, as a 0-dim int64 tensor that every step updates."""
