"""Small problems to train on, and what tests of whole runs share."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

f64, f32, bf16 = torch.float64, torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Problem:
    """A model, always the same one, and its loss at a step, always on the same data."""

    layers: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], Tensor]

    def model(self, dtype: torch.dtype = f64, seed: int = 7) -> nn.Module:
        """A new model with the values of that seed, which are the same in every dtype but for rounding."""
        draw = torch.Generator().manual_seed(seed)
        model = self.layers().to(dtype)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(0.5 * torch.randn(p.shape, generator=draw, dtype=f64))
        return model


class Net(nn.Module):
    """Two matrices and, unless `plain`, a vector and a single number; the loss is not quadratic in them."""

    def __init__(self, *, plain: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5, bias=not plain)
        self.outer = nn.Linear(5, 2, bias=False)
        self.gain = None if plain else nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out = self.outer(torch.tanh(self.inner(x)))
        return out if self.gain is None else self.gain * out


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def regression(model: nn.Module, step: int) -> Tensor:
    draw = torch.Generator().manual_seed(1000 + step)
    device = next(model.parameters()).device
    x, y = (torch.randn(8, n, generator=draw, dtype=f64).to(device, dtype_of(model)) for n in (3, 2))
    return (model(x) - y).square().mean()


def recall(model: nn.Module, step: int) -> Tensor:
    draw = torch.Generator().manual_seed(2000 + step)
    rows = torch.randint(7, (4,), generator=draw)
    return (model(rows) - torch.randn(4, 3, generator=draw, dtype=f64).to(dtype_of(model))).square().mean()


MLP = Problem(Net, regression)
FULL_BATCH = Problem(Net, lambda model, step: regression(model, 0))
MATRICES = Problem(lambda: Net(plain=True), regression)
EMBEDDING = Problem(lambda: nn.Embedding(7, 3, sparse=True), recall)
NORMALISED = Problem(lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)), regression)


def advance(
    model: nn.Module, optimizer: Optimizer, problem: Problem, steps: Iterable[int], *, closure: bool = False
) -> None:
    """Train on the data of these steps; with a closure, the optimizer evaluates the loss itself."""
    for step in steps:

        def evaluate(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = problem.loss(model, step)
            loss.backward()
            return loss

        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


def everything(**parts: Any) -> dict[str, Any]:
    """A copy of all that the parts' state dicts hold (model=, optimizer=, belay=), flat, by name."""
    return dict(_leaves("", {name: part.state_dict() for name, part in parts.items()}))


def _leaves(path: str, tree: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(tree, Mapping | list | tuple):
        for key, branch in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _leaves(f"{path}/{key}", branch)
    else:
        yield path, tree.detach().clone() if isinstance(tree, Tensor) else tree


def bits(t: Tensor) -> Tensor:
    """Every bit: nan equals nan, 0 and −0 differ."""
    dense = t.detach().to_dense() if t.is_sparse else t.detach()
    return dense.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def same(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y))
    return type(x) is type(y) and x == y


def different(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names under which two copies made by `everything` differ, if only by a bit; empty if the copies are the same."""
    assert one.keys() == other.keys()
    return [name for name in one if not same(one[name], other[name])]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make any wait of the host for the device an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
