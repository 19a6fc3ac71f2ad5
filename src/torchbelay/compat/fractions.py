"""float32 copies of 16-bit averages, in which steps add up that are too small for 16 bits."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchbelay.ops import arithmetic

from .tensors import copy_, follow_, start, wide

_dtype = attrgetter("dtype")
_device = attrgetter("device")
_ORDINARY = {Tensor, torch.nn.Parameter}

# Elements that are compared, moved and rounded at a time. On a CPU what they need stays in its cache. On other devices
# a run is large enough to keep them busy, with 64 MiB of scratch memory.
RUN, DEVICE_RUN = 1 << 18, 1 << 23


class Fractions:
    """float32 copies of 16-bit averages.

    A copy counts where it still rounds to what the average holds. Elsewhere somebody has written the average
    meanwhile, for instance by loading a checkpoint, and what the average holds counts.
    """

    def __init__(self) -> None:
        self._copies: list[Tensor] = []
        self._block: _Block | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the copies alone: a pickle does not know that tensors share memory."""
        return {"_copies": [copy.clone() for copy in self._copies], "_block": None}

    @torch.no_grad()
    def follow(self, averages: Sequence[Tensor], weights: Sequence[Tensor], share: float) -> None:
        """Move every average by `share` of its way to its weight; integers are copied."""
        dtypes = list(map(_dtype, averages))
        kinds = {dtype for dtype in set(dtypes) if wide(dtype) != dtype}
        if not kinds:  # the usual case, and fast
            self._copies, self._block = [], None
            follow_(averages, weights, share)
            return
        narrow = [i for i, dtype in enumerate(dtypes) if dtype in kinds]
        block = self._in_one_block([averages[i] for i in narrow])
        if block is None:
            follow_(self.widen(averages), weights, share)
            self.round_into(averages)
            return
        block.follow([averages[i] for i in narrow], [weights[i].detach() for i in narrow], share)
        if len(narrow) < len(averages):
            rest = [i for i, dtype in enumerate(dtypes) if dtype not in kinds]
            follow_([averages[i] for i in rest], [weights[i] for i in rest], share)

    @torch.no_grad()
    def widen(self, averages: Sequence[Tensor]) -> list[Tensor]:
        """Return the averages to compute with: a float32 copy of each 16-bit one, and the others themselves."""
        narrow = [a for a in averages if wide(a.dtype) != a.dtype]
        if not narrow:
            self._copies, self._block = [], None
            return list(averages)
        if (block := self._in_one_block(narrow)) is not None:
            block.check(narrow)
        else:
            self._block = None
            self._match(narrow)
            for copy, average in zip(self._copies, narrow, strict=True):
                same = arithmetic.bits(copy.to(average.dtype)) == arithmetic.bits(average)
                torch.where(same, copy, average, out=copy)  # asking whether that is needed would make the host wait
        own = iter(self._copies)
        return [a if wide(a.dtype) == a.dtype else next(own) for a in averages]

    def round_into(self, averages: Sequence[Tensor]) -> None:
        """Round the copies into the 16-bit averages that they belong to."""
        copy_([a for a in averages if wide(a.dtype) != a.dtype], self._copies)

    def _match(self, narrow: list[Tensor]) -> None:
        """Let the copies be of these averages, and where these are."""
        if [copy.shape for copy in self._copies] != [a.shape for a in narrow]:
            self._copies = start(narrow)
        # What an update under inference_mode has left must not be written outside of it.
        copies = (copy.clone() if copy.is_inference() else copy for copy in self._copies)
        self._copies = [copy.to(a.device) for copy, a in zip(copies, narrow, strict=True)]

    def _in_one_block(self, narrow: list[Tensor]) -> "_Block | None":
        """Return the copies in one block of memory, if all averages are on one device."""
        if not narrow or len(set(map(_device, narrow))) > 1 or not _ORDINARY.issuperset(map(type, narrow)):
            return None
        if self._block is None or not self._block.fits(narrow):
            self._match(narrow)
            self._block = _Block(narrow, self._copies)
            self._copies = self._block.views
        return self._block


class _Run(NamedTuple):
    """Some averages, or a part of a large one, whose copies lie side by side."""

    first: int
    last: int
    part: slice | None  # of the memory of a large one
    copy: Tensor  # float32
    copies: list[Tensor]  # the same memory, in the shapes of the averages
    rounded: Tensor  # scratch memory, in the dtype of the averages
    held: list[Tensor]  # scratch memory in their shapes
    all_held: Tensor
    wide: list[Tensor]
    all_wide: Tensor


