"""What `Foreach`, `Reference` and `Host` share: groups move one after the other, by numbers that the host knows."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from . import planes
from .facts import Fact
from .step import Count, Motion, Move, TensorGroup, Tensors
from .trade import ListTrade

# A group, its motion, and a copy of w1 from before the step if the motion needs one.
Prepared = tuple[TensorGroup, Motion, list[Tensor] | None]

_dtype, _shape = attrgetter("dtype"), attrgetter("shape")


class ListBackend:
    """Moves groups one after the other. A subclass says how one group is moved, by `move`."""

    name: str
    fuses: bool = False
    copies_always: bool = False  # w1 from before the step is needed for every motion

    def __init__(self) -> None:
        self.remember([])

    def remember(self, groups: Iterable[TensorGroup]) -> None:
        """Remember the devices, dtypes and shapes of the weights; operations on lists take any strides."""
        weights = self._weights = [*{id(w): w for group in groups for w in group.w1}.values()]
        known = _facts(weights)
        self._are_alike = Fact(lambda tensors: _facts(tensors) == known)

    def is_current(self) -> bool:
        """Whether the weights have the devices, dtypes and shapes that were remembered."""
        return not self._weights or self._are_alike(self._weights)

    def follows_schedule(self, group: TensorGroup) -> bool:
        """False: the host knows the numbers."""
        return False

    @torch.no_grad()
    def prepare(self, moves: Sequence[Move], count: Count, *, capturing: bool = False) -> "PreparedLists":
        """Copy w1 for motions that cannot do without."""
        prepared: list[Prepared] = []
        for group, motion, _ in moves:
            assert motion is not None
            needed = self.copies_always or motion.needs_copy
            prepared.append((group, motion, self.copy(group) if needed else None))
        return PreparedLists(self, prepared, count)

    def copy(self, group: TensorGroup) -> list[Tensor]:
        """Copy w1 of a group."""
        return [w.clone() for w in group.w1]

    def fuse(self, rule: str, parameters: list[Tensor], states: list[Any], moves: Sequence[Move]) -> None:
        """None: there is no pass that an optimizer could take them along in."""

    def used_for(self, group: TensorGroup) -> str:
        """The backend's own name, for every group."""
        return self.name

    def trade(self, x: Tensors, y: Tensors) -> ListTrade:
        """Trade contents by way of a scratch buffer."""
        return ListTrade(x, y)

    def wait(self) -> None:
        """Return at once: torch's own stream keeps the order."""

    def release(self) -> None:
        """Do nothing: a step keeps no memory for the next one."""

    def move(self, group: TensorGroup, motion: Motion, copy: Tensors | None, keep: Tensor | None) -> None:
        """Move w1 and w2 of a group; `copy` holds w1 from before the step if the motion needs it."""
        raise NotImplementedError

    def move_planes(
        self, group: TensorGroup, motion: Motion, copy: Tensors | None, keep: Tensor | None, step: Tensor
    ) -> None:
        """Move a group whose averages have 24 bits, at the step of that number, a 0-dim tensor on its device."""
        planes.move(self.move, group, motion, copy, keep, step)


class PreparedLists:
    """A step of groups that are moved one after the other."""

    def __init__(self, backend: ListBackend, prepared: list[Prepared], count: Count) -> None:
        self._backend, self._prepared, self._count = backend, prepared, count

    def finish(self, keep: Tensor | None) -> None:
        """Move everything."""
        for group, motion, copy in self._prepared:
            if motion.rests:
                continue
            if group.low:
                step = self._count.on(group.w1[0].device) + 1
                self._backend.move_planes(group, motion, copy, keep, step)
            else:
                self._backend.move(group, motion, copy, keep)


def _facts(tensors: Sequence[Tensor]) -> list[Any]:
    return [*map(_dtype, tensors), *map(_shape, tensors), *map(Tensor.get_device, tensors)]
