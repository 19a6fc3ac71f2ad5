"""What the tests of the kernels share. They run on a GPU, or in Triton's interpreter where there is none."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchbelay.ops.backend import Motion, Move, Score, choose

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(eq=False)
class Tensors:
    """Lists that move together, as a cohort is."""

    w1: list[Tensor]
    w2: list[Tensor]
    v1: list[Tensor] = field(default_factory=list)
    v2: list[Tensor] = field(default_factory=list)
    born: int = 0

    def copy(self, dtype: torch.dtype | None = None) -> "Tensors":
        lists = ([t.clone() if dtype is None else t.to(dtype) for t in ts] for ts in self.lists())
        return Tensors(*lists, born=self.born)

    def lists(self) -> tuple[list[Tensor], ...]:
        return self.w1, self.w2, self.v1, self.v2

    def all(self) -> list[Tensor]:
        return [t for ts in self.lists() for t in ts]


class Counter:
    """Steps taken, on the device."""

    def __init__(self, count: int = 0) -> None:
        self.count = torch.tensor(count, device=WHERE)

    def on(self, device: torch.device) -> Tensor:
        return self.count


def normal(shape: tuple[int, ...], dtype: torch.dtype = f32, *, seed: int = 0) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(WHERE, dtype)


def take(
    around: Any,
    moves: list[Move],
    updates: list[Tensor] | None = None,
    keep: Tensor | None = None,
    count: Counter | None = None,
) -> None:
    """One step by somebody else, with all that is done around it; `updates` are for the first move's weights."""
    ready = around.prepare(moves, count or Counter())
    ready.before(keep)
    if keep is None or keep:
        for t, by in zip(moves[0].lists.w1, updates or [], strict=bool(updates)):
            t += by
    ready.after(keep)
    if count is not None:
        count.count += 1 if keep is None else int(keep)


def kernel() -> Any:
    """A fresh way through the kernels."""
    return choose("triton")


def still(lists: Tensors, motion: Motion) -> Move:
    """A move whose numbers the host knows."""
    return Move(lists, motion)


def scored(lists: Tensors, *motions: Motion, **law: Any) -> Move:
    """A move whose numbers only the device knows."""
    return Move(lists, None, Score(motions, **law))
