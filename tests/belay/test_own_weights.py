"""The model's own weights in the state of its optimizer: checkpoints whose model is the average resume bit for bit."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.small import BELAY, EMA, mlp, same, snapshot, train, values, with_batchnorm

KEY = "torchbelay//"
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "without a state": lambda ps: torch.optim.SGD(ps, lr=1e-2),
}


class Run:
    """A training in whose checkpoints the model is the average."""

    def __init__(
        self, method: Any = EMA, kind: str = "AdamW", *, model: nn.Module, rides: bool = True, **options: Any
    ) -> None:
        self.model, self.optimizer = model, OPTIMIZERS[kind](model.parameters())
        self.belay = tb.Belay(model, self.optimizer, method, save_with_optimizer=True, **options)
        self.belay._parts.weights_ride = rides

    def saved(self) -> dict[str, Any]:
        with self.belay.averaged():
            return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def load(self, saved: dict[str, Any]) -> "Run":
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        return self

    def everything(self) -> dict[str, Any]:
        return snapshot(self.model, self.belay)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("buffers", ["copy", "average", "ignore"])
def test_the_weights_come_back_and_training_goes_on_bit_for_bit(kind: str, buffers: Any) -> None:
    run = Run(BELAY, kind, model=with_batchnorm(), buffers=buffers)
    train(run.model, run.optimizer, 3)
    saved, before = run.saved(), run.everything()
    assert not torch.equal(saved["model"]["0.weight"], run.model.get_parameter("0.weight"))
    again = Run(BELAY, kind, model=with_batchnorm(seed=5), buffers=buffers).load(saved)
    assert same(again.everything(), before)
    for each in (run, again):
        train(each.model, each.optimizer, 3, first=3)
    assert same(again.everything(), run.everything())


def test_statistics_that_were_found_for_the_average_do_not_become_the_models() -> None:
    run = Run(model=with_batchnorm())
    train(run.model, run.optimizer, 3)
    own = values(run.model)
    with run.belay.averaged():
        run.model.get_buffer("1.running_mean").fill_(7.0)
    saved = run.saved()
    assert saved["model"]["1.running_mean"].tolist() == [7.0] * 5
    again = Run(model=with_batchnorm(seed=5)).load(saved)
    assert same(values(again.model), own)
    with again.belay.averaged():
        assert again.model.get_buffer("1.running_mean").tolist() == [7.0] * 5


@pytest.mark.parametrize("inside", [True, False])
def test_a_state_has_them_wherever_they_are_and_the_live_state_never(inside: bool) -> None:
    run = Run(model=mlp())
    train(run.model, run.optimizer, 2)
    own = values(run.model)
    state = run.saved()["optimizer"] if inside else run.optimizer.state_dict()
    carried = {
        key.removeprefix(f"{KEY}weights/"): value
        for entries in state["state"].values()
        for key, value in entries.items()
        if key.startswith(KEY)
    }
    assert same(carried, own)
    run.optimizer.load_state_dict(copy.deepcopy(state))
    assert not any(KEY in str(key) for entries in run.optimizer.state.values() for key in entries)
    assert same(values(run.model), own)


def test_a_belay_that_does_not_save_them_loads_them() -> None:
    run = Run(model=mlp())
    train(run.model, run.optimizer, 2)
    again = Run(model=mlp(seed=3), rides=False).load(run.saved())
    assert same(values(again.model), values(run.model))
    state = again.optimizer.state_dict()["state"].values()
    assert not any(key.startswith(KEY) for entries in state for key in entries)


def test_averages_of_several_optimizers_bring_the_weights_of_each() -> None:
    def made(seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer], tb.Belay]:
        model = mlp(seed=seed)
        halves = [torch.optim.AdamW(model[0].parameters(), lr=1e-2), torch.optim.SGD(model[2].parameters(), lr=1e-2)]
        belay = tb.Belay(model, halves, EMA, save_with_optimizer=True)
        belay._parts.weights_ride = True
        return model, halves, belay

    model, halves, belay = made(0)
    for optimizer in halves:
        train(model, optimizer, 2)
    with belay.averaged():
        saved = copy.deepcopy([model.state_dict(), *(each.state_dict() for each in halves)])
    again, others, its_belay = made(4)
    again.load_state_dict(saved[0])
    for optimizer, state in zip(others, saved[1:], strict=True):
        optimizer.load_state_dict(state)
    assert same(snapshot(again, its_belay), snapshot(model, belay))


def test_weights_of_another_dtype_are_cast_as_those_of_a_model_are() -> None:
    run = Run(model=mlp())
    train(run.model, run.optimizer, 2)
    again = Run(model=mlp(seed=3).bfloat16()).load(run.saved())
    assert same(values(again.model), {name: value.bfloat16() for name, value in values(run.model).items()})


def damage(state: dict[str, Any], how: str) -> str:
    """Damage the first weight of a state; return what the error says."""
    entries = next(each for each in state["state"].values() if f"{KEY}weights/0.weight" in each)
    if how == "shape":
        entries[f"{KEY}weights/0.weight"] = torch.zeros(2, 2)
        return r"the shape of the model's own '0.weight' differs: \(2, 2\)"
    value = entries.pop(f"{KEY}weights/0.weight")
    if how == "missing":
        return "the model's own weights in the checkpoint differ .* missing: '0.weight'"
    if how == "kind":
        entries[f"{KEY}velocities1/0.weight"] = value
        return "the model's own"
    entries[f"{KEY}weights/0.weight"] = "a text"
    return "the model's own '0.weight' is damaged: str is not a tensor"


@pytest.mark.parametrize("how", ["shape", "missing", "kind", "text"])
def test_weights_that_do_not_fit_are_refused_and_nothing_is_loaded(how: str) -> None:
    run = Run(model=mlp())
    train(run.model, run.optimizer, 2)
    state = copy.deepcopy(run.optimizer.state_dict())
    message = damage(state, how)
    again = Run(model=mlp(seed=3))
    before = again.everything(), copy.deepcopy(again.optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        again.optimizer.load_state_dict(state)
    assert same((again.everything(), again.optimizer.state_dict()), before)
