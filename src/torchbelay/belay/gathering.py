"""Tensors of which each rank has a right slice, made whole on every rank by a few messages of all of them."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import traffic


class _Place(NamedTuple):
    """Where a tensor is in a buffer of bytes: its dtype, and shape, strides and offset in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Gathering:
    """Messages that make tensors whole; once made, for as long as the tensors are where they are."""

    def __init__(self, wholes: Iterable[Tensor], ranks: int, rank: int, group: Any) -> None:
        alike: dict[torch.device, list[Tensor]] = {}
        for whole in wholes:
            alike.setdefault(whole.device, []).append(whole)
        self._messages: list[_Message] = []
        for device, some in alike.items():
            slots = [traffic.slot(t.shape, ranks, t.itemsize) for t in some]
            for places in traffic.buckets(slots, ranks):
                these, sizes = [some[i] for i in places], [slots[i] for i in places]
                self._messages.append(_Message(these, sizes, ranks, rank, talking(group, device)))
        self._group = group

    def run(self) -> None:
        """Send all messages; a collective."""
        for message in self._messages:
            message.send(self._group)


class _Message:
    """One all-gather: the slices that go into it, and where the slices that come out of it belong."""

    def __init__(
        self, wholes: Sequence[Tensor], slots: Sequence[int], ranks: int, rank: int, there: torch.device
    ) -> None:
        *starts, self._size = accumulate(slots, initial=0)
        self._ranks, self._there = ranks, there
        self._mine = [slice_of(whole, ranks, rank) for whole in wholes]
        self._sent = [self._place(t, start) for t, start in zip(self._mine, starts, strict=True)]
        self._to: list[Tensor] = []
        self._received: list[_Place] = []
        for whole, start in zip(wholes, starts, strict=True):
            self._add(whole, start)

    def _add(self, whole: Tensor, start: int) -> None:
        """Note where the slices of a tensor come from: those of equal size at once, then what is left.

        What is not cut is that of the first rank: ranks may have rounded it at random.
        """
        d = traffic.dimension(whole.shape, self._ranks)
        if d is None:
            self._to.append(whole)
            self._received.append(self._place(whole, start))
            return
        size, rows = whole.shape[d], traffic.chunk(whole.shape[d], self._ranks, 0)[1]
        full, left = divmod(size, rows)
        equal = whole.narrow(d, 0, full * rows).view(*whole.shape[:d], full, rows, *whole.shape[d + 1 :]).movedim(d, 0)
        one = self._place(equal[0], start)
        self._to.append(equal)
        strides = (self._size // whole.itemsize, *one.strides)
        self._received.append(one._replace(shape=tuple(equal.shape), strides=strides))
        if left:
            self._to.append(whole.narrow(d, full * rows, left))
            self._received.append(self._place(self._to[-1], full * self._size + start))

    def _place(self, t: Tensor, start: int) -> _Place:
        """Return the place of a tensor that begins at a byte of a buffer, one number after the other."""
        strides = tuple(prod(t.shape[i + 1 :]) for i in range(t.ndim))
        return _Place(t.dtype, tuple(t.shape), strides, start // t.itemsize)

    def send(self, group: Any) -> None:
        """Exchange the slices, and write what came from all ranks."""
        mine = torch.empty(self._size, dtype=torch.uint8, device=self._there)
        torch._foreach_copy_(_read(mine, self._sent), self._mine)
        everything = torch.empty(self._ranks * self._size, dtype=torch.uint8, device=self._there)
        _all_gather(everything, mine, group=group)
        torch._foreach_copy_(self._to, _read(everything, self._received))


def slice_of(whole: Tensor, ranks: int, rank: int) -> Tensor:
    """Return the slice of a tensor that belongs to a rank; a view. What is not cut belongs to all."""
    d = traffic.dimension(whole.shape, ranks)
    return whole if d is None else whole.narrow(d, *traffic.chunk(whole.shape[d], ranks, rank))


def talking(group: Any, device: torch.device) -> torch.device:
    """Return where the ranks of a group exchange tensors of a device: there, if the group can, or where it can."""
    known = [each.type for each in getattr(group, "_device_types", ())]
    return device if device.type in known or not known else torch.device(known[0])


def _read(buffer: Tensor, places: Sequence[_Place]) -> list[Tensor]:
    """Return the tensors that are at these places of a buffer of bytes."""
    typed = {dtype: buffer.view(dtype) for dtype in {place.dtype for place in places}}
    return [typed[dtype].as_strided(shape, strides, offset) for dtype, shape, strides, offset in places]


def _all_gather(everything: Tensor, mine: Tensor, group: Any) -> None:
    """Gather flat tensors of one size; torch has a new name for that, and warns about the old one."""
    distributed = torch.distributed
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    gather(everything, mine, group=group)
