"""FSDP2: shards are averaged where they are, faults included."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import torchbelay as tb
from helpers import seams
from torchbelay import testing

from .runs import (
    BELAY,
    EMA,
    LAGGED,
    OF,
    SPECTATORS,
    SWINGING,
    TOLERANCE,
    Net,
    Run,
    agree,
    batch,
    each_its_own,
    everything,
    fsdp,
    here,
    loss_of,
    mine,
    on,
    refused,
    same,
    sharded,
    whole,
)


@on(2, 3, 4)
def averages_are_sharded_like_their_parameters(folder: Path) -> None:
    run = fsdp(SWINGING, spectators={"short": EMA})
    state = run.belay.state_dict()["averages"]
    parameters = dict(run.model.named_parameters())
    for average, kinds in (("average", ("weights", "velocities1", "velocities2")), ("short", ("weights",))):
        for kind in kinds:
            assert list(state[average][kind]) == list(parameters)
            for name, t in state[average][kind].items():
                p = parameters[name]
                assert (t.device_mesh, t.placements, t.shape) == (p.device_mesh, p.placements, p.shape)
                assert here(t).shape == here(p).shape
                assert here(t).untyped_storage().data_ptr() != here(p).untyped_storage().data_ptr() or not p.numel()
    sizes = torch.tensor([here(parameters["second.weight"]).numel(), here(parameters["scale"]).numel()])
    everybody = [torch.zeros(2, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, sizes)
    assert {0, 5} == {int(size[0]) for size in everybody}  # some ranks have nothing of it
    assert len({int(size[1]) for size in everybody}) > 1  # and some less than others


@on(2, 3, 4)
def sharded_training_is_that_of_one_process(folder: Path) -> None:
    run, one = (make(each_its_own, spectators=SPECTATORS).train(range(6)) for make in (fsdp, Run))
    agree(run.weights(), one.weights())
    for name in ("average", *SPECTATORS):
        agree(run.average(name), one.average(name))
    said, expected = run.belay.stats(), one.belay.stats()
    for key in ("tension", "tension_ratio"):
        assert abs(said[key] - expected[key]) <= 1e-12 * expected[key], (key, said, expected)


@on(2, 3, 4)
def the_coupling_of_shards_is_bit_for_bit_that_of_ordinary_tensors(folder: Path) -> None:
    """Replayed: ordinary parameters that are given, around each step, what the optimizer made of the shards."""
    seen: list[list[Tensor]] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.append([here(p).clone() for p in optimizer.param_groups[0]["params"]])

    def watch(run: Run) -> None:  # in line before Belay's own hooks
        run.optimizer.register_step_pre_hook(look)
        run.optimizer.register_step_post_hook(look)

    run = fsdp(each_its_own, spectators=SPECTATORS, before=watch).train(range(6))
    names = list(seams.named_parameters(run.model))
    plain = nn.ParameterList([nn.Parameter(t.clone()) for t in seen[0]])
    by_hand = tb.Belay(plain, None, lambda name, p: OF[names[int(name)]], spectators=SPECTATORS)
    for before, after in zip(seen[::2], seen[1::2], strict=True):
        assert all(torch.equal(p, t) for p, t in zip(plain, before, strict=True))
        by_hand.before_step(lr=0.02)
        with torch.no_grad():
            for p, t in zip(plain, after, strict=True):
                p.copy_(t)
        by_hand.after_step()
    for average in ("average", *SPECTATORS):
        weights, replayed = (b.state_dict()["averages"][average]["weights"].values() for b in (run.belay, by_hand))
        assert all(torch.equal(here(x), y) for x, y in zip(weights, replayed, strict=True))
    assert all(torch.equal(here(x), y) for x, y in zip(run.model.parameters(), plain, strict=True))


@on(2, 3, 4)
def a_step_talks_to_nobody(folder: Path) -> None:
    run = fsdp(each_its_own, spectators=SPECTATORS)
    for step in range(3):
        run.optimizer.zero_grad()
        loss_of(run.model, mine(batch(step))).backward()
        with CommDebugMode() as talk:
            run.optimizer.step()
        assert talk.get_total_counts() == 0, talk.get_comm_counts()
    with CommDebugMode() as talk:
        with run.belay.averaged():
            pass
        run.belay.state_dict()
        run.belay.average_state_dict()
        run.belay.reset()
    assert talk.get_total_counts() == 0, talk.get_comm_counts()
    with CommDebugMode() as talk:  # and this is what a check that talks shows
        run.belay.average_state_dict(full=True)
    assert talk.get_total_counts() > 0


@on(2, 3, 4)
def averaged_is_seen_by_a_root_that_keeps_its_parameters_gathered(folder: Path) -> None:
    x = batch(99)
    run, one = fsdp(BELAY).train(range(3)), Run(BELAY).train(range(3))
    for step in range(3, 5):
        outputs = []
        for each in (run, one):
            with torch.no_grad():
                plain = each.model(x)
                with each.belay.averaged():
                    inside = each.model(x)
                again = each.model(x)
            assert torch.equal(plain, again)
            assert (plain - inside).abs().max() > 1e-3
            outputs.append(torch.stack([plain, inside]))
            each.train([step])
        torch.testing.assert_close(*outputs, rtol=0, atol=TOLERANCE)
        agree(run.weights(), one.weights())
        agree(run.average(), one.average())
    with torch.no_grad():
        with run.belay.averaged():
            inside = run.model(x)
        run.model(x)  # gathered again
        run.belay.copy_to_model()
        assert torch.equal(run.model(x), inside)


@on(2, 4)
def averaged_is_seen_whatever_is_kept_gathered_and_in_whatever_precision(folder: Path) -> None:
    """Modules that keep everything after a forward, or a part of it, and compute in bfloat16."""
    keep: bool | int = False if dist.get_world_size() == 2 else 2
    x = batch(99).float()
    narrow, wide = (MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=d) for d in (None, torch.float32))

    def spread(net: Net) -> nn.Module:
        net.float()
        fully_shard(net.first, reshard_after_forward=keep, mp_policy=narrow)
        return fully_shard(net, reshard_after_forward=keep, mp_policy=wide)

    run = Run(EMA, spread, share=lambda x: mine(x).float()).train(range(3))
    fresh = Run(EMA, spread, seed=5)
    fresh.model.load_state_dict(run.belay.average_state_dict())
    with torch.no_grad():
        plain = run.model(x)
        with run.belay.averaged():
            inside = run.model(x)
        assert torch.equal(inside, fresh.model(x))
        assert not torch.equal(inside, plain)
        assert torch.equal(run.model(x), plain)


@on(2, 3)
def a_sharded_model_that_is_converted_keeps_its_average(folder: Path) -> None:
    """FSDP2 gives its parameters other memory before the first forward; the averages must not go on with the old."""
    run, one = (make(BELAY, adam=False, dtype=torch.float64) for make in (fsdp, Run))
    old = here(run.model.scale)
    for each in (run, one):
        each.model.float()
        each.share = lambda x, share=each.share: share(x).float()
        each.train(range(4))
    assert here(run.model.scale).data_ptr() != old.data_ptr() or not old.numel()
    agree(run.weights(), one.weights(), 1e-6)  # float32 by now
    agree(run.average(), one.average(), 1e-6)
    assert run.belay.stats()["tension"] > 0.01


@on(2, 3)
def an_export_between_forward_and_backward_disturbs_nothing(folder: Path) -> None:
    runs = [fsdp(EMA).train(range(2)) for _ in range(2)]
    for run in runs:
        run.optimizer.zero_grad()
        loss = loss_of(run.model, mine(batch(2)))
        if run is runs[0]:
            run.belay.average_state_dict()
            run.belay.state_dict()
        loss.backward()
        run.optimizer.step()
    assert same(everything(runs[0]), everything(runs[1]))


@on(2)
def without_resharding_the_average_would_be_trained(folder: Path) -> None:
    """What the check above would see: the root still holds what it gathered of the average."""
    run, one = fsdp(EMA).train(range(3)), Run(EMA).train(range(3))
    with pytest.MonkeyPatch.context() as patch:
        seams.drop_resharding(patch)
        with torch.no_grad(), run.belay.averaged():
            run.model(batch(99))
    run.train([3])
    one.train([3])
    with refused(AssertionError):
        agree(run.weights(), one.weights())


class Outer(nn.Module):
    """A root that shards what is inside of it."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def inside_of(outer: list[nn.Module], *, twice: bool = False) -> Any:
    """Shard a model by a root above it, which is appended to the list; `twice`: by a root above that one too."""

    def spread(net: Net) -> nn.Module:
        fully_shard(net.first)
        outer.append(fully_shard(Outer(net)))
        if twice:
            outer.append(fully_shard(Outer(outer[-1])))
        return net

    return spread


