"""One average for all replicas: each rank keeps a slice of it, and the replicas are those of a run that keeps it all."""

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torchbelay as tb
from torchbelay.belay import traffic

from .runs import BELAY, EMA, LAGGED, SPECTATORS, SWINGING, Run, agree, batch, each_its_own, loss_of, mine, on, refused, same

WATCHING = {"ema": EMA, "lagged": LAGGED, "swa": tb.methods.swa()}


def world() -> Any:
    return dist.group.WORLD


def replica(method: Any, **options: Any) -> Run:
    """A replica of DDP that keeps all of its average."""
    return Run(method, DistributedDataParallel, share=mine, **options)


def sharing(method: Any, **options: Any) -> Run:
    """A replica of DDP that shares its average with the others."""
    return replica(method, shard=world(), **options)


@contextmanager
def messages() -> Iterator[list[int]]:
    """The bytes that this rank gave to each collective of torch.distributed, one number per message."""
    found: list[int] = []
    watched = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
            found.append(tensors[-1].nbytes if tensors else -1)
            return watched[name](*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counting(name))
    try:
        yield found
    finally:
        for name, original in watched.items():
            setattr(dist, name, original)


COLLECTIVES = ("all_gather_into_tensor", "all_gather", "all_reduce", "broadcast", "all_gather_object", "reduce_scatter")


def counted_step(run: Run, step: int) -> list[int]:
    run.optimizer.zero_grad()
    loss_of(run.model, run.share(batch(step))).backward()
    with messages() as found:
        run.optimizer.step()
    return found


def held(run: Run) -> int:
    """The bytes of averages and velocities on this rank."""
    found = 0
    for saved in run.belay.state_dict()["averages"].values():
        for kind in ("weights", "velocities1", "velocities2"):
            found += sum(t.to_local().untyped_storage().nbytes() for t in saved[kind].values())
    return found


def compare(run: Run, whole: Run, names: Any = ("average",)) -> None:
    """The two runs agree bit for bit: weights and averages."""
    agree(run.weights(), whole.weights(), 0)
    for name in names:
        agree(run.average(name), whole.average(name), 0)


@on(2, 3, 4)
def replicas_that_share_an_average_are_those_that_each_keep_it(folder: Path) -> None:
    run, whole = (make(each_its_own, spectators=SPECTATORS) for make in (sharing, replica))
    for steps in (range(4), range(4, 7)):
        run.train(steps)
        whole.train(steps)
        compare(run, whole, ("average", *SPECTATORS))
    mine, theirs = run.belay.stats(), whole.belay.stats()
    assert mine.keys() == theirs.keys()
    for key in mine:
        assert abs(mine[key] - theirs[key]) <= 1e-12 * abs(theirs[key]), key
    assert f"slice {dist.get_rank() + 1} of {dist.get_world_size()}" in repr(run.belay)
