"""Small models and training loops that the tests share."""

import copy
from typing import Any

import torch
from torch import nn

import torchbelay as tb
from helpers import problems

WHERE = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton's kernels run, in its interpreter or not
BELAY = tb.Spring(k=1.0, m1=10.0, m2=20.0)
EMA = tb.Spring.ema(decay=0.9)
SWINGING = tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0)


def mlp(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)


def with_batchnorm(*, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1))


def batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(1000 + step)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, first: int = 0) -> None:
    some = next(model.parameters())
    for step in range(first, first + steps):
        x = batch(step, some.dtype).to(some.device)
        optimizer.zero_grad()
        (model(x) - x.sin().sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()


def attached(method: Any, *, model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Any, tb.Belay]:
    model = mlp() if model is None else model
    model = model.to(WHERE) if options.get("impl") == "triton" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, tb.Belay(model, optimizer, method, **options)


class Still(torch.optim.Optimizer):
    """An optimizer whose step does nothing, so that only the averages move."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        pass


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def snapshot(model: nn.Module, belay: tb.Belay) -> dict[str, Any]:
    """Everything that a refused call must leave as it was."""
    return copy.deepcopy({"model": model.state_dict(), "belay": belay.state_dict(), "step": belay.step})


def same(x: Any, y: Any) -> bool:
    """Bit-identical, through dicts and lists."""
    if isinstance(x, dict):
        return isinstance(y, dict) and list(x) == list(y) and all(same(x[key], y[key]) for key in x)
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(same, x, y))
    return problems.same(x, y)
