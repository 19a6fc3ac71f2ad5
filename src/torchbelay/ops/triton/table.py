"""Where the tensors of a model are, written down for the device: a row of addresses per tensor, and a map of blocks.

A captured CUDA graph reads all of it at every replay, so what a graph has seen is never overwritten.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import attrgetter, call, is_, itemgetter
from typing import Any, ClassVar, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from torchbelay.ops.devices import is_capturing
from torchbelay.ops.facts import Fact
from torchbelay.ops.place import Place, name_key
from torchbelay.ops.step import Tensors
from torchbelay.ops.strides import is_dense

from . import layout

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
BLOCK = 1024

_address, _stride, _is_plain = Tensor.data_ptr, Tensor.stride, Tensor.is_contiguous
_dtype, _shape, _device = attrgetter("dtype"), attrgetter("shape"), Tensor.get_device


class Follower(NamedTuple):
    """An average of one tensor: its memory, and the cohort whose numbers move it.

    One of 24 bits has a second plane, and a place in the whole parameter.
    """

    w2: Tensor
    v1: Tensor | None
    v2: Tensor | None
    cohort: int
    low: Tensor | None = None
    place: Place | None = None


class State(NamedTuple):
    """What an optimizer keeps for one tensor: two moments and a step count, or less. None: it has none."""

    group: int  # of the optimizer
    first: Tensor | None
    second: Tensor | None
    step: Tensor | None


StandIns = list[tuple[Tensor, Tensor]]  # weights, and copies of them that are laid out as the weights were


class Known:
    """Tensors, and what a kernel assumes of them: addresses, sizes, dtypes, devices and layouts.

    The address alone is not enough. Memory that was freed is used again, by a tensor of another layout too.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self.addresses: list[int] = list(map(_address, self.tensors))
        self.strides, self.dtypes = list(map(_stride, self.tensors)), list(map(_dtype, self.tensors))
        known = _layouts(self.tensors)
        self._are_alike = Fact(lambda tensors: _layouts(tensors) == known)

    def are_alike(self) -> bool:
        """Whether the tensors have their shapes, dtypes, devices and layouts, wherever they are."""
        return self._are_alike(self.tensors)

    def are_there(self) -> bool:
        """Whether the tensors are at their addresses."""
        return list(map(_address, self.tensors)) == self.addresses


def _layouts(tensors: Sequence[Tensor]) -> list[Any]:
    """Return what a kernel assumes of tensors; strides only if they are unusual: they make a tuple per tensor."""
    plain = list(map(_is_plain, tensors))
    unusual = [] if all(plain) else [t.stride() for t, yes in zip(tensors, plain, strict=True) if not yes]
    return [plain, unusual, *(list(map(what, tensors)) for what in (_shape, _dtype, _device))]


class KnownStates:
    """What an optimizer keeps for its parameters, as it was: which tensors, and where. None of them is kept alive."""

    def __init__(self, states: Iterable[dict[str, Any]], keys: Sequence[str]) -> None:
        states = list(states)
        self._columns = []
        for key in keys:
            tensors = [own.get(key) for own in states]
            refs = [_nothing if t is None else ref(t) for t in tensors]
            self._columns.append((key, refs, [_where(t) for t in tensors]))

    def are_current(self, states: Iterable[dict[str, Any]]) -> bool:
        """Whether these are the very tensors, where they were: users replace, move and offload them."""
        states = list(states)
        for key, refs, addresses in self._columns:
            try:
                now = list(map(itemgetter(key), states))
            except KeyError:
                now = [own.get(key) for own in states]
            if len(now) != len(refs) or not all(map(is_, now, map(call, refs))):
                return False
            try:
                found = list(map(_address, now))
            except TypeError:  # some are None, and some that are None now have died
                found = list(map(_where, now))
            if found != addresses:
                return False
        return True


def _nothing() -> None:
    """Stand for a tensor that is not there."""


