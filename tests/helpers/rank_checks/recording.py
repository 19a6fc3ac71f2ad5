"""Snapshots of sharded and replicated models, and averages that are made of them."""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbelay as tb
from torchbelay.snapshots import Recorder, recorder, synthesize, window
from torchbelay.snapshots.folder import Folder

from .runs import EMA, Net, Run, agree, everything, fsdp, mine, on

STEPS = range(24)


def freeze(run: Run) -> None:
    """Train the second layer alone."""
    run.model.first.requires_grad_(False)
    trained = [p for p in run.model.parameters() if p.requires_grad]
    run.optimizer = torch.optim.SGD(trained, lr=0.1)


def shared(folder: Path, name: str) -> Path:
    """A folder of this number of ranks."""
    return folder / f"{name}{dist.get_world_size()}"


@on(2, 3)
def snapshots_of_shards_are_those_of_one_process(folder: Path) -> None:
    run, one = (make(EMA, tied=True, spectators=tb.snapshots.defaults()) for make in (fsdp, Run))
    path = shared(folder, "snapshots")
    alone = path.with_name(f"{path.name}-alone{dist.get_rank()}")
    with Recorder(run.belay, path, every=4) as made:
        run.train(STEPS)
    assert made.recorded == [0, 4, 8, 12, 16, 20, 24]
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, made.state_dict())
    assert states == [made.state_dict()] * len(states)  # any rank may save it
    dist.barrier()
    assert {each.path.suffix for each in Folder(path).snapshots} == {".dcp"}
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)  # each rank by itself
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "is_first_rank", lambda: True)
        with Recorder(one.belay, alone, every=4):
            one.train(STEPS)
    dist.destroy_process_group(group)
    found, expected = Folder(path).snapshots, Folder(alone).snapshots
    assert [(each.step, each.average) for each in found] == [(each.step, each.average) for each in expected]
    for mine_, theirs in zip(found, expected, strict=True):
        with mine_.open() as a, theirs.open() as b:
            agree({name: a.read(name) for name in sorted(a.names)}, {name: b.read(name) for name in sorted(b.names)})
    for target in (window(10), tb.methods.ema(half_life=6.0)):
        spread, whole = (synthesize(each, target, max_error=0.5) for each in (path, alone))
        assert spread.weights == whole.weights
        agree(dict(sorted(spread.state_dict().items())), dict(sorted(whole.state_dict().items())), 1e-11)
        Net(tied=True).load_state_dict(spread.state_dict(), strict=True)
    dist.barrier()


@on(2)
def what_is_frozen_in_a_sharded_model_is_written_once(folder: Path) -> None:
    run = fsdp(EMA, before=freeze)
    path = shared(folder, "frozen")
    with Recorder(run.belay, path, every=2):
        run.train(range(4))
    dist.barrier()
    (rest,) = path.glob("*.rest.*")
    assert rest.name.startswith("000000000.rest.0-")
    assert rest.suffix == ".dcp"
    state = synthesize(path, EMA).state_dict()
    agree(
        {name: state[name] for name in ("first.weight", "second.weight")},
        {name: value for name, value in run.average().items() if name in ("first.weight", "second.weight")},
    )
    Net().load_state_dict(state, strict=True)
    dist.barrier()


@on(2)
def what_changes_untrained_in_a_sharded_model_is_written_again(folder: Path) -> None:
    run = fsdp(EMA, before=freeze)
    path = shared(folder, "changed")
    with Recorder(run.belay, path, every=2):
        run.train(range(3))
        if dist.get_rank() == 1:  # one rank alone sees it
            for p in run.model.first.parameters():
                p.data.to_local().fill_(7.0)
        run.train(range(3, 8))
        whole = {name: p.full_tensor() for name, p in run.model.named_parameters() if name.startswith("first")}
    dist.barrier()
    assert sorted(each.name.partition(".")[0] for each in path.glob("*.rest.*")) == ["000000000", "000000004"]
    state, before = synthesize(path, EMA).state_dict(), synthesize(path, EMA, at=2).state_dict()
    agree({name: state[name] for name in whole}, whole)
    assert any(bool((value == 7).any()) for value in whole.values())
    assert not any(bool((before[name] == 7).any()) for name in whole)
    dist.barrier()


