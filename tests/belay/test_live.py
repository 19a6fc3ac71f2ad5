"""`belay.tensors()`: the average as a live mapping, and several optimizers and models beside it."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers import seams
from helpers.live import assert_is, shared, shares_average, values_of
from helpers.operations import Memory
from helpers.small import BELAY, EMA, attached, batch, mlp, same, snapshot, train, with_batchnorm


def test_it_is_the_average_at_the_moment_of_asking() -> None:
    model, optimizer, belay = attached(BELAY, spectators={"short": EMA})
    tensors, short = belay.tensors(), belay.tensors("short")
    assert isinstance(tensors, Mapping)
    assert list(tensors) == [name for name, _ in model.named_parameters()]
    assert len(tensors) == 4
    assert "0.weight" in tensors
    assert "nothing" not in tensors
    with pytest.raises(KeyError):
        tensors["nothing"]
    for step in range(3):
        train(model, optimizer, 1, first=step)
        weights = belay.state_dict()["averages"]
        assert same(values_of(tensors), weights["average"]["weights"])
        assert same(values_of(short), weights["short"]["weights"])
        assert shared(tensors["0.weight"], weights["average"]["weights"]["0.weight"])
        assert not any(t.requires_grad for t in tensors.values())
    assert "average" in repr(tensors)
    assert tensors != belay.tensors()


def test_nothing_is_copied() -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 1)
    with Memory() as memory:
        tensors = dict(belay.tensors())
    assert memory.peak == 0
    assert len(tensors) == 4


def test_tensors_have_the_averages_own_dtype() -> None:
    _, _, belay = attached(EMA, model=mlp(torch.bfloat16))
    assert {t.dtype for t in belay.tensors().values()} == {torch.float32}


@pytest.mark.parametrize("when", ["before", "inside"])
def test_it_is_right_inside_averaged_and_after_it(when: str) -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm(), spectators={"short": EMA})
    train(model, optimizer, 3)
    tensors = belay.tensors() if when == "before" else None
    before = snapshot(model, belay)
    weights = before["belay"]["averages"]["average"]["weights"]
    with belay.averaged():
        tensors = tensors or belay.tensors()
        inside = tensors["0.weight"]
        assert same(values_of(tensors), weights)
        assert same(model[0].weight.detach(), inside)
        assert not shared(model[0].weight, inside)
        assert same(snapshot(model, belay)["belay"], before["belay"])
        assert belay.stats()["tension"] > 0
    assert same(inside.clone(), weights["0.weight"])
    assert same(snapshot(model, belay), before)
    with belay.averaged("short"):
        assert same(values_of(tensors), weights)
    train(model, optimizer, 1, first=3)
    assert same(inside.clone(), belay.average_state_dict()["0.weight"])


def test_a_block_whose_average_somebody_begins_to_hold_inside_is_left_as_ever() -> None:
    """Also with 16-bit weights, weights that share memory, and after an exception."""
    for dtype in (torch.float32, torch.bfloat16):
        model = mlp(dtype)
        model.view = nn.Parameter(model[0].weight.data[1:])  # overlaps
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        belay = tb.Belay(model, optimizer, EMA)
        train(model, optimizer, 1)
        before = snapshot(model, belay)
        held: list[Mapping[str, torch.Tensor]] = []
        with pytest.raises(ZeroDivisionError), belay.averaged():
            hold_and_fail(belay, held)
        assert same(snapshot(model, belay), before)
        assert same(values_of(held[0]), before["belay"]["averages"]["average"]["weights"])


def hold_and_fail(belay: tb.Belay, held: list[Mapping[str, torch.Tensor]]) -> None:
    held.append(belay.tensors())
    belay.module()
    raise ZeroDivisionError


def test_it_goes_with_functional_call() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm())
    train(model, optimizer, 3)
    model.eval()
    found = torch.func.functional_call(model, dict(belay.tensors()), batch(0))
    with belay.averaged():
        assert torch.equal(model(batch(0)), found)


def test_after_a_move_of_the_model_it_has_the_new_tensors() -> None:
    model = nn.Conv2d(3, 4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA, dtype=torch.float64)
    tensors = belay.tensors()
    old = tensors["weight"]
    model.to(memory_format=torch.channels_last).double()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert tensors["weight"].stride() == model.weight.stride()
    assert not shared(tensors["weight"], old)


# Several optimizers, several models -----------------------------------------------------------------------------------


def test_of_several_optimizers_there_is_one_module() -> None:
    model = with_batchnorm()
    optimizers = [
        torch.optim.SGD(model[0].parameters(), lr=0.1),
        torch.optim.AdamW([*model[1].parameters(), *model[3].parameters()], lr=0.01),
    ]
    belay = tb.Belay(model, optimizers, EMA, start=2)
    made, tensors = belay.module(), belay.tensors()
    for step in range(5):
        model(batch(step)).square().mean().backward()
        optimizers[0].step()
        assert_is(made, belay)
        if step % 2:
            optimizers[1].step()
        assert_is(made, belay)
        assert same(values_of(tensors), {name: belay.average_state_dict()[name] for name in tensors})
        assert len(tensors) == 6
    assert shares_average(made, belay)
    before = values_of(tensors)
    with belay.averaged():
        assert_is(made, belay)
        assert same(values_of(tensors), before)
    belay.reset()
    assert_is(made, belay)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_optimizers_in_the_backward_each_step_looks_at_its_own_parameter(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_batchnorm().to(dtype)
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    belay = tb.Belay(model, optimizers.values(), EMA)
    made = belay.module()
    model(batch(9, dtype)).square().mean().backward()  # the first step forms cohorts
    looks = seams.looks(monkeypatch)
    for step in range(4):
        model.zero_grad()
        model(batch(step, dtype)).square().mean().backward()
        assert_is(made, belay)
    assert looks.count == 0
    weight = model[3].weight
    model[3].double()
    model.zero_grad()
    weight.grad = torch.ones_like(weight)
    optimizers[weight].step()
    assert looks.count == 1
    assert_is(made, belay)


def test_of_several_models_there_are_several_modules() -> None:
    class Stage(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            setattr(self, name, nn.Linear(3, 3))
            self.name = name
            self.register_buffer("table", torch.randn(2), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return getattr(self, self.name)(x)

    stages = [Stage("first"), Stage("second")]
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=0.1)
    belay = tb.Belay(stages, optimizer, EMA)
    made = belay.module()
    assert [type(each) for each in made] == [Stage, Stage]
    into = belay.module(into=[Stage("first"), Stage("second")])
    for step in range(3):
        optimizer.zero_grad()
        stages[1](stages[0](batch(step))).square().mean().backward()
        optimizer.step()
        exported = belay.average_state_dict()
        for modules in (made, into):
            states = modules[0].state_dict() | modules[1].state_dict()
            assert same({name: states[name] for name in exported}, dict(exported))
            for stage, module in zip(stages, modules, strict=True):
                assert same(module.table, stage.table)
    with belay.averaged():
        assert torch.equal(made[1](made[0](batch(0))), stages[1](stages[0](batch(0))))


def test_tensors_without_a_model_have_no_module_but_a_mapping() -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    belay = tb.Belay.from_parameters([("some.weight", weight)], optimizer, tb.Spring.ema(decay=0.5))
    for into in (None, nn.Linear(1, 1)):
        with pytest.raises(ValueError, match=r"module\(\) needs a model, .* tensors without one; use tensors\(\)"):
            belay.module(into=into)
    tensors = belay.tensors()
    weight.sum().backward()
    optimizer.step()
    assert same(values_of(tensors), {"some.weight": torch.full((2,), 0.5)})


def test_a_mapping_that_is_held_follows_layers_that_trade_places() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.9))
    held = belay.tensors()

    def train(steps: int) -> None:
        for _ in range(steps):
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()

    train(17)
    model[0], model[1] = model[1], model[0]
    train(3)
    expected = belay.average_state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in held.items())
    model[0] = nn.Sequential(model[0])
    assert set(held) == model.state_dict().keys()


def test_modules_that_nobody_holds_are_forgotten_as_others_are_made() -> None:
    model = nn.Linear(2, 2)
    belay = tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), tb.methods.ema(0.9))
    for _ in range(5):
        belay.module()
    assert len(belay._parts.live.modules) <= 2
