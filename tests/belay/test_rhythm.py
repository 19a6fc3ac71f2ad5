"""A long rhythm (`every=30000`) costs the host no more than a short one."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

import torchbelay as tb
from helpers.small import WHERE, mlp

LONG = 30_000


def calls(function: Callable[[], Any]) -> int:
    """The calls of Python functions, each turn of a generator among them."""
    count = 0

    def notice(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(notice)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def resting(method: tb.Method, every: int, **options: Any) -> tuple[Callable[[], Any], tb.Belay]:
    """A step between two couplings, ready to be taken, and its Belay."""
    gc.collect()  # other Belays, which would count this step as one of another optimizer
    model = mlp().to(WHERE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = {"watching": tb.methods.ema(0.9)} if every > 1 else {}
    belay = tb.Belay(model, optimizer, method, spectators=watching, every=every, **options)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for _ in range(2):
        optimizer.step()
    return optimizer.step, belay


@pytest.mark.parametrize("guard", ["ignore", "skip"])
@pytest.mark.parametrize("impl", ["foreach", "triton"])
def test_a_step_takes_as_many_calls_whatever_the_rhythm(impl: str, guard: str) -> None:
    short, long = (
        calls(resting(tb.methods.ema(0.99), every, impl=impl, on_nonfinite=guard)[0]) for every in (LONG // 1000, LONG)
    )
    assert long <= 1.01 * short  # the interpreter of the kernels makes a few calls more or less by itself


@pytest.mark.parametrize("guard", ["ignore", "skip"])
def test_a_step_takes_as_many_calls_whatever_the_period_of_the_method(guard: str) -> None:
    short, long = (
        calls(resting(tb.methods.lookahead(k=k), 1, impl="triton", on_nonfinite=guard)[0]) for k in (LONG // 1000, LONG)
    )
    assert long <= 1.01 * short


def test_numbers_to_log_take_as_many_calls_whatever_the_rhythm() -> None:
    short, long = (calls(resting(tb.Spring(k=1e-5, m1=1.0, m2=2.0), n)[1].stats) for n in (LONG // 1000, LONG))
    assert long <= short + 5


def test_a_long_rhythm_couples_as_strongly_as_its_steps_would() -> None:
    model = mlp(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.5), every=3)
    old = model[0].bias.detach().clone()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for _ in range(3):
        optimizer.step()
    torch.testing.assert_close(belay.average_state_dict()["0.bias"], old + 7 / 8 * (model[0].bias - old))
