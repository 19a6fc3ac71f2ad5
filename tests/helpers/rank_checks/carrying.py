"""Averages that are saved with a sharded optimizer, exported, changed, and read from files, on several ranks."""

import copy
import io
import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import torchbelay as tb

from .runs import BELAY, EMA, SWINGING, Net, Run, agree, everything, fsdp, mine, on, same, sharded

WARM = tb.methods.ema(0.9, warmup="ratio")
HOW: dict[str, dict[str, Any]] = {
    "several averages": {"method": SWINGING, "spectators": {"short": WARM}},
    "a memory and buffers": {"method": tb.methods.schedule_free(0.9), "buffers": "average"},
    "not begun": {"method": BELAY, "start": 9},
}
OPTIONS = {
    "nested": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "broadcast": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
}


def made(how: str, make: Any, **more: Any) -> Run:
    return make(**HOW[how], save_with_optimizer=True, **more)


@on(2, 3)
def averages_go_with_the_state_of_a_sharded_optimizer(folder: Path) -> None:
    for how in HOW:
        for adam in (True, False):
            for options in OPTIONS.values():
                run, again = (made(how, fsdp, adam=adam, seed=seed) for seed in (0, 5))
                run.train(range(3))
                again.model.load_state_dict(run.model.state_dict())
                state = copy.deepcopy(get_optimizer_state_dict(run.model, run.optimizer, options=options))
                if options.broadcast_from_rank0 and dist.get_rank():
                    state = {}
                set_optimizer_state_dict(again.model, again.optimizer, state, options=options)
                assert same(everything(again), everything(run)), (how, adam, options)
                assert same(everything(again.train(range(3, 5))), everything(run.train(range(3, 5)))), (how, adam)


@on(2, 3)
def a_rank_resumes_its_shards_by_torch_save(folder: Path) -> None:
    run, again = (made("several averages", fsdp, seed=seed) for seed in (0, 5))
    run.train(range(3))
    file = io.BytesIO()
    torch.save([run.model.state_dict(), run.optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    again.model.load_state_dict(weights)
    again.optimizer.load_state_dict(state)
    assert same(everything(again.train(range(3, 5))), everything(run.train(range(3, 5))))


@on(2)
def the_state_of_a_sharded_optimizer_is_saved(folder: Path) -> None:
    for how in HOW:
        for name in ("nested", "flattened"):
            run = made(how, fsdp).train(range(3))
            state = get_optimizer_state_dict(run.model, run.optimizer, options=OPTIONS[name])
            dcp.save({"model": run.model, "optimizer": state}, checkpoint_id=folder / f"carried {how} {name}")


@on(1, 2, 3, 4)
def the_state_of_a_sharded_optimizer_is_loaded_on_any_number_of_ranks(folder: Path) -> None:
    make = Run if dist.get_world_size() == 1 else fsdp
    for how in HOW:
        for name in ("nested", "flattened"):
            one, run = made(how, Run).train(range(3)), made(how, make, seed=5)
            state = get_optimizer_state_dict(run.model, run.optimizer, options=OPTIONS[name])
            dcp.load({"model": run.model, "optimizer": state}, checkpoint_id=folder / f"carried {how} {name}")
            set_optimizer_state_dict(run.model, run.optimizer, state, options=OPTIONS[name])
            assert run.belay.step == 3
            for steps in ((), range(3, 6)):
                one.train(steps)
                run.train(steps)
                agree(run.weights(), one.weights())
                for average in one.belay.state_dict()["averages"]:
                    agree(run.average(average), one.average(average))


@on(2)
def replicas_of_fsdp1_that_flattens_nothing_carry_averages_too(folder: Path) -> None:
    def wrapped(net: Net) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return FullyShardedDataParallel(
                net, sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True, device_id=torch.device("cpu")
            )

    runs = [Run(EMA, wrapped, share=mine, seed=seed, save_with_optimizer=True) for seed in (0, 5, 6)]
    run, again, third = runs
    run.train(range(2))
    again.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    state = copy.deepcopy(get_optimizer_state_dict(run.model, run.optimizer))
    set_optimizer_state_dict(third.model, third.optimizer, state)
    assert same(again.belay.state_dict(), run.belay.state_dict())
    assert same(third.belay.state_dict(), run.belay.state_dict())


# Exports --------------------------------------------------------------------------------------------------------------


@on(2, 3)
def the_models_own_weights_are_gathered_inside_the_block_too(folder: Path) -> None:
    run = fsdp(EMA).train(range(2))
    own = run.weights()
    with run.belay.averaged():
        whole = run.belay.model_state_dict(full=True)
        parts = run.belay.model_state_dict()
    assert same(parts, run.model.state_dict())
    if dist.get_rank():
        assert whole == {}
    else:
        agree({name: whole[name] for name in own}, own, 0)


class Saving(Net):
    """A model that writes itself as Transformers' do."""

    def save_pretrained(self, folder: Path, **how: Any) -> None:
        (folder / "config.json").write_text(json.dumps([type(self).__name__, dist.get_rank()]))
        save_file({name: t.contiguous() for name, t in self.state_dict().items()}, folder / "model.safetensors")


@on(2, 3)
def the_first_rank_saves_a_sharded_model_that_can_be_loaded_as_a_whole(folder: Path) -> None:
    model = sharded(Saving())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    model(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(belay.state_dict())
    there = folder / f"pretrained{dist.get_world_size()}"
    belay.save_pretrained(there)
    with belay.averaged():
        belay.save_pretrained(there)
    dist.barrier()
    found, expected = load_file(there / "model.safetensors"), belay.average_state_dict(full=True)
    if dist.get_rank() == 0:
        assert same(dict(sorted(found.items())), dict(sorted(expected.items())))
    assert same(belay.state_dict(), before)
    model(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()  # every slot has its shard again
    assert belay.step == 2


@on(2, 3)
def every_rank_reads_its_part_of_a_file_with_an_average(folder: Path) -> None:
    run = fsdp(EMA).train(range(2))
    path = folder / f"read{dist.get_world_size()}"
    run.belay.save_average(path)
    dist.barrier()
    other = sharded(Net(seed=5))
    about = tb.load_average(path, other)
    assert about["step"] == "2"
    assert same(other.state_dict(), run.belay.average_state_dict())


# Changes of mind -----------------------------------------------------------------------------------------------------


@on(2, 3)
def a_sharded_average_changes_its_method_as_that_of_one_process(folder: Path) -> None:
    one, run = (make(EMA, adam=False).train(range(2)) for make in (Run, fsdp))
    for each in (one, run):
        each.belay.change(SWINGING)
        each.train(range(2, 5))
    agree(run.average(), one.average())
    agree(run.weights(), one.weights())


@on(2, 3)
def a_sharded_average_takes_a_state_of_another_method(folder: Path) -> None:
    one, run = (make(EMA, adam=False).train(range(2)) for make in (Run, fsdp))
    for source in (one, run):  # a whole state, and that of the same shards
        other = fsdp(SWINGING, adam=False, seed=5, spectators={"new": WARM}, dtype=torch.float32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            other.belay.load_state_dict(source.belay.state_dict(), strict=False)
        (said,) = [str(each.message) for each in caught]
        assert "'new' is new and begins at the checkpoint's 'average'" in said
        for name in ("average", "new"):
            expected = {key: source.average()[key].float().double() for key in other.weights()}
            agree({key: other.average(name)[key] for key in expected}, expected, 0)
        other.train(range(2))
        assert other.belay.step == 4
