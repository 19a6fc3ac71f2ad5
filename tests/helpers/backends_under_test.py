"""What the tests of backends share: tensors that move together, and one step around which a backend moves them."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from helpers.seams import Motion, Move, Schedule
from torchbelay.ops.place import Place

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(eq=False)
class Tensors:
    """Aligned lists of tensors that move together."""

    w1: list[Tensor]
    w2: list[Tensor]
    v1: list[Tensor] = field(default_factory=list)
    v2: list[Tensor] = field(default_factory=list)
    low: list[Tensor] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    born: int = 0
    order: list[int] = field(default_factory=list)

    def copy(self, dtype: torch.dtype | None = None) -> "Tensors":
        lists = ([t.clone() if dtype is None else t.to(dtype) for t in ts] for ts in (*self.lists(), self.low))
        return Tensors(*lists, self.places, self.born)

    def lists(self) -> tuple[list[Tensor], ...]:
        return self.w1, self.w2, self.v1, self.v2

    def all(self) -> list[Tensor]:
        return [t for ts in (*self.lists(), self.low) for t in ts]


class Counter:
    """The number of steps taken, on the device."""

    def __init__(self, count: int = 0) -> None:
        self.count = torch.tensor(count, device=WHERE)

    def on(self, device: torch.device) -> Tensor:
        return self.count


def normal(shape: tuple[int, ...], dtype: torch.dtype = f32, *, seed: int = 0) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(WHERE, dtype)


def take(
    backend: Any,
    moves: list[Move],
    updates: list[Tensor] | None = None,
    keep: Tensor | None = None,
    count: Counter | None = None,
) -> None:
    """Take one step with the backend around it; `updates` are added to the weights of the first move."""
    groups = [move.group for move in moves]
    if not backend.is_current() or getattr(backend, "known", None) != groups:  # asked before every step
        backend.remember(groups)
        backend.known = groups
    step = backend.prepare(moves, count or Counter())
    if keep is None or keep:
        for t, by in zip(moves[0].group.w1, updates or [], strict=bool(updates)):
            t += by
    step.finish(keep)
    if count is not None:
        count.count += 1 if keep is None else int(keep)


def still(lists: Tensors, motion: Motion) -> Move:
    """A move whose numbers the host knows."""
    return Move(lists, motion)


def scheduled(lists: Tensors, *motions: Motion, **law: Any) -> Move:
    """A move whose numbers only the device knows."""
    return Move(lists, None, Schedule(motions, **law))
