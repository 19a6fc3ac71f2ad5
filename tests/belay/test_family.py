"""Parameters that go from one optimizer of a Belay to another: their averages go on."""

import copy
import warnings
from typing import Any

import pytest
import torch

import torchbelay as tb
from helpers.several_optimizers import alternate, evaluate, several
from helpers.small import BELAY, EMA, SWINGING, same

METHODS = {
    "ema": EMA,
    "belay": BELAY,
    "swinging": SWINGING,
    "swa": tb.methods.swa(),
    "schedule-free": tb.methods.schedule_free(0.9),
}


def move(parameter: torch.Tensor, giver: torch.optim.Optimizer, taker: torch.optim.Optimizer) -> None:
    for group in giver.param_groups:
        group["params"] = [p for p in group["params"] if p is not parameter]
    giver.state.pop(parameter, None)
    taker.add_param_group({"params": [parameter], "lr": 0.2})


@pytest.mark.parametrize("how", METHODS)
@pytest.mark.parametrize("first", [0, 1], ids=["the giver steps first", "the taker steps first"])
def test_a_parameter_that_changes_its_optimizer_keeps_its_average_and_its_age(how: str, first: int) -> None:
    model, optimizers, belay = several(METHODS[how], spectators={"short": EMA})
    alternate(model, optimizers, range(5))  # 5 and 2 steps
    before = belay.state_dict()["averages"]
    old = {name: average["weights"]["2.weight"].clone() for name, average in before.items()}
    memories = dict(before["average"]["memories"])
    move(model[2].weight, *optimizers)
    evaluate(model, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizers[first].step()
        moved = belay.state_dict()["averages"]
        assert moved["average"]["ages"]["2.weight"] == (5 if first == 0 else 6)
        if first == 0:
            assert all(same(moved[name]["weights"]["2.weight"], old[name]) for name in old)
            assert moved["average"]["memories"].get("2.weight") == memories.get("2.weight")
        optimizers[1 - first].step()
    now = belay.state_dict()
    assert now["averages"]["average"]["ages"] == {"0.weight": 6, "2.weight": 6, "0.bias": 3, "2.bias": 3}
    assert [row[:2] for row in now["optimizers"]] == [[6, 1], [3, 1]]
    assert "2.weight" in now["optimizers"][1][2]
    assert not same(now["averages"]["short"]["weights"]["2.weight"], old["short"])


def test_the_average_of_such_a_parameter_has_the_numbers_of_the_formula() -> None:
    model, optimizers, belay = several(tb.methods.swa())
    seen = [model[2].weight.detach().clone()]
    for step in range(8):
        if step == 4:
            move(model[2].weight, *optimizers)
        evaluate(model, step)
        optimizers[0].step()
        if step % 2:
            optimizers[1].step()
        if step < 4 or step % 2:
            seen.append(model[2].weight.detach().clone())
    # the mean of what it has seen since construction: its own first value has no share
    mean = torch.stack(seen[1:]).mean(0)
    assert torch.allclose(belay.average_state_dict()["2.weight"], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", METHODS)
@pytest.mark.parametrize("optimizers_then", ["as they were", "one for all"])
def test_a_parameter_that_is_older_than_its_new_optimizer_is_resumed(how: str, optimizers_then: str) -> None:
    model, optimizers, belay = several(METHODS[how])
    alternate(model, optimizers, range(5))  # 5 and 2 steps
    move(model[2].weight, *optimizers)
    evaluate(model, 5)
    optimizers[1].step()
    state = copy.deepcopy(belay.state_dict())
    assert state["averages"]["average"]["ages"]["2.weight"] == 6
    assert state["optimizers"][1][0] == 3
    other = copy.deepcopy(model)
    those: Any = [
        torch.optim.SGD([dict(other.named_parameters())[name] for name in names], lr=0.2)
        for _, _, names in state["optimizers"]
    ]
    if optimizers_then == "one for all":
        those = torch.optim.SGD(other.parameters(), lr=0.2)
    resumed = tb.Belay(other, those, METHODS[how])
    for _ in range(2):  # the second state is one of its own
        resumed.load_state_dict(state)
        again = copy.deepcopy(resumed.state_dict())
        assert again["averages"]["average"]["ages"] == state["averages"]["average"]["ages"]
        ours, theirs = (each["averages"]["average"]["weights"] for each in (again, state))
        assert all(same(ours[name], theirs[name]) for name in theirs)
        state = again


@pytest.mark.parametrize("how", METHODS)
def test_a_state_that_is_saved_right_after_a_parameter_went_to_another_optimizer_has_its_average(how: str) -> None:
    model, optimizers, belay = several(METHODS[how])
    alternate(model, optimizers, range(5))  # 5 and 2 steps
    move(model[2].weight, *optimizers)
    state = copy.deepcopy(belay.state_dict())
    assert [row[0] for row in state["optimizers"]] == [5, 2]
    other = copy.deepcopy(model)
    named = dict(other.named_parameters())
    those = [torch.optim.SGD([named[name] for name in names], lr=0.2) for _, _, names in state["optimizers"]]
    assert any(named["2.weight"] is p for p in those[1].param_groups[0]["params"])
    resumed = tb.Belay(other, those, METHODS[how])
    resumed.load_state_dict(state)
    again = resumed.state_dict()
    assert again["averages"]["average"]["ages"]["2.weight"] == 5
    for kind in ("ages", "weights", "velocities1", "velocities2", "memories"):
        ours, theirs = (each["averages"]["average"][kind] for each in (again, state))
        assert ours.keys() == theirs.keys()
        assert all(same(ours[name], theirs[name]) for name in theirs)


def test_a_parameter_that_two_of_them_hold_is_refused_at_the_step_and_nothing_has_changed() -> None:
    model, optimizers, belay = several(BELAY)
    alternate(model, optimizers, range(2))
    optimizers[1].add_param_group({"params": [model[2].weight]})
    evaluate(model, 2)
    before = belay.state_dict()
    weights = {name: w.clone() for name, w in before["averages"]["average"]["weights"].items()}
    with pytest.raises(ValueError, match=r"parameter '2\.weight' is in two optimizers, AdamW and SGD"):
        optimizers[1].step()
    assert same(belay.state_dict()["averages"]["average"]["weights"], weights)
    optimizers[0].step()  # the one that had it goes on
    assert belay.step == 3


def test_a_parameter_that_leaves_all_of_them_is_averaged_no_more() -> None:
    model, optimizers, belay = several(EMA)
    alternate(model, optimizers, range(2))
    optimizers[0].param_groups[0]["params"] = [model[0].weight]
    with pytest.warns(tb.BelayWarning, match=r"1 parameter\(s\) were taken from the optimizer, '2\.weight' first"):
        alternate(model, optimizers, range(2, 4))
    assert torch.equal(belay.average_state_dict()["2.weight"], model[2].weight)


def test_a_parameter_that_comes_to_averages_that_have_not_begun_begins_with_them() -> None:
    model, optimizers, belay = several(EMA, start=2)
    alternate(model, optimizers, range(3))  # 3 and 1 steps: the first have begun
    move(model[2].weight, *optimizers)
    with pytest.warns(tb.BelayWarning, match=r"were taken from the optimizer, '2\.weight' first"):
        alternate(model, optimizers, range(3, 4))
    assert torch.equal(belay.average_state_dict()["2.weight"], model[2].weight)  # its optimizer's second step
    alternate(model, optimizers, range(4, 6))
    assert not torch.equal(belay.average_state_dict()["2.weight"], model[2].weight)


@pytest.mark.parametrize("how", ["ema", "belay"])
@pytest.mark.parametrize("first", [0, 1], ids=["the giver steps first", "the taker steps first"])
def test_a_new_parameter_in_the_memory_of_one_that_left_goes_to_another_optimizer(how: str, first: int) -> None:
    model, optimizers, belay = several(METHODS[how])
    alternate(model, optimizers, range(4))
    old = model[2].weight
    model[2].weight = torch.nn.Parameter(old.data)
    move(old, *optimizers)
    optimizers[1].param_groups[-1]["params"] = [model[2].weight]
    evaluate(model, 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizers[first].step()
        optimizers[1 - first].step()
    said = sorted(str(each.message) for each in caught)
    assert ["were added to" in each for each in said] == [True, False]
    assert ["were taken from" in each for each in said] == [False, True]
    assert "2.weight" in belay.average_state_dict()


def test_a_method_that_remembers_learning_rates_goes_apart_with_its_parameter() -> None:
    def run(*, moved: bool) -> dict[str, Any]:
        model, optimizers, belay = several(tb.methods.schedule_free(0.9))
        alternate(model, optimizers, range(4))
        if moved:
            move(model[2].weight, *optimizers)
        alternate(model, optimizers, range(4, 8))
        return dict(belay.state_dict()["averages"]["average"]["memories"])

    stayed, went = run(moved=False), run(moved=True)
    assert stayed["0.weight"] == went["0.weight"]  # what stayed does not see the other's learning rate
    assert went["2.weight"][0] == 6  # 4 steps, and the other optimizer's 2
    assert went["2.weight"] != stayed["2.weight"]
