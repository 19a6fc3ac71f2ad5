"""Tensors that lie in one memory, as two Parameters that were tied by `b.data = a.data`.

Ranges of addresses are compared first, for all tensors at once. Tensors whose ranges overlap form a cluster, and only
those are compared with each other. Views may lie between each other without an element in common, as the columns of a
matrix: a map of the cluster's memory tells which elements are taken.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from math import gcd
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from torchbelay.ops.strides import is_dense

from .shard import local


class Memory(NamedTuple):
    """Where a tensor lay at some time; it does not keep that memory alive."""

    storage: ref[torch.UntypedStorage]
    place: tuple[Any, ...]


def memory(t: Tensor) -> Memory | None:
    """Return where a tensor lies; None if another object keeps its elements."""
    try:
        return Memory(ref(local(t).untyped_storage()), place(local(t)))
    except (RuntimeError, NotImplementedError):
        return None


def is_in(before: Memory | None, t: Tensor) -> bool:
    """Whether a tensor is the same view of the same memory; an address alone may be that of other memory by now."""
    now = memory(t)
    if before is None or now is None:
        return False
    return before.storage() is now.storage() and before.place == now.place


def sharing_memory(tensors: Mapping[int, Tensor]) -> list[list[int]]:
    """Return clusters of tensors whose ranges in memory overlap, by their keys; a tensor that is alone is in none."""
    alike: dict[tuple[torch.device, int], list[int]] = {}
    for key, t in tensors.items():
        if t.numel():
            alike.setdefault((t.device, t.untyped_storage().data_ptr()), []).append(key)
    found: list[list[int]] = []
    for keys in alike.values():
        reach = 0
        for key in sorted(keys, key=lambda key: tensors[key].data_ptr()) if len(keys) > 1 else ():
            t = tensors[key]
            if t.data_ptr() >= reach:
                found.append([])
            found[-1].append(key)
            reach = max(reach, end(t))
    return [cluster for cluster in found if len(cluster) > 1]


def overlapping(tensors: Iterable[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return two different tensors that have an element in common; None if no two have."""
    given = {id(t): t for t in tensors if has_memory(t)}
    rank = {key: i for i, key in enumerate(given)}
    for cluster in sharing_memory({key: local(t) for key, t in given.items()}):
        pair = _first_overlap([given[key] for key in cluster])
        if pair is not None:
            one, other = sorted(pair, key=lambda t: rank[id(t)])
            return one, other
    return None


def _first_overlap(cluster: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return two tensors of a cluster that have an element in common; tensors are in the order of their addresses."""
    dense = [t for t in cluster if is_dense(local(t))]
    for x, y in pairwise(dense):  # of dense tensors, neighbours overlap if any two do
        if local(y).data_ptr() < end(local(x)):
            return x, y
    if len(dense) == len(cluster):
        return None
    taken = _Map(map(local, cluster))
    for i, t in enumerate(cluster):
        if taken.has(local(t)):
            return next(other for other in cluster[:i] if overlaps(local(other), local(t))), t
        taken.mark(local(t))
    return None


def in_memory_of(owners: Iterable[Tensor], others: Iterable[Tensor]) -> set[int]:
    """Return the ids of those others that are owners, or have an element in common with one."""
    own, rest = ({id(t): t for t in found} for found in (owners, others))
    found = own.keys() & rest.keys()
    for cluster in sharing_memory({key: local(t) for key, t in (own | rest).items() if has_memory(t)}):
        theirs = [key for key in cluster if key not in own]
        if 0 < len(theirs) < len(cluster):
            ground = Ground([local(own[key]) for key in cluster if key in own], [local(rest[key]) for key in theirs])
            found |= {key for key in theirs if ground.is_owned(local(rest[key]))}
    return found


class Ground:
    """The memory of a cluster, and what its owners have of it."""

    def __init__(self, owners: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        self._owners, self._others = owners, others
        dense = sorted((t for t in owners if is_dense(t)), key=Tensor.data_ptr)
        self._starts = [t.data_ptr() for t in dense]
        # of the dense owners up to each one, the one that reaches furthest
        self._furthest: list[Tensor] = list(accumulate(dense, _further))

    def owner_around(self, t: Tensor) -> Tensor | None:
        """Return a dense owner that has all of a tensor."""
        before = bisect_right(self._starts, t.data_ptr())
        owner = self._furthest[before - 1] if before else None
        return owner if owner is not None and end(owner) >= end(t) else None

    def is_owned(self, t: Tensor) -> bool:
        """Whether an owner has an element of a tensor."""
        if is_dense(t):
            before = bisect_left(self._starts, end(t))
            if before and end(self._furthest[before - 1]) > t.data_ptr():
                return True
            if len(self._starts) == len(self._owners):
                return False
        return self._map.has(t)

    @cached_property
    def _map(self) -> "_Map":
        taken = _Map([*self._owners, *self._others])
        for owner in self._owners:
            taken.mark(owner)
        return taken


class _Map:
    """The memory that tensors lie in, and which places in it are taken; a place is as small as it must be."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found = list(tensors)
        self._start = min(t.data_ptr() for t in found)
        self._unit = gcd(*(n for t in found for n in (t.itemsize, t.data_ptr() - self._start)))
        size = (max(map(end, found)) - self._start) // self._unit
        self._taken = torch.zeros(size, dtype=torch.bool, device="cpu")

    def mark(self, t: Tensor) -> None:
        """Take the places of a tensor."""
        self._places(t).fill_(True)

    def has(self, t: Tensor) -> bool:
        """Whether a place of a tensor is taken."""
        return bool(self._places(t).any())

    def _places(self, t: Tensor) -> Tensor:
        many = t.itemsize // self._unit  # places per element
        once = [(n, stride) if stride else (1, 1) for n, stride in zip(t.shape, t.stride(), strict=True)]  # expanded
        sizes, strides = [n for n, _ in once], [stride * many for _, stride in once]
        return self._taken.as_strided([*sizes, many], [*strides, 1], (t.data_ptr() - self._start) // self._unit)


def overlaps(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of a cluster have an element in common."""
    if end(x) <= y.data_ptr() or end(y) <= x.data_ptr():
        return False
    if is_dense(x) and is_dense(y):
        return True
    taken = _Map([x, y])
    taken.mark(x)
    return taken.has(y)


def has_memory(t: Tensor) -> bool:
    """Whether the address of a tensor tells where its elements are; not so if another object keeps them."""
    part = local(t)
    if is_lazy(part) or part.layout != torch.strided or part.is_quantized:
        return False
    try:
        return part.numel() > 0 and part.untyped_storage().nbytes() > 0 and part.data_ptr() != 0
    except (RuntimeError, NotImplementedError):
        return False


def end(t: Tensor) -> int:
    """Return the address behind the last element."""
    reach = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr() + reach * t.itemsize


def _further(x: Tensor, y: Tensor) -> Tensor:
    return y if end(y) >= end(x) else x


def place(t: Tensor) -> tuple[Any, ...]:
    """Return where a tensor lies and how its memory is read; equal for tensors that are one."""
    return t.data_ptr(), t.device, t.dtype, t.shape, t.stride(), t.is_conj(), t.is_neg()
