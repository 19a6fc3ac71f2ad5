"""Which parameters are averaged, in which dtype, and what becomes of those that come, go and are renamed."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.operations import foreach_calls
from helpers.small import BELAY, EMA, Still, attached, batch, mlp, same, train, values


def test_frozen_weights_are_exported_as_they_are_and_not_averaged() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    train(model, optimizer, 3)
    assert set(belay.state_dict()["averages"]["average"]["weights"]) == {"2.weight", "2.bias"}
    with torch.no_grad():
        model[0].weight.add_(1)
    assert torch.equal(belay.average_state_dict()["0.weight"], model[0].weight)


def test_a_tied_weight_is_averaged_once_and_exported_under_both_names() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"encode": nn.Linear(3, 3, bias=False), "decode": nn.Linear(3, 3, bias=False)})
    model["decode"].weight = model["encode"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    start = model["encode"].weight.detach().clone()
    model["decode"](model["encode"](batch(0))).square().mean().backward()
    optimizer.step()
    exported = belay.average_state_dict()
    assert list(belay.state_dict()["averages"]["average"]["weights"]) == ["encode.weight"]
    assert torch.equal(exported["encode.weight"], exported["decode.weight"])
    assert torch.allclose(exported["encode.weight"], 0.9 * start + 0.1 * model["encode"].weight, atol=1e-7)
    with belay.averaged():
        assert model["decode"].weight is model["encode"].weight


def test_a_method_for_each_parameter() -> None:
    model, optimizer, belay = attached(lambda name, p: None if name.startswith("2") else EMA)
    train(model, optimizer, 3)
    exported = belay.average_state_dict()
    assert set(belay.state_dict()["averages"]["average"]["weights"]) == {"0.weight", "0.bias"}
    assert torch.equal(exported["2.weight"], model[2].weight)
    assert not torch.equal(exported["0.weight"], model[0].weight)


def test_methods_differ_from_parameter_to_parameter() -> None:
    together, optimizer, belay = attached(lambda name, p: BELAY if "weight" in name else EMA)
    train(together, optimizer, 1)
    alone, optimizer_alone, belay_alone = attached(EMA)
    train(alone, optimizer_alone, 1)
    assert torch.equal(belay.average_state_dict()["0.bias"], belay_alone.average_state_dict()["0.bias"])
    assert torch.equal(belay.average_state_dict()["0.weight"], mlp()[0].weight)  # Algorithm 1 follows a step behind


def test_equal_methods_made_anew_for_each_parameter_move_together() -> None:
    calls = []
    for method in (BELAY, lambda name, p: tb.Spring(k=1.0, m1=10.0, m2=20.0)):
        model = mlp()
        optimizer = Still(model.parameters())
        tb.Belay(model, optimizer, method, impl="foreach")
        calls.append(foreach_calls(optimizer.step))
    assert calls[0] == calls[1] > 0


def test_a_parameter_added_later_is_adopted_at_its_own_value_with_a_warning() -> None:
    model, optimizer, belay = attached(tb.methods.swa())
    train(model, optimizer, 4)
    model.append(nn.Linear(1, 1))
    late = model[3].weight.detach().clone()
    optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.5})
    with pytest.warns(tb.BelayWarning, match=r"2 parameter\(s\) were added .* '3.weight'"):
        train(model, optimizer, 1)
    ages = belay.state_dict()["averages"]["average"]["ages"]
    assert ages["3.weight"] == 1
    assert ages["0.weight"] == 5
    assert torch.equal(belay.average_state_dict()["3.weight"], model[3].weight)  # swa's first step is a copy
    assert not torch.equal(model[3].weight, late)
    train(model, optimizer, 1, first=9)  # and warns only once


def test_a_parameter_that_replaces_another_under_its_name_is_adopted_too() -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 2)
    model[2].bias = nn.Parameter(torch.full((1,), 7.0))
    optimizer.param_groups[0]["params"][3] = model[2].bias
    with pytest.warns(tb.BelayWarning, match="2.bias"):
        train(model, optimizer, 1)
    assert belay.average_state_dict()["2.bias"].item() == pytest.approx(7.0, abs=0.1)


def test_a_parameter_that_left_the_optimizer_is_averaged_no_more() -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 2)
    del optimizer.param_groups[0]["params"][2:]
    with pytest.warns(tb.BelayWarning, match=r"2 parameter\(s\) were taken from .* '2.weight'"):
        train(model, optimizer, 1)
    exported = belay.average_state_dict()
    assert torch.equal(exported["2.weight"], model[2].weight)
    assert not torch.equal(exported["0.weight"], model[0].weight)
    belay.load_state_dict(belay.state_dict())


def test_averages_follow_their_parameters_when_the_model_names_them_anew() -> None:
    """Surgery on the model: a layer wrapped, a layer inserted before others, with and without new parameters."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    train(model, optimizer, 3)
    first, second = belay.average_state_dict()["0.weight"], belay.average_state_dict()["1.weight"]
    model.insert(0, nn.Identity())
    assert torch.equal(belay.average_state_dict()["1.weight"], first)
    assert torch.equal(belay.average_state_dict()["2.weight"], second)
    model.insert(0, nn.Linear(3, 3))  # and what was 1.weight is 2.weight now
    optimizer.add_param_group({"params": model[0].parameters()})
    with pytest.warns(tb.BelayWarning, match="0.weight"):
        train(model, optimizer, 1)
    names = ["2.weight", "2.bias", "3.weight", "3.bias", "0.weight", "0.bias"]
    assert list(belay.state_dict()["averages"]["average"]["weights"]) == names
    exported = belay.average_state_dict()
    torch.testing.assert_close(exported["2.weight"], torch.lerp(first, model[2].weight.detach(), 0.1))
    belay.load_state_dict(belay.state_dict())
    with belay.averaged():
        assert same(values(model), exported)


