"""The backend for any device: a few launches for all tensors, and a copy of w1 only if a motion needs it."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from . import arithmetic
from .lists import ListBackend, PreparedLists
from .step import Count, Motion, Move, TensorGroup, Tensors


class Foreach(ListBackend):
    """Motions by torch's own operations on lists of tensors.

    On a CPU the copies of w1 are kept, and the next step writes into their memory. New memory at every step would take
    longer than all the rest of it: the system fills it with zeros, page by page. A GPU's allocator keeps memory itself.
    """

    name = "foreach"

    def remember(self, groups: Iterable[TensorGroup]) -> None:
        """Remember the weights of these groups; copies of others are given up."""
        groups = list(groups)
        super().remember(groups)
        self._known = frozenset(groups)
        self.release()

    def release(self) -> None:
        """Give up the copies."""
        self._copies: dict[TensorGroup, list[Tensor]] = {}
        self._last: dict[TensorGroup, list[Tensor]] = {}

    @torch.no_grad()
    def prepare(self, moves: Sequence[Move], count: Count, *, capturing: bool = False) -> PreparedLists:
        """Copy w1 for motions that cannot do without. A copy that this step does not need is given up."""
        self._last, self._copies = self._copies, {}
        prepared = super().prepare(moves, count, capturing=capturing)
        self._last = {}
        return prepared

    def copy(self, group: TensorGroup) -> list[Tensor]:
        """Copy w1 of a group, into the memory of its last copy if there is one."""
        if (copies := self._last.get(group)) is not None:
            torch._foreach_copy_(copies, group.w1)
        else:
            copies = super().copy(group)
            if group not in self._known or not all(map(_can_be_kept, copies)):
                return copies
        self._copies[group] = copies
        return copies

    def move(self, group: TensorGroup, motion: Motion, copy: Tensors | None, keep: Tensor | None) -> None:
        """Move both: w1 holds w1*."""
        if copy is None:
            arithmetic.pull_together_(group.w1, group.w2, motion.coupling.a, motion.coupling.q, keep)
        else:
            arithmetic.couple_(
                group.w1, group.w2, copy, motion.numbers, keep, swing1=motion.swing1, swing2=motion.swing2,
                meets=motion.meets and motion.swings,
            )  # fmt: skip


def _can_be_kept(copy: Tensor) -> bool:
    """Whether any later step can write into a copy: not if it was made in inference mode."""
    return type(copy) is Tensor and copy.device.type == "cpu" and not copy.is_inference()
