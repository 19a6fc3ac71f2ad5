"""Ranks that must agree before they work together: what differs is refused on all of them, and nobody waits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchbelay as tb
from torchbelay.belay import agreement

from .runs import BELAY, EMA, on, refused
from .sharing import Messages, sharing, world


def linear(width: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(width, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def first() -> bool:
    return dist.get_rank() == 0


@on(2, 3, 4)
def ranks_that_agree_exchange_a_digest_and_ranks_that_do_not_are_told_what_differs(folder: Path) -> None:
    facts = {"names": {f"layer {i}": "(1024, 1024)" for i in range(1000)}, "method": BELAY}
    with Messages() as messages:
        agreement.agree(world(), facts)
    assert sum(messages.sent) < 500  # bytes, whatever the number of facts
    last = dist.get_rank() == dist.get_world_size() - 1
    for other, words in (
        (facts | {"method": EMA}, ("disagree about method", "on rank 0 and", "on rank")),
        (facts | {"names": {"layer 0": "(1,)"}}, ("about names: 'layer 0' is (1024, 1024) on rank 0 and (1,)",)),
        ({"method": BELAY}, ("about names: 'layer 0' is (1024, 1024) on rank 0 and missing",)),
        (facts | {"names": dict(reversed(facts["names"].items()))}, ("about the order of names",)),
    ):
        with refused(ValueError, *words, "on every rank of the group"):
            agreement.agree(world(), other if last else facts)
    dist.barrier()


@on(2, 3)
def the_problem_of_one_rank_is_that_of_all(folder: Path) -> None:
    kind, message = (KeyError, "only here") if first() else (ValueError, "rank 0 could not go on.*only here")
    with pytest.raises(kind, match=message):
        agreement.agree(world(), {}, KeyError("only here") if first() else None)
    with pytest.raises(kind, match=message), agreement.agreement(world()):
        {}["only here"] if first() else None
    with agreement.agreement(None) as facts:
        facts["anything"] = dist.get_rank()
    dist.barrier()


DIFFERENT: dict[str, Any] = {
    "method": lambda: (linear(), {"method": tb.Spring.ema(decay=0.5)}, "methods of 'average'"),
    "rule": lambda: (
        linear(),
        {"method": lambda name, p: EMA if name == "bias" else None},
        "'weight' is .* and missing",
    ),
    "shape": lambda: (linear(4), {}, r"the parameters: 'weight' is \(2, 3\) in torch.float32.*\(2, 4\)"),
    "option": lambda: (linear(), {"every": 2}, "the options: 'every' is 1 on rank 0 and 2 on rank 1"),
    "dtype": lambda: (linear(), {"dtype": torch.bfloat16}, "the options: 'dtype'"),
    "spectators": lambda: (linear(), {"spectators": {"x": EMA}}, "methods of 'x'"),
}


@on(2, 3)
def ranks_that_differ_are_refused_on_all_of_them(folder: Path) -> None:
    for make in DIFFERENT.values():
        other, how, message = make()
        model, optimizer = other if dist.get_rank() == 1 else linear()
        options = {"method": EMA} | (how if dist.get_rank() == 1 else {})
        with pytest.raises(ValueError, match=message):
            tb.Belay(model, optimizer, shard=world(), **options)
        assert not optimizer._optimizer_step_pre_hooks
    model, optimizer = linear()
    decay = 0.5 if first() else 0.6
    with refused(ValueError, "the methods of 'average'", "decay=function"):
        tb.Belay(model, optimizer, tb.methods.ema(lambda step: decay), shard=world())
    model, optimizer = linear()
    with torch.no_grad():
        model.bias[0] += dist.get_rank()
    with refused(ValueError, "the weights", "DistributedDataParallel", "'bias' is"):
        tb.Belay(model, optimizer, EMA, shard=world())
    model, optimizer = linear()
    with refused(ValueError if dist.get_rank() else TypeError, "optimizer", "is not a torch.optim.Optimizer"):
        tb.Belay(model, optimizer if dist.get_rank() else "adam", EMA, shard=world())
    assert not optimizer._optimizer_step_pre_hooks
    dist.barrier()


@on(2, 3)
def a_change_that_differs_is_refused_on_all_ranks(folder: Path) -> None:
    run = sharing(EMA).train(range(1))
    with refused(ValueError, "the methods of 'average'"):
        run.belay.change(tb.Spring.ema(decay=0.5) if first() else BELAY)
    assert run.belay.decay == pytest.approx(0.9)
    run.belay.change(BELAY)
    run.train(range(1, 3))


@on(4)
def what_is_not_a_group_of_this_rank_is_refused(folder: Path) -> None:
    model, optimizer = linear()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "node"))
    pair = dist.new_group([0, 1])
    for group in ("world", 3, True, [0, 1], dist):
        with refused(TypeError, "is neither a process group nor a DeviceMesh", "torch.distributed.group.WORLD"):
            tb.Belay(model, optimizer, EMA, shard=group)
    with refused(ValueError, "2 dimensions", "mesh['nodes']"):
        tb.Belay(model, optimizer, EMA, shard=mesh)
    if dist.get_rank() > 1:
        with refused(ValueError, f"rank {dist.get_rank()}, is not part of"):
            tb.Belay(model, optimizer, EMA, shard=pair)
    else:
        assert f"slice {dist.get_rank() + 1} of 2" in repr(tb.Belay(model, optimizer, EMA, shard=pair))
    dist.barrier()


@on(2)
def what_does_not_go_with_a_shared_average_is_refused_with_the_cure(folder: Path) -> None:
    sharded = fully_shard(nn.Linear(4, 4))
    with refused(ValueError, "'weight' is a DTensor", "leave shard out"):
        tb.Belay(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1), EMA, shard=world())
    model, optimizer = linear()
    with refused(ValueError, "save_with_optimizer=True does not go with shard", "state_dict(full=True)"):
        tb.Belay(model, optimizer, EMA, shard=world(), save_with_optimizer=True)
    assert not optimizer._optimizer_step_pre_hooks
    belay = tb.Belay(model, optimizer, EMA, shard=world())
    for ask in (belay.module, belay.tensors):
        with refused(ValueError, "keeps a slice of it only", "averaged()"):
            ask()
