"""Runs that are recorded, with everything that snapshots are to rebuild kept beside them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchbelay as tb
from torchbelay.physics.method import Method
from torchbelay.snapshots import Recorder


class Walk:
    """A random walk of float64 weights: SGD at rate 1 with gradients that are white noise.

    `along` are averages that are trained along and not recorded: what synthesis must find.
    """

    def __init__(
        self,
        method: Method | None = None,
        *,
        size: int = 50,
        seed: int = 0,
        along: Mapping[str, Any] | None = None,
        spectators: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.model = nn.Module()
        start = torch.randn(size, dtype=torch.float64, generator=self.generator)
        self.model.weight = nn.Parameter(5 * start)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        recorded = tb.snapshots.defaults() if spectators is None else spectators
        self.along = dict(along or {})
        self.belay = tb.Belay(
            self.model,
            self.optimizer,
            method or tb.methods.ema(0.9),
            spectators={**recorded, **self.along},
            **options,
        )
        self.names = ["average", *recorded]
        self.points = [self.weight]

    @property
    def weight(self) -> Tensor:
        return self.model.weight.detach().clone()

    def record(self, folder: Path, every: int, **options: Any) -> Recorder:
        options.setdefault("averages", self.names)
        return Recorder(self.belay, folder, every=every, **options)

    def steps(self, count: int) -> None:
        for _ in range(count):
            noise = torch.randn(self.model.weight.shape, dtype=torch.float64, generator=self.generator)
            self.model.weight.grad = -noise
            self.optimizer.step()
            self.points.append(self.weight)

    def average(self, name: str) -> Tensor:
        return self.belay.average_state_dict(name)["weight"]


def relative_error(found: Tensor, truth: Tensor, weights: Tensor) -> float:
    """Return ‖found − truth‖ ÷ ‖truth − weights‖."""
    return float((found - truth).norm() / (truth - weights).norm())