def test_a_parameter_that_was_replaced_behind_the_optimizers_back_is_noticed() -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 1)
    model.load_state_dict(mlp(seed=2).state_dict(), assign=True)
    for call in (
        belay.average_state_dict,
        belay.state_dict,
        belay.reset,
        belay.copy_to_model,
        belay.averaged().__enter__,
    ):
        with pytest.raises(
            RuntimeError, match=r"'0.weight' is no longer in the model.*assign=True.* make the optimizer"
        ):
            call()


def tie(model: nn.Sequential) -> None:
    model[3].weight = model[0].weight


def parametrize(model: nn.Sequential) -> None:
    nn.utils.parametrizations.weight_norm(model[3])


def replace(model: nn.Sequential) -> None:
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize(("change", "name"), [(tie, "3.weight"), (parametrize, "3.weight"), (replace, "0.weight")])
def test_a_parameter_that_has_left_the_model_is_named_at_the_next_step_with_the_causes(change: Any, name: str) -> None:
    model = nn.Sequential(*mlp(), nn.Linear(3, 4))
    model[3].weight = nn.Parameter(torch.ones_like(model[0].weight))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    change(model)
    said = (
        rf"'{name}' is no longer in the model, .*tied, parametrized, .*: take it out of the optimizer, or make the opt"
    )
    with pytest.raises(RuntimeError, match=said):
        belay.average_state_dict()
    model[2].late = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [model[2].late]})  # so that the step looks at the optimizer's groups
    with pytest.raises(ValueError, match=said):
        optimizer.step()
    assert belay.step == 0


def test_a_parameter_that_has_left_the_model_may_be_taken_out_of_the_optimizer() -> None:
    model, optimizer, belay = attached(EMA)
    lost = model[0].weight
    nn.utils.parametrizations.weight_norm(model[0])
    group = optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if p is not lost]
    optimizer.add_param_group({"params": list(model[0].parametrizations.parameters())})
    with pytest.warns(tb.BelayWarning, match="parameter"):
        train(model, optimizer, 1)
    assert "0.parametrizations.weight.original0" in belay.average_state_dict()


def test_a_parameter_that_is_gone_from_model_and_optimizer_is_forgotten() -> None:
    model = nn.Sequential(*mlp(), nn.Linear(1, 1))
    optimizer = torch.optim.SGD([{"params": model[:3].parameters()}, {"params": model[3].parameters()}], lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    train(model, optimizer, 1)
    del model[3], optimizer.param_groups[1]
    assert list(belay.state_dict()["averages"]["average"]["weights"]) == list(mlp().state_dict())
    assert list(belay.average_state_dict()) == list(mlp().state_dict())


def test_a_layer_that_only_left_the_optimizer_is_told_of_whatever_else_left_the_model() -> None:
    model = nn.Sequential(*mlp(), nn.Linear(1, 1), nn.Linear(1, 1))
    optimizer = torch.optim.SGD([{"params": layer.parameters()} for layer in (model[:3], model[3], model[4])], lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    train(model, optimizer, 2)
    average = belay.average_state_dict()["3.weight"]
    del model[4], optimizer.param_groups[1:]  # the one layer is gone, the other one is frozen from now on
    assert torch.equal(belay.average_state_dict()["3.weight"], average)
    with pytest.warns(tb.BelayWarning, match=r"2 parameter\(s\) were taken from .* '3.weight'"):
        train(model, optimizer, 1)
    assert torch.equal(belay.average_state_dict()["3.weight"], model[3].weight)


def test_a_layer_that_leaves_before_the_averages_begin_does_no_harm() -> None:
    model = nn.Sequential(*mlp(), nn.Linear(1, 1))
    optimizer = torch.optim.SGD([{"params": model[:3].parameters()}, {"params": model[3].parameters()}], lr=0.1)
    belay = tb.Belay(model, optimizer, BELAY, start=2)
    del model[3], optimizer.param_groups[1]
    assert set(belay.state_dict()["averages"]["average"]["weights"]) == set(values(model))
    watching = tb.Belay(model, optimizer, EMA)  # asks what the other one pulls
    train(model, optimizer, 3)
    assert (belay.step, watching.step) == (3, 3)


def test_numbers_to_log_are_those_of_the_groups_as_they_are() -> None:
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.3}]
    optimizer = torch.optim.SGD(groups)
    belay = tb.Belay(model, optimizer, EMA)
    del optimizer.param_groups[0]  # frozen from now on
    assert belay.stats()["effective_lr"] == 0.3
    assert "effective_lr/1" not in belay.stats()


