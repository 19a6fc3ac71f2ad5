"""Where the tensors of a model are, written down for the device: a row of addresses per tensor, and a map of blocks.

A captured CUDA graph reads all of it at every replay, so what a graph has seen is never overwritten.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchbelay.ops.devices import is_capturing
from torchbelay.ops.step import Tensors

from . import layout

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
BLOCK = 1024

_address = Tensor.data_ptr


class Follower(NamedTuple):
    """An average of one tensor: its memory, and the cohort whose numbers move it."""

    w2: Tensor
    v1: Tensor | None
    v2: Tensor | None
    cohort: int


class State:
    """What an optimizer keeps for one tensor, in a dict of its own: two moments and a step count, or less.

    The memory is held. So a kernel that still has the address of a replaced tensor writes to no other tensor's memory.
    """

    def __init__(self, own: dict[str, Any], keys: Sequence[str | None], group: int) -> None:
        self.group, self._own = group, own
        tensors: list[Tensor | None] = [own.get(key) if key else None for key in keys]
        self.first, self.second, self.step = tensors
        self.addresses = tuple(map(_where, tensors))
        self._known = [(k, t, t.data_ptr()) for k, t in zip(keys, tensors, strict=True) if k and t is not None]
        self._absent = [k for k, t in zip(keys, tensors, strict=True) if k and t is None]
        self._held = [t.untyped_storage() for t in tensors if t is not None]

    @staticmethod
    def are_current(states: "Sequence[State]") -> bool:
        """Whether every state still has these tensors, where they were."""
        for state in states:
            own = state._own
            for key, tensor, address in state._known:
                if own.get(key) is not tensor or tensor.data_ptr() != address:
                    return False
            for key in state._absent:
                if own.get(key) is not None:
                    return False
        return True


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Return the address of each tensor's memory."""
    return list(map(_address, tensors))


def fits(w1: Tensor, *others: Tensor) -> bool:
    """Whether kernels can take these as flat memory: real, of 16 or 32 bits, dense, and laid out alike."""
    return (
        w1.layout == torch.strided
        and all(t.dtype in KINDS and t.layout == torch.strided and t.device == w1.device for t in (w1, *others))
        and all(t.shape == w1.shape and (t.stride() == w1.stride() or t.numel() < 2) for t in others)
        and _is_dense(w1)
        and type(w1) in (Tensor, torch.nn.Parameter)
    )


def _is_dense(t: Tensor) -> bool:
    if t.is_contiguous():
        return True
    order = sorted(range(t.dim()), key=lambda d: (t.stride(d), t.shape[d]), reverse=True)
    return t.permute(order).is_contiguous()


def upload(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the numbers on the device, without waiting for it."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    if is_capturing(device):
        raise RuntimeError(
            "a graph is being captured, and the averages' tensors are not what they were in the last step; take a step "
            "before capturing, with the same model and averages"
        )
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class Mirror:
    """A list of numbers that seldom changes, in one place on the device. A captured graph gets a copy of its own."""

    CODES: ClassVar = {torch.int64: "q", torch.float64: "d"}

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._values = dtype, [0] * size
        self._there = torch.zeros(size, dtype=dtype, device=device)
        self._is_cuda = device.type == "cuda"
        # Pinned in time for the first graph: while one is being captured it would be too late.
        self._spare = torch.empty(size, dtype=dtype, pin_memory=True) if self._is_cuda else None
        self._captured: list[Tensor] = []

    def get(self, values: list[Any], capturing: bool) -> Tensor:
        """Return the values on the device; nothing is copied if they have not changed."""
        if capturing:
            return self._for_a_graph(values)
        if self._is_cuda and self._spare is None:
            self._spare = torch.empty(len(values), dtype=self._dtype, pin_memory=True)
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
        pinned.copy_(torch.tensor(values, dtype=self._dtype))
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
        self.w1, self.followers, self.states, self.block = list(w1), followers, states, block
        self.device = self.w1[0].device
        self.addresses = addresses(self.w1)
        self.averages = max(1, *map(len, followers)) if followers else 1
        self.gaps = any(len(each) < self.averages for each in followers)
        self.columns = int(layout.HEAD) + int(layout.SLOT) * self.averages
        self.kinds = 0
        counts = [-(-t.numel() // block) for t in self.w1]
        firsts = [0, *accumulate(counts)]
        self.blocks = firsts[-1]
        place = 0
        rows = []
        for i, (t, where) in enumerate(zip(self.w1, self.addresses, strict=True)):
            *moments, step = (0, 0, 0) if states is None else states[i].addresses
            group = 0 if states is None else states[i].group
            kind = 3 * KINDS[t.dtype] + KINDS[followers[i][0].w2.dtype if followers[i] else t.dtype]
            self.kinds |= 1 << kind
            slots = [[_where(f.w2), _where(f.v1), _where(f.v2), f.cohort] for f in followers[i]]
            rest = [slots[0][0] if slots else where, 0, 0, none]  # memory that can be read, and is left as it is
            slots += [rest] * (self.averages - len(slots))
            aligned = all(a % 16 == 0 for a in (where, *moments, *(a for slot in slots for a in slot[:3])))
            row = [t.numel(), firsts[i], kind, int(aligned), where, place, *moments, group, step]
            rows.append(sum(slots, row))
            place += -(-t.numel() * t.itemsize // 16) * 16
        self.copy_bytes = place
        self.rows = upload(rows, torch.int64, self.device)
        each = upload(counts, torch.int64, self.device)
        self.map = torch.repeat_interleave(
            torch.arange(len(counts), dtype=torch.int32, device=self.device), each, output_size=self.blocks
        )

    def is_current(self) -> bool:
        """Whether the weights are where they were."""
        return addresses(self.w1) == self.addresses


def _where(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()
