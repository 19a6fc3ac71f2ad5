"""Two trainings side by side, with `Belay` and with the original program, on the same small network and batches."""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

import torchbelay as tb
from helpers.problems import MLP, advance

STEPS = 150
# The two sides round differently, some 1e-16 per step, and the network hands that on; measured, the worst case
# is 3e-13, of momentum 0.99. A wrong coefficient is off by 1e-4 at the least.
TOLERANCE = 1e-12

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
Schedule = Callable[[int], float]
Update = Callable[[Tensor, int], Tensor]
Program = Callable[[Tensor, Update], Iterator[tuple[Tensor, Tensor]]]  # yields (w1, w2) after each step, for ever


def sgd(lr: float = 0.1, **more: Any) -> Make:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **more)


def adamw(lr: float = 0.01, **more: Any) -> Make:
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr, **more)


INNER = {"sgd": sgd(weight_decay=0.01), "adamw": adamw(weight_decay=0.05)}


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def set_lr(optimizer: torch.optim.Optimizer, lr: Schedule | None, t: int) -> None:
    for group in optimizer.param_groups if lr else ():
        group["lr"] = lr(t)


def jagged(t: int) -> float:
    """A learning rate that goes up and down by factors of up to 7."""
    return 0.1 * (0.15 + 0.85 * (math.sin(t * t) ** 2))


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = STEPS,
    lr: Schedule | None = None,
    after: Callable[[int], None] = lambda t: None,
) -> Tensor:
    """Train on fresh batches; return the weights, one row per step."""
    rows = []
    for t in range(1, steps + 1):
        set_lr(optimizer, lr, t)
        advance(net, optimizer, MLP, [t])
        after(t)
        rows.append(flat(net.parameters()))
    return torch.stack(rows)


def belayed(
    method: Any, make: Make, *, steps: int = STEPS, lr: Schedule | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Train with Belay attached; return (weights, averages), one row per step."""
    net = MLP.model()
    optimizer = make(net.parameters())
    belay = tb.Belay(net, optimizer, method, **options)
    averages: list[Tensor] = []
    weights = train(
        net, optimizer, steps=steps, lr=lr, after=lambda t: averages.append(flat(belay.average_state_dict().values()))
    )
    return weights, torch.stack(averages)


def alone(program: Program, make: Make, *, steps: int = STEPS, lr: Schedule | None = None) -> tuple[Tensor, Tensor]:
    """Run a program on one flat vector; the inner optimizer only supplies the update."""
    net = MLP.model()
    point = nn.Parameter(flat(net.parameters()))
    optimizer = make([point])

    def update(w: Tensor, t: int) -> Tensor:
        set_lr(optimizer, lr, t)
        nn.utils.vector_to_parameters(w, net.parameters())
        point.grad = flat(torch.autograd.grad(MLP.loss(net, t), list(net.parameters())))
        point.data = w.clone()
        optimizer.step()
        return point.data - w

    w1, w2 = zip(*islice(program(point.detach().clone(), update), steps), strict=True)
    return torch.stack(w1), torch.stack(w2)


def assert_same(mine: tuple[Tensor, ...], theirs: tuple[Tensor, ...], tolerance: float = TOLERANCE) -> None:
    assert 1 <= len(mine) == len(theirs) <= 2
    for which, a, b in zip(("weights", "average"), mine, theirs, strict=False):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=lambda m, which=which: f"{which}: {m}")
