"""What `Foreach`, `Reference` and `Host` share: groups move one after the other, by numbers that the host knows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import arithmetic
from .step import Count, Motion, Move, TensorGroup, Tensors

# A group, its motion, and a copy of w1 from before the step if the motion needs one.
Prepared = tuple[TensorGroup, Motion, list[Tensor] | None]


class ListBackend:
    """Moves groups one after the other. A subclass says how one group is moved, by `before` and `after`."""

    name: str
    fuses: bool = False
    remembers_addresses: bool = False
    copies_always: bool = False  # w1 from before the step is needed for every motion, not only if its split is None

    def is_current(self) -> bool:
        """True: nothing is remembered of the tensors."""
        return True

    def forget(self) -> None:
        """Nothing is remembered of the tensors."""

    def follows_schedule(self, group: TensorGroup) -> bool:
        """False: the host knows the numbers."""
        return False

    @torch.no_grad()
    def prepare(self, moves: Sequence[Move], count: Count, *, capturing: bool = False) -> "PreparedLists":
        """Copy w1 for motions that cannot do without."""
        prepared: list[Prepared] = []
        for group, motion, _ in moves:
            assert motion is not None
            needed = self.copies_always or motion.split is None
            copy = [w.clone() for w in group.w1] if needed else None
            prepared.append((group, motion, copy))
        return PreparedLists(self, prepared)

    def fuse(self, rule: str, parameters: list[Tensor], states: list[Any], moves: Sequence[Move]) -> None:
        """None: there is no pass that an optimizer could take them along in."""

    def used_for(self, group: TensorGroup) -> str:
        """The backend's own name, for every group."""
        return self.name

    def exchange_(self, x: Tensors, y: Tensors) -> None:
        """Trade contents by way of a scratch buffer."""
        arithmetic.exchange_(x, y)

    def wait(self) -> None:
        """Return at once: torch's own stream keeps the order."""

    def before(self, group: TensorGroup, motion: Motion, keep: Tensor | None) -> None:
        """Move w2 of a group if the motion leads."""
        raise NotImplementedError

    def after(self, group: TensorGroup, motion: Motion, copy: Tensors | None, keep: Tensor | None) -> None:
        """Move w1 and w2 of a group; `copy` holds w1 from before the step if the motion needs it."""
        raise NotImplementedError


class PreparedLists:
    """A step of groups that are moved one after the other."""

    def __init__(self, backend: ListBackend, prepared: list[Prepared]) -> None:
        self._backend, self._prepared = backend, prepared

    def before(self, keep: Tensor | None) -> None:
        """Move what moves before the optimizer's step."""
        for group, motion, copy in self._prepared:
            if copy is None and motion.leads:
                self._backend.before(group, motion, keep)

    def after(self, keep: Tensor | None) -> None:
        """Move everything else."""
        for group, motion, copy in self._prepared:
            if copy is not None or motion.trails:
                self._backend.after(group, motion, copy, keep)
