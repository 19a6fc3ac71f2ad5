"""Slices of a shared average on one rank of a group that is only pretended; several real ones: helpers/rank_checks."""

import copy
import gc
import weakref
from collections.abc import Iterator
from math import nan
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchbelay as tb
from helpers import seams
from helpers.backends_under_test import WHERE
from torchbelay.belay import agreement, gathering

RANK, RANKS = 1, 3
BELAY, EMA = tb.Spring(k=1.0, m1=10.0, m2=20.0), tb.Spring.ema(decay=0.9)
SWINGING = tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Rank 1 of 3, whose neighbours agree about everything and send nan."""

    def gather(everything: Tensor, mine: Tensor, group: Any) -> None:
        rows = everything.view(RANKS, -1)
        rows.view(torch.float32).fill_(nan)
        rows[RANK] = mine

    monkeypatch.setattr(agreement, "_everybody", lambda group, mine: [mine] * RANKS)
    monkeypatch.setattr(gathering, "_all_gather", gather)
    dist.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def small(impl: str = "auto") -> nn.Module:
    """A model, where the kernels are if they move it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.Conv2d(3, 9, 2), nn.Linear(9, 2, bias=False))
    return model.to(WHERE if impl == "triton" else "cpu")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.device)
    optimizer.step()


def own(state: dict[str, Tensor], belay: tb.Belay) -> dict[str, Tensor]:
    return {name: belay._parts.slices.slice_of(t).clone() for name, t in state.items()}


def local(belay: tb.Belay, name: str, kind: str = "weights") -> dict[str, Tensor]:
    return {key: t.to_local().clone() for key, t in belay.state_dict()["averages"][name][kind].items()}


