"""Keeping weights that are nan or inf out of the averages."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torchbelay.ops import arithmetic
from torchbelay.ops.workers import Sync

from .shard import least, local

Named = Sequence[tuple[str, Tensor]]


class Guard:
    """Looks at the weights after each step. Averages ignore a step that leaves non-finite weights.

    Ranks that share the weights come to the same answer.
    """

    def __init__(self, *, raises: bool) -> None:
        self.raises = raises

    def look(self, named: Named, step: int | None) -> Tensor | None:
        """Return 1 if the weights are finite and 0 if not, or raise; None if they are known to be finite."""
        weights = [w for _, w in named]
        good = least(arithmetic.finite([local(w) for w in weights]), weights)
        if self.raises and bool(good):
            return None
        if not self.raises:
            return good
        raise FloatingPointError(
            f"{self._what(named)} after the optimizer's step{'' if step is None else f' {step}'}. No average has "
            "moved, and the weights are as the optimizer left them: load a checkpoint, or go back to the average by "
            "copy_to_model()"
        )

    def look_at_sums(self, sums: list[Tensor], weights: Iterable[Tensor], step: int) -> Tensor | None:
        """Return 1 if the sums over all workers are finite and 0 if not, or raise; None if they are known to be.

        A worker may be several ranks, which have sums of their own parts of the weights: all of them must be finite.
        """
        good = least(arithmetic.finite(sums), weights)
        if self.raises and not bool(good):
            raise FloatingPointError(
                f"the weights of a worker are not finite at the sync of step {step}, on this rank or another: no "
                "average has moved. Load a checkpoint, or go back to the average by copy_to_model()"
            )
        return None if self.raises else good

    def check(self, wanted: Named) -> None:
        """Refuse to begin an average at weights that are not finite."""
        if not self.is_good(wanted):
            raise ValueError(f"{self._what(wanted)}: no average can begin there; load or initialise it first")

    def is_good(self, wanted: Named) -> bool:
        """Whether all are finite, on every rank; waits for the device."""
        weights = [w for _, w in wanted]
        return bool(least(arithmetic.finite([local(w) for w in weights]), weights))

    def _what(self, weights: Named) -> str:
        """Name the first bad parameter, the same one on all ranks."""
        bad = [i for i, (_, w) in enumerate(weights) if not bool(arithmetic.finite([local(w)]))]
        first = least(torch.tensor(bad[0] if bad else len(weights), device="cpu"), [w for _, w in weights])
        return f"parameter {weights[int(first)][0]!r} is not finite"


def exchanged(prepared: object, guard: Guard | None, weights: Iterable[Tensor], step: int) -> Tensor | None:
    """Let all workers sum what they contribute, if the step is a sync; return 1 if the averages may move, 0 if not.

    None means that they may. What is not finite on any worker is not finite in the sum, which all of them have, so that
    they come to one answer. Nothing has moved yet.
    """
    assert isinstance(prepared, Sync)
    sums = prepared.exchange()
    return None if guard is None or not sums else guard.look_at_sums(sums, weights, step)
