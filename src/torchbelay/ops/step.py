"""What one step asks of the tensors: a motion for each group of tensors that move alike."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchbelay.physics.coupling import Coupling, Inertia, Split
from torchbelay.physics.method import Law

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
    def split(self) -> Split | None:
        """The motion as work around a step without a copy of w1; None if it needs the copy."""
        return None if self.swings else self.coupling.split()

    @cached_property
    def leads(self) -> bool:
        """Whether the average moves before the optimizer does."""
        return self.split is not None and self.split.before != 0

    @cached_property
    def trails(self) -> bool:
        """Whether anything moves after the optimizer's step."""
        return self.split is None or self.split.pull != 0 or self.split.follow != 0

    @cached_property
    def pulls(self) -> bool:
        """Whether the weights feel the average."""
        return self.coupling.pulls or self.swing1 is not None

    @cached_property
    def rests(self) -> bool:
        """Whether nothing moves at all."""
        return not self.swings and self.numbers == (0.0, 0.0, 1.0, 0.0)


REST = Motion(Coupling(0.0, 0.0, 1.0, 0.0))


@dataclass(frozen=True, eq=False)
class Schedule:
    """Every motion of a method that needs neither learning rates nor a step count from the host.

    `motions` are those of one period, from the first step on. A law, if given, takes their place.
    """

    motions: tuple[Motion, ...]
    law: Law | None = None


class TensorGroup(Protocol):
    """Tensors that move alike, in aligned lists. The optimizer had taken `born` steps before their first."""

    w1: list[Tensor]
    w2: list[Tensor]
    v1: list[Tensor]
    v2: list[Tensor]
    born: int


class Move(NamedTuple):
    """What a step does to a group. The motion is None if only the device knows which one of the schedule it is."""

    group: TensorGroup
    motion: Motion | None
    schedule: Schedule | None = None

    @property
    def motions(self) -> tuple[Motion, ...]:
        """Every motion that may be applied without asking the host again."""
        if self.schedule is not None:
            return self.schedule.motions
        assert self.motion is not None
        return (self.motion,)


class Count(Protocol):
    """The number of steps taken so far, kept on each device."""

    def on(self, device: torch.device) -> Tensor:
        """Return the count on that device, as a 0-dim int64 tensor that every step updates."""
