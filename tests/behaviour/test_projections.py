"""Weights that are changed after the optimizer's step, as by a mask or a clamp: what the average sees of it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import torchbelay as tb
from helpers.small import BELAY, EMA, same

LIMIT = 0.25


def new() -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    model.weight.clamp_(-LIMIT, LIMIT)


def step(model: nn.Module, optimizer: Optimizer) -> None:
    """Move every weight by 1."""
    model.weight.grad = -torch.ones_like(model.weight)
    optimizer.step()


def in_the_loop(model: nn.Module, optimizer: Optimizer, method: Any, steps: int) -> tb.Belay:
    belay = tb.Belay(model, optimizer, method)
    for _ in range(steps):
        step(model, optimizer)
        clamp(model)
    return belay


def by_a_hook(model: nn.Module, optimizer: Optimizer, method: Any, steps: int) -> tb.Belay:
    optimizer.register_step_post_hook(lambda *_: clamp(model))
    belay = tb.Belay(model, optimizer, method)
    for _ in range(steps):
        step(model, optimizer)
    return belay


def by_hand(model: nn.Module, optimizer: Optimizer, method: Any, steps: int) -> tb.Belay:
    belay = tb.Belay(model, None, method)
    for _ in range(steps):
        belay.before_step(lr=1.0)
        step(model, optimizer)
        clamp(model)
        belay.after_step()
    return belay


def by_update(model: nn.Module, optimizer: Optimizer, method: Any, steps: int) -> tb.Belay:
    belay = tb.Belay(model, None, method)
    for _ in range(steps):
        step(model, optimizer)
        clamp(model)
        belay.update()
    return belay


def result(how: Any, method: Any, steps: int = 3) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model, optimizer = new()
    belay = how(model, optimizer, method, steps)
    return dict(belay.average_state_dict()), dict(model.state_dict())


def test_the_average_takes_the_weights_as_the_step_leaves_them() -> None:
    """They are 1 after the first step, and 1.25 after the others, whose clamp the average never sees."""
    average, weights = result(in_the_loop, tb.methods.ema(0.5))
    assert average["weight"].tolist() == [[((0.5 * 1.0) + 1.25) / 2 / 2 + 1.25 / 2] * 2]
    assert weights["weight"].tolist() == [[LIMIT] * 2]


@pytest.mark.parametrize("how", [by_a_hook, by_hand, by_update])
def test_the_cures_average_what_the_clamp_leaves(how: Any) -> None:
    average, weights = result(how, tb.methods.ema(0.5))
    assert average["weight"].tolist() == [[LIMIT * 7 / 8] * 2]  # 0, 1/8, 3/16, 7/32
    assert weights["weight"].tolist() == [[LIMIT] * 2]


@pytest.mark.parametrize("method", [EMA, BELAY], ids=["ema", "belay"])
def test_a_hook_and_calls_by_hand_agree_bit_for_bit_and_stay_within_the_limit(method: Any) -> None:
    found = [result(how, method, steps=20) for how in (by_a_hook, by_hand)]
    assert same(found[0], found[1])
    assert all(0 < value["weight"].max() <= LIMIT for value in found[0])


def test_a_hook_that_is_registered_after_the_belay_comes_too_late() -> None:
    model, optimizer = new()
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.5))
    optimizer.register_step_post_hook(lambda *_: clamp(model))
    step(model, optimizer)
    assert belay.average_state_dict()["weight"].tolist() == [[0.5, 0.5]]
    assert model.weight.tolist() == [[LIMIT, LIMIT]]
