"""`identify` tells what happens to buffers, integers, frozen, tied and 16-bit weights, and to idle updates."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import averaging_code as code
from torchbelay import Belay, methods
from torchbelay.testing import Identification, identify

STEPS = 40


def found(factory: Any, **options: Any) -> Identification:
    return identify(factory, **{"steps": STEPS} | options)


def state_dicts(move: Any) -> Any:
    """Return code that moves every entry of a deep copy's state dict, as `move(average, weight)`."""

    @torch.no_grad()
    def update(average: nn.Module, model: nn.Module) -> None:
        for mine, theirs in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            move(mine, theirs)

    return code.deep_copied(update)


def lerp_floats(mine: Tensor, theirs: Tensor) -> None:
    if mine.is_floating_point():
        mine.lerp_(theirs, 0.1)


# Buffers and integers ------------------------------------------------------------------------------------------------


def test_buffers_that_are_averaged_copied_kept_or_left_out_are_told_apart() -> None:
    averaged = found(state_dicts(lerp_floats))
    assert (str(averaged.buffers), str(averaged.integers)) == ("averaged", "ignored")
    copied = found(code.averaged_model())
    assert (str(copied.buffers), str(copied.integers)) == ("copied", "copied")
    left_out = found(code.ema())
    assert (str(left_out.buffers), str(left_out.integers)) == ("left out", "left out")
    assert "Buffers are left out. Whole numbers are left out." in str(left_out)


@pytest.mark.parametrize("buffers", ["copy", "average", "ignore"])
def test_our_own_buffers_are_what_the_option_says(buffers: str) -> None:
    told = found(code.belay(lambda: methods.ema(0.9), buffers=buffers))
    # the export of "ignore" has the model's own buffers
    assert str(told.buffers) == {"copy": "copied", "average": "averaged", "ignore": "copied"}[buffers]
    assert str(told.integers) == "copied"
    assert (str(told.frozen), str(told.tied)) == ("copied", "averaged")


def test_whole_numbers_that_are_averaged_and_rounded_are_told() -> None:
    told = found(state_dicts(lambda mine, theirs: mine.copy_(0.6 * mine + 0.4 * theirs)))
    assert told.integers.treatment == "otherwise"
    assert told.integers.dtype == "int64"
    assert "Whole numbers are neither copied nor averaged like weights." in str(told)


def test_whole_numbers_that_are_averaged_as_floats_are_told() -> None:
    def factory(model: nn.Module) -> Any:
        shadow = {name: t.detach().clone().double() for name, t in model.state_dict().items()}

        def update() -> None:
            for name, t in model.state_dict().items():
                shadow[name] = 0.9 * shadow[name] + 0.1 * t.detach()

        return update, lambda: shadow

    told = found(factory)
    assert (told.integers.treatment, told.integers.dtype) == ("averaged", "float64")


def test_code_that_raises_on_whole_numbers_is_told_and_nothing_else_suffers() -> None:
    told = found(state_dicts(lambda mine, theirs: mine.lerp_(theirs, 0.1)))
    assert told.integers.treatment is None
    assert "update() number 1 raised NotImplementedError" in told.integers.error
    assert "Whole numbers: update() number 1 raised" in str(told)
    assert str(told.buffers) == "averaged"
    (problem,) = told.problems
    assert problem.startswith("Whole numbers: update() number 1 raised NotImplementedError")
    assert problem.endswith("; copy them instead of averaging them.")
    assert str(told).count("Whole numbers") == 1
    assert "Nothing looks wrong" not in str(told)


def test_what_is_copied_between_hard_syncs_is_a_copy_and_what_waits_for_them_is_not() -> None:
    def factory(model: nn.Module, **options: Any) -> Any:
        belay = Belay(model, None, methods.hard_sync(3), **options)
        return belay.update, belay.average_state_dict

    for buffers, treatment in (("copy", "copied"), ("average", "averaged")):
        told = found(partial(factory, buffers=buffers), every=3)
        assert (str(told.buffers), str(told.frozen), told.problems) == (treatment, "copied", ())


def test_a_copy_at_the_updates_that_move_is_a_copy() -> None:
    @torch.no_grad()
    def update(average: nn.Module, model: nn.Module) -> None:
        average.calls = getattr(average, "calls", 0) + 1
        if average.calls % 5 == 0:
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
            for mine, theirs in zip(average.buffers(), model.buffers(), strict=True):
                mine.copy_(theirs)

    told = found(code.deep_copied(update), every=5)
    assert (str(told.buffers), str(told.integers), told.problems) == ("copied", "copied", ())


# Frozen and tied weights ---------------------------------------------------------------------------------------------


def trained_only(model: nn.Module) -> Any:
    shadow = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    def update() -> None:
        for name, p in model.named_parameters():
            if p.requires_grad:
                shadow[name].lerp_(p.detach(), 0.1)

    return update, shadow.values


def test_frozen_weights_that_are_left_out_are_told() -> None:
    told = found(trained_only)
    assert (str(told.frozen), told.problems) == ("left out", ())


def test_frozen_weights_that_keep_their_first_value_are_told() -> None:
    @torch.no_grad()
    def update(average: nn.Module, model: nn.Module) -> None:
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            if theirs.requires_grad:
                mine.lerp_(theirs, 0.1)

    told = found(code.deep_copied(update))
    assert str(told.frozen) == "ignored"
    assert "Frozen weights keep their first value." in str(told)


