"""Averages of 24 bits: the same bits on any number of ranks, however they share the parameters."""

import copy
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import torchbelay as tb
from torchbelay.belay.shard import part_for

from .runs import EMA, here, on, refused, same

SHAPES = {
    "rows": ((5, 4), Shard(0)),
    "columns": ((4, 5), Shard(1)),
    "few": ((1, 3), Shard(0)),
    "all": ((7,), Replicate()),
}


class Model(nn.Module):
    """Parameters of float32, each spread over the ranks in its own way, or not at all."""

    def __init__(self, *, spread: bool) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if spread else None
        for i, (name, (shape, placement)) in enumerate(SHAPES.items()):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(i))
            tensor = values if mesh is None else distribute_tensor(values, mesh, [placement], src_data_rank=None)
            self.register_parameter(name, nn.Parameter(tensor))


def moved(model: nn.Module, belay: tb.Belay, steps: int) -> None:
    """Steps of products alone: they round each number alike, wherever it is."""
    for _ in range(steps):
        belay.before_step()
        with torch.no_grad():
            for p in model.parameters():
                here(p).mul_(0.875)
        belay.after_step()


def planes(belay: tb.Belay) -> dict[str, Tensor]:
    saved = belay.state_dict()["averages"]["average"]
    return {f"{kind}/{name}": t for kind in ("weights", "weights_low") for name, t in saved[kind].items()}


def agree(belay: tb.Belay, one: tb.Belay) -> None:
    """That each rank has its part of the bits that one process has."""
    for (name, mine), theirs in zip(planes(belay).items(), planes(one).values(), strict=True):
        assert here(mine).dtype == theirs.dtype
        assert torch.equal(here(mine), part_for(theirs, mine)), name


@on(1, 2, 3, 4)
def planes_have_the_bits_of_one_process_on_any_number_of_ranks(folder: Path) -> None:
    models = [Model(spread=spread) for spread in (True, False)]
    belay, one = (tb.Belay(model, None, EMA, bits=24, impl="reference") for model in models)
    moved(models[0], belay, 5)
    moved(models[1], one, 5)
    agree(belay, one)
    before = {name: here(t).clone() for name, t in planes(belay).items()}
    with belay.averaged():
        for name, p in models[0].named_parameters():
            assert torch.equal(here(p), part_for(one.average_state_dict()[name], p))
    assert same(before, {name: here(t) for name, t in planes(belay).items()})
    full = belay.average_state_dict(full=True)
    if dist.get_rank() == 0:
        assert all(torch.equal(full[name], value) for name, value in one.average_state_dict().items())
    assert abs(belay.stats()["tension"] - one.stats()["tension"]) <= 1e-9
    loaded = tb.Belay(Model(spread=True), None, EMA, bits=24, impl="reference")
    loaded.load_state_dict(copy.deepcopy(one.state_dict()))  # that of one process
    agree(loaded, one)


@on(1, 2, 3, 4)
def planes_are_saved_by_two_ranks_and_go_on_with_the_same_bits_on_others(folder: Path) -> None:
    """Two ranks come first."""
    model, single = (Model(spread=spread) for spread in (True, False))
    belay, one = (tb.Belay(each, None, EMA, bits=24, impl="reference") for each in (model, single))
    where = folder / "planes"
    if dist.get_world_size() == 2:
        moved(model, belay, 3)
        dcp.save({"model": model.state_dict(), "belay": belay}, checkpoint_id=where)
        with refused(BaseException, "Missing key"):
            dcp.load({"belay": tb.Belay(Model(spread=True), None, EMA)}, checkpoint_id=where)
    else:
        dcp.load({"model": model.state_dict(), "belay": belay}, checkpoint_id=where)
    moved(model, belay, 3)
    moved(single, one, 6)
    agree(belay, one)


@on(2, 3)
def replicas_that_share_an_average_of_24_bits_have_the_bits_of_one(folder: Path) -> None:
    models = [Model(spread=False) for _ in range(2)]
    belay = tb.Belay(models[0], None, EMA, bits=24, impl="reference", shard=dist.group.WORLD)
    one = tb.Belay(models[1], None, EMA, bits=24, impl="reference")
    moved(models[0], belay, 4)
    moved(models[1], one, 4)
    agree(belay, one)
    with belay.averaged():
        for name, p in models[0].named_parameters():
            assert torch.equal(p, one.average_state_dict()[name]), name
    full = belay.average_state_dict(full=True)
    if dist.get_rank() == 0:
        assert all(torch.equal(full[name], value) for name, value in one.average_state_dict().items())
    assert abs(belay.stats()["tension"] - one.stats()["tension"]) <= 1e-9
    belay.reset()
    one.reset()
    agree(belay, one)


@on(2, 3)
def planes_of_replicas_agree(folder: Path) -> None:
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(nn.Linear(30, 3))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    belay = tb.Belay(wrapped, optimizer, EMA, bits=24)
    for step in range(4):
        optimizer.zero_grad()
        wrapped(
            torch.randn(4, 30, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        ).sum().backward()
        optimizer.step()
    for t in planes(belay).values():
        bits = t.contiguous().view(torch.uint8)
        first = bits.clone()
        dist.broadcast(first, src=0)
        assert torch.equal(bits, first)


@on(2, 3)
def fsdp2_goes_with_24_bits(folder: Path) -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    belay = tb.Belay(model, optimizer, EMA, bits=24, save_with_optimizer=True)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
    mine = sum(here(p).numel() for p in model.parameters())
    assert sum(here(t).numel() * here(t).element_size() for t in planes(belay).values()) == 3 * mine
    state = copy.deepcopy(optimizer.state_dict())
    before = {name: here(t).clone() for name, t in planes(belay).items()}
    belay.reset()
    optimizer.load_state_dict(state)
    assert same(before, {name: here(t) for name, t in planes(belay).items()})