@on(2, 3, 4)
def a_root_above_the_model_does_not_train_the_average(folder: Path) -> None:
    """The optimizer and Belay have the inner model; forwards go through the root, which gathers its parameters."""
    x = batch(99)
    for twice in (False, True):
        outer: list[nn.Module] = []
        run, one = Run(BELAY, inside_of(outer, twice=twice), share=mine), Run(BELAY)
        for step in range(4):
            outputs = []
            for each, root in ((run, outer[-1]), (one, one.model)):
                with torch.no_grad():
                    plain = root(x)
                    with each.belay.averaged():
                        inside = root(x)
                    again = root(x)
                assert torch.equal(plain, again)
                outputs.append(torch.stack([plain, inside]))
                with each.belay.averaged(), torch.no_grad():
                    root(x)  # gathered, right before a step
                each.optimizer.zero_grad()
                loss_of(root, each.share(batch(step))).backward()
                each.optimizer.step()
            torch.testing.assert_close(*outputs, rtol=0, atol=TOLERANCE)
            agree(run.weights(), one.weights())
            agree(run.average(), one.average())
        with torch.no_grad():
            with run.belay.averaged():
                inside = outer[-1](x)
            outer[-1](x)  # gathered again
            run.belay.copy_to_model()
            assert torch.equal(outer[-1](x), inside)
            outer[-1](x)
            late = tb.Belay(run.model, None, EMA)  # made of shards, while the root has gathered them
        assert isinstance(late.average_state_dict()["scale"], DTensor)