def test_tied_weights_that_move_twice_are_told() -> None:
    told = found(state_dicts(lerp_floats))
    assert str(told.tied) == "otherwise"
    assert "Tied weights move otherwise than untied ones, twice per update for instance." in str(told)
    assert str(found(code.ema()).tied) == "averaged"


def test_code_that_refuses_tied_weights_is_told() -> None:
    def factory(model: nn.Module) -> Any:
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        if len(names) > len(list(model.parameters())):
            raise ValueError("tied weights are not supported")
        return code.ema(0.1)(model)

    told = found(factory)
    assert told.tied.error == "factory(model) raised ValueError: tied weights are not supported"
    (problem,) = told.problems
    assert problem == (
        "Tied weights: factory(model) raised ValueError: tied weights are not supported; models that have them cannot "
        "be averaged by it."
    )
    assert str(told).count(problem) == 1


# 16 bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.2, 0.1, 0.01, 0.001, 0.0001])
def test_an_average_of_16_bits_loses_small_changes_at_any_decay(rate: float) -> None:
    told = found(code.ema(rate), steps=128)
    assert [(low.weights, low.average, low.accumulates) for low in told.sixteen_bit] == [
        ("bfloat16", "bfloat16", False),
        ("float16", "float16", False),
    ]
    assert "at decay 0.9999 it stands still" in str(told)


@pytest.mark.parametrize("rate", [0.2, 0.1, 0.01, 0.001, 0.0001])
def test_an_average_in_float32_keeps_them(rate: float) -> None:
    wide = code.loop(lambda shadow, p, t: shadow.lerp_(p.to(shadow.dtype), rate), start=lambda p: p.float())
    told = found(wide, steps=128)
    assert [(low.average, low.accumulates) for low in told.sixteen_bit] == [("float32", True)] * 2
    assert "it moves at decay 0.9999" in str(told)


def test_an_average_that_is_float32_inside_and_read_as_bfloat16_keeps_them() -> None:
    told = found(code.belay(lambda: methods.ema(0.99)), steps=128)
    assert [(low.average, low.accumulates) for low in told.sixteen_bit] == [("bfloat16", True), ("float16", True)]


def test_stochastic_rounding_keeps_them() -> None:
    def move(shadow: Tensor, p: Tensor, t: int) -> None:
        if shadow.dtype is not torch.bfloat16:
            shadow.lerp_(p, 0.01)
            return
        exact = shadow.float().lerp(p.float(), 0.01)
        bits = exact.view(torch.int32) + torch.randint(0, 1 << 16, exact.shape, dtype=torch.int32)
        shadow.copy_((bits & ~0xFFFF).view(torch.float32))

    told = found(code.loop(move), steps=128)
    assert [low.accumulates for low in told.sixteen_bit] == [True, False]


def test_a_dtype_that_the_code_refuses_is_told() -> None:
    def factory(model: nn.Module) -> Any:
        if next(model.parameters()).dtype is torch.float16:
            raise TypeError("no halves")
        return code.ema(0.01)(model)

    told = found(factory, steps=128)
    assert told.sixteen_bit[1].error == "factory(model) raised TypeError: no halves"
    assert "Weights in float16: factory(model) raised TypeError: no halves." in str(told)


def test_what_cannot_be_told_is_not_said() -> None:
    pulling = found(code.belay(lambda: methods.belay(1.0, 10.0, 20.0)))
    assert [low.accumulates for low in pulling.sixteen_bit] == [None, None]
    assert "0.9999" not in str(pulling)


# Updates without a change --------------------------------------------------------------------------------------------


def idle_code(*, moves: bool, counts: bool) -> Any:
    """Return a warm-up that treats updates without a change in one of four ways."""

    def factory(model: nn.Module) -> Any:
        shadow, last, counted = code.shadow_of(model), code.shadow_of(model), 0

        def update() -> None:
            nonlocal last, counted
            now = code.shadow_of(model)
            changed = any(not torch.equal(now[name], last[name]) for name in now)
            last = now
            rate = 9 / (10 + counted + 1)
            counted += changed or counts
            for name, w in now.items() if changed or moves else ():
                shadow[name].lerp_(w, rate)

        return update, lambda: shadow

    return factory


@pytest.mark.parametrize(
    ("moves", "counts", "expected"),
    [(True, True, "counts"), (False, False, "ignored"), (True, False, "moves"), (False, True, "counted only")],
)
def test_updates_without_a_change_are_told(moves: bool, counts: bool, expected: str) -> None:
    told = found(idle_code(moves=moves, counts=counts))
    assert (told.idle, told.warmup.law, told.problems) == (expected, "ratio", ())


def test_updates_without_a_change_that_do_something_else_are_told() -> None:
    def factory(model: nn.Module) -> Any:
        shadow, last = code.shadow_of(model), code.shadow_of(model)

        def update() -> None:
            nonlocal last
            now = code.shadow_of(model)
            same = all(torch.equal(now[name], last[name]) for name in now)
            last = now
            for name, w in now.items():
                shadow[name].lerp_(w, 0.7 if same else 0.1)

        return update, lambda: shadow

    told = found(factory)
    assert told.idle == "otherwise"
    assert "does something else" in str(told)


def test_few_updates_do_not_tell() -> None:
    assert found(code.ema(), steps=8).idle is None
