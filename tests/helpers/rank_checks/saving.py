"""Exports and checkpoints of sharded models, by torch.save and by torch.distributed.checkpoint."""

import copy
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import torchbelay as tb

from .runs import BELAY, EMA, SWINGING, Net, Run, agree, everything, fsdp, here, mine, on, refused, same


@on(2, 3, 4)
def a_full_export_is_on_the_first_rank_and_gathers_one_tensor_at_a_time(folder: Path) -> None:
    run, one = (make(EMA, tied=True).train(range(3)) for make in (fsdp, Run))
    whole_ones: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    full_tensor = DTensor.full_tensor

    def counted(self: DTensor, *args: Any, **kwargs: Any) -> Tensor:
        alive.append(sum(ref() is not None for ref in whole_ones))
        found = full_tensor(self, *args, **kwargs)
        whole_ones.append(weakref.ref(found))
        return found

    DTensor.full_tensor = counted
    try:
        exported = run.belay.average_state_dict(full=True)
    finally:
        DTensor.full_tensor = full_tensor
    assert alive == [0] * len(list(run.model.parameters()))  # tied weights once
    if dist.get_rank():
        assert exported == {}
    else:
        assert all(type(t) is Tensor and t.device.type == "cpu" for t in exported.values())
        agree(exported, one.average())
        assert exported["third.weight"] is exported["second.weight"]
        Net(tied=True).load_state_dict(exported, strict=True)
    with run.belay.averaged():
        inside = run.belay.average_state_dict(full=True)
    assert same(inside, exported)


@on(2, 3, 4)
def every_rank_saves_and_the_first_one_writes(folder: Path) -> None:
    run, one = (make(EMA, tied=True).train(range(3)) for make in (fsdp, Run))
    path = folder / f"average{dist.get_world_size()}.safetensors"
    run.belay.save_average(path)
    dist.barrier()
    found = load_file(path)
    agree({name: found.pop(name) for name in one.average()}, one.average())
    assert not found
    with safe_open(path, "pt") as file:
        about = file.metadata()
    assert (about["method"], about["step"], about["torchbelay"]) == ("Spring.ema(decay=0.9)", "3", tb.__version__)
    assert not list(folder.glob("*.tmp"))


@on(2)
def a_path_that_the_first_rank_refuses_lets_no_other_rank_wait(folder: Path) -> None:
    run = fsdp(EMA).train(range(1))
    if dist.get_rank() == 0:
        with refused(IsADirectoryError, "is a folder"):
            run.belay.save_average(folder)
    else:
        run.belay.save_average(folder)
    dist.barrier()
    assert not list(folder.glob("*.tmp"))


@on(2)
def weights_that_one_rank_alone_looks_at_are_compared_without_the_others(folder: Path) -> None:
    run = fsdp(EMA)
    for p in run.model.parameters():
        p.data.add_(1.0)
    if dist.get_rank() == 0:
        with pytest.warns(tb.BelayWarning, match="no step was seen"):
            run.belay.state_dict()
    dist.barrier()


