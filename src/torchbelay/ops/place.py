"""Where the elements of a tensor are in the whole parameter, of which a rank or a step may have a part."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Which part of a whole parameter a tensor is: the parameter's name and shape, and where the part begins."""

    name: str
    whole: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(name: str, shape: Sequence[int]) -> "Place":
        """Return the place of a parameter that is in one part."""
        return Place(name, (*shape,), (0,) * len(shape), (*shape,))

    def split(self, size: int, dim: int) -> "list[Place]":
        """Return the places of what `Tensor.split` makes of the tensor."""
        found = []
        for first in range(0, self.shape[dim], size):
            rows = min(size, self.shape[dim] - first)
            start = (*self.start[:dim], self.start[dim] + first, *self.start[dim + 1 :])
            found.append(replace(self, start=start, shape=(*self.shape[:dim], rows, *self.shape[dim + 1 :])))
        return found

    @property
    def strides(self) -> list[int]:
        """How far neighbours along each dimension are apart in the whole parameter, in row-major order."""
        return [prod(self.whole[d + 1 :]) for d in range(len(self.whole))]

    @property
    def first(self) -> int:
        """The index of the first element in the whole parameter."""
        return sum(first * stride for first, stride in zip(self.start, self.strides, strict=True))

    @property
    def is_run(self) -> bool:
        """Whether the elements, in row-major order, follow each other in the whole parameter too."""
        cut = [d for d, (n, whole) in enumerate(zip(self.shape, self.whole, strict=True)) if n != whole]
        return not cut or all(n == 1 for n in self.shape[: cut[-1]]) or 0 in self.shape

    def index(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return the indices of the elements in the whole parameter, as lower and upper 32 bits; None for zeros."""
        kind = torch.int32 if prod(self.whole) <= 1 << 32 else torch.int64
        total = torch.zeros((), dtype=kind, device=device)
        for d, stride in enumerate(self.strides):
            along = torch.arange(self.shape[d], dtype=kind, device=device)
            along = along.mul_(_signed(stride) if kind == torch.int32 else stride)
            total = total.unsqueeze(-1) + along
        first = self.first
        if kind == torch.int32:
            return total.add_(_signed(first)).flatten(), None
        total = total.add_(first).flatten()
        return total.to(torch.int32), (total >> 32).to(torch.int32)


@cache
def name_key(name: str) -> int:
    """Return 64 bits that stand for a parameter's name, as an integer with a sign."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def _signed(number: int) -> int:
    """Return the integer of 32 bits that has the same lower 32 bits."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