@on(2)
def a_root_that_cannot_be_found_is_refused_and_changes_nothing(folder: Path) -> None:
    outer: list[nn.Module] = []
    run = Run(EMA, inside_of(outer), share=mine)
    with pytest.MonkeyPatch.context() as patch:
        seams.drop_fsdp_registry(patch)
        with refused(RuntimeError, "is sharded", "does not tell by which module", "give Belay the module"):
            run.belay.averaged().__enter__()
    before = everything(run)
    with run.belay.averaged():
        pass
    assert same(everything(run), before)


@on(2)
def a_container_of_parts_of_a_sharded_model_does_not_train_the_average(folder: Path) -> None:
    x = batch(99)
    run, one = fsdp(EMA, adam=False), Run(EMA, adam=False)
    for each in (run, one):
        each.belay.detach()
        parts = nn.ModuleDict({"first": each.model.first, "second": each.model.second})
        each.optimizer = torch.optim.SGD(parts.parameters(), lr=0.02)
        each.belay = tb.Belay(parts, each.optimizer, EMA)
        each.train(range(2))
        with each.belay.averaged(), torch.no_grad():
            each.model(x)
        each.train([2])
    agree(run.weights(), one.weights())


@on(2, 3, 4)
def names_are_those_of_the_shards_whatever_is_gathered(folder: Path) -> None:
    """Construction, adoption of late parameters and steps by hand, right after a forward without a backward."""
    x = batch(0)
    net = sharded(Net())
    with torch.no_grad():
        net(x)
    assert not isinstance(net.scale, DTensor)  # the root is gathered indeed
    by_hand = tb.Belay(net, None, EMA)
    start = whole(by_hand.average_state_dict()["scale"])
    for _ in range(2):
        with torch.no_grad():
            net(x)
        by_hand.before_step()
        with torch.no_grad():
            for p in net.parameters():
                p.add_(1.0)
        by_hand.after_step()
    w1, w2 = start + 2, 0.9 * (0.9 * start + 0.1 * (start + 1)) + 0.1 * (start + 2)
    torch.testing.assert_close(whole(net.scale), w1, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(whole(by_hand.average_state_dict()["scale"]), w2, rtol=0, atol=TOLERANCE)


@on(2, 3, 4)
def averages_in_host_memory_are_sharded_too(folder: Path) -> None:
    run, other = fsdp(EMA, device="cpu").train(range(4)), fsdp(EMA).train(range(4))
    assert same(run.belay.state_dict(), other.belay.state_dict())
    with run.belay.averaged(), torch.no_grad():
        run.model(batch(99))
    assert same(everything(run.train([4])), everything(other.train([4])))


# Faults ---------------------------------------------------------------------------------------------------------------


@on(2, 3, 4)
def a_nan_on_one_rank_is_one_for_all(folder: Path) -> None:
    """Only one rank holds a shard of second.weight, and only that one can see it."""
    for method in (EMA, LAGGED, BELAY):
        run, one = (make(method, adam=False, on_nonfinite="skip").train(range(2)) for make in (fsdp, Run))
        for each in (run, one):
            each.optimizer.zero_grad()
            loss_of(each.model, each.share(batch(2))).backward()
            each.model.second.weight.grad.mul_(float("nan"))
        before = copy.deepcopy(run.belay.state_dict()["averages"])
        run.optimizer.step()
        one.optimizer.step()
        assert same(run.belay.state_dict()["averages"], before)
        assert run.belay.step == 2
        agree(run.average(), one.average())
        raising = fsdp(method, adam=False, on_nonfinite="raise").train(range(2))
        loss_of(raising.model, mine(batch(2))).backward()
        raising.model.second.weight.grad.mul_(float("nan"))
        before = copy.deepcopy(raising.belay.state_dict())
        with refused(FloatingPointError, "'second.weight'", "step 3"):
            raising.optimizer.step()
        assert same(raising.belay.state_dict(), before)


@on(2, 3, 4)
def a_step_that_a_scaler_skips_is_skipped_by_all(folder: Path) -> None:
    for fused, waits in ((False, False), (True, False), (True, True)):  # whether it skips is asked, or on the device
        run = fsdp(BELAY, adam=False)
        run.belay.detach()
        run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.1, fused=fused)
        run.belay = tb.Belay(run.model, run.optimizer, BELAY, spectators={"lagged": LAGGED})
        scaler = torch.amp.GradScaler("cpu")
        for step in range(4):
            run.optimizer.zero_grad()
            scaler.scale(loss_of(run.model, mine(batch(step)))).backward()
            if step == 2:
                before = everything(run)
                run.model.second.weight.grad.fill_(float("inf"))
            with pytest.MonkeyPatch.context() as patch:
                seams.set_waiting(patch, waits)
                scaler.step(run.optimizer)
            scaler.update()
            if step == 2:
                assert same(everything(run), before)
        assert run.belay.step == 3


