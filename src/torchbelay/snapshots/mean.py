"""The weighted mean of one part of a tensor over several checkpoints.

With weights that add up to 1, Σ c_i·x_i = x + Σ c_i·(x_i − x) for x, the value in the last checkpoint. In this form,
elements that are equal everywhere come out unchanged to the last bit, and rounding concerns the small differences only.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .checkpoint import Checkpoint

_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


class Part(NamedTuple):
    """Some elements of a tensor, in row-major order."""

    name: str
    start: int
    length: int


class NotFiniteError(ValueError):
    """A checkpoint holds NaN or infinity, or the mean is too large for the dtype."""


class Workspace:
    """Memory that one thread uses again and again: memory fresh from the system costs more than the arithmetic."""

    def __init__(self) -> None:
        self.blocks: dict[str, Tensor] = {}

    def get(self, use: str, count: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor with arbitrary content."""
        size = count * dtype.itemsize
        block = self.blocks.get(use)
        if block is None or block.numel() < size:
            block = self.blocks[use] = torch.empty(size, dtype=torch.uint8, device="cpu")
        return block[:size].view(dtype)


class Source(NamedTuple):
    """A checkpoint, the name of a tensor in it, and the weight of that tensor in a mean."""

    checkpoint: Checkpoint
    name: str
    weight: float


def mean(
    sources: Sequence[Source], part: Part, workspace: Workspace, *, wide: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """Return the mean of a part, a flat tensor of `dtype` that is valid until the workspace is used again.

    The weights of the sources add up to 1. `wide` is the dtype of the arithmetic.
    """
    found = _mean(sources, part, workspace, wide, _REAL.get(dtype, dtype))
    return found.view(dtype) if dtype.is_complex else found


def _mean(sources: Sequence[Source], part: Part, workspace: Workspace, wide: torch.dtype, dtype: torch.dtype) -> Tensor:
    *others, last = sources
    newest = _read(last, part, workspace, "last")
    base = newest
    if newest.dtype != wide:
        base = workspace.get("base", newest.numel(), wide).copy_(newest)
    total: Tensor | None = None
    for source in others:
        values = _read(source, part, workspace, "values")
        if same_bytes(values, newest):
            continue
        if values.dtype != wide:
            values = workspace.get("wide", values.numel(), wide).copy_(values)
        values.sub_(base)
        if total is None:
            total = torch.mul(values, source.weight, out=workspace.get("total", values.numel(), wide))
        else:
            total.add_(values, alpha=source.weight)
    if total is None:  # the same in all
        if math.isnan(base.amin()):  # infinity may be part of the model: a mask
            _refuse(sources, part, workspace)
        return newest if newest.dtype == dtype else workspace.get("out", newest.numel(), dtype).copy_(newest)
    total.add_(base)
    if not _fits(total, dtype):
        _refuse(sources, part, workspace)
        if wide != torch.float64:  # a difference was too large for float32
            return _mean(sources, part, workspace, torch.float64, dtype)
        raise NotFiniteError(f"the merge of {part.name!r} is too large for {dtype}; use other weights")
    return total if dtype == wide else workspace.get("out", total.numel(), dtype).copy_(total)


def _read(source: Source, part: Part, workspace: Workspace, use: str) -> Tensor:
    """Read a part; complex numbers as pairs of real ones."""
    dtype = source.checkpoint.dtype(source.name)
    flat = workspace.get(use, part.length, dtype)
    source.checkpoint.read_into(source.name, part.start, flat)
    return flat.view(_REAL[dtype]) if dtype.is_complex else flat


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Return whether two flat tensors are equal, also in NaN and in the sign of zero."""
    if one.dtype != other.dtype:
        return False
    whole = one.numel() * one.element_size() % 8 == 0
    unit = torch.int64 if whole else torch.uint8  # longer ones are faster
    return torch.equal(one.view(unit), other.view(unit))


def _fits(values: Tensor, dtype: torch.dtype) -> bool:
    """Return whether all values are finite, also as numbers of `dtype`."""
    low, high = values.aminmax()
    return max(-low.item(), high.item()) <= torch.finfo(dtype).max  # false for NaN, which both would be


def _refuse(sources: Sequence[Source], part: Part, workspace: Workspace) -> None:
    """Raise if a checkpoint holds NaN or infinity in a part: say which one."""
    for source in sources:
        bad = ~_read(source, part, workspace, "values").isfinite()
        if found := int(bad.sum()):
            first = part.start + int(bad.int().argmax())
            raise NotFiniteError(
                f"{source.checkpoint.path}: {source.name!r} holds NaN or infinity (values: {found:,}, the first is "
                f"number {first:,}); leave this checkpoint out"
            )
