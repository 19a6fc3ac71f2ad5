"""The copies of weights that `Foreach` keeps on a CPU between steps: in which nothing old may be read."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.small import BELAY, EMA, SWINGING, values

SIZE = 1237  # elements of a weight; no other tensor here has as many
LAGGED = tb.Spring(k=0.2, m1=float("inf"), m2=1.0)


def copies() -> int:
    """Return how many tensors there are that may be copies of the weight."""
    gc.collect()
    return sum(1 for t in gc.get_objects() if type(t) is torch.Tensor and t.numel() == SIZE)


def ready(method: Any, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, tb.Belay]:
    model = nn.Linear(SIZE, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, method, **options)
    model.weight.grad = torch.ones_like(model.weight)
    return model, optimizer, belay


def test_one_copy_is_kept_from_step_to_step_and_given_up_by_detach() -> None:
    _, optimizer, belay = ready(BELAY)
    before = copies()
    for _ in range(3):
        optimizer.step()
        assert copies() == before + 1
    belay.detach()
    assert copies() <= before


def test_one_copy_is_kept_on_a_machine_with_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the backend of a machine with a GPU needs triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _, optimizer, belay = ready(BELAY)
    assert "triton" in type(belay._stepper.backend).__module__
    before = copies()
    for _ in range(3):
        optimizer.step()
        assert copies() == before + 1
    belay.detach()
    assert copies() <= before


def test_an_ema_keeps_none() -> None:
    _, optimizer, _ = ready(EMA)
    before = copies()
    optimizer.step()
    assert copies() == before


def test_a_step_that_needs_no_copy_gives_it_up() -> None:
    _, optimizer, belay = ready(BELAY)
    before = copies()
    optimizer.step()
    belay.change(EMA)
    optimizer.step()
    assert copies() == before


def test_the_reference_makes_a_new_copy_at_every_step() -> None:
    """It is what the kept copies are compared with."""
    _, optimizer, _ = ready(BELAY, impl="reference")
    before = copies()
    optimizer.step()
    assert copies() == before


# What a user does between two steps -----------------------------------------------------------------------------------


def stop_a_step(net: nn.Module, optimizer: torch.optim.Optimizer, belay: tb.Belay) -> None:
    """Raise inside a step, when the copies are made; the weights have changed before the next one."""

    def fail() -> float:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(fail)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(2)


def put_other_memory(net: nn.Module, optimizer: torch.optim.Optimizer, belay: tb.Belay) -> None:
    for p in net.parameters():
        p.data = 2 * p.data


def lay_out(net: nn.Module, optimizer: torch.optim.Optimizer, belay: tb.Belay) -> None:
    net.to(memory_format=torch.channels_last)


def add_a_group(net: nn.Module, optimizer: torch.optim.Optimizer, belay: tb.Belay) -> None:
    generator = torch.Generator().manual_seed(1)
    net.new = nn.Parameter(torch.randn(3, generator=generator))
    optimizer.add_param_group({"params": [net.new]})


def swap(net: nn.Module, optimizer: torch.optim.Optimizer, belay: tb.Belay) -> None:
    with belay.averaged():
        pass


EVENTS: dict[str, Callable[[Any, Any, Any], object]] = {
    "nothing": lambda net, optimizer, belay: None,
    "a step is stopped": stop_a_step,
    "other memory": put_other_memory,
    "other strides": lay_out,
    "a wider dtype": lambda net, optimizer, belay: net.double(),
    "another method": lambda net, optimizer, belay: belay.change(LAGGED),
    "more weights": add_a_group,
    "a swap": swap,
    "begin again": lambda net, optimizer, belay: belay.reset(),
}


@pytest.mark.filterwarnings("ignore:1 parameter.s. were added")
@pytest.mark.parametrize("method", [BELAY, LAGGED, SWINGING], ids=["belay", "lagged", "velocities"])
@pytest.mark.parametrize("event", EVENTS)
def test_whatever_happens_between_steps_the_averages_are_those_of_the_reference(event: str, method: Any) -> None:
    found = []
    for impl in ("foreach", "reference"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        belay = tb.Belay(net, optimizer, method, impl=impl)
        generator = torch.Generator().manual_seed(2)
        for step in range(6):
            if step == 3:
                EVENTS[event](net, optimizer, belay)
            for p in net.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(p)
            optimizer.step()
        found.append((values(net), belay.average_state_dict()))
    torch.testing.assert_close(*found)


def test_copies_that_were_made_in_inference_mode_are_not_written_later() -> None:
    found = []
    for impl in ("foreach", "reference"):
        torch.manual_seed(0)
        model, optimizer, belay = ready(BELAY, impl=impl)
        with torch.inference_mode():
            optimizer.step()
        optimizer.step()
        found.append((values(model), belay.average_state_dict()))
    torch.testing.assert_close(*found)
