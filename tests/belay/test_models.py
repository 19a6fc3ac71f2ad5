"""What is averaged as one model: several modules, or tensors without a module."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import torchbelay as tb
from helpers.problems import different, everything
from helpers.small import BELAY, EMA, batch, mlp, same, snapshot, train, values, with_batchnorm


class Stage(nn.Module):
    """Some layers of a model, by the names that they have there."""

    def __init__(self, whole: nn.Sequential, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, whole.get_submodule(name))
        self.register_buffer("table", torch.arange(3.0), persistent=False)  # each stage has one of its own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.children():
            x = module(x)
        return x


def stages(whole: nn.Sequential) -> list[nn.Module]:
    return [Stage(whole, "0", "1"), Stage(whole, *(name for name, _ in whole.named_children() if name > "1"))]


def pipeline(
    method: Any, *, model: nn.Sequential | None = None, **options: Any
) -> tuple[nn.Sequential, list[nn.Module], torch.optim.Optimizer, tb.Belay]:
    whole = mlp() if model is None else model
    parts = stages(whole)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    return whole, parts, optimizer, tb.Belay(parts, optimizer, method, **options)


# Several models


@pytest.mark.parametrize("buffers", ["copy", "average", "ignore"])
def test_stages_of_a_pipeline_have_the_average_of_the_whole_model(buffers: Any) -> None:
    whole, parts, optimizer, belay = pipeline(BELAY, model=with_batchnorm(), buffers=buffers)
    plain = with_batchnorm()
    optimizer2 = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    alone = tb.Belay(plain, optimizer2, BELAY, buffers=buffers)
    for model, each in ((whole, optimizer), (plain, optimizer2)):
        train(model, each, 5)
    assert same(dict(belay.average_state_dict()), dict(alone.average_state_dict()))
    plain.load_state_dict(belay.average_state_dict(), strict=True)
    own, x = values(whole), batch(0)
    with belay.averaged() as inside:
        assert all(each is part for each, part in zip(inside, parts, strict=True))
        whole.eval(), plain.eval()
        assert torch.equal(parts[1](parts[0](x)), plain(x))
    assert same(values(whole), own)


def test_one_optimizer_per_stage_goes_with_it() -> None:
    whole = mlp()
    parts = stages(whole)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    belay = tb.Belay(parts, optimizers, EMA)
    single = mlp()
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1)
    alone = tb.Belay(single, optimizer, EMA)
    for step in range(3):
        x = batch(step)
        for model in (whole, single):
            model.zero_grad()
            model(x).square().mean().backward()
        for each in (*optimizers, optimizer):
            each.step()
    assert same(dict(belay.average_state_dict()), dict(alone.average_state_dict()))


def test_a_checkpoint_of_the_stages_is_that_of_the_whole_model() -> None:
    *_, belay = pipeline(EMA, model=with_batchnorm())
    whole = with_batchnorm(seed=1)
    alone = tb.Belay(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2), EMA)
    alone.load_state_dict(belay.state_dict())
    assert different(everything(belay=alone), everything(belay=belay)) == []


def test_a_list_of_one_model_is_that_model_and_a_generator_will_do() -> None:
    for given in ([mlp()], (model for model in [mlp()])):
        model, *_ = models = list(given)
        belay = tb.Belay((each for each in models), torch.optim.SGD(model.parameters(), lr=0.1), EMA)
        with belay.averaged() as inside:
            assert len(inside) == 1
            assert inside[0] is model
        assert list(belay.average_state_dict()) == list(model.state_dict())


def test_wrapped_stages_are_looked_through() -> None:
    whole = mlp()
    parts = stages(whole)
    parts[1] = nn.DataParallel(parts[1])
    parts[0] = torch.compile(parts[0], backend="eager")
    belay = tb.Belay(parts, torch.optim.SGD(whole.parameters(), lr=0.1), EMA)
    assert list(belay.average_state_dict()) == list(whole.state_dict())


def test_steps_by_hand_work_with_several_models() -> None:
    whole = mlp()
    belay = tb.Belay(stages(whole), None, tb.Spring.ema(decay=0.5))
    before = values(whole)
    belay.before_step()
    with torch.no_grad():
        for p in whole.parameters():
            p.add_(2.0)
    belay.after_step()
    for name, tensor in belay.average_state_dict().items():
        assert torch.allclose(tensor, before[name] + 1.0, rtol=1e-6)


def test_a_weight_that_two_stages_share_is_averaged_once_and_exported_under_both_names() -> None:
    first, last = nn.Module(), nn.Module()
    first.embedding, last.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    last.head.weight = first.embedding.weight
    belay = tb.Belay([first, last], torch.optim.SGD(first.parameters(), lr=0.1), EMA)
    assert list(belay.state_dict()["averages"]["average"]["weights"]) == ["embedding.weight"]
    found = belay.average_state_dict()
    assert found["embedding.weight"] is found["head.weight"]


def test_a_module_that_two_models_share_under_one_name_is_no_clash() -> None:
    first, second = nn.Module(), nn.Module()
    first.trunk = second.trunk = with_batchnorm()
    second.head = nn.Linear(1, 1)
    parameters = [*first.parameters(), *second.head.parameters()]
    belay = tb.Belay([first, second], torch.optim.SGD(parameters, lr=0.1), EMA)
    assert set(belay.average_state_dict()) == set(first.state_dict()) | set(second.state_dict())
    with belay.averaged():
        pass


def test_what_each_stage_keeps_for_itself_is_swapped_and_not_exported() -> None:
    whole, parts, optimizer, belay = pipeline(EMA, buffers="average")
    parts[0].table += 1  # type: ignore[operator]
    parts[1].table += 2  # type: ignore[operator]
    train(whole, optimizer, 2)
    with belay.averaged():
        assert parts[0].table.tolist() != parts[1].table.tolist()
        parts[1].table.fill_(9.0)
    assert parts[1].table.tolist() == [2.0, 3.0, 4.0]
    assert not any("table" in key for key in belay.average_state_dict())
    belay.load_state_dict(belay.state_dict())


def test_a_saved_average_of_several_models_loads_into_the_whole(tmp_path: Any) -> None:
    whole, _, optimizer, belay = pipeline(EMA, model=with_batchnorm())
    train(whole, optimizer, 2)
    belay.save_average(tmp_path / "whole.safetensors")
    with_batchnorm(seed=1).load_state_dict(load_file(tmp_path / "whole.safetensors"), strict=True)


def pair() -> tuple[nn.Module, nn.Module]:
    return nn.Linear(2, 2), nn.Linear(2, 2)


def with_buffer(name: str) -> nn.Module:
    module = nn.Module()
    module.register_buffer(name, torch.zeros(2))
    return module


def with_parameter(name: str) -> nn.Module:
    module = nn.Module()
    module.register_parameter(name, nn.Parameter(torch.zeros(2)))
    return module


CLASHES: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    "weight": pair,
    "statistics": lambda: (
        nn.Sequential(with_buffer("statistics"), nn.Linear(1, 1)),
        _zeroth(with_buffer("statistics")),
    ),
    "both": lambda: (with_parameter("both"), with_buffer("both")),
}


def _zeroth(child: nn.Module) -> nn.Module:
    return nn.ModuleDict({"0": child})


@pytest.mark.parametrize("name", CLASHES)
def test_two_models_with_one_name_for_different_tensors_are_refused_with_the_cure(name: str) -> None:
    models = CLASHES[name]()
    parameters = [p for model in models for p in model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with pytest.raises(ValueError, match=rf"the name '[0.]*{name}'.*nn\.ModuleDict"):
        tb.Belay(models, optimizer, EMA)
    assert not optimizer._optimizer_step_pre_hooks
    belay = tb.Belay(nn.ModuleDict({"first": models[0], "second": models[1]}), optimizer, EMA)  # the cure
    assert all(key.startswith(("first.", "second.")) for key in belay.average_state_dict())


def test_a_clash_that_comes_later_is_refused_too() -> None:
    first, second = with_parameter("one"), with_parameter("two")
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    belay = tb.Belay([first, second], optimizer, EMA)
    second.register_parameter("one", nn.Parameter(torch.ones(2)))
    with pytest.raises(ValueError, match="the name 'one'"):
        belay.average_state_dict()


def test_what_cannot_be_several_models_is_refused_with_the_cure() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for given, error, message in (
        ([], ValueError, "model is an empty sequence"),
        ([model, model], ValueError, r"model\[1\], Sequential, is in the sequence twice"),
        ([model, 3], TypeError, r"model\[1\]=int is not a torch\.nn\.Module"),
        ({"a": model}, TypeError, r"list\(models\.values\(\)\).*nn\.ModuleDict\(models\)"),
        (model.parameters(), TypeError, r"model\[0\] is not a module but a Parameter.*from_parameters"),
        (model.named_parameters(), TypeError, r"model\[0\] is not a module but a tuple.*from_parameters"),
        ("mlp", TypeError, "model=str is not a torch.nn.Module"),
        ([nn.Linear(3, 1)], ValueError, r"is in none of the models; pass all models whose parameters"),
    ):
        with pytest.raises(error, match=message):
            tb.Belay(given, optimizer, EMA)  # type: ignore[arg-type]
    assert not optimizer._optimizer_step_pre_hooks


# Tensors without a module


def test_tensors_with_names_are_averaged_like_a_models() -> None:
    model, plain = mlp(), mlp()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    belay = tb.Belay.from_parameters(model.named_parameters(), optimizers[0], BELAY, spectators={"short": EMA})
    alone = tb.Belay(plain, optimizers[1], BELAY, spectators={"short": EMA})
    for m, optimizer in zip((model, plain), optimizers, strict=True):
        train(m, optimizer, 5)
    assert different(everything(model=model, belay=belay), everything(model=plain, belay=alone)) == []
    model.load_state_dict(belay.average_state_dict("short"), strict=True)
    alone.load_state_dict(belay.state_dict())


def test_tensors_without_names_are_called_by_their_positions_and_averaged_gives_their_list() -> None:
    weights = [torch.ones(2, requires_grad=True), torch.zeros(3, 2, requires_grad=True)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    belay = tb.Belay.from_parameters(iter(weights), optimizer, tb.Spring.ema(decay=0.5))
    for w in weights:
        w.grad = torch.ones_like(w)
    optimizer.step()
    assert {name: t.flatten()[0].item() for name, t in belay.average_state_dict().items()} == {"0": 0.5, "1": -0.5}
    with belay.averaged() as inside:
        assert all(x is w for x, w in zip(inside, weights, strict=True))
        assert weights[0].tolist() == [0.5, 0.5]
    assert weights[0].tolist() == [0.0, 0.0]


def test_what_else_the_optimizer_holds_is_not_averaged() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay.from_parameters(model[2].named_parameters(), optimizer, BELAY)
    train(model, optimizer, 3)
    assert list(belay.average_state_dict()) == ["weight", "bias"]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    train(model, optimizer, 1)
    assert list(belay.state_dict()["averages"]["average"]["weights"]) == ["weight", "bias"]


def test_a_tensor_that_no_optimizer_holds_is_exported_as_it_is() -> None:
    kept, trained = torch.full((2,), 7.0), torch.ones(2, requires_grad=True)
    belay = tb.Belay.from_parameters([kept, trained], torch.optim.SGD([trained], lr=1.0), EMA)
    assert belay.average_state_dict()["0"].tolist() == [7.0, 7.0]
    assert list(belay.state_dict()["averages"]["average"]["weights"]) == ["1"]


def test_without_an_optimizer_all_tensors_are_averaged_by_hand() -> None:
    weight = torch.zeros(2)  # it needs no gradient: something else updates it
    belay = tb.Belay.from_parameters([("w", weight)], None, tb.Spring.ema(decay=0.5))
    belay.before_step()
    weight.add_(1.0)
    belay.after_step()
    assert belay.average_state_dict()["w"].tolist() == [0.5, 0.5]
    belay.copy_to_model()
    assert weight.tolist() == [0.5, 0.5]


def test_several_optimizers_and_options_go_with_tensors() -> None:
    model = mlp(torch.bfloat16)
    halves = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    belay = tb.Belay.from_parameters(model.named_parameters(), halves, EMA, start=1, dtype=torch.float64)
    before = snapshot(model, belay)
    for optimizer in halves:
        optimizer.step()
    assert {w.dtype for w in belay.state_dict()["averages"]["average"]["weights"].values()} == {torch.float64}
    assert before["step"] == 0
    assert belay.step == 1


def test_what_cannot_be_tensors_is_refused_with_the_cure() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    some = model[0].weight
    for given, error, message in (
        (model, TypeError, r"params=Sequential is a module; use Belay\(model"),
        (dict(model.named_parameters()), TypeError, r"params=dict .*items\(\)"),
        (some, TypeError, "params=Parameter is not an iterable of tensors"),
        (3, TypeError, "params=int is not an iterable of tensors"),
        ([], ValueError, "params is empty"),
        ([some, some], ValueError, r"params\[1\] is a tensor that came before"),
        ([("a", some), ("a", model[0].bias)], ValueError, "params has the name 'a' twice"),
        ([(some, "a")], TypeError, r"params\[0\], tuple, is neither"),
        (optimizer.param_groups, TypeError, r"params\[0\], dict, is neither"),
        (
            [torch.ones(2)],
            ValueError,
            "nothing to average.*: the optimizer holds none of the parameters; give it those",
        ),
    ):
        with pytest.raises(error, match=message):
            tb.Belay.from_parameters(given, optimizer, EMA)  # type: ignore[arg-type]
    assert not optimizer._optimizer_step_pre_hooks
