"""Targets: texts that are read without running code, and the profiles that they ask for."""

import math

import pytest
import torch

import torchbelay as tb
from helpers.methods_under_test import METHODS
from torchbelay.physics.identity import describe
from torchbelay.snapshots.profiles import profile
from torchbelay.snapshots.targets import aim_at, check, decay, label, parse, parse_family, window

SPRINGS = {
    "ema spring": lambda: tb.Spring.ema(decay=0.9),
    "heavy": lambda: tb.Spring(k=1.0, m1=math.inf, m2=500.0),
    "velocities": lambda: tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0),
}


@pytest.mark.parametrize("name", METHODS | SPRINGS)
def test_what_a_checkpoint_says_of_a_method_makes_it_again(name: str) -> None:
    method = (METHODS | SPRINGS)[name]()
    again = parse(describe(method))
    assert describe(again) == describe(method)
    assert describe(parse(label(method))) == describe(method)
    assert len(label(method)) <= len(describe(method))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ema",
        "ema(",
        "__import__('os').system('true')",
        "ema.__class__(0.9)",
        "eval('1')",
        "ema(0.9)(1)",
        "[ema(0.9)]",
        "ema(0.9) if True else ema(0.8)",
        "unknown(1)",
        "ema(0.9); ema(0.8)",
        "lambda: ema(0.9)",
        "Method()",
        "\0",
    ],
)
def test_anything_but_a_call_of_a_known_name_is_refused_with_the_choices(text: str) -> None:
    with pytest.raises(ValueError, match=r"choose from .*ema.*window, decay"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ema(open('x'))", "not a plain value"),
        ("ema(cosine(open('x'), 1.0, 5))", "not a plain value"),
        ("ema(cosine(0.9, 1.0))", "missing 1 required positional argument"),
        ("ema((1, 2))", "not a number or a text"),
        ("ema({1: 2})", "not a number or a text"),
        ("ema(**{'decay': 0.9})", "write every argument out"),
        ("ema(2.0)", "decay=2.0"),
        ("ema(half=3)", "unexpected keyword argument 'half'"),
        ("window(0)", "steps=0"),
        ("decay(10, 'quadratic')", "shape='quadratic'"),
        ("window([10, 20])", "tells 2 targets"),
        ("ema(decay=-0.9)", "decay=-0.9"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize("text", ["swa()", "ema(0.9)", "window(10)", "Spring.ema(0.9)"])
@pytest.mark.parametrize("prefix", ["tb.", "torchbelay.", "methods.", "tb.methods.", "tb.snapshots."])
def test_names_may_be_written_as_in_a_program(prefix: str, text: str) -> None:
    assert parse(prefix + text) == parse(text)
    scheduled = parse("tb.methods.ema(tb.schedules.cosine(0.996, 1.0, steps=100))")
    assert scheduled == tb.methods.ema(tb.schedules.cosine(0.996, 1.0, steps=100))


def test_a_schedule_may_stand_in_place_of_a_number() -> None:
    found = parse("ema(cosine(0.996, 1.0, steps=100))")
    assert found == tb.methods.ema(tb.schedules.cosine(0.996, 1.0, steps=100))


def test_a_list_tells_one_target_per_value() -> None:
    family = parse_family("decay([100, 200], shape=['cosine', 'linear'])")
    assert [label(each) for each in family] == [
        "decay(100, 'cosine')",
        "decay(100)",
        "decay(200, 'cosine')",
        "decay(200)",
    ]


def test_what_is_not_a_target_is_refused() -> None:
    with pytest.raises(TypeError, match=r"target=Spring.ema was not called"):
        check(tb.Spring.ema)
    with pytest.raises(TypeError, match="target=3 is neither a method"):
        check(3)
    assert check("window(5)") == window(5)
    assert check(decay(5)) == decay(5)


def test_a_window_is_the_mean_of_the_last_weights() -> None:
    walk = torch.randn(30, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    w1 = walk.cumsum(0)
    mean = aim_at(window(12), 30).life
    torch.testing.assert_close(profile(mean.filter, mean.born, 30) @ walk, w1[-12:].mean())


@pytest.mark.parametrize("shape", ["linear", "cosine", "1-sqrt"])
def test_a_decay_is_a_run_whose_last_updates_shrink(shape: str) -> None:
    updates = torch.randn(30, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    rule = {
        "linear": lambda x: 1 - x,
        "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
        "1-sqrt": lambda x: 1 - math.sqrt(x),
    }[shape]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: rule((k - 18) / 12) if k >= 18 else 1.0)
    for u in updates:
        weight.grad = -u
        optimizer.step()
        scheduler.step()
    ended = aim_at(decay(12, shape), 30).life
    torch.testing.assert_close(profile(ended.filter, ended.born, 30) @ updates, weight.detach())


def test_a_linear_decay_is_a_window() -> None:
    one, other = aim_at(decay(20), 50).life, aim_at(window(20), 50).life
    torch.testing.assert_close(profile(one.filter, one.born, 50), profile(other.filter, other.born, 50))


def test_more_steps_than_the_run_had_are_refused() -> None:
    with pytest.raises(ValueError, match="asks for more steps than the 10"):
        aim_at(window(11), 10)