class _Block:
    """float32 copies in one block of memory.

    Few calls do for many small averages, and of large ones everything that a part needs stays in the cache.
    """

    def __init__(self, averages: list[Tensor], copies: list[Tensor]) -> None:
        self._layouts = [_about(a) for a in averages]
        self._device = averages[0].device
        self._memory = torch.empty(sum(a.numel() for a in averages), dtype=torch.float32, device=self._device)
        self.views = [
            _shaped(some, a)
            for some, a in zip(torch.split(self._memory, [a.numel() for a in averages]), averages, strict=True)
        ]
        for view, copy in zip(self.views, copies, strict=True):
            view.copy_(copy)
        self._runs = list(self._cut(averages))

    def fits(self, averages: list[Tensor]) -> bool:
        """Whether these are averages like those that the copies were made of."""
        if self._memory.is_inference() and not torch.is_inference_mode_enabled():
            return False
        return self._layouts == [_about(a) for a in averages]

    def check(self, averages: list[Tensor]) -> None:
        """Let what an average holds count, if its copy does not round to it any more."""
        for run in self._runs:
            _check(run, _taken(run, averages))

    def follow(self, averages: list[Tensor], weights: list[Tensor], share: float) -> None:
        """Check the copies, move them by `share` of their way to the weights, and round them into the averages."""
        for i in {run.first for run in self._runs if run.part is not None}:
            if weights[i].stride() != averages[i].stride():  # parts of both are to belong together
                weights[i] = torch.empty_like(averages[i], dtype=weights[i].dtype).copy_(weights[i])
        for run in self._runs:
            some = _taken(run, averages)
            _check(run, some)
            torch._foreach_copy_(run.wide, _taken(run, weights))
            run.copy.lerp_(run.all_wide, share)
            torch._foreach_copy_(some, run.copies)

    def _cut(self, averages: list[Tensor]) -> "list[_Run]":
        """Cut the averages into runs of one dtype and of about so many elements at most as fit well."""
        most = RUN if self._device.type == "cpu" else DEVICE_RUN
        runs: list[tuple[int, int, slice | None, int, int]] = []  # first, last, part, and where in the block
        begin = first = 0
        end = 0
        for i, average in enumerate(averages):
            size = average.numel()
            large = size > most and _is_dense(average)
            if first < i and (large or end - begin + size > most or averages[first].dtype != average.dtype):
                runs.append((first, i, None, begin, end))
                first, begin = i, end
            if large:
                for low in range(0, size, most):
                    high = min(low + most, size)
                    runs.append((i, i + 1, slice(low, high), end + low, end + high))
                first, begin = i + 1, end + size
            end += size
        if first < len(averages):
            runs.append((first, len(averages), None, begin, end))
        room = max((high - low for *_, low, high in runs), default=0)
        kinds = (torch.int16, torch.int16, torch.float32)
        scratch = [torch.empty(room, dtype=dtype, device=self._device) for dtype in kinds]
        return [self._run(averages, *run, *scratch) for run in runs]

    def _run(
        self,
        averages: list[Tensor],
        first: int,
        last: int,
        part: slice | None,
        low: int,
        high: int,
        rounded: Tensor,
        held: Tensor,
        wide: Tensor,
    ) -> _Run:
        copy, dtype = self._memory[low:high], averages[first].dtype
        size = high - low
        rounded, held, wide = rounded[:size].view(dtype), held[:size].view(dtype), wide[:size]
        if part is not None:
            return _Run(first, last, part, copy, [copy], rounded, [held], held, [wide], wide)
        some = averages[first:last]
        sizes = [a.numel() for a in some]
        in_held, in_wide = (
            [_shaped(t, a) for t, a in zip(torch.split(memory, sizes), some, strict=True)] for memory in (held, wide)
        )
        return _Run(first, last, None, copy, self.views[first:last], rounded, in_held, held, in_wide, wide)


def _check(run: _Run, averages: list[Tensor]) -> None:
    torch._foreach_copy_(run.held, averages)
    run.rounded.copy_(run.copy)
    if run.copy.device.type == "cpu":  # asking a device whether anything changed would make the host wait for it
        # large integers are compared faster, and a nan equals itself
        width = next(t for t in (torch.int64, torch.int32, torch.int16) if 2 * len(run.rounded) % t.itemsize == 0)
        if torch.equal(run.rounded.view(width), run.all_held.view(width)):
            return
    same = arithmetic.bits(run.rounded) == arithmetic.bits(run.all_held)
    torch.where(same, run.copy, run.all_held, out=run.copy)


def _taken(run: _Run, tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors of a run; of a large one the part, as it lies in memory."""
    if run.part is None:
        return tensors[run.first : run.last]
    tensor = tensors[run.first]
    return [tensor.as_strided((tensor.numel(),), (1,))[run.part]]


def _about(tensor: Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _shaped(memory: Tensor, like: Tensor) -> Tensor:
    """Return flat memory in the shape of a tensor, and in its layout if that has no gaps."""
    return (
        memory.as_strided(like.size(), like.stride(), memory.storage_offset())
        if _is_dense(like)
        else memory.view(like.shape)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side in memory, in whatever order, and each of them once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
