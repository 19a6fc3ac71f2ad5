"""One average for all replicas: each rank of a group keeps a slice of it, and moves that slice alone.

The model is whole on every rank, as under DistributedDataParallel. An average is a DTensor, cut along one dimension
(`traffic.py` says which): so checkpoints and exports know where each slice belongs. What moves is the local part of the
average and the same slice of the weights, a view. If the average pulls, the ranks then gather the weights.
"""

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchbelay.ops.step import Move

from . import traffic
from .gathering import Gathering, slice_of, talking
from .shard import is_sharded, local

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
        self._last: tuple[set[int], Gathering] | None = None  # of which views, and how they were gathered last

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

        kind = talking(self.group, device).type
        if kind not in self._meshes:
            self._meshes[kind] = DeviceMesh.from_group(self.group, kind)
        return self._meshes[kind]

    def slice_of(self, whole: Tensor) -> Tensor:
        """Return the slice of a tensor, whole on this rank, whose average this rank keeps; a view."""
        return slice_of(whole, self.ranks, self.rank)

    # Views of the weights ----------------------------------------------------------------------------------------

    def view(self, w1: Tensor) -> Tensor:
        """Return the view of a parameter's slice: one object for all averages, for as long as they follow it."""
        if id(w1) not in self._each:
            self._each[id(w1)] = _Slice(w1, self.slice_of(w1.detach()))
            self._facts, self._last = [], None
        return self._each[id(w1)].view

    def forget(self, w1: Tensor) -> None:
        """Forget the view of a parameter; an average that still follows it gets a new one when it forms its cohorts."""
        if self._each.pop(id(w1), None) is not None:
            self._facts, self._last = [], None

    def follow(self) -> None:
        """Let the views be where the weights are: a model may be moved, cast or laid out anew, also by a step."""
        facts = _facts([w1 for w1, _ in self._each.values()])
        if facts == self._facts:
            return
        for each in self._each.values():
            now = self.slice_of(each.w1.detach())
            if _where(now) != _where(each.view):
                each.view.data = now  # the same object: what was prepared with it finds the weights
        self._facts, self._last = facts, None

    # What the ranks do together ----------------------------------------------------------------------------------

    def spread_pulled(self, moves: Iterable[Move]) -> None:
        """Let every rank have the weights of which each has moved its slice; a collective if an average has pulled."""
        pulled = {
            id(view)
            for move in moves
            if move.pulls and (move.motion is None or move.motion.pulls)
            for view in move.group.w1
        }
        if not pulled:
            return
        if self._last is None or self._last[0] != pulled:
            # In the order of the parameters, whatever groups they move in.
            wholes = [w1.detach() for w1, view in self._each.values() if id(view) in pulled]
            assert len(wholes) == len(pulled), "a view that was forgotten has moved"
            self._last = pulled, Gathering(wholes, self.ranks, self.rank, self.group)
        self._last[1].run()

    def share(self, wholes: Iterable[Tensor]) -> None:
        """Let every rank have the whole of tensors of which each has a right slice; a collective.

        Slices go together into messages of a bounded size, whatever their dtypes.
        """
        Gathering(wholes, self.ranks, self.rank, self.group).run()

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
        """Return a copy in the host memory of the group's first rank, None on other ranks; a collective likewise."""
        whole = self.whole(t).detach()
        return whole.to("cpu", copy=True) if self.rank == 0 else None


def _where(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.dtype, t.device, t.shape, t.stride()


def _facts(weights: list[Tensor]) -> list[Any]:
    """Return what the views of weights depend on; strides, which make a tuple each, only if they are unusual."""
    unusual = [t.stride() for t in weights if not t.is_contiguous()]
    where = [*map(Tensor.data_ptr, weights), *map(Tensor.get_device, weights)]
    return [*where, *map(_dtype, weights), *map(_shape, weights), *unusual]
