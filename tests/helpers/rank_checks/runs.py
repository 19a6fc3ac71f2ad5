"""What the checks of several ranks share: a model, a run, and the comparison of two."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torchbelay as tb
from helpers import seams

TOLERANCE = 1e-13  # some ulps of numbers around 1, in float64
ROWS = 12  # of a batch: a multiple of every number of ranks

BELAY = tb.Spring(k=1.0, m1=10.0, m2=20.0)
EMA = tb.Spring.ema(decay=0.9)
LAGGED = tb.Spring(k=0.2, m1=float("inf"), m2=1.0)
SWINGING = tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0)
OF = {
    "scale": BELAY,
    "first.weight": SWINGING,
    "first.bias": tb.methods.heavy_ball(0.9),
    "second.weight": EMA,
    "second.bias": tb.methods.lookahead(k=3),
}
SPECTATORS = {"ema": EMA, "lagged": LAGGED, "swa": tb.methods.swa()}


def each_its_own(name: str, parameter: Tensor) -> tb.Method:
    """A method for each parameter: one run shows them all."""
    return OF[name]


Check = Callable[[Path], None]
CHECKS: list[tuple[tuple[int, ...], Check]] = []


def on(*worlds: int) -> Callable[[Check], Check]:
    """Register a check for these numbers of ranks."""

    def register(check: Check) -> Check:
        CHECKS.append((worlds, check))
        return check

    return register


class Net(nn.Module):
    """A root with parameters of its own, of sizes that no number of ranks divides, some of them smaller than it."""

    def __init__(self, *, seed: int = 0, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.rand(5) + 0.5)
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 5, bias=False) if tied else nn.Linear(5, 1)
        if tied:
            self.third = nn.Linear(5, 5, bias=False)
            self.third.weight = self.second.weight
        self.norm = nn.BatchNorm1d(5, affine=False)
        self.register_buffer("cache", torch.zeros(7), persistent=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.norm(torch.tanh(self.first(x))) * self.scale)
        return self.third(h).sum(1, keepdim=True) if hasattr(self, "third") else h


def batch(step: int) -> Tensor:
    """The rows of all ranks."""
    return torch.randn(ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 + step))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sin().sum(1, keepdim=True)).square().mean()


def mine(x: Tensor) -> Tensor:
    """This rank's rows of a batch."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


class Run:
    """A model in training; `spread` shards or wraps the model before the optimizer is made."""

    def __init__(
        self,
        method: Any,
        spread: Callable[[Net], nn.Module] = lambda net: net,
        *,
        share: Callable[[Tensor], Tensor] = lambda x: x,
        seed: int = 0,
        tied: bool = False,
        adam: bool = True,
        before: Callable[["Run"], None] = lambda run: None,
        **options: Any,
    ) -> None:
        net = Net(seed=seed, tied=tied)
        net.norm.eval()  # statistics of a rank's own rows are not those of all
        self.share, self.model = share, spread(net)
        kind = torch.optim.AdamW if adam else torch.optim.SGD
        self.optimizer = kind(self.model.parameters(), lr=0.02)
        before(self)
        self.belay = tb.Belay(self.model, self.optimizer, method, **options)

    def train(self, steps: Any) -> "Run":
        for step in steps:
            self.optimizer.zero_grad()
            loss_of(self.model, self.share(batch(step))).backward()
            self.optimizer.step()
        return self

    def weights(self) -> dict[str, Tensor]:
        return {name: whole(p) for name, p in seams.named_parameters(self.model).items()}

    def average(self, name: str = "average", **how: Any) -> dict[str, Tensor]:
        return {key: whole(value) for key, value in self.belay.average_state_dict(name, **how).items()}


def whole(t: Tensor) -> Tensor:
    """A copy of a tensor, gathered from all ranks."""
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def here(t: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return (t.to_local() if isinstance(t, DTensor) else t).detach()


def sharded(net: Net) -> nn.Module:
    """FSDP2: one child on its own, the rest with the root."""
    fully_shard(net.first)
    return fully_shard(net)


def fsdp(method: Any, **options: Any) -> Run:
    return Run(method, sharded, share=mine, **options)


def agree(mine: dict[str, Tensor], one: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    assert list(mine) == list(one)
    for name in mine:
        torch.testing.assert_close(
            mine[name], one[name], rtol=0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def same(x: Any, y: Any) -> bool:
    """Whether this rank's parts are bit-identical."""
    if isinstance(x, dict):
        return list(x) == list(y) and all(same(x[key], y[key]) for key in x)
    if isinstance(x, Tensor):
        return x.dtype == y.dtype and torch.equal(here(x), here(y))
    return x == y


def everything(run: Run) -> Any:
    return copy.deepcopy({"model": run.model.state_dict(), "belay": run.belay.state_dict()})


def refused(kind: type[BaseException], *words: str) -> Any:
    return pytest.raises(kind, match=".*".join(map(re.escape, words)))
