"""A parameter that leaves the model while it is trained on is told of in time, once, and at no cost to most steps."""

import gc
import sys
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import torchbelay as tb
from helpers.small import EMA, attached, batch, mlp, train
from torchbelay.belay.departures import EVERY, Departures

LEFT = "is no longer in the model, but the optimizer still trains it.*take it out of the optimizer.*cannot be used"


def tied() -> tuple[nn.Module, torch.optim.Optimizer, tb.Belay]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, tb.Belay(model, optimizer, EMA)


def steps(optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.step()


def warned_at(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[tuple[int, str]]:
    """Return the steps, counted from here, before which a warning came, and what it said."""
    found = []
    for step in range(steps):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(model, optimizer, 1, first=step)
        found += [(step, str(each.message)) for each in caught]
    return found


@pytest.mark.parametrize("before", [0, 5, EVERY])
def test_a_weight_that_is_tied_later_is_told_of_at_one_of_the_next_steps(before: int) -> None:
    model, optimizer, belay = tied()
    train(model, optimizer, before)
    model[1].weight = model[0].weight
    ((step, said),) = warned_at(model, optimizer, 3 * EVERY)
    assert step == -before % EVERY
    assert said.startswith("parameter '1.weight' is no longer in the model")
    assert belay.step == before + 3 * EVERY


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: m.load_state_dict(mlp(seed=1).state_dict(), assign=True), "0.weight"),
        (lambda m: parametrizations.weight_norm(m[2]), "2.weight"),
        (lambda m: m.__setitem__(2, nn.Linear(5, 1)), "2.weight"),
        (lambda m: setattr(m[0], "bias", None), "0.bias"),
    ],
    ids=["assign", "weight_norm", "another layer", "no bias"],
)
@pytest.mark.parametrize("start", [0, 1000])
def test_whatever_takes_a_parameter_out_of_the_model(change: Any, name: str, start: int) -> None:
    model, optimizer, _ = attached(EMA, start=start)
    train(model, optimizer, 2)
    change(model)
    with pytest.warns(tb.BelayWarning, match=f"parameter '{name}' {LEFT}"):
        train(model, optimizer, EVERY, first=2)


def test_of_several_optimizers_each_is_looked_at() -> None:
    model = mlp()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    tb.Belay(model, optimizers, EMA)
    model[2] = nn.Linear(5, 1)
    model(batch(0)).sum().backward()
    with pytest.warns(tb.BelayWarning, match=f"parameter '2.weight' {LEFT}"):
        optimizers[0].step()


def test_each_of_several_optimizers_looks_if_no_other_one_has() -> None:
    model = mlp()
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2]))
    tb.Belay(model, [first, second], EMA)
    model(batch(0)).sum().backward()
    first.step()
    model[0] = nn.Linear(3, 5)
    with pytest.warns(tb.BelayWarning, match=f"parameter '0.weight' {LEFT}"):
        steps(second, 2 * EVERY + 1)  # the first of its looks is left out


def test_several_optimizers_that_step_in_turn_share_their_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, looks = mlp(), []
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    tb.Belay(model, optimizers, EMA)
    is_known = Departures._is_known
    monkeypatch.setattr(Departures, "_is_known", lambda self: looks.append(1) or is_known(self))
    model(batch(0)).sum().backward()
    for _ in range(4 * EVERY):
        for optimizer in optimizers:
            optimizer.step()
    assert len(looks) == 4


def test_an_optimizer_that_lost_its_parameters_and_rests_does_not_end_the_looks_of_another() -> None:
    model = mlp()
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2]))
    tb.Belay(model, [first, second], EMA)
    model(batch(0)).sum().backward()
    first.step(), second.step()
    first.param_groups[0]["params"] = []
    model[2] = nn.Linear(5, 1)
    with pytest.warns(tb.BelayWarning, match=f"parameter '2.weight' {LEFT}"):
        steps(second, 2 * EVERY)


@pytest.mark.parametrize("deep", [False, True], ids=["the layer itself", "a block around it"])
def test_a_layer_that_is_replaced_while_somebody_holds_it(deep: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Sequential(nn.Linear(3, 1))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tb.Belay(model, optimizer, EMA)
    train(model, optimizer, 2)
    held = model[1] if deep else model[1][0][0]
    if deep:
        model[1] = nn.Linear(3, 1)
    else:
        model[1][0][0] = nn.Linear(3, 1)
    with pytest.warns(tb.BelayWarning, match=f"parameter '1.0.0.weight' {LEFT}"):
        train(model, optimizer, EVERY, first=2)
    assert isinstance(held, nn.Module)


def test_what_stays_in_the_model_is_no_reason_to_warn() -> None:
    """Warnings are errors here: layers that get other names, and parameters that leave the optimizer too."""
    model, optimizer, belay = tied()
    train(model, optimizer, 3)
    model[0] = nn.Sequential(model[0])
    train(model, optimizer, 2 * EVERY)
    assert "0.0.weight" in belay._averages.each["average"].entries  # exports would ask for the names themselves
    model[1].requires_grad_(False)
    model.to(torch.float64).to(torch.float32)
    train(model, optimizer, 2 * EVERY)
    belay.average_state_dict()


def test_a_parameter_that_left_model_and_optimizer_is_reported_by_the_step_and_not_here() -> None:
    model, optimizer, _ = tied()
    train(model, optimizer, EVERY)
    gone = weakref.ref(model[1].weight)
    optimizer.param_groups[0]["params"] = [*model[0].parameters(), *model[2].parameters()]
    optimizer.state.clear()
    del model[1]
    ((_, said),) = warned_at(model, optimizer, 2 * EVERY)
    assert "2 parameter(s) were taken from the optimizer" in said
    optimizer.zero_grad()
    gc.collect()
    assert gone() is None


def test_steps_between_two_looks_take_the_calls_that_they_took() -> None:
    model, optimizer, belay = tied()

    def calls() -> int:
        count = 0

        def look(frame: Any, event: str, _: Any) -> None:
            nonlocal count
            count += event == "call" and "torchbelay" in frame.f_code.co_filename

        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        sys.setprofile(look)
        optimizer.step()
        sys.setprofile(None)
        return count

    found = [calls() for _ in range(2 * EVERY + 1)]
    usual = found[2]
    assert set(found[2:EVERY] + found[EVERY + 1 : 2 * EVERY]) == {usual}
    assert found[EVERY] == found[2 * EVERY] <= usual + 6
    belay._stepper.look_at_names = None
    assert calls() == usual