def fits(w1: Tensor, *others: Tensor) -> bool:
    """Whether kernels can take these as flat memory: real, of 16 or 32 bits, dense, and laid out alike."""
    return (
        w1.layout == torch.strided
        and all(t.dtype in KINDS and t.layout == torch.strided and t.device == w1.device for t in (w1, *others))
        and all(t.shape == w1.shape and (t.stride() == w1.stride() or t.numel() < 2) for t in others)
        and is_dense(w1)
        and type(w1) in (Tensor, torch.nn.Parameter)
    )


def upload(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the numbers on the device, without waiting for it."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    if is_capturing(device):
        raise RuntimeError(
            "a graph is being captured, and the averages' tensors are not what they were in the last step; take a step "
            "before capturing, with the same model and averages"
        )
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=True).to(device, non_blocking=True)


class Mirror:
    """A list of numbers that seldom changes, in one place on the device. A captured graph gets a copy of its own."""

    CODES: ClassVar = {torch.int64: "q", torch.float64: "d"}

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._values = dtype, [0] * size
        with torch.inference_mode(False):  # later steps write to it, also outside
            self._there = torch.zeros(size, dtype=dtype, device=device)
        self._is_cuda = device.type == "cuda"
        # Pinned in time for the first graph: while one is being captured it would be too late.
        self._spare = torch.empty(size, dtype=dtype, device="cpu", pin_memory=True) if self._is_cuda else None
        self._captured: list[Tensor] = []

    def get(self, values: list[Any], capturing: bool) -> Tensor:
        """Return the values on the device; nothing is copied if they have not changed."""
        if capturing:
            return self._for_a_graph(values)
        if self._is_cuda and self._spare is None:
            self._spare = torch.empty(len(values), dtype=self._dtype, device="cpu", pin_memory=True)
        if values != self._values:
            here = torch.frombuffer(array(self.CODES[self._dtype], values), dtype=self._dtype)
            # another pinned buffer each time: the last one may not have been read yet
            self._there.copy_(here.pin_memory() if self._is_cuda else here, non_blocking=True)
            self._values = values
        return self._there

    def _for_a_graph(self, values: list[Any]) -> Tensor:
        if self._spare is None:
            raise RuntimeError("take a step of the optimizer between capturing two graphs of it")
        pinned, self._spare = self._spare, None
        pinned.copy_(torch.tensor(values, dtype=self._dtype, device="cpu"))
        there = torch.empty_like(self._there).copy_(pinned, non_blocking=True)
        self._captured += [pinned, there]
        return there


