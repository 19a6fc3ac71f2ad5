"""Several workers that share one average, against one program that simulates all of them."""

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchbelay as tb
from torchbelay.ops import workers as cost

from .runs import Net, agree, batch, loss_of, on, refused, same, whole

STEPS = 14
EVERY_STEP = tb.methods.easgd(0.1)
SELDOM = tb.methods.easgd(rho=4.0, every=3)
BELAY = tb.Spring(k=1.0, m1=10.0, m2=20.0)
DILOCO = tb.methods.diloco(every=3, lr=0.6, momentum=0.8)
LOCAL_SGD = tb.methods.lookahead(k=4, alpha=1.0)


def rows(step: int, worker: int) -> Tensor:
    """The batch of one worker, which no other has."""
    return batch(100 * worker + step)


class Worker:
    """A model that one worker trains alone."""

    def __init__(self, worker: int, net: nn.Module | None = None) -> None:
        self.worker, self.net = worker, Net() if net is None else net
        self.net.norm.eval()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.02)

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss_of(self.net, rows(step, self.worker)).backward()
        self.optimizer.step()

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.net.parameters()]

    def write(self, weights: list[Tensor]) -> None:
        with torch.no_grad():
            for p, w in zip(self.net.parameters(), weights, strict=True):
                p.copy_(w)

    def named(self) -> dict[str, Tensor]:
        return {name: whole(p) for name, p in self.net.named_parameters()}


class Attached(Worker):
    """A worker with a Belay."""

    def __init__(self, method: Any, *, net: nn.Module | None = None, workers: Any = None, **options: Any) -> None:
        group = dist.group.WORLD if workers is None else workers
        super().__init__(dist.get_rank(), net)
        self.belay = tb.Belay(self.net, self.optimizer, method, workers=group, **options)

    def train(self, steps: Any) -> "Attached":
        for step in steps:
            self.step(step)
        return self

    def average(self) -> dict[str, Tensor]:
        found = self.belay.average_state_dict()
        return {name: found[name] for name, _ in self.net.named_parameters()}


Sync = Callable[[int, list[list[Tensor]], list[list[Tensor]], list[Tensor]], tuple[list[list[Tensor]], list[Tensor]]]


def simulate(sync: Sync, steps: int = STEPS) -> tuple[list[Worker], dict[str, Tensor]]:
    """Train all workers in one program. `sync` has the weights before and after a step, and the common average."""
    all_of_them = [Worker(i) for i in range(dist.get_world_size())]
    average = all_of_them[0].weights()
    for step in range(steps):
        before = [each.weights() for each in all_of_them]
        for each in all_of_them:
            each.step(step)
        after, average = sync(step + 1, before, [each.weights() for each in all_of_them], average)
        for each, weights in zip(all_of_them, after, strict=True):
            each.write(weights)
    names = [name for name, _ in all_of_them[0].net.named_parameters()]
    return all_of_them, dict(zip(names, average, strict=True))


def elastic(alpha: float, every: int) -> Sync:
    """EASGD as it was published: x_i and the centre move at once, from where they were."""

    def sync(step: int, before: Any, after: Any, centre: Any) -> Any:
        if step % every:
            return after, centre
        moved = [[x - alpha * (o - c) for x, o, c in zip(xs, os, centre)] for xs, os in zip(after, before)]  # noqa: B905
        new = [c + alpha * sum(os[i] - c for os in before) for i, c in enumerate(centre)]
        return moved, new

    return sync


def springs(k: float, m1: float, m2: float) -> Sync:
    """Algorithm 1 for many bodies: each spring pulls its worker and the average."""

    def sync(step: int, before: Any, after: Any, average: Any) -> Any:
        one, two = k / (2 * m1), k / (2 * m2)
        moved = [[(1 - one) * x + one * c for x, c in zip(xs, average, strict=True)] for xs in after]
        new = [c + sum(two * (os[i] - c) for os in before) for i, c in enumerate(average)]
        return moved, new

    return sync


def outer(every: int, lr: float, momentum: float) -> Sync:
    """DiLoCo: torch's own SGD with Nesterov momentum, on the mean of the displacements as a gradient."""
    held: list[nn.Parameter] = []
    optimizers: list[torch.optim.Optimizer] = []

    def sync(step: int, before: Any, after: Any, average: Any) -> Any:
        if step % every:
            return after, average
        if not held:
            held.extend(nn.Parameter(w.clone()) for w in average)
            optimizers.append(torch.optim.SGD(held, lr=lr, momentum=momentum, nesterov=momentum > 0))
        for i, p in enumerate(held):
            p.grad = torch.stack([average[i] - xs[i] for xs in after]).mean(0)
        optimizers[0].step()
        new = [p.detach().clone() for p in held]
        return [new for _ in after], new

    return sync


def agrees(mine: Attached, everybody: list[Worker], average: dict[str, Tensor]) -> None:
    """Compare this worker with its double in the simulation, and the average of all workers with each other."""
    agree(mine.named(), everybody[dist.get_rank()].named(), 1e-12)
    agree(mine.average(), average, 1e-12)
    assert_same_average(mine)


def assert_same_average(mine: Attached) -> None:
    """Compare the average, bit for bit, with that of the first worker."""
    theirs = [copy.deepcopy(mine.average())]
    dist.broadcast_object_list(theirs, src=0)
    assert same(theirs[0], mine.average())


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the bytes of every message of several ranks."""
    sent: list[int] = []
    names = ("all_reduce", "broadcast", "all_gather", "all_gather_object", "reduce_scatter_tensor")
    right = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Callable[..., Any]:
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            sent.append(tensor.nbytes if isinstance(tensor, Tensor) else 0)
            return right[name](tensor, *args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield sent
    finally:
        for name in names:
            setattr(dist, name, right[name])


@on(1, 2, 3, 4)
def workers_on_springs_equal_one_program_that_simulates_them(folder: Path) -> None:
    for method, sync in (
        (EVERY_STEP, elastic(0.1, 1)),
        (SELDOM, elastic(4.0 * 0.02, 3)),
        (BELAY, springs(1.0, 10.0, 20.0)),
        (tb.methods.belay(0.5, 5.0, 40.0), springs(0.5, 5.0, 40.0)),
    ):
        agrees(Attached(method).train(range(STEPS)), *simulate(sync))


@on(1, 2, 3, 4)
def workers_that_meet_equal_one_program_that_simulates_them(folder: Path) -> None:
    for method, *numbers in (
        (DILOCO, 3, 0.6, 0.8),
        (tb.methods.diloco(every=4), 4, 0.7, 0.9),
        (LOCAL_SGD, 4, 1.0, 0.0),
        (tb.methods.lookahead(k=2, alpha=0.5), 2, 0.5, 0.0),
    ):
        mine = Attached(method).train(range(12))
        agrees(mine, *simulate(outer(*numbers), 12))
        assert same(mine.named(), mine.average())  # after a sync not a bit is between them
        agrees(mine.train([12]), *simulate(outer(*numbers), 13))
