"""What `torchbelay plan` says, against bytes and messages that are counted."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torchbelay as tb
from torchbelay.belay.cost import NOTHING, Mode, cost_of

from .runs import on
from .sharing import Messages

EMA, PULLS, EASGD = tb.methods.ema(0.9), tb.Spring(k=1.0, m1=4.0, m2=4.0, follow="after"), tb.methods.easgd(0.05)


def model(mode: Mode) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 5))
    if mode == "fsdp2":
        return fully_shard(made)
    return DistributedDataParallel(made) if mode.startswith("ddp") else made


def measured(mode: Mode, method: Any, **options: Any) -> tuple[int, list[int], list[int]]:
    """Return the bytes of the average on this rank, and those given to the messages of a step and of averaged()."""
    trained = model(mode)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    belay = tb.Belay(trained, optimizer, method, **options)
    for _ in range(2):
        trained(torch.ones(3, 7)).sum().backward()
        with Messages() as step:
            optimizer.step()
    with Messages() as entered, belay.averaged():
        pass
    saved = belay.state_dict()["averages"]["average"]["weights"].values()
    local = (t.to_local() if isinstance(t, DTensor) else t for t in saved)
    return sum(t.untyped_storage().nbytes() for t in local), step.sent, entered.sent


@on(2, 3, 4)
def a_plan_says_what_an_average_stores_and_sends(folder: Path) -> None:
    ranks = dist.get_world_size()
    shapes = [tuple(p.shape) for p in model("workers").parameters()]
    kinds: list[tuple[Mode, dict[str, Any]]] = [
        ("ddp", {}),
        ("ddp-sharded", {"shard": dist.group.WORLD}),
        ("fsdp2", {}),
        ("workers", {"workers": dist.group.WORLD}),
    ]
    for mode, options in kinds:
        plan = cost_of(mode, shapes, ranks)
        pulling = EASGD if mode == "workers" else PULLS
        for method, expected in ((EMA, plan.watching), (pulling, plan.pulling)):
            if mode == "workers" and method is EMA:
                continue  # its workers would share nothing
            stored, step, entered = measured(mode, method, **options)
            most = torch.tensor(stored)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            assert int(most) == plan.stored, (mode, method)
            for sent, told in ((step, expected), (entered, plan.evaluating)):
                assert len(sent) == told.messages, (mode, method, sent)
                around = 2 * (ranks - 1) / ranks if mode == "workers" else ranks - 1  # of a sum; of a gathering
                assert abs(sum(sent) * around - told.bytes) < 1e-6, (mode, method, sent)
    assert cost_of("ddp-sharded", shapes, 1).pulling == NOTHING
