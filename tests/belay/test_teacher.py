"""`belay.module(into=...)`: a module of the user's own becomes the average, or is refused before anything changes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.live import assert_is, shared, shares_average
from helpers.small import EMA, attached, batch, mlp, same, snapshot, train, values, with_batchnorm


@pytest.mark.parametrize("mode", ["copy", "average", "ignore"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_module_of_the_users_own_becomes_the_average(dtype: torch.dtype, mode: str) -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm().to(dtype), buffers=mode)
    train(model, optimizer, 2)
    teacher = with_batchnorm(seed=5).to(dtype)
    found = belay.module(into=teacher)
    assert found is teacher
    assert not teacher.training
    assert_is(teacher, belay)  # also the buffers that are copied once
    for step in range(2, 4):
        train(model, optimizer, 1, first=step)
        assert_is(teacher, belay, buffers=mode != "ignore")
    assert shares_average(teacher, belay) is (dtype is torch.float32)
    before = snapshot(model, belay)
    with belay.averaged():
        assert_is(teacher, belay, buffers=mode != "ignore")
    assert same(snapshot(model, belay), before)


def test_a_wide_teacher_of_16_bit_weights_is_the_average_itself() -> None:
    model, optimizer, belay = attached(EMA, model=mlp(torch.bfloat16))
    teacher = belay.module(into=mlp(seed=5))
    train(model, optimizer, 2)
    assert shares_average(teacher, belay)
    assert {p.dtype for p in teacher.parameters()} == {torch.float32}


def test_a_wrapped_teacher_is_bound_inside() -> None:
    model, optimizer, belay = attached(EMA)
    teacher = torch.compile(mlp(seed=5), backend="eager")
    assert belay.module(into=teacher) is teacher
    train(model, optimizer, 2)
    assert_is(teacher._orig_mod, belay)


def test_a_teacher_may_be_bound_again_and_to_a_new_belay() -> None:
    model, optimizer, belay = attached(EMA)
    teacher = mlp(seed=5)
    belay.module(into=teacher)
    belay.module(into=teacher)
    train(model, optimizer, 1)
    assert_is(teacher, belay)
    belay.detach()
    del belay
    other = tb.Belay(model, optimizer, tb.Spring.ema(decay=0.5))
    other.module(into=teacher)
    train(model, optimizer, 1, first=1)
    assert_is(teacher, other)


def tied() -> nn.Module:
    model = mlp(seed=5)
    model[2].bias = nn.Parameter(model[2].bias.detach())
    model.add_module("3", model[0])
    return model


def with_table(model: nn.Sequential, *shape: int) -> nn.Sequential:
    model.register_buffer("table", torch.zeros(shape))
    return model


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "no module": (lambda model: "teacher", TypeError, "into= must be built like the model: model=str is not"),
    "the model": (lambda model: model, ValueError, "into= shares weights with the model"),
    "a view of the model": (lambda model: shallow(model), ValueError, "into= shares weights with the model"),
    "fewer parameters": (lambda model: model_of(model, mlp()[:2]), ValueError, "parameter '2.weight' is in the model"),
    "more parameters": (
        lambda model: model_of(model, nn.Sequential(*mlp(), nn.Linear(1, 1))),
        ValueError,
        "parameter '3.weight' is in the module given as into= alone",
    ),
    "another shape": (
        lambda model: model_of(model, nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))),
        ValueError,
        r"'0.weight' has the shape \(6, 3\) in into=, and \(5, 3\) in the model",
    ),
    "another dtype": (
        lambda model: model_of(model, mlp(torch.float16)),
        ValueError,
        "parameter '0.weight' is torch.float16 in into=; it must be torch.float32, as that of the model",
    ),
    "no memory": (lambda model: model_of(model, mlp()).to("meta"), ValueError, "on the meta device; materialise"),
    "other buffers": (lambda model: mlp(seed=5), ValueError, "buffer 'table' is in the model alone"),
    "buffers of another shape": (
        lambda model: with_table(mlp(seed=5), 3),
        ValueError,
        r"buffer 'table' has the shape \(3,\) in into=, and \(2,\) in the model",
    ),
}


def shallow(model: nn.Module) -> nn.Module:
    other = with_table(mlp(seed=5), 2)
    other[0].weight.data = model[0].weight.data[:]
    return other


def model_of(model: nn.Module, layers: nn.Sequential) -> nn.Sequential:
    return with_table(layers, 2)


@pytest.mark.parametrize(("make", "kind", "match"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_before_anything_changes(make: Any, kind: type[Exception], match: str) -> None:
    model, optimizer, belay = attached(EMA, model=with_table(mlp(), 2))
    train(model, optimizer, 1)
    teacher = make(model)
    before = snapshot(model, belay)
    theirs = None if isinstance(teacher, str) or next(teacher.parameters()).is_meta else values(teacher)
    flags = None if isinstance(teacher, str) else [teacher.training, *(p.requires_grad for p in teacher.parameters())]
    with pytest.raises(kind, match=match):
        belay.module(into=teacher)
    assert same(snapshot(model, belay), before)
    if theirs is not None:
        assert same(values(teacher), theirs)
    if flags is not None:
        assert [teacher.training, *(p.requires_grad for p in teacher.parameters())] == flags
    train(model, optimizer, 1, first=1)


def test_one_teacher_cannot_be_two_averages() -> None:
    model, optimizer, belay = attached(EMA, spectators={"short": EMA})
    other = tb.Belay(model, optimizer, EMA)
    teacher = belay.module(into=mlp(seed=5))
    for use in (lambda: belay.module("short", into=teacher), lambda: other.module(into=nn.Sequential(*teacher))):
        with pytest.raises(ValueError, match="into= follows the average 'average' already; give each a module of its"):
            use()
    train(model, optimizer, 1)
    assert_is(teacher, belay)


def test_inside_averaged_and_inside_a_step_it_is_refused() -> None:
    model, optimizer, belay = attached(EMA)
    with belay.averaged(), pytest.raises(RuntimeError, match=r"module\(\) inside averaged\('average'\): leave the bl"):
        belay.module(into=mlp(seed=5))

    def closure() -> torch.Tensor:
        with pytest.raises(RuntimeError, match=r"module\(\) inside optimizer.step\(\)"):
            belay.module(into=mlp(seed=5))
        made.append(belay.module())
        loss = model(batch(0)).square().mean()
        loss.backward()
        return loss

    made: list[nn.Module] = []
    optimizer.step(closure)
    assert_is(made[0], belay)


def test_a_teacher_before_the_average_begins_shares_the_models_weights_and_then_the_average() -> None:
    model, optimizer, belay = attached(EMA, start=2)
    teacher = belay.module(into=mlp(seed=5))
    for step in range(4):
        assert_is(teacher, belay)
        assert shared(teacher[0].weight, model[0].weight) is (step < 2)
        train(model, optimizer, 1, first=step)
    copies = copy.deepcopy(teacher)
    train(model, optimizer, 1, first=4)
    assert not same(values(copies), values(teacher))


def test_modules_for_several_models_come_in_their_order_or_are_refused() -> None:
    def stages() -> list[nn.Module]:
        return [nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1))]  # no two names are the same

    models = stages()
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    belay = tb.Belay(models, optimizer, EMA)
    for teachers in (stages()[::-1], [*stages(), nn.ReLU()][::-1]):
        with pytest.raises(ValueError, match=r"into\[0\] is not built like model 0; give .* in their order"):
            belay.module(into=teachers)
        assert all(p.requires_grad for teacher in teachers for p in teacher.parameters())
    first, second = belay.module(into=stages())
    models[1](models[0](torch.ones(4, 2))).sum().backward()
    optimizer.step()
    average = belay.average_state_dict()
    assert same({**first.state_dict(), **second.state_dict()}, dict(average))
