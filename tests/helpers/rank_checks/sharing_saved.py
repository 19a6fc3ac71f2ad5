"""Exports and checkpoints of an average that replicas share, on any number of ranks."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn

import torchbelay as tb
from torchbelay import snapshots
from torchbelay.snapshots import recorder
from torchbelay.snapshots.folder import Folder

from .runs import EMA, SWINGING, Net, Run, agree, everything, fsdp, mine, on, refused, same
from .saving import saved_by_the_first_rank
from .sharing import compare, replica, sharing, world

HOW: dict[str, Any] = {"spectators": {"short": tb.methods.ema(0.9, warmup="ratio")}, "adam": False}
NAMES = ("average", "short")
KINDS: dict[str, dict[str, Any]] = {
    "shared, swinging": {"method": SWINGING, "keep_initial": True, "buffers": "average", **HOW},
    "shared, not begun": {"method": tb.methods.heavy_ball(0.9), "start": 5, **HOW},
}


@on(2, 3, 4)
def exports_of_a_shared_average_are_whole(folder: Path) -> None:
    run, whole = (make(EMA, tied=True, dtype=torch.float32).train(range(3)) for make in (sharing, replica))
    exported = run.belay.average_state_dict()
    agree(exported, whole.average(), 0)
    assert all(type(t) is Tensor for t in exported.values())
    assert exported["third.weight"] is exported["second.weight"]
    Net(tied=True).load_state_dict(exported, strict=True)
    full = run.belay.average_state_dict(full=True)
    assert same(full, exported) if dist.get_rank() == 0 else full == {}
    path = folder / f"shared{dist.get_world_size()}.safetensors"
    for dtype in (None, torch.float32):
        run.belay.save_average(path, dtype=dtype)
        dist.barrier()
        found = load_file(path)
        dist.barrier()
        for name, value in whole.average().items():
            expected = value if dtype is None or not value.is_floating_point() else value.to(dtype)
            assert torch.equal(found[name], expected), name
    if dist.get_rank() == 0:
        with refused(IsADirectoryError, "is a folder"):
            run.belay.save_average(folder)
    else:
        run.belay.save_average(folder)  # no rank waits for the one that refuses


class Pretrained(nn.Linear):
    """A model that writes itself, as those of Transformers do."""

    def save_pretrained(self, folder: Any) -> None:
        torch.save(self.state_dict(), Path(folder) / "weights.pt")


@on(2)
def a_folder_for_from_pretrained_has_the_whole_average(folder: Path) -> None:
    torch.manual_seed(0)
    model = Pretrained(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA, shard=world())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    expected = belay.average_state_dict()
    belay.save_pretrained(folder / "pretrained")
    dist.barrier()
    found = torch.load(folder / "pretrained" / "weights.pt", weights_only=True)
    agree(found, expected, 0)
    assert not torch.equal(found["weight"], model.weight)


@on(2, 3)
def slices_are_not_pickled_and_a_full_state_is(folder: Path) -> None:
    run, whole = (make(SWINGING, **HOW).train(range(3)) for make in (sharing, replica))
    state = run.belay.state_dict()
    with refused(TypeError, "a slice of each average", "state_dict(full=True)", "torch.distributed.checkpoint"):
        torch.save(state, io.BytesIO())
    again = sharing(SWINGING, seed=5, **HOW)
    again.model.load_state_dict(run.model.state_dict())
    again.belay.load_state_dict(copy.deepcopy(state))
    compare(again.train(range(3, 5)), run.train(range(3, 5)), NAMES)
    whole.train(range(3, 5))
    path = folder / f"full{dist.get_world_size()}.pt"
    full = saved_by_the_first_rank(run.belay.state_dict(full=True), path)
    assert same(full, whole.belay.state_dict())
    weights = copy.deepcopy(run.model.state_dict())
    ahead = run.train(range(5, 7))
    for make in (sharing, replica):  # a state that is whole fits replicas that share and those that do not
        other = make(SWINGING, seed=5, **HOW)
        other.model.load_state_dict(weights)
        other.belay.load_state_dict(full)
        compare(other.train(range(5, 7)), ahead, NAMES)


@on(1, 2, 3, 4)
def a_full_state_of_two_ranks_fits_any_number(folder: Path) -> None:
    path = folder / "full of two.pt"
    one = Run(SWINGING, **HOW).train(range(3))
    if dist.get_world_size() == 2:
        state = sharing(SWINGING, **HOW).train(range(3)).belay.state_dict(full=True)
        saved_by_the_first_rank(state, path)
        of_shards = fsdp(SWINGING, **HOW).train(range(3)).belay.state_dict(full=True)
        if dist.get_rank() == 0:
            for name in NAMES:
                agree(of_shards["averages"][name]["weights"], state["averages"][name]["weights"])
        else:
            assert of_shards == state == {}
    for make in (sharing, fsdp) if dist.get_world_size() > 1 else (sharing, Run):
        run = make(SWINGING, seed=5, **HOW)
        run.belay.load_state_dict(torch.load(path, weights_only=True))
        for name in NAMES:
            agree(run.average(name), one.average(name))


@on(2)
def shared_averages_are_saved_by_distributed_checkpoints(folder: Path) -> None:
    for kind, how in KINDS.items():
        run = sharing(**how).train(range(3))
        dcp.save({"model": run.model.module, "belay": run.belay}, checkpoint_id=folder / kind)
    plain = Run(SWINGING, share=mine, **HOW)
    dcp.save({"model": plain.model, "belay": plain.belay}, checkpoint_id=folder / "not shared")
    sharded = fsdp(SWINGING, **HOW).train(range(3))
    dcp.save({"belay": sharded.belay}, checkpoint_id=folder / "sharded model")


@on(1, 2, 3, 4)
def distributed_checkpoints_of_shared_averages_are_loaded_on_any_number_of_ranks(folder: Path) -> None:
    for kind, how in KINDS.items():
        one = Run(**how).train(range(3))
        for make in (sharing, Run):  # into replicas that share, and into those that do not
            run = make(seed=5, **how)
            inner = run.model.module if make is sharing else run.model
            dcp.load({"model": inner, "belay": run.belay}, checkpoint_id=folder / kind)
            assert run.belay.step == 3
            for name in NAMES:
                agree(run.average(name), one.average(name))
                if how.get("keep_initial"):
                    readout = tb.readouts.bema() if name == "short" else None
                    agree(run.average(name, readout=readout), one.average(name, readout=readout))
            if make is sharing:
                run.train(range(3, 7))
                after = Run(**how).train(range(7))
                agree(run.weights(), after.weights())
                for name in NAMES:
                    agree(run.average(name), after.average(name))


@on(2, 3)
def checkpoints_of_whole_averages_and_sharded_models_fit_a_shared_one(folder: Path) -> None:
    for kind, steps in (("not shared", 0), ("sharded model", 3)):
        run, one = sharing(SWINGING, seed=5, **HOW), Run(SWINGING, **HOW).train(range(steps))
        dcp.load({"belay": run.belay}, checkpoint_id=folder / kind)
        for name in NAMES:
            agree(run.average(name), one.average(name))


@on(2, 3)
def a_state_that_does_not_fit_one_rank_is_refused_by_all(folder: Path) -> None:
    run = sharing(SWINGING, **HOW).train(range(3))
    before = everything(run)
    whole = replica(SWINGING, **HOW).train(range(4)).belay.state_dict()
    damaged = dict(whole) | {"step": "four"}
    with refused(ValueError, "damaged" if dist.get_rank() == 0 else "rank 0 could not go on"):
        run.belay.load_state_dict(damaged if dist.get_rank() == 0 else whole)
    assert same(everything(run), before)
    older = replica(SWINGING, **HOW).train(range(2)).belay.state_dict()
    with refused(ValueError, "disagree about the state", "'step' is 2 on rank 0 and 4 on rank 1"):
        run.belay.load_state_dict(older if dist.get_rank() == 0 else whole)
    assert same(everything(run), before)
    with refused(BaseException, "decay=0.5"):  # torch's CheckpointException is no Exception
        other = sharing(tb.Spring.ema(decay=0.5), keep_initial=True, buffers="average", **HOW)
        dcp.load({"belay": other.belay}, checkpoint_id=folder / "shared, swinging")


@on(2)
def another_method_goes_on_from_a_shared_state(folder: Path) -> None:
    run, whole = (make(SWINGING, **HOW).train(range(3)) for make in (sharing, replica))
    state = run.belay.state_dict(full=True)
    state = saved_by_the_first_rank(state, folder / "another method.pt")
    others = [make(tb.methods.lookahead(k=2), adam=False) for make in (sharing, replica)]
    for other in others:
        other.model.load_state_dict(whole.model.state_dict())
        with pytest.warns(tb.BelayWarning, match="this state is of another Belay"):
            other.belay.load_state_dict(state, strict=False)
        other.train(range(3, 6))
    compare(*others)


@on(2)
def snapshots_of_a_shared_average_are_those_of_a_whole_one(folder: Path) -> None:
    how = {"spectators": snapshots.defaults()}
    run, one = sharing(EMA, **how), Run(EMA, **how)
    path, alone = folder / "shared snapshots", folder / f"whole snapshots {dist.get_rank()}"
    with snapshots.Recorder(run.belay, path, every=4):
        run.train(range(8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "is_first_rank", lambda: True)  # each rank by itself
        with snapshots.Recorder(one.belay, alone, every=4):
            one.train(range(8))
    dist.barrier()
    found, expected = (sorted(Folder(each).snapshots, key=lambda s: s.path.name) for each in (path, alone))
    assert {each.path.suffix for each in found} == {".dcp"}
    assert [(each.step, each.average) for each in found] == [(each.step, each.average) for each in expected]
    for mine_, theirs in zip(found, expected, strict=True):
        with mine_.open() as a, theirs.open() as b:
            agree({name: a.read(name) for name in sorted(a.names)}, {name: b.read(name) for name in sorted(b.names)})
    dist.barrier()


@on(3)
def a_group_without_rank_0_records_by_itself(folder: Path) -> None:
    group = dist.new_group([1, 2])
    path = folder / "snapshots without rank 0"
    if dist.get_rank() > 0:
        run = Run(EMA, adam=False, shard=group)
        with snapshots.Recorder(run.belay, path, every=2) as made:
            run.train(range(4))
        assert made.recorded == [0, 2, 4]
        dist.barrier(group)
        last = [each for each in Folder(path).snapshots if each.step == 4 and each.average == "average"]
        with last[0].open() as file:
            expected = run.average()
            agree({name: file.read(name) for name in sorted(file.names)}, dict(sorted(expected.items())))
    dist.barrier()
