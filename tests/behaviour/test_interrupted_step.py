"""A step, interrupted by an exception at each line of the library, or by signals.

Before the first weight or average moves, nothing has changed, and the step can be taken again. Once they have begun to
move, they have all moved, or further steps are refused until `reset()` or `load_state_dict()`.
"""

import copy
import gc
import os
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.interrupting import SOURCE, Interruption, every_line, raising_at
from helpers.small import BELAY, EMA, SWINGING, WHERE, batch, mlp, same, snapshot, with_batchnorm
from torchbelay import optim

ROOMS = (SOURCE / "belay", SOURCE / "ops", SOURCE / "optim.py")
Made = tuple[nn.Module, torch.optim.Optimizer, list[tb.Belay]]


def made(kind: Any, method: Any, model: nn.Module | None = None, watcher: Any = None, **options: Any) -> Made:
    model = mlp() if model is None else model
    optimizer = kind(model.parameters(), lr=1e-2)
    belays = [tb.Belay(model, optimizer, method, **options)]
    return model, optimizer, belays + ([] if watcher is None else [tb.Belay(model, optimizer, watcher)])


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1, bias=False).to(WHERE)  # Triton's interpreter is slow


SGD = torch.optim.SGD
SHORT = {"short": tb.methods.swa()}
MADE: dict[str, Callable[[], Made]] = {
    "ema": lambda: made(SGD, EMA),
    "belay and a spectator": lambda: made(SGD, BELAY, spectators=SHORT),
    "velocities": lambda: made(torch.optim.AdamW, SWINGING),
    "a method that remembers": lambda: made(SGD, tb.methods.schedule_free(0.9)),
    "averaged buffers": lambda: made(SGD, BELAY, with_batchnorm(), buffers="average"),
    "a look at the weights": lambda: made(SGD, BELAY, on_nonfinite="skip"),
    "begins later": lambda: made(SGD, BELAY, start=3),
    "two Belays": lambda: made(SGD, BELAY, watcher=tb.methods.ema(0.9, warmup="ratio")),
    "kernels": lambda: made(SGD, BELAY, tiny(), impl="triton"),
    "one pass": lambda: made(optim.AdamW, BELAY, tiny(), impl="triton"),
}
SLOW = ("kernels", "one pass")  # each line takes several steps of Triton's interpreter
every_kind = pytest.mark.parametrize(
    "make", [pytest.param(make, marks=[pytest.mark.slow] * (name in SLOW), id=name) for name, make in MADE.items()]
)


def prepared(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Callable[[], Any]:
    """Compute the gradients of a step, and return what takes it."""
    optimizer.zero_grad()
    model(batch(number).to(next(model.parameters()).device)).square().mean().backward()
    return optimizer.step


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, belays: list[tb.Belay]) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the last step was stopped while")
        return copy.deepcopy([optimizer.state_dict(), *(snapshot(model, belay) for belay in belays)])


def steps(make: Callable[[], Made], count: int) -> Made:
    gc.collect()  # Belays of lines before: a step walks over all, and would take more lines than were counted
    torch.manual_seed(0)
    model, optimizer, belays = make()
    for number in range(count):
        prepared(model, optimizer, number)()
    return model, optimizer, belays


def is_refused(step: Callable[[], Any]) -> bool:
    """Whether a step is refused because the last one was stopped in the middle."""
    try:
        step()
    except RuntimeError as problem:
        return all(word in str(problem) for word in ("stopped while weights", "load_state_dict()", "reset()"))
    return False


@every_kind
def test_an_exception_at_any_line_leaves_nothing_half_done_in_silence(make: Callable[[], Made]) -> None:
    ends = [everything(*steps(make, count)) for count in (3, 4)]  # without interruption
    outcomes = Counter[str]()
    for line in every_line(prepared(*steps(make, 2)[:2], 2), ROOMS):
        model, optimizer, belays = steps(make, 2)
        step = prepared(model, optimizer, 2)
        before = everything(model, optimizer, belays)
        with raising_at(line, ROOMS) as place, pytest.raises(Interruption):
            step()
        after = everything(model, optimizer, belays)
        untouched = same(after, before)
        if is_refused(step if untouched else prepared(model, optimizer, 3)):
            outcomes["refused"] += 1
            with pytest.warns(tb.BelayWarning, match="some of these averages have moved and some have not"):
                states = [belay.state_dict() for belay in belays]
            assert same(states, [each["belay"] for each in after[1:]]), place
        elif untouched:
            outcomes["nothing has happened"] += 1
            prepared(model, optimizer, 3)()
            assert same(everything(model, optimizer, belays), ends[1]), place
        elif same(everything(model, optimizer, belays), ends[1]):
            outcomes["all has moved"] += 1
        else:
            outcomes["the optimizer has stepped, and no average has moved"] += 1
            assert not same(after, ends[0]), place
            if not after[1]["belay"]["began"]:  # it is the weights, and begins after the next step
                assert belays[0].state_dict()["began"], place
                continue
            for now, then in zip(after[1:], before[1:], strict=True):
                assert same(now["belay"]["averages"], then["belay"]["averages"]), place
            assert {belay.step for belay in belays} == {3}, place
    assert outcomes["nothing has happened"], outcomes


@contextmanager
def handled(number: int) -> Iterator[list[int]]:
    """Let a signal raise, as Ctrl-C does, when its handler runs."""
    delivered: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        delivered.append(number)
        raise Interruption("a signal")

    old = signal.signal(number, handler)
    try:
        yield delivered
    finally:
        signal.signal(number, old)


@pytest.mark.skipif(os.name == "nt", reason="Windows has other signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("how", ["two Belays", "averaged buffers", "one pass"])
def test_signals_wait_until_all_averages_have_moved(number: int, how: str, monkeypatch) -> None:
    make = MADE[how]
    model, optimizer, belays = steps(make, 2)
    step = prepared(model, optimizer, 2)
    sent = []

    def sending(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not sent:
                sent.append(number)
                os.kill(os.getpid(), number)
            return function(*args, **kwargs)

        return wrapped

    with handled(number) as delivered, monkeypatch.context() as patch:
        if how == "one pass":
            from torchbelay.ops.triton import launch

            patch.setattr(launch, "launch", sending(launch.launch))
        else:
            patch.setattr(torch, "_foreach_lerp_", sending(torch._foreach_lerp_))
        with pytest.raises(Interruption):
            step()
    assert sent == delivered == [number]
    prepared(model, optimizer, 3)()
    assert same(everything(model, optimizer, belays), everything(*steps(make, 4)))


def test_lagged_averages_are_never_ahead_of_a_step_that_was_interrupted() -> None:
    def make() -> Made:
        return made(SGD, tb.Spring(k=0.2, m1=inf, m2=1.0))

    _, optimizer, (belay,) = steps(make, 2)
    before = copy.deepcopy(belay.state_dict())

    def stop() -> None:
        raise Interruption("in the closure")

    with pytest.raises(Interruption):
        optimizer.step(stop)
    assert same(belay.state_dict(), before)