@on(2, 3, 4)
def a_sharded_run_resumes_through_torch_save(folder: Path) -> None:
    run = fsdp(SWINGING, adam=False, spectators={"short": tb.methods.ema(0.9, warmup="ratio")}).train(range(3))
    file = io.BytesIO()
    torch.save([run.model.state_dict(), run.belay.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    again = fsdp(SWINGING, adam=False, seed=5, spectators={"short": tb.methods.ema(0.9, warmup="ratio")})
    again.model.load_state_dict(weights)
    again.belay.load_state_dict(state)
    assert same(everything(again.train(range(3, 6))), everything(run.train(range(3, 6))))


@on(2, 3, 4)
def a_state_of_one_process_fits_a_sharded_model_and_not_the_other_way(folder: Path) -> None:
    one, run = Run(SWINGING, adam=False).train(range(3)), fsdp(SWINGING, adam=False).train(range(3))
    other = fsdp(SWINGING, adam=False, seed=5)
    with CommDebugMode() as talk:
        other.belay.load_state_dict(one.belay.state_dict())
    assert talk.get_total_counts() == 0
    agree(other.average(), one.average(), 0)
    before = everything(one)
    with refused(ValueError, "spread over ranks", "torch.distributed.checkpoint"):
        one.belay.load_state_dict(run.belay.state_dict())
    assert same(everything(one), before)


def even(**how: Any) -> tuple[nn.Module, tb.Belay]:
    """A model whose parts have one shape on all ranks: nothing but their place tells them apart."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(12, 12).double(), **how)
    return model, tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), EMA)


def saved_by_the_first_rank(state: Any, path: Path) -> Any:
    """What every rank reads if the first one alone writes, as Accelerate does with registered objects."""
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()
    return torch.load(path, map_location="cpu", weights_only=True)


@on(2, 3, 4)
def the_shards_of_one_rank_are_refused_by_the_others(folder: Path) -> None:
    model, belay = even()
    state = saved_by_the_first_rank(belay.state_dict(), folder / f"shards{dist.get_world_size()}.pt")
    average = {name: here(t).clone() for name, t in belay.average_state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    belay.reset()
    if dist.get_rank() == 0:
        belay.load_state_dict(state)
        assert same({name: here(t) for name, t in belay.average_state_dict().items()}, average)
        return
    before = copy.deepcopy(belay.state_dict())
    with refused(ValueError, "part (0,)", f"part ({dist.get_rank()},) here", "torch.distributed.checkpoint"):
        belay.load_state_dict(state)
    assert same(belay.state_dict(), before)


@on(4)
def replicas_of_shards_may_share_a_state(folder: Path) -> None:
    """With HSDP two ranks hold the same part: the one may read what the other wrote, and no others."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    _, belay = even(mesh=mesh)
    state = saved_by_the_first_rank(belay.state_dict(), folder / "hybrid.pt")
    if mesh.get_coordinate()[1] == 0:
        belay.load_state_dict(state)
    else:
        with refused(ValueError, "part (0,)", "part (1,) here"):
            belay.load_state_dict(state)


@on(2, 3)
def replicas_of_ddp_share_the_state_of_the_first_rank(folder: Path) -> None:
    run, again = (Run(SWINGING, DistributedDataParallel, share=mine, adam=False, seed=seed) for seed in (0, 5))
    run.train(range(3))
    path = folder / f"replicas{dist.get_world_size()}.pt"
    weights, state = saved_by_the_first_rank([run.model.state_dict(), run.belay.state_dict()], path)
    again.model.load_state_dict(weights)
    again.belay.load_state_dict(state)
    assert same(everything(again.train(range(3, 5))), everything(run.train(range(3, 5))))


# torch.distributed.checkpoint -----------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "swinging": {"method": SWINGING, "spectators": {"short": tb.methods.ema(0.9, warmup="ratio")}},
    "with a memory": {"method": tb.methods.heavy_ball(0.9), "buffers": "average"},
    "begun": {"method": BELAY, "start": 2},
    "not begun": {"method": SWINGING, "start": 5},
    "own buffers": {"method": EMA},
    "initial weights": {"method": BELAY, "spectators": {"short": EMA}, "keep_initial": True},
}


def prepared(how: str, make: Callable[..., Run], **more: Any) -> Run:
    return make(adam=False, **OPTIONS[how], **more)


def write_statistics(run: Run) -> None:
    """Write statistics that are the average's own until the next step, as update_bn does."""
    with run.belay.averaged():
        run.model.norm.running_mean.fill_(0.25)


@on(2)
def distributed_checkpoints_are_saved(folder: Path) -> None:
    for how in OPTIONS:
        run = prepared(how, fsdp).train(range(3))
        assert isinstance(run.belay, Stateful)
        if how == "own buffers":
            write_statistics(run)
        dcp.save({"model": run.model, "belay": run.belay}, checkpoint_id=folder / how)


@on(1, 2, 3, 4)
def distributed_checkpoints_are_loaded_on_any_number_of_ranks(folder: Path) -> None:
    make = Run if dist.get_world_size() == 1 else fsdp
    for how in OPTIONS:
        one = prepared(how, Run).train(range(3))
        if how == "own buffers":
            write_statistics(one)
        run = prepared(how, make, seed=5)
        dcp.load({"model": run.model, "belay": run.belay}, checkpoint_id=folder / how)
        assert run.belay.step == 3
        for steps in ((), range(3, 8)):
            one.train(steps)
            run.train(steps)
            agree(run.weights(), one.weights())
            for name in one.belay.state_dict()["averages"]:
                agree(run.average(name), one.average(name))
                if how == "initial weights":
                    agree(run.average(name, readout=tb.readouts.bema()), one.average(name, readout=tb.readouts.bema()))
        ages, expected = (each.belay.state_dict()["averages"]["average"]["ages"] for each in (run, one))
        assert ages == expected


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another decay": ({"method": tb.Spring.ema(decay=0.5)}, "decay=0.5"),
    "another method": ({"method": BELAY}, "Spring(k=1"),
    "another dtype": ({"method": EMA, "dtype": torch.float32}, "float32"),
    "another start": ({"method": EMA, "start": 7}, "start=7"),
    "another model": ({"method": EMA, "tied": True}, ""),
    "another spectator": ({"method": EMA, "spectators": {"short": EMA}}, "short"),
    "no initial weights": ({"method": EMA, "keep_initial": True}, "keep_initial"),
}


@on(1, 3)
def a_distributed_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(folder: Path) -> None:
    make = Run if dist.get_world_size() == 1 else fsdp
    for options, word in WRONG.values():
        run = make(adam=False, seed=5, **options).train(range(2))
        before = everything(run)
        with refused(BaseException, word):  # torch's CheckpointException is no Exception
            dcp.load({"belay": run.belay}, checkpoint_id=folder / "own buffers")
        assert same(everything(run), before)