@pytest.mark.parametrize("impl", ["foreach", "reference", pytest.param("triton", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("method", [EMA, BELAY, SWINGING], ids=["ema", "belay", "swinging"])
def test_a_slice_moves_as_the_same_numbers_of_a_whole_average_do(group, impl: str, method: tb.Method) -> None:
    model = small(impl)
    twin = copy.deepcopy(model)
    runs = []
    for each, how in ((model, {"shard": group}), (twin, {})):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        runs.append((optimizer, tb.Belay(each, optimizer, method, spectators={"x": EMA}, impl=impl, **how)))
    (optimizer, belay), (other, whole) = runs
    for seed in range(3):
        step(model, optimizer, seed)
        step(twin, other, seed)
        for name in ("average", "x"):
            expected = own(whole.state_dict()["averages"][name]["weights"], belay)
            assert equal(local(belay, name), expected, impl)
        assert equal(own(model.state_dict(), belay), own(twin.state_dict(), belay), impl)
        model.load_state_dict(twin.state_dict())  # what the neighbours would have sent
    assert f"impl='{impl}" in repr(belay)  # slices of columns are moved by foreach beside the kernels
    assert f"slice {RANK + 1} of {RANKS}" in repr(belay)


def equal(found: dict[str, Tensor], expected: dict[str, Tensor], impl: str) -> bool:
    """Bit for bit; kernels are compared by float32's rounding, because blocks begin elsewhere."""
    if impl != "triton":
        return all(torch.equal(found[name], expected[name]) for name in expected)
    return all(torch.allclose(found[name], expected[name], rtol=1e-6, atol=1e-7) for name in expected)


@pytest.mark.thorough
def test_kernels_that_follow_a_schedule_send_at_its_syncs_alone(group, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    gather = gathering._all_gather
    monkeypatch.setattr(gathering, "_all_gather", lambda *a, **how: (sent.append(a[1].nbytes), gather(*a, **how)))
    model = small("triton")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tb.Belay(model, optimizer, tb.methods.lookahead(k=3), impl="triton", shard=group)
    counts = []
    for seed in range(6):
        step(model, optimizer, seed)
        counts.append(len(sent))
    assert counts == [0, 0, 1, 1, 1, 2]


def test_several_averages_of_a_parameter_follow_one_view_of_it(group) -> None:
    """Kernels take what several averages do to a tensor for one piece of work only if they see one tensor."""
    model = small()
    belay = tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), EMA, spectators={"x": EMA}, shard=group)
    views = [[id(w) for cohort in average.cohorts for w in cohort.w1] for average in belay._averages]
    assert views[0] == views[1]
    assert len(set(views[0])) == 5


def test_a_captured_step_is_refused_if_the_average_pulls(group, monkeypatch: pytest.MonkeyPatch) -> None:
    for method in (BELAY, EMA):
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tb.Belay(model, optimizer, method, shard=group)
        step(model, optimizer, 0)
        before = copy.deepcopy(model.state_dict())
        with monkeypatch.context() as patch:
            seams.set_capturing(patch)
            if method is EMA:
                step(model, optimizer, 1)
                continue
            with pytest.raises(RuntimeError, match=r"pulls and that replicas share \(shard\).*outside the graph"):
                step(model, optimizer, 1)
        assert all(torch.equal(t, before[name]) or not t.isfinite().all() for name, t in model.state_dict().items())


def lost(everything: Tensor, mine: Tensor, group: Any) -> None:
    raise RuntimeError("connection lost")


def test_weights_come_back_if_the_ranks_cannot_gather_an_average(group, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA, shard=group)
    step(model, optimizer, 0)
    before, average = copy.deepcopy(model.state_dict()), local(belay, "average")
    with monkeypatch.context() as patch:
        patch.setattr(gathering, "_all_gather", lost)
        with pytest.raises(RuntimeError, match="connection lost"), belay.averaged():
            pytest.fail("the block is not entered")
    assert equal(model.state_dict(), before, "foreach")
    assert equal(local(belay, "average"), average, "foreach")
    with torch.inference_mode(), belay.averaged():
        assert equal(own(model.state_dict(), belay), average, "foreach")
    assert equal(model.state_dict(), before, "foreach")
    step(model, optimizer, 1)


def test_a_step_whose_weights_could_not_be_gathered_is_not_built_upon(group, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, BELAY, shard=group)
    with monkeypatch.context() as patch:
        patch.setattr(gathering, "_all_gather", lost)
        with pytest.raises(RuntimeError, match="connection lost"):
            step(model, optimizer, 0)
    with pytest.raises(RuntimeError, match="the last step was stopped"):
        step(model, optimizer, 1)
    belay.reset()
    step(model, optimizer, 1)
    assert belay.step == 1


def test_what_a_parameter_had_is_let_go_with_it(group) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA, shard=group)
    step(model, optimizer, 0)
    gone = weakref.ref(model[2].weight)
    optimizer.param_groups[0]["params"].pop()
    optimizer.state.clear()
    del model[2]
    with pytest.warns(tb.BelayWarning, match="taken from"):
        step(model, optimizer, 1)
    gc.collect()
    assert gone() is None
    assert belay.step == 2


@pytest.mark.parametrize("given", [None, 0, "world"])
def test_without_other_processes_a_group_is_refused(given: object) -> None:
    if given is None:
        assert tb.Belay(small(), None, EMA, shard=None).step == 0
        return
    with pytest.raises(ValueError, match=r"shard=.*init_process_group.*torchrun"):
        tb.Belay(small(), None, EMA, shard=given)


def test_a_full_state_of_one_process_is_a_copy_of_its_state() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, BELAY)
    step(model, optimizer, 0)
    full = belay.state_dict(full=True)
    weights = copy.deepcopy(full["averages"]["average"]["weights"])
    step(model, optimizer, 1)
    assert all(torch.equal(t, weights[name]) for name, t in full["averages"]["average"]["weights"].items())
    other = tb.Belay(small(), None, BELAY)
    other.load_state_dict(full)
    assert other.step == 1
