"""The backend for several workers that share one average: one sum over all of them at a sync, and nothing between.

Every worker has weights of its own and a copy of the average. At a sync each contributes one vector, its share of what
moves the average. All workers get the same sum, bit for bit, and add it to the same average, so that the copies stay
equal.

    on springs   x_i = b·(w1_i − w2) + q·u_i      w2' = w2 + Σx_i,  and w1_i' = w1_i + a·(w2 − w1_i) + p·u_i
    by the mean  x_i = (w1_i* − w2)/N             d = Σx_i takes the place of w1* − w2, and all w1_i become w2'
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import arithmetic
from .lists import ListBackend, Prepared
from .step import Count, Motion, Move, TensorGroup, Tensors


class Workers(ListBackend):
    """Moves an average that all ranks of a process group share, with torch's own operations on lists of tensors."""

    name = "foreach"

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, self.count = group, torch.distributed.get_world_size(group)

    def used_for(self, group: TensorGroup) -> str:
        """The code that moves the group, and for how many workers."""
        return f"{self.name}, {self.count} workers"

    @torch.no_grad()
    def prepare(  # type: ignore[override]  # a sync, not lists that move one after the other
        self, moves: Sequence[Move], count: Count, *, capturing: bool = False
    ) -> "Sync":
        """Copy w1 for springs that need it from before the step."""
        prepared: list[Prepared] = []
        for group, motion, _ in moves:
            assert motion is not None
            needed = motion.coupling.needs_copy and not motion.rests
            prepared.append((group, motion, [w.clone() for w in group.w1] if needed else None))
        return Sync(self, [each for each in prepared if not each[1].rests])


class _Piece(NamedTuple):
    """Some tensors of one motion, of one dtype and one device."""

    motion: Motion
    w1: list[Tensor]
    w2: list[Tensor]
    before: list[Tensor]  # w1 from before the step; w1* itself, if nothing else is needed
    v2: list[Tensor]
    there: list[Tensor]  # the part of the vector that belongs to them


class Sync:
    """A step of one worker; if any motion is not at rest, all workers sync in it."""

    def __init__(self, backend: Workers, prepared: list[Prepared]) -> None:
        self._backend, self._prepared = backend, prepared
        self._vectors: list[Tensor] = []
        self._pieces: list[_Piece] = []

    @torch.no_grad()
    def exchange(self) -> list[Tensor]:
        """Sum the vectors of all workers, now that w1 holds w1*; return the sums. Nothing has moved yet."""
        self._vectors, self._pieces = [], []
        parts = self._parts()
        for g, (group, motion, copy) in enumerate(self._prepared):
            before = group.w1 if copy is None else copy
            there = [parts[g, i] for i in range(len(group.w1))]
            lists = (group.w1, group.w2, before, there, *([group.v2] if group.v2 else []))
            for w1, w2, w0, x, *v2 in arithmetic.pieces(*lists):
                self._pieces.append(_Piece(motion, w1, w2, w0, v2[0] if v2 else [], x))
                self._fill(self._pieces[-1])
        for vector in self._vectors if self._backend.count > 1 else ():
            torch.distributed.all_reduce(vector, group=self._backend.group)
        return self._vectors

    def _parts(self) -> dict[tuple[int, int], Tensor]:
        """Make a vector for each device and dtype; return the part of each tensor, by the numbers of group and tensor.

        Groups depend on the dtypes of the weights, which a worker may have cast alone. Nothing here does, so that
        numbers of different workers are added only if they belong to the same weight.
        """
        order = sorted(
            (position, g, i)
            for g, (group, _, _) in enumerate(self._prepared)
            for i, position in enumerate(group.order or range(len(group.w1)))
        )
        alike: dict[tuple[torch.device, torch.dtype], dict[tuple[int, int], Tensor]] = {}
        for _, g, i in order:
            w2 = self._prepared[g][0].w2[i]
            alike.setdefault((w2.device, arithmetic.widest(w2)), {})[g, i] = w2
        parts: dict[tuple[int, int], Tensor] = {}
        for (device, dtype), some in alike.items():
            sizes = [t.numel() for t in some.values()]
            vector = torch.empty(sum(sizes), dtype=dtype, device=device)
            for (place, t), part in zip(some.items(), torch.split(vector, sizes), strict=True):
                parts[place] = part.view(t.shape)
            self._vectors.append(vector)
        return parts

    def _fill(self, piece: _Piece) -> None:
        """Write this worker's share into its part of the vector."""
        _, b, _, q = piece.motion.numbers
        if piece.motion.meets:
            b, q = 1 / self._backend.count, 0.0
        for x, (away, update) in zip(piece.there, _distances(piece), strict=True):
            x.copy_(away).mul_(b)
            if q and update is not None:
                x.add_(update, alpha=q)

    @torch.no_grad()
    def finish(self, keep: Tensor | None) -> None:
        """Move everything by the sums."""
        for piece in self._pieces:
            (self._meet if piece.motion.meets else self._pull)(piece, keep)
        self._vectors, self._pieces = [], []

    def _pull(self, piece: _Piece, keep: Tensor | None) -> None:
        """Let the spring pull this worker, and let the average follow all of them."""
        a, _, p, _ = piece.motion.numbers
        changes = []
        for away, update in _distances(piece):
            change = away.mul_(-a)
            changes.append(change if update is None or p == 1 else change.add_(update, alpha=p - 1))
        arithmetic.add_(piece.w1, changes, keep=keep)
        arithmetic.add_(piece.w2, piece.there, keep=keep)

    def _meet(self, piece: _Piece, keep: Tensor | None) -> None:
        """Let the average follow the mean of all workers, and let this worker go on from it."""
        d, swing = piece.there, piece.motion.swing2
        changes: Tensors = torch._foreach_mul(d, piece.motion.coupling.b)
        if swing is not None:
            carry, stay, pull, _ = swing.inertia
            v = [v.to(x.dtype) for v, x in zip(piece.v2, d, strict=True)]
            torch._foreach_add_(changes, v, alpha=carry)
            gains = torch._foreach_mul(v, stay - 1)
            torch._foreach_add_(gains, d, alpha=pull)
            arithmetic.add_(piece.v2, gains, keep=keep)
        arithmetic.add_(piece.w2, changes, keep=keep)
        arithmetic.write_(piece.w1, piece.w2, keep)