@pytest.mark.parametrize(
    ("weights", "asked", "average"),
    [
        (torch.float32, None, torch.float32),
        (torch.bfloat16, None, torch.float32),
        (torch.float16, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.complex64, None, torch.complex64),
        (torch.float32, torch.float64, torch.float64),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.complex64, torch.float64, torch.complex128),
    ],
)
def test_the_dtype_of_the_average(weights: torch.dtype, asked: torch.dtype | None, average: torch.dtype) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=weights))])
    belay = tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), EMA, dtype=asked)
    assert belay.state_dict()["averages"]["average"]["weights"]["0"].dtype == average
    assert str(average).removeprefix("torch.") in repr(belay)


def test_integer_parameters_are_left_alone_and_exported() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.arange(3), requires_grad=False)])
    belay = tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), EMA)
    assert list(belay.state_dict()["averages"]["average"]["weights"]) == ["0"]
    assert torch.equal(belay.average_state_dict()["1"], torch.arange(3))


def test_a_model_that_moves_to_another_dtype_keeps_its_average() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    train(model, optimizer, 2)
    model.to(torch.bfloat16)
    train(model, optimizer, 1, first=2)
    assert belay.state_dict()["averages"]["average"]["weights"]["0.weight"].dtype == torch.float32


def test_feedback_into_16_bit_weights_warns_and_an_ema_does_not() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.warns(tb.BelayWarning, match="float32 master weights"):
            attached(BELAY, model=mlp(dtype))
        attached(EMA, model=mlp(dtype))


def test_by_hand_parameters_that_join_later_are_adopted_too() -> None:
    model = mlp()
    model[2].requires_grad_(False)
    belay = tb.Belay(model, None, EMA)
    model[2].requires_grad_(True)
    with pytest.warns(tb.BelayWarning, match=r"2 parameter\(s\) were added"):
        belay.before_step()
    belay.after_step()
    model[0].requires_grad_(False)  # frozen again, it stays
    belay.before_step()
    belay.after_step()
    assert len(belay.state_dict()["averages"]["average"]["weights"]) == 4


@pytest.mark.parametrize("method", [EMA, BELAY], ids=str)
def test_a_weight_that_is_frozen_while_the_optimizer_holds_it_is_averaged_and_pulled_on(method: tb.Spring) -> None:
    model, optimizer, belay = attached(method)
    train(model, optimizer, 3)
    model[0].requires_grad_(False)
    w1, w2 = (state["0.weight"].clone() for state in (values(model), belay.average_state_dict()))
    frozen, numbers = w1, method.coupling(1, 1e-2)
    train(model, optimizer, 2, first=3)
    for _ in range(2):  # the optimizer gives it no update
        w1, w2 = w1 + numbers.a * (w2 - w1), w2 + numbers.b * (w1 - w2)
    assert torch.equal(values(model)["0.weight"], frozen) is (method is EMA)
    torch.testing.assert_close(values(model)["0.weight"], w1, rtol=0, atol=1e-6)
    torch.testing.assert_close(belay.average_state_dict()["0.weight"], w2, rtol=0, atol=1e-6)

    optimizer.param_groups[0]["params"] = [*model[2].parameters()]  # the cure: the optimizer does not hold it
    stays = values(model)["0.weight"]
    with pytest.warns(tb.BelayWarning, match="taken from the optimizer"):
        train(model, optimizer, 2, first=5)
    assert torch.equal(values(model)["0.weight"], stays)


def test_a_method_that_cannot_be_hashed_is_as_good_as_any() -> None:
    @dataclass(frozen=True)
    class Listed:
        rates: list[float]

        def coupling(self, step: int, lr: float) -> tb.Coupling:
            return tb.Coupling(0.0, self.rates[0], 1.0, self.rates[0])

    model, optimizer, belay = attached(Listed([0.5]))
    train(model, optimizer, 2)
    assert belay.step == 2


def test_feedback_that_comes_later_or_to_late_parameters_warns_of_16_bits_too() -> None:
    with pytest.warns(tb.BelayWarning, match="16 bits wide"):
        attached(tb.methods.lookahead(k=1000), model=mlp(torch.bfloat16))
    model = nn.Sequential(*mlp(), nn.Linear(1, 1).to(torch.bfloat16))
    optimizer = torch.optim.SGD(model[:3].parameters(), lr=0.1)
    tb.Belay(model, optimizer, BELAY)
    optimizer.add_param_group({"params": model[3].parameters()})
    with pytest.warns(tb.BelayWarning) as said:
        optimizer.step()
    assert any("16 bits wide" in str(each.message) for each in said)
