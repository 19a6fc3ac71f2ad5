"""Checkpoints of averages that several optimizers move: resumed bit for bit, in whatever way parameters are shared."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import torchbelay as tb
from helpers.several_optimizers import alternate, several, two_optimizers
from helpers.small import BELAY, EMA, SWINGING, mlp, same, snapshot, train, with_batchnorm

METHODS = {
    "ema": EMA,
    "belay": BELAY,
    "swinging": SWINGING,
    "swa": tb.methods.swa(),
    "schedule-free": tb.methods.schedule_free(0.9),
    "lookahead": tb.methods.lookahead(k=3),
}
every_method = pytest.mark.parametrize("how", METHODS)


def saved(model: nn.Module, optimizers: list[Any], belay: tb.Belay) -> dict[str, Any]:
    parts = {"model": model, "belay": belay, **{str(i): each for i, each in enumerate(optimizers)}}
    return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})


def load(state: dict[str, Any], model: nn.Module, optimizers: list[Any], belay: tb.Belay) -> None:
    parts = {"model": model, "belay": belay, **{str(i): each for i, each in enumerate(optimizers)}}
    for name, part in parts.items():
        part.load_state_dict(copy.deepcopy(state[name]))


@every_method
@pytest.mark.parametrize("options", [{}, {"every": 2}, {"start": 3}, {"buffers": "average"}], ids=str)
def test_a_resumed_run_is_the_run_bit_for_bit(how: str, options: dict[str, Any]) -> None:
    if "every" in options and how not in ("ema", "belay"):
        options = {}
    options = options | {"spectators": {"short": EMA}}
    run = several(METHODS[how], model=with_batchnorm(), **options)
    alternate(*run[:2], range(5))
    state = saved(*run)
    alternate(*run[:2], range(5, 11))
    again = several(METHODS[how], model=with_batchnorm(seed=1), **options)
    load(state, *again)
    assert same(saved(*again), state)
    assert again[2].step == 5
    alternate(*again[:2], range(5, 11))
    assert same(saved(*again), saved(*run))


def test_the_state_tells_the_steps_of_each_optimizer() -> None:
    model, optimizers, belay = several(EMA)
    alternate(model, optimizers, range(5))
    state = belay.state_dict()
    assert (state["format"], state["step"], state["began"]) == (2, 5, 1)
    assert state["optimizers"] == [[5, 1, ["0.weight", "2.weight"]], [2, 1, ["0.bias", "2.bias"]]]


@every_method
def test_the_order_of_the_optimizers_does_not_matter(how: str) -> None:
    model, optimizers, belay = several(METHODS[how])
    alternate(model, optimizers, range(5))
    other = mlp(seed=1)
    others = two_optimizers(other)
    turned = tb.Belay(other, others[::-1], METHODS[how])
    turned.load_state_dict(copy.deepcopy(belay.state_dict()))
    assert [row[0] for row in turned.state_dict()["optimizers"]] == [2, 5]
    one, two = belay.state_dict()["averages"]["average"], turned.state_dict()["averages"]["average"]
    for kind in ("weights", "ages", "memories", "methods"):
        assert same(dict(sorted(one[kind].items())), dict(sorted(two[kind].items())))


def test_averaged_buffers_keep_their_age_when_another_optimizer_is_the_first() -> None:
    model, optimizers, belay = several(tb.methods.swa(), model=with_batchnorm(), buffers="average")
    alternate(model, optimizers, range(5))
    other = with_batchnorm(seed=1)
    turned = tb.Belay(other, two_optimizers(other)[::-1], tb.methods.swa(), buffers="average")
    turned.load_state_dict(copy.deepcopy(belay.state_dict()))
    rows = turned.state_dict()["averages"]["average"]["own_buffers"]
    assert {age for _, _, age, _ in rows} == {5}
    turned.load_state_dict(turned.state_dict())


@every_method
def test_a_state_of_one_optimizer_goes_on_with_several_and_back(how: str) -> None:
    def one(seed: int) -> tuple[nn.Module, Any, tb.Belay]:
        model = mlp(seed=seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return model, optimizer, tb.Belay(model, optimizer, METHODS[how])

    def two(seed: int) -> tuple[nn.Module, list[Any], tb.Belay]:
        model = mlp(seed=seed)
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.05) for layer in (model[0], model[2])]
        return model, optimizers, tb.Belay(model, optimizers, METHODS[how])

    single, split = one(0), two(1)
    train(*single[:2], 4)
    split[0].load_state_dict(single[0].state_dict())
    split[2].load_state_dict(copy.deepcopy(single[2].state_dict()))
    assert split[2].step == 4
    train(*single[:2], 3, first=4)
    for step in range(4, 7):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1000 + step))
        split[0].zero_grad()
        (split[0](x) - x.sin().sum(1, keepdim=True)).square().mean().backward()
        for optimizer in split[1]:
            optimizer.step()
    ours, theirs = (each[2].state_dict()["averages"]["average"] for each in (single, split))
    assert same(dict(ours["weights"]), {name: theirs["weights"][name] for name in ours["weights"]})
    assert ours["ages"] == theirs["ages"]
    again = one(2)
    again[2].load_state_dict(copy.deepcopy(split[2].state_dict()))
    back = again[2].state_dict()
    assert "optimizers" not in back
    assert same(dict(back["averages"]["average"]["weights"]), dict(ours["weights"]))


def test_several_counts_go_into_one_and_ages_stay() -> None:
    model, optimizers, belay = several(tb.methods.swa())
    alternate(model, optimizers, range(5))
    other = mlp(seed=1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.05)
    single = tb.Belay(other, optimizer, tb.methods.swa())
    single.load_state_dict(copy.deepcopy(belay.state_dict()))
    assert single.step == 5
    assert single.state_dict()["averages"]["average"]["ages"] == belay.state_dict()["averages"]["average"]["ages"]
    train(other, optimizer, 1)
    assert single.state_dict()["averages"]["average"]["ages"] == {
        "0.weight": 6, "0.bias": 3, "2.weight": 6, "2.bias": 3,
    }  # fmt: skip


def test_parameters_shared_in_another_way_keep_their_ages() -> None:
    model, optimizers, belay = several(EMA)
    alternate(model, optimizers, range(5))
    other = mlp(seed=1)
    halves = tb.Belay(other, [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (other[0], other[2])], EMA)
    halves.load_state_dict(copy.deepcopy(belay.state_dict()))
    assert halves.state_dict()["averages"]["average"]["ages"] == {
        "0.weight": 5,
        "0.bias": 2,
        "2.weight": 5,
        "2.bias": 2,
    }
    assert [row[0] for row in halves.state_dict()["optimizers"]] == [5, 5]
    halves.load_state_dict(halves.state_dict())


def test_averages_of_which_some_have_begun_are_resumed() -> None:
    run = several(EMA, start=3)
    alternate(*run[:2], range(4))  # 4 and 2 steps
    state = saved(*run)
    assert state["belay"]["began"] == 2
    again = several(EMA, start=3, model=mlp(seed=1))
    load(state, *again)
    assert same(saved(*again), state)
    for made in (run, again):
        alternate(*made[:2], range(4, 9))
    assert same(saved(*again), saved(*run))


def test_averages_of_which_some_have_begun_are_refused_where_one_optimizer_trains_all() -> None:
    run = several(EMA, start=3)
    alternate(*run[:2], range(4))
    state = copy.deepcopy(run[2].state_dict())
    model = mlp(seed=1)
    single = tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), EMA, start=3)
    halves = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    for target in (single, tb.Belay(model, halves, EMA, start=3)):
        before = snapshot(model, target)
        with pytest.raises(ValueError, match=r"some optimizers have begun.* give Belay the optimizers that it had"):
            target.load_state_dict(state)
        assert same(snapshot(model, target), before)
    del state["optimizers"]  # as torch.distributed.checkpoint would read it
    with pytest.raises(ValueError, match="some optimizers have begun"):
        single.load_state_dict(state)


def damages() -> dict[str, Any]:
    def change(*path: Any, to: Any) -> Any:
        def apply(state: Any) -> None:
            for key in path[:-1]:
                state = state[key]
            state[path[-1]] = to

        return apply

    return {
        "no list": change("optimizers", to=3),
        "empty": change("optimizers", to=[]),
        "no row": change("optimizers", 0, to=None),
        "a short row": change("optimizers", 0, to=[1, 1]),
        "steps are no number": change("optimizers", 0, 0, to="5"),
        "steps below 0": change("optimizers", 0, 0, to=-1),
        "more steps than the largest": change("optimizers", 0, 0, to=6),
        "an age of more steps than all took": change("averages", "average", "ages", "0.weight", to=99),
        "begun twice": change("optimizers", 0, 1, to=2),
        "a name that is none": change("optimizers", 0, 2, to=[3]),
        "no step": change("step", to=None),
        "no averages": change("averages", to=None),
        "an average that is none": change("averages", "average", to=7),
        "a weight of the second optimizer of another shape": change(
            "averages", "average", "weights", "0.bias", to=torch.zeros(3)
        ),
        "a weight more": change("averages", "average", "weights", "9.weight", to=torch.zeros(3)),
        "another option": change("options", "every", to=2),
        "another method for the second optimizer": change("averages", "average", "methods", "0.bias", to="other"),
        "no ages": change("averages", "average", "ages", to=None),
    }


@pytest.mark.parametrize("how", damages())
def test_a_damaged_state_is_refused_and_changes_nothing(how: str) -> None:
    model, optimizers, belay = several(EMA)
    alternate(model, optimizers, range(5))
    state = copy.deepcopy(belay.state_dict())
    alternate(model, optimizers, range(5, 7))
    damages()[how](state)
    before = snapshot(model, belay)
    with pytest.raises(ValueError):  # noqa: PT011  # the messages are those of a single optimizer's states
        belay.load_state_dict(state)
    assert same(snapshot(model, belay), before)


def test_a_missing_weight_is_named_whichever_optimizer_trains_it() -> None:
    _, _, belay = several(EMA)
    for name in ("0.weight", "0.bias"):
        state = copy.deepcopy(belay.state_dict())
        del state["averages"]["average"]["weights"][name]
        with pytest.raises(ValueError, match=rf"missing: '{name}'"):
            belay.load_state_dict(state)


@pytest.mark.filterwarnings("ignore:torch.distributed")
@every_method
def test_torchs_distributed_checkpoint_resumes_bit_for_bit(how: str, tmp_path: Any) -> None:
    run = several(METHODS[how], spectators={"short": EMA})
    alternate(*run[:2], range(5))
    dcp.save({"belay": run[2]}, checkpoint_id=tmp_path)
    again = several(METHODS[how], spectators={"short": EMA}, model=mlp(seed=1))
    dcp.load({"belay": again[2]}, checkpoint_id=tmp_path)
    assert same(again[2].state_dict(), run[2].state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_torchs_distributed_checkpoint_of_one_optimizer_is_not_read_by_several(tmp_path: Any) -> None:
    model = mlp()
    dcp.save({"belay": tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), EMA)}, checkpoint_id=tmp_path)
    other, _, belay = several(EMA, model=mlp(seed=1))
    before = snapshot(other, belay)
    with pytest.raises(CheckpointException, match=r"belay\.optimizers"):
        dcp.load({"belay": belay}, checkpoint_id=tmp_path)
    assert same(snapshot(other, belay), before)
