"""One average for all replicas: each rank of a group keeps a slice of it, and moves that slice alone.

The model is whole on every rank, as under DistributedDataParallel. An average is a DTensor, cut along one dimension
(`traffic.py` says which): so checkpoints and exports know where each slice belongs. What moves is the local part of the
average and the same slice of the weights, a view. If the average pulls, the ranks then gather the weights.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchbelay.ops.step import Move

from . import traffic
from .shard import is_first_rank, is_sharded, local

_dtype, _shape = attrgetter("dtype"), attrgetter("shape")


class _Slice(NamedTuple):
    """A parameter, and a view of the slice whose average is on this rank."""

    w1: Tensor
    view: Tensor


class Slices:
    """How the ranks of a group share averages, and the views of the weights that the averages of this rank follow."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.ranks, self.rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
        self._meshes: dict[str, Any] = {}
        self._each: dict[int, _Slice] = {}  # by the id of a parameter
        self._facts: list[Any] = []

    def __repr__(self) -> str:
        return f"slice {self.rank + 1} of {self.ranks}"

    # Averages ----------------------------------------------------------------------------------------------------

    def spread(self, part: Tensor, w1: Tensor) -> Tensor:
        """Return the average of a parameter, or another tensor of its shape, of which this rank has `part`."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        d = traffic.dimension(w1.shape, self.ranks)
        return DTensor.from_local(
            part,
            self._mesh(w1.device),
            [Replicate() if d is None else Shard(d)],
            run_check=False,
            shape=w1.shape,
            stride=torch.empty(w1.shape, device="meta").stride(),
        )

    def _mesh(self, device: torch.device) -> Any:
        """Return the group as a mesh, on the kind of device on which its ranks talk about tensors of this one."""
        from torch.distributed.device_mesh import DeviceMesh

        kind = self._talking(device).type
        if kind not in self._meshes:
            self._meshes[kind] = DeviceMesh.from_group(self.group, kind)
        return self._meshes[kind]

    def _talking(self, device: torch.device) -> torch.device:
        known = [each.type for each in getattr(self.group, "_device_types", ())]
        return device if device.type in known or not known else torch.device(known[0])

    def slice_of(self, whole: Tensor) -> Tensor:
        """Return the slice of a tensor, whole on this rank, whose average this rank keeps; a view."""
        d = traffic.dimension(whole.shape, self.ranks)
        return whole if d is None else whole.narrow(d, *traffic.chunk(whole.shape[d], self.ranks, self.rank))

    # Views of the weights ----------------------------------------------------------------------------------------

    def view(self, w1: Tensor) -> Tensor:
        """Return the view of a parameter's slice: one object for all averages, for as long as they follow it."""
        if id(w1) not in self._each:
            self._each[id(w1)] = _Slice(w1, self.slice_of(w1.detach()))
            self._facts = []
        return self._each[id(w1)].view

    def forget(self, w1: Tensor) -> None:
        """Forget the view of a parameter; an average that still follows it gets a new one when it forms its cohorts."""
        if self._each.pop(id(w1), None) is not None:
            self._facts = []

    def follow(self) -> None:
        """Let the views be where the weights are: a model may be moved, cast or laid out anew, also by a step."""
        facts = _facts([w1 for w1, _ in self._each.values()])
        if facts == self._facts:
            return
        for each in self._each.values():
            now = self.slice_of(each.w1.detach())
            if _where(now) != _where(each.view):
                each.view.data = now  # the same object: what was prepared with it finds the weights
        self._facts = facts

    # What the ranks do together ----------------------------------------------------------------------------------

    def spread_pulled(self, moves: Iterable[Move]) -> None:
        """Let every rank have the weights of which each has moved its slice; a collective if an average has pulled."""
        pulled = {
            id(view)
            for move in moves
            if move.pulls and (move.motion is None or move.motion.pulls)
            for view in move.group.w1
        }
        if pulled:  # in the order of the parameters, whatever groups they move in
            wholes = [w1.detach() for w1, view in self._each.values() if id(view) in pulled]
            assert len(wholes) == len(pulled), "a view that was forgotten has moved"
            self.share(wholes)

    def share(self, wholes: Sequence[Tensor]) -> None:
        """Let every rank have the whole of tensors of which each has a right slice; a collective.

        Slices go together into messages of a bounded size, whatever their dtypes.
        """
        alike: dict[torch.device, list[Tensor]] = {}
        for whole in wholes:
            alike.setdefault(whole.device, []).append(whole)
        for device, some in alike.items():
            slots = [traffic.slot(t.shape, self.ranks, t.itemsize) for t in some]
            for places in traffic.buckets(slots, self.ranks):
                self._exchange([some[i] for i in places], [slots[i] for i in places], device)

    def _exchange(self, wholes: list[Tensor], slots: list[int], device: torch.device) -> None:
        """Send one message, and write what came from all ranks."""
        *starts, size = accumulate(slots, initial=0)
        there = self._talking(device)
        mine = torch.empty(size, dtype=torch.uint8, device=there)
        slices = [self.slice_of(whole) for whole in wholes]
        sent = [_read(mine, start, t.shape, t.dtype) for start, t in zip(starts, slices, strict=True)]
        torch._foreach_copy_(sent, slices)
        everything = torch.empty((self.ranks, size), dtype=torch.uint8, device=there)
        _all_gather(everything.view(-1), mine, group=self.group)
        to: list[Tensor] = []
        source: list[Tensor] = []
        for start, whole in zip(starts, wholes, strict=True):
            for rows, bytes_of in self._rows(whole, everything):
                to.append(rows)
                source.append(_read(bytes_of, start, rows.shape, rows.dtype))
        torch._foreach_copy_(to, source)

    def _rows(self, whole: Tensor, everything: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the ranks' slices of a tensor with the messages that have them: those of equal size together.

        What is not cut is that of the first rank: ranks may have rounded it at random.
        """
        d = traffic.dimension(whole.shape, self.ranks)
        if d is None:
            return [(whole, everything[0])]
        size = whole.shape[d]
        rows = traffic.chunk(size, self.ranks, 0)[1]
        full, left = divmod(size, rows)
        equal = whole.narrow(d, 0, full * rows).view(*whole.shape[:d], full, rows, *whole.shape[d + 1 :]).movedim(d, 0)
        found = [(equal, everything[:full])]
        return [*found, (whole.narrow(d, full * rows, left), everything[full])] if left else found

    def holds(self, t: Tensor) -> bool:
        """Whether a tensor is an average that the ranks of this group share."""
        return is_sharded(t) and t.device_mesh in self._meshes.values()  # type: ignore[attr-defined]

    def whole(self, t: Tensor) -> Tensor:
        """Return all of a shared average; a collective. Of any other tensor, the tensor itself."""
        if not self.holds(t):
            return t
        part = local(t.detach())
        found = torch.empty(t.shape, dtype=t.dtype, device=part.device)
        self.slice_of(found).copy_(part)
        self.share([found])
        return found

    def sealed(self, t: Tensor) -> Tensor:
        """Return a shared average that refuses to be pickled; any other tensor is returned as it is."""
        if not self.holds(t):
            return t
        from .slice_tensor import sealed

        return sealed(t)

    def copied(self, t: Tensor) -> Tensor:
        """Return a copy of a tensor, all of it; a collective if it is a shared average."""
        return self.whole(t) if self.holds(t) else t.detach().clone()

    def collected(self, t: Tensor) -> Tensor | None:
        """Return a copy in the first rank's host memory, None on other ranks; a collective likewise."""
        whole = self.whole(t).detach()
        return whole.to("cpu", copy=True) if is_first_rank() else None


def _all_gather(everything: Tensor, mine: Tensor, group: Any) -> None:
    """Gather flat tensors of one size; torch has a new name for that, and warns about the old one."""
    distributed = torch.distributed
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    gather(everything, mine, group=group)


def _read(buffer: Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the part of bytes, from a place on, that are a tensor of that shape; of rows of bytes, one of each row."""
    nbytes = shape[buffer.ndim - 1 :].numel() * dtype.itemsize
    return buffer[..., start : start + nbytes].view(dtype).view(shape)


def _where(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.dtype, t.device, t.shape, t.stride()


def _facts(weights: list[Tensor]) -> list[Any]:
    """Return what the views of weights depend on; strides, which make a tuple each, only if they are unusual."""
    unusual = [t.stride() for t in weights if not t.is_contiguous()]
    where = [*map(Tensor.data_ptr, weights), *map(Tensor.get_device, weights)]
    return [*where, *map(_dtype, weights), *map(_shape, weights), *unusual]
