"""Exports and checkpoints of sharded models, by torch.save and by torch.distributed.checkpoint."""

import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import torchbelay as tb

from .runs import BELAY, EMA, SWINGING, Net, Run, agree, everything, fsdp, on, refused, same


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


# torch.distributed.checkpoint -----------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "swinging": {"method": SWINGING, "spectators": {"short": tb.methods.ema(0.9, warmup="ratio")}},
    "with a memory": {"method": tb.methods.heavy_ball(0.9), "buffers": "average"},
    "begun": {"method": BELAY, "start": 2},
    "not begun": {"method": SWINGING, "start": 5},
    "own buffers": {"method": EMA},
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
        ages, expected = (each.belay.state_dict()["averages"]["average"]["ages"] for each in (run, one))
        assert ages == expected


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another decay": ({"method": tb.Spring.ema(decay=0.5)}, "decay=0.5"),
    "another method": ({"method": BELAY}, "Spring(k=1"),
    "another dtype": ({"method": EMA, "dtype": torch.float32}, "float32"),
    "another start": ({"method": EMA, "start": 7}, "start=7"),
    "another model": ({"method": EMA, "tied": True}, ""),
    "another spectator": ({"method": EMA, "spectators": {"short": EMA}}, "short"),
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