class Table:
    """Rows of addresses for tensors of one device, each with the averages that follow it."""

    def __init__(
        self,
        w1: Tensors,
        followers: Sequence[Sequence[Follower]],
        states: Sequence[State] | None = None,
        *,
        none: int = 0,
        block: int = BLOCK,
    ) -> None:
        self.w1, self.followers, self.block, self._none = list(w1), followers, block, none
        self.device = self.w1[0].device
        self._known = Known(self.w1)
        self.averages = max(1, *map(len, followers)) if followers else 1
        self.gaps = any(len(each) < self.averages for each in followers)
        self.columns = int(layout.HEAD) + int(layout.SLOT) * self.averages
        self.kinds, self.mapped = 0, False
        counts = [-(-t.numel() // block) for t in self.w1]
        firsts = [0, *accumulate(counts)]
        self.blocks = firsts[-1]
        place = 0
        rows = []
        for i, (t, where) in enumerate(zip(self.w1, self._known.addresses, strict=True)):
            # Addresses alone are kept of the optimizer's state: who offloads it wants its memory back.
            *moments, step, group = (0, 0, 0, 0) if states is None else (*map(_where, states[i][1:]), states[i].group)
            kind = int(layout.WAYS) * KINDS[t.dtype] + (_kind(followers[i][0]) if followers[i] else KINDS[t.dtype])
            self.kinds |= 1 << kind
            slots = [[_where(f.w2), _where(f.low), _where(f.v1), _where(f.v2), f.cohort] for f in followers[i]]
            rest = [*(slots[0][:2] if slots else (where, 0)), 0, 0, none]  # can be read, and is left as it is
            slots += [rest] * (self.averages - len(slots))
            aligned = all(a % 16 == 0 for a in (where, *moments, *(a for slot in slots for a in slot[:-1])))
            row = [t.numel(), firsts[i], kind, int(aligned), where, place, *moments, group, step]
            row += (index := _index(t, followers[i][0].place if followers[i] else None))
            self.mapped |= index[2] != 0
            rows.append(sum(slots, row))
            place += -(-t.numel() * t.itemsize // 16) * 16
        self.copy_bytes = place
        self.rows = upload(rows, torch.int64, self.device)
        each = upload(counts, torch.int64, self.device)
        self.map = torch.repeat_interleave(
            torch.arange(len(counts), dtype=torch.int32, device=self.device), each, output_size=self.blocks
        )

    def is_current(self) -> bool:
        """Whether the weights are where they were, and laid out as they were."""
        return self._known.are_alike() and self._known.are_there()

    def is_there(self) -> bool:
        """Whether the weights are where they were."""
        return self._known.are_there()

    def elsewhere(self) -> "tuple[Table, StandIns]":
        """Return the table for weights in other memory, and stand-ins for those that are laid out otherwise now.

        A stand-in is a copy that is laid out as the weights were. If the weights are to move, it is to be copied back.
        """
        w1: list[Tensor] = []
        stand_ins: StandIns = []
        known = self._known
        for w, each, stride, dtype in zip(self.w1, self.followers, known.strides, known.dtypes, strict=True):
            shape = each[0].w2.shape if each else w.shape
            if w.shape != shape:
                raise RuntimeError(
                    f"the optimizer's step has put weights of shape {tuple(w.shape)} in place of weights of shape "
                    f"{tuple(shape)}; make the optimizer and Belay anew"
                )
            if (w.stride(), w.dtype, w.device) != (stride, dtype, self.device):
                stand_ins.append((w, torch.empty_strided(shape, stride, dtype=dtype, device=self.device).copy_(w)))
                w = stand_ins[-1][1]
            w1.append(w)
        return Table(w1, self.followers, none=self._none, block=self.block), stand_ins


def fits_planes(w1: Tensor, low: Tensor, place: Place) -> bool:
    """Whether kernels can take the second plane of an average too, if the weights and the first one fit."""
    alike = low.device == w1.device and (low.stride() == w1.stride() or low.numel() < 2)
    return alike and _digits(w1, place) is not None


def _kind(follower: Follower) -> int:
    return KINDS[follower.w2.dtype] if follower.low is None else int(layout.PLANES)


def _index(w1: Tensor, place: Place | None) -> list[int]:
    """Return the columns that tell the name, and the indices of elements in the whole parameter."""
    if place is None:
        return [0] * 7
    digits = _digits(w1, place)
    assert digits is not None
    if digits in ([], [(w1.numel(), 1)]):
        return [name_key(place.name), place.first, 0, 0, 0, 0, 0]
    (inner, stride), (middle, stride2), (_, stride3) = [*digits, (1, 0), (1, 0)][:3]
    return [name_key(place.name), place.first, inner, stride, middle, stride2, stride3]


def _digits(w1: Tensor, place: Place) -> list[tuple[int, int]] | None:
    """Return sizes, from the innermost of memory on, and their strides in the whole; None if kernels cannot do that."""
    found: list[tuple[int, int]] = []
    for d in sorted(range(w1.dim()), key=lambda d: (w1.stride(d), -d)):
        size, stride = w1.shape[d], place.strides[d]
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = found[-1][0] * size, found[-1][1]
        elif size != 1:
            found.append((size, stride))
    simple = found in ([], [(w1.numel(), 1)]) or 0 in w1.shape
    return found if simple or (len(found) <= 3 and w1.numel() < 1 << 31) else None


def _where(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()
