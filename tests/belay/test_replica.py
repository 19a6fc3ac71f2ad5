"""A live module gets the parts that its model gets: late layers, adapters, parametrizations, replaced parts."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import torchbelay as tb
from helpers.live import assert_is, output, shared, shares_average
from helpers.small import EMA, attached, batch, mlp, same, snapshot, train, with_batchnorm
from helpers.zoo import Transformer, add_adapter, next_word, sentences

added = pytest.warns(tb.BelayWarning, match="were added")


class Growing(nn.Module):
    """A body, and branches that come later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.branches = nn.Linear(3, 4), nn.ModuleList()
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        for branch in self.branches:
            hidden = hidden + branch(hidden)
        return self.head(hidden)


class LoRA(nn.Module):
    """An adapter around a layer, which it keeps inside under another name."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.a, self.b = nn.Linear(layer.in_features, 2, bias=False), nn.Linear(2, layer.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.b(self.a(x))


def growing() -> tuple[Growing, Any, tb.Belay]:
    model = Growing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, tb.Belay(model, optimizer, EMA)


def test_a_layer_that_joins_model_and_optimizer_joins_the_module() -> None:
    model, optimizer, belay = growing()
    made = belay.module()
    head, weight = made.head, made.head.weight
    for step in range(3):
        model.branches.append(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        optimizer.add_param_group({"params": model.branches[step].parameters()})
        with added:
            train(model, optimizer, 1, first=step)
        assert_is(made, belay)
        assert shares_average(made, belay)
        assert not made.branches[step].training
        assert made.head is head
        assert made.head.weight is weight
        train(model, optimizer, 1, first=step)
        assert_is(made, belay)
    model.eval()
    with torch.no_grad(), belay.averaged():
        assert torch.equal(made(batch(0)), model(batch(0)))


def test_a_layer_that_leaves_the_model_leaves_the_module() -> None:
    model, optimizer, belay = growing()
    model.branches.append(nn.Linear(4, 4))
    made = belay.module()
    train(model, optimizer, 1)
    assert len(made.branches) == 1
    model.branches = nn.ModuleList()
    train(model, optimizer, 1, first=1)
    assert len(made.branches) == 0
    assert_is(made, belay)


def test_adapters_around_a_layer_keep_the_layer_and_its_average() -> None:
    model, optimizer, belay = growing()
    made = belay.module()
    seen: list[Tensor] = []
    made.head.register_forward_hook(lambda *args: seen.append(args[-1]))  # of the user, on a part that stays
    train(model, optimizer, 2)
    body, weight = made.body, made.body.weight
    model.body = LoRA(model.body)
    optimizer.add_param_group({"params": [*model.body.a.parameters(), *model.body.b.parameters()]})
    with added:
        train(model, optimizer, 1, first=2)
    assert type(made.body) is LoRA
    assert made.body.base_layer is body
    assert made.body.base_layer.weight is weight
    assert_is(made, belay)
    train(model, optimizer, 2, first=3)
    assert_is(made, belay)
    assert same(output(made, batch(1)), seen[-1])
    with torch.no_grad(), belay.averaged():
        assert torch.equal(seen[-1], model(batch(1)))


def test_a_parametrization_that_comes_later_is_taken_over() -> None:
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    made = belay.module()

    def step(number: int) -> None:
        torch.manual_seed(number)
        optimizer.zero_grad()
        next_word(model, sentences(number)).backward()
        optimizer.step()

    step(0)
    add_adapter(model.blocks[0].qkv)
    optimizer.add_param_group({"params": model.blocks[0].qkv.parametrizations.weight[0].parameters()})
    with added:
        step(1)
    assert type(made.blocks[0].qkv) is type(model.blocks[0].qkv)
    assert_is(made, belay)
    step(2)
    assert_is(made, belay)
    assert made.head.weight is made.embed.weight
    model.eval()
    words = sentences(9)[:, :-1]
    with torch.no_grad(), belay.averaged():
        assert torch.equal(made(words), model(words))


def test_weight_norm_that_comes_and_goes_is_taken_over() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    made = belay.module()
    train(model, optimizer, 1)
    parametrizations.weight_norm(model[0])
    optimizer.param_groups[0]["params"] = list(model.parameters())
    with pytest.warns(tb.BelayWarning):
        train(model, optimizer, 1, first=1)
    assert_is(made, belay)
    parametrize.remove_parametrizations(model[0], "weight")
    optimizer.param_groups[0]["params"] = list(model.parameters())
    with pytest.warns(tb.BelayWarning):
        train(model, optimizer, 1, first=2)
    assert type(made[0]) is nn.Linear
    assert_is(made, belay)


def test_a_part_that_is_wrapped_or_compiled_later_changes_nothing() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm())
    made = belay.module()
    parts = list(made)
    train(model, optimizer, 1)
    model[0] = torch.compile(model[0], backend="eager")
    train(model, optimizer, 1, first=1)
    assert list(made) == parts
    assert_is(made, belay)


def test_a_part_that_somebody_holds_gets_what_the_model_gets() -> None:
    model, optimizer, belay = growing()
    branches = belay.module().branches
    model.branches.append(nn.Linear(4, 4))
    optimizer.add_param_group({"params": model.branches.parameters()})
    with added:
        train(model, optimizer, 1)
    assert same(branches[0].weight.detach(), belay.average_state_dict()["branches.0.weight"])


def test_buffers_parameters_and_layers_that_no_optimizer_knows_are_taken_over_too() -> None:
    model, optimizer, belay = growing()
    made = belay.module().train()
    model.register_buffer("scale", torch.ones(2))
    model.head.extra = nn.Parameter(torch.ones(3), requires_grad=False)
    model.branches.append(nn.Linear(4, 4).requires_grad_(False))
    train(model, optimizer, 1)
    assert_is(made, belay)
    assert shared(made.head.extra, model.head.extra)
    assert made.branches[0].training  # as the module that it became a part of
    made.own = nn.Linear(1, 1)  # what the user adds stays, unless the model gets something of that name
    train(model, optimizer, 1, first=1)
    assert isinstance(made.own, nn.Linear)


def test_a_late_part_that_cannot_be_copied_is_refused_before_anything_moves() -> None:
    class Stubborn(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("not this one")

    model, optimizer, belay = growing()
    other = tb.Belay(model, optimizer, EMA)
    made = belay.module()
    model.branches.append(Stubborn(4, 4).requires_grad_(False))
    before = snapshot(model, belay)
    match = r"has other parts now, and the module .* 'average' cannot get them .*not this one.*drop that module"
    with pytest.raises(RuntimeError, match=match):
        train(model, optimizer, 1)
    with pytest.raises(RuntimeError, match=match), belay.averaged():
        pytest.fail("the block must not be entered")
    assert same(snapshot(model, belay), before)
    assert len(made.branches) == 0
    del made
    train(model, optimizer, 1)
    assert belay.step == other.step == 1
    with belay.averaged():
        pass


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_adapters_of_peft_before_and_after() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model, optimizer, belay = growing()
    made = belay.module()
    train(model, optimizer, 1)
    inject_adapter_in_model(LoraConfig(target_modules=["body"], r=2), model)
    optimizer.add_param_group({"params": [p for n, p in model.named_parameters() if "lora" in n]})
    with added:
        train(model, optimizer, 1, first=1)
    train(model, optimizer, 1, first=2)
    assert_is(made, belay)
    with torch.no_grad(), belay.averaged():
        assert torch.equal(made(batch(0)), model(batch(0)))
    again = belay.module()
    train(model, optimizer, 1, first=3)
    assert_is(again, belay)
