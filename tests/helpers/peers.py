"""Other libraries' averages behind one small interface, for tests that compare them with ours."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_multi_avg_fn,
)


def library(name: str) -> ModuleType:
    return pytest.importorskip(name, reason=f"{name} is a peer that this test is about")


# The peers, each with a constant decay and a start at the weights as they are ----------------------------------------


class Torch:
    name = "torch"

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = model
        self.ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.ema.update_parameters(model)

    def update(self) -> None:
        self.ema.update_parameters(self.model)

    def average(self) -> dict[str, Tensor]:
        return self.ema.module.state_dict()


class EmaPytorch:
    name = "ema_pytorch"

    def __init__(self, model: nn.Module, decay: float, **more: Any) -> None:
        how = {"beta": decay, "min_value": decay, "update_every": 1, "update_after_step": 0} | more
        self.ema = library("ema_pytorch").EMA(model, **how)
        self.ema.update()

    def update(self) -> None:
        self.ema.update()

    def average(self) -> dict[str, Tensor]:
        return self.ema.ema_model.state_dict()

    def updates(self) -> int:
        return int(self.ema.step) - 1  # the first was the copy


class TorchEma:
    name = "torch_ema"

    def __init__(self, model: nn.Module, decay: float, use_num_updates: bool = False) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        self.ema = library("torch_ema").ExponentialMovingAverage(
            model.parameters(), decay=decay, use_num_updates=use_num_updates
        )

    def update(self) -> None:
        self.ema.update()

    def average(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.ema.shadow_params, strict=True))


Peer = Torch | EmaPytorch | TorchEma
every_peer = pytest.mark.parametrize("peer", [Torch, EmaPytorch, TorchEma], ids=lambda p: p.name)


def two_layers() -> nn.Sequential:
    """Layers of one shape, with random weights."""
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    for p in model.parameters():
        nn.init.normal_(p, generator=generator)
    return model


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    after: Callable[[], Any] = lambda: None,
    *,
    seed: int = 6,
) -> None:
    """Steps along random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
        after()


def same(x: dict[str, Tensor], y: dict[str, Tensor]) -> bool:
    """Whether what both have is equal to the last bit, and they have anything in common."""
    common = x.keys() & y.keys()
    return bool(common) and all(torch.equal(x[name], y[name]) for name in common)