def _distances(piece: _Piece) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield w1 − w2 from before the step, and the update if it is not in that already, in the wider of their dtypes."""
    for w1, w2, w0 in zip(piece.w1, piece.w2, piece.before, strict=True):
        wide = arithmetic.widest(w1, w2)
        start = w0.to(wide)
        yield start - w2.to(wide), None if w0 is w1 or w0.data_ptr() == w1.data_ptr() else w1.to(wide) - start


# What workers store and send ------------------------------------------------------------------------------------------


def stored_bytes(weights: int, *, momentum: bool = False, bytes_per_number: int = 4) -> int:
    """Return the bytes of the average on each worker; `momentum`: its velocity too, as DiLoCo has it.

    During a sync each worker needs `exchanged_bytes` more.

    >>> stored_bytes(1_000), stored_bytes(1_000, momentum=True)
    (4000, 8000)
    """
    return weights * bytes_per_number * (2 if momentum else 1)


def exchanged_bytes(weights: int, workers: int, *, bytes_per_number: int = 4) -> int:
    """Return the bytes of the vector that the workers sum at a sync; 0 for one worker.

    Numbers have the dtype of the average, and at least 4 bytes.

    >>> exchanged_bytes(1_000, workers=4), exchanged_bytes(1_000, workers=1)
    (4000, 0)
    """
    return weights * bytes_per_number if workers > 1 else 0


def sent_bytes(weights: int, workers: int, *, bytes_per_number: int = 4) -> float:
    """Return the bytes that each worker sends at a sync, if the sum goes around a ring: 2(N−1)/N of the vector.

    >>> sent_bytes(1_000, workers=4)
    6000.0
    """
    return 2 * (workers - 1) / workers * exchanged_bytes(weights, workers, bytes_per_number=bytes_per_number)


def messages(workers: int, dtypes: int = 1) -> int:
    """Return the number of sums at a sync: one per dtype (and device) of the averages.

    >>> messages(workers=4)
    1
    """
    return dtypes if workers > 1 else 0