@on(2)
def rows_that_trade_places_between_shards_are_written_again(folder: Path) -> None:
    run = fsdp(EMA, before=freeze)
    path = shared(folder, "traded")
    with Recorder(run.belay, path, every=2):
        run.train(range(3))
        rows = run.model.first.weight.data.to_local()[:2]
        parts = [torch.empty_like(rows) for _ in range(2)]
        dist.all_gather(parts, rows.contiguous())
        rows.copy_(parts[1 - dist.get_rank()])
        run.train(range(3, 6))
        whole = run.model.first.weight.full_tensor()
    dist.barrier()
    assert torch.equal(synthesize(path, EMA).state_dict()["first.weight"], whole)
    assert not torch.equal(synthesize(path, EMA, at=2).state_dict()["first.weight"], whole)
    dist.barrier()


@on(2)
def a_sharded_recording_begins_again_at_a_reset(folder: Path) -> None:
    run = fsdp(EMA, before=freeze)
    path = shared(folder, "reset")
    with Recorder(run.belay, path, every=2):
        run.train(range(5))
        with torch.no_grad():
            for p in run.model.parameters():
                p.mul_(2.0)
        run.belay.reset()
        run.train(range(5, 9))
    dist.barrier()
    found = synthesize(path, EMA)
    assert found.begin == 5
    assert sorted(each.name.partition(".")[0] for each in path.glob("*.rest.*")) == ["000000000", "000000005"]
    wanted = run.average()
    state = found.state_dict()
    agree({name: state[name] for name in wanted}, wanted)
    dist.barrier()


@on(2)
def of_replicas_the_first_rank_records(folder: Path) -> None:
    run = Run(EMA, DistributedDataParallel, share=mine)
    path = shared(folder, "replicas")
    with Recorder(run.belay, path, every=2) as made:
        run.train(range(4))
    assert made.recorded == ([] if dist.get_rank() else [0, 2, 4])
    dist.barrier()
    assert Folder(path).steps == [0, 2, 4]
    agree({"scale": synthesize(path, EMA).state_dict()["scale"]}, {"scale": run.average()["scale"]})
    dist.barrier()


@on(2)
def ranks_agree_about_a_snapshot_that_is_left_out(folder: Path) -> None:
    """The disk of one rank is too slow: none of them waits for it, and none writes alone."""
    run = fsdp(EMA)
    path, go = shared(folder, "slow"), threading.Event()
    made = Recorder(run.belay, path, every=1)
    made.wait()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(recorder, "MOST_WAITING", 1)
            made._background.add(lambda: go.wait() and None, 1)
        try:
            run.train(range(1))
            with pytest.warns(tb.BelayWarning, match="the snapshots of step 2 are left out"):
                run.train(range(1, 2))
        finally:
            go.set()
        made.wait()
    run.train(range(2, 3))
    made.close()
    dist.barrier()
    assert made.recorded == Folder(path).steps == [0, 1, 3]
    dist.barrier()


@on(2)
def a_sharded_recording_goes_on_after_a_resume(folder: Path) -> None:
    path = shared(folder, "resumed")
    first = fsdp(EMA)
    recording = Recorder(first.belay, path, every=2)
    first.train(range(3))
    state = everything(first)
    first.train(range(3, 8))
    recording.close()
    dist.barrier()
    second = fsdp(EMA)
    second.model.load_state_dict(state["model"])
    second.belay.load_state_dict(state["belay"])
    again = Recorder(second.belay, path, every=2)
    second.train(range(3, 5))
    again.close()
    dist.barrier()
    found = Folder(path)
    assert found.steps == [0, 2, 4, 5]
    assert not found.stale
    assert not list(path.glob(".*"))
    dist.barrier()
