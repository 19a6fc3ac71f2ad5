"""Adapters on a frozen model: only what trains is averaged, and adapters that come later are adopted."""

import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.small import BELAY, EMA, same, values
from helpers.zoo import Transformer, adapted, add_adapter, next_word, sentences
from torchbelay.testing import CONTRACTS, check


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        next_word(model, sentences(step)).backward()
        optimizer.step()


def averaged_names(belay: tb.Belay) -> set[str]:
    return set(belay.state_dict()["averages"]["average"]["weights"])


# By hand, as a parametrization of the weight: no package needed


def test_only_the_adapters_are_averaged_and_the_frozen_weights_are_exported_as_they_are() -> None:
    torch.manual_seed(0)
    model = adapted()
    optimizer = torch.optim.AdamW(trainable(model), lr=0.05)
    belay = tb.Belay(model, optimizer, BELAY)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    train(model, optimizer, range(5))
    assert averaged_names(belay) == {name for name, p in model.named_parameters() if p.requires_grad}
    exported = belay.average_state_dict()
    assert all(torch.equal(exported[name], value) for name, value in frozen.items())
    other = adapted()
    other.load_state_dict(exported, strict=True)
    model.eval()
    other.eval()
    with belay.averaged():
        assert torch.equal(model(sentences(0)[:, :-1]), other(sentences(0)[:, :-1]))


def test_an_adapter_that_comes_later_is_adopted_and_what_it_renames_is_followed() -> None:
    """A parametrization gives the weight another name; its average goes with it."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    train(model, optimizer, range(4))
    average = belay.average_state_dict()["blocks.0.qkv.weight"]
    model.requires_grad_(False)
    optimizer.zero_grad()  # the optimizer holds the frozen weights still, and leaves alone what has no gradient
    add_adapter(model.blocks[0].qkv)
    adapter = model.blocks[0].qkv.parametrizations.weight[0]
    optimizer.add_param_group({"params": adapter.parameters()})
    start = adapter.a.detach().clone()
    with pytest.warns(tb.BelayWarning, match=r"2 parameter\(s\) were added .*qkv.parametrizations.weight.0.a"):
        train(model, optimizer, range(4, 5))
    exported = belay.average_state_dict()
    original = model.blocks[0].qkv.parametrizations.weight.original
    assert "blocks.0.qkv.weight" not in exported
    torch.testing.assert_close(
        exported["blocks.0.qkv.parametrizations.weight.original"], torch.lerp(average, original, 0.1)
    )
    assert torch.equal(adapter.a, start)  # B is zero at first: only B has a gradient
    assert torch.equal(exported["blocks.0.qkv.parametrizations.weight.0.a"], start)
    torch.testing.assert_close(exported["blocks.0.qkv.parametrizations.weight.0.b"], 0.1 * adapter.b.detach())
    assert belay.state_dict()["averages"]["average"]["ages"]["blocks.0.qkv.parametrizations.weight.0.b"] == 1


def test_by_hand_the_adapters_are_found_by_what_requires_gradients() -> None:
    torch.manual_seed(0)
    model = adapted()
    belay = tb.Belay(model, None, EMA)
    assert averaged_names(belay) == {name for name, p in model.named_parameters() if p.requires_grad}


# The package that people use


@pytest.fixture(scope="module")
def peft() -> Iterator[Any]:
    if importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed (with what it needs it is 170 MB); the tests above do the same by hand")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, and those of all that it imports
        import peft

        yield peft


def lora(peft: Any, model: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["qkv", "out"], lora_dropout=0.1)
    return peft.get_peft_model(Transformer() if model is None else model, config)


def test_of_a_peft_model_only_what_trains_is_averaged(peft: Any) -> None:
    model = lora(peft)
    optimizer = torch.optim.AdamW(trainable(model), lr=0.05)
    belay = tb.Belay(model, optimizer, BELAY)
    names = averaged_names(belay)
    assert len(names) == 4
    assert all("lora_" in name for name in names)
    base = values(model.get_base_model().embed)
    train(model, optimizer, range(5))
    before = values(model)
    other = lora(peft)
    other.load_state_dict(belay.average_state_dict(), strict=True)
    other.eval()
    with belay.averaged():
        model.eval()
        assert torch.equal(model(sentences(0)[:, :-1]), other(sentences(0)[:, :-1]))
        saved = {name: w.clone() for name, w in peft.get_peft_model_state_dict(model).items()}  # as save_pretrained()
    model.train()
    assert same(values(model), before)
    assert same(values(model.get_base_model().embed), base)
    average = belay.state_dict()["averages"]["average"]["weights"]
    assert len(saved) == 4
    for name, value in saved.items():
        assert torch.equal(value, average[name.replace(".weight", ".default.weight")])
        assert not torch.equal(value, before[name.replace(".weight", ".default.weight")])


def test_a_peft_adapter_that_comes_later_is_adopted_and_the_first_keeps_its_average(peft: Any) -> None:
    model = lora(peft)
    optimizer = torch.optim.SGD(trainable(model), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    train(model, optimizer, range(4))
    first = {name: w.clone() for name, w in belay.state_dict()["averages"]["average"]["weights"].items()}
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["qkv"]))
    model.set_adapter("second")
    optimizer.zero_grad()  # the first adapter does not take part any more
    late = [p for name, p in model.named_parameters() if "second" in name]
    optimizer.add_param_group({"params": late})
    weights = values(model)
    with pytest.warns(tb.BelayWarning, match=r"2 parameter\(s\) were added"):
        train(model, optimizer, range(4, 7))
    state = belay.state_dict()["averages"]["average"]
    assert {name for name, age in state["ages"].items() if age == 3} == averaged_names(belay) - set(first)
    assert len(averaged_names(belay)) == 6
    for name, average in first.items():  # it goes on towards weights that stand still
        torch.testing.assert_close(state["weights"][name], weights[name] + 0.9**3 * (average - weights[name]))
    assert any(not torch.equal(p, weights[name]) for name, p in model.named_parameters() if "second" in name)


def test_a_peft_model_merged_inside_averaged_is_the_base_with_the_average(peft: Any) -> None:
    model = lora(peft)
    optimizer = torch.optim.SGD(trainable(model), lr=0.5)
    belay = tb.Belay(model, optimizer, EMA)
    train(model, optimizer, range(4))
    average = belay.average_state_dict()
    layer = model.get_base_model().blocks[0].qkv
    base = layer.base_layer.weight.detach().clone()
    with belay.averaged():
        delta = layer.get_delta_weight("default").detach()
    prefix = "base_model.model.blocks.0.qkv.lora_"
    expected = 2 * average[f"{prefix}B.default.weight"] @ average[f"{prefix}A.default.weight"]  # alpha / r = 2
    torch.testing.assert_close(delta, expected)
    assert delta.abs().max() > 0
    assert torch.equal(layer.base_layer.weight, base)


def test_the_contract_holds_for_a_peft_model(peft: Any) -> None:
    report = check(
        lambda: lora(peft),
        lambda model: torch.optim.AdamW(trainable(model), lr=0.05),
        batch=sentences,
        loss=next_word,
        steps=4,
    )
    assert report.passed == tuple(CONTRACTS)