# The contract suite ---------------------------------------------------------------------------------------------------


@on(2, 3)
def the_contract_holds_for_sharded_models(folder: Path) -> None:
    def make() -> nn.Module:
        net = Net()
        net.norm.eval()
        return sharded(net)

    report = testing.check(
        make,
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.02),
        batch=lambda step: mine(batch(step)),
        loss=loss_of,
        steps=3,
    )
    assert report.skipped == {}, report


READOUTS = (tb.readouts.blend(0.65), tb.readouts.blend({"first.*": 0.25, "*": 1.0}), tb.readouts.bema())


@on(2, 3, 4)
def readouts_of_shards_are_those_of_one_process(folder: Path) -> None:
    run, one = (make(BELAY, spectators={"ema": EMA}, keep_initial=True).train(range(3)) for make in (fsdp, Run))
    before = everything(run)
    for name in ("average", "ema"):
        for readout in (*READOUTS, tb.readouts.centre()):
            with CommDebugMode() as talk:
                exported = run.belay.average_state_dict(name, readout=readout)
            assert talk.get_total_counts() == 0
            parameters = dict(run.model.named_parameters())
            assert all(exported[key].placements == p.placements for key, p in parameters.items())
            wanted = one.average(name, readout=readout)
            agree({key: whole(t) for key, t in exported.items()}, wanted)
            loss_of(run.model, batch(9))  # the root keeps what it gathered
            with run.belay.averaged(name, readout=readout), one.belay.averaged(name, readout=readout):
                agree(run.weights(), one.weights())
                torch.testing.assert_close(loss_of(run.model, batch(9)), loss_of(one.model, batch(9)))
                assert same(run.belay.average_state_dict(name, readout=readout), exported)
            full = run.belay.average_state_dict(name, full=True, readout=readout)
            if dist.get_rank() == 0:
                agree(full, wanted)
    assert same(everything(run), before)
    agree(run.train(range(3, 5)).average(), one.train(range(3, 5)).average())


@on(2, 3, 4)
def initial_weights_are_sharded_like_their_parameters_and_begin_again_with_them(folder: Path) -> None:
    run = fsdp(BELAY, keep_initial=True)
    parameters = dict(run.model.named_parameters())
    for step in (0, 2):
        run.train(range(step, step + 2))
        run.belay.reset()
        for name, w0 in run.belay.state_dict()["averages"]["average"]["initial"].items():
            p = parameters[name]
            assert (w0.device_mesh, w0.placements, w0.shape) == (p.device_mesh, p.placements, p.shape)
            assert torch.equal(here(w0), here(p))
