"""torch's default dtype and device are the user's own: no number of an average may depend on them."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

import torchbelay as tb
from helpers.problems import MLP, advance, different, everything, f32
from helpers.small import WHERE, same
from torchbelay import optim

METHODS = {
    "belay": tb.Spring(k=1.0, m1=10.0, m2=20.0),
    "lagged": tb.Spring(k=0.2, m1=inf, m2=1.0),
    "velocities": tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0),
    "swa": tb.methods.swa(),
    "lookahead": tb.methods.lookahead(k=2),
}


@contextmanager
def default(what: torch.dtype | str) -> Iterator[None]:
    """Set a default dtype, or a default device: on "meta" whatever is made without a device holds no numbers."""
    if isinstance(what, str):
        with torch.device(what):
            yield
        return
    old = torch.get_default_dtype()
    torch.set_default_dtype(what)
    try:
        yield
    finally:
        torch.set_default_dtype(old)


def steps(model: nn.Module, optimizer: Any, some: range, scaler: GradScaler | None, what: Any) -> None:
    """Train; only what the library does is done under the default, for the batches are the test's own."""
    for step in some:
        optimizer.zero_grad()
        loss = MLP.loss(model, step)
        (loss if scaler is None else scaler.scale(loss)).backward()
        with default(what):
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()


def numbers(how: str, kind: Any, impl: str, options: dict[str, Any], scaled: bool, what: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = MLP.model(f32).to(WHERE)
    with default(what):
        optimizer = kind(model.parameters(), lr=0.02)
        belay = tb.Belay(model, optimizer, METHODS[how], spectators={"s": METHODS["swa"]}, impl=impl, **options)
    scaler = GradScaler(WHERE, init_scale=2.0) if scaled else None
    steps(model, optimizer, range(4), scaler, what)
    with default(what), belay.averaged():
        pass
    with default(what):
        found: dict[str, Any] = {
            "stats": belay.stats(),
            "state": belay.state_dict(),
            "average": dict(belay.average_state_dict()),
        }
        belay.load_state_dict(found["state"])
        belay.reset()
    return everything(model=model, optimizer=optimizer) | {"found": found, "after": belay.state_dict()}


every_default = pytest.mark.parametrize("what", [torch.float16, torch.float64, "meta"], ids=str)


@every_default
@pytest.mark.parametrize("options", [{}, {"on_nonfinite": "raise"}, {"start": 2}], ids=str)
def test_they_change_no_number(what: Any, options: dict[str, Any]) -> None:
    for how in METHODS:
        mine, plain = (
            numbers(how, torch.optim.SGD, "foreach", options, False, given) for given in (what, torch.float32)
        )
        assert same(mine, plain), how


@every_default
@pytest.mark.parametrize("kind", [torch.optim.SGD, optim.AdamW, optim.SGD], ids=["SGD", "our AdamW", "our SGD"])
def test_they_change_no_number_of_a_kernel(what: Any, kind: Any) -> None:
    pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this platform")
    for how in ("belay", "swa"):
        mine, plain = (numbers(how, kind, "triton", {}, False, given) for given in (what, torch.float32))
        assert same(mine, plain), how


@pytest.mark.parametrize("what", [torch.float16, "meta"], ids=str)
@pytest.mark.parametrize("impl", ["foreach", "triton"])
def test_they_change_nothing_under_a_scaler(what: Any, impl: str) -> None:
    if impl == "triton":
        pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this platform")
    mine, plain = (numbers("belay", optim.AdamW, impl, {}, True, given) for given in (what, torch.float32))
    assert same(mine, plain)


def test_a_dead_feature_stays_finite_under_a_narrow_default() -> None:
    """Adam divides by √v + eps; an eps of 1e-8 is 0 in float16, and 0/0 is nan."""
    pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this platform")
    model = nn.Linear(3, 2).to(WHERE)
    with default(torch.float16):
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        belay = tb.Belay(model, optimizer, METHODS["belay"], impl="triton")
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
            p.grad.view(-1)[0] = 1.0
        optimizer.step()
        assert "in one pass" in repr(belay)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_the_loop_above_trains() -> None:
    model = MLP.model(f32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    before = everything(model=model)
    steps(model, optimizer, range(2), None, torch.float32)
    other = MLP.model(f32)
    advance(other, torch.optim.SGD(other.parameters(), lr=0.02), MLP, range(2))
    assert different(everything(model=model), everything(model=other)) == []
    assert different(everything(model=model), before)
