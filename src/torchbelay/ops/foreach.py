"""The backend for any device: a few launches for all tensors, and a copy of w1 only if a motion needs it."""

from torch import Tensor

from . import arithmetic
from .lists import ListBackend
from .step import Motion, TensorGroup, Tensors


class Foreach(ListBackend):
    """Motions by torch's own operations on lists of tensors."""

    name = "foreach"

    def move(self, group: TensorGroup, motion: Motion, copy: Tensors | None, keep: Tensor | None) -> None:
        """Move both: w1 holds w1*."""
        if copy is None:
            arithmetic.pull_together_(group.w1, group.w2, motion.coupling.a, motion.coupling.q, keep)
        else:
            arithmetic.couple_(
                group.w1, group.w2, copy, motion.numbers, keep, swing1=motion.swing1, swing2=motion.swing2,
                meets=motion.meets and motion.swings,
            )  # fmt: skip
