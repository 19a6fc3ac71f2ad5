"""Averages that copy (decay 0, hard syncs) or stand still (decay 1), and scheduled ones, on every backend."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchbelay as tb
from helpers.small import WHERE, batch, mlp, same, train, values, with_batchnorm
from torchbelay import methods, optim
from torchbelay.physics.schedules import cosine, linear

# How the averages are kept: the options of Belay, and whether a copy is one to the last bit. The reference computes
# w2 + (w1 − w2) + u as it is written down, which rounds.
BACKENDS: dict[str, tuple[dict[str, Any], bool]] = {
    "foreach": ({"impl": "foreach"}, True),
    "reference": ({"impl": "reference"}, False),
    "host": ({"device": "cpu"}, True),
    "triton": ({"impl": "triton"}, True),
}
every_backend = pytest.mark.parametrize("backend", BACKENDS)
COPYING: dict[str, Any] = {"decay 0": methods.ema(0.0), "hard sync": methods.hard_sync(1)}


def attached(
    method: Any, backend: str, *, dtype: torch.dtype = torch.float32, kind: Any = torch.optim.SGD, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, tb.Belay, bool]:
    given, exact = BACKENDS[backend]
    if backend == "triton":
        pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this platform")
    model = mlp(dtype).to(WHERE if backend == "triton" else "cpu")
    optimizer = kind(model.parameters(), lr=0.1)
    return model, optimizer, tb.Belay(model, optimizer, method, **given, **options), exact


def kept(belay: tb.Belay, name: str = "average") -> dict[str, Tensor]:
    """The average in its own dtype."""
    return {key: w.cpu() for key, w in belay.state_dict()["averages"][name]["weights"].items()}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().cpu().float().clone() for name, p in model.named_parameters()}


def assert_copied(found: dict[str, Tensor], source: dict[str, Tensor], exact: bool) -> None:
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 0, "atol": 1e-6}
    torch.testing.assert_close(found, source, **tolerance)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", COPYING)
def test_a_copy_is_the_weights_after_every_step(how: str, dtype: torch.dtype, backend: str) -> None:
    model, optimizer, belay, exact = attached(COPYING[how], backend, dtype=dtype)
    for step in range(5):
        before = parameters(model)
        train(model, optimizer, 1, first=step)
        assert_copied(kept(belay), parameters(model), exact)
        assert not same(before, parameters(model))


@every_backend
def test_a_late_copy_is_the_weights_before_the_step(backend: str) -> None:
    model, optimizer, belay, exact = attached(methods.ema(0.0, follow="before"), backend)
    for step in range(5):
        before = parameters(model)
        train(model, optimizer, 1, first=step)
        assert_copied(kept(belay), before, exact)


@every_backend
@pytest.mark.parametrize("start", [0, 2])
def test_a_target_is_copied_at_its_syncs_and_stands_still_between(start: int, backend: str) -> None:
    model, optimizer, belay, exact = attached(methods.hard_sync(3), backend, start=start)
    target = parameters(model)
    for step in range(1, 12):
        train(model, optimizer, 1, first=step)
        if step <= start or (step - start) % 3 == 0:
            target = parameters(model)
        if step >= start:
            assert_copied(kept(belay), target, exact)


@every_backend
def test_every_thins_a_copy_to_a_hard_sync(backend: str) -> None:
    model, optimizer, belay, exact = attached(methods.ema(0.0), backend, every=3)
    other, its, synced, _ = attached(methods.hard_sync(3), backend)
    for step in range(7):
        train(model, optimizer, 1, first=step)
        train(other, its, 1, first=step)
        assert_copied(kept(belay), kept(synced), exact)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"every": 2}, {"start": 2}], ids=str)
def test_an_average_with_decay_1_keeps_every_bit(options: dict[str, int], dtype: torch.dtype, backend: str) -> None:
    model, optimizer, belay, _ = attached(methods.ema(1.0), backend, dtype=dtype, **options)
    train(model, optimizer, options.get("start", 0))
    first = parameters(model)
    train(model, optimizer, 5, first=2)
    assert same(kept(belay), first)
    with torch.no_grad():
        model[0].weight.fill_(math.inf)
    train(model, optimizer, 2, first=7)
    assert not torch.isfinite(model[0].weight).any()
    assert same(kept(belay), first)  # nothing passes through a coefficient of 0


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "host"])  # where averages never pull
@pytest.mark.parametrize("kind", [torch.optim.SGD, optim.AdamW, optim.SGD], ids=["SGD", "our AdamW", "our SGD"])
def test_they_watch_beside_an_average_that_pulls(kind: Any, backend: str) -> None:
    spectators = {"copy": methods.ema(0.0), "still": methods.ema(1.0), "target": methods.hard_sync(2)}
    model, optimizer, belay, exact = attached(
        tb.Spring(k=1.0, m1=10.0, m2=20.0), backend, kind=kind, spectators=spectators
    )
    first = target = parameters(model)
    for step in range(1, 6):
        train(model, optimizer, 1, first=step)
        target = target if step % 2 else parameters(model)
        assert_copied(kept(belay, "copy"), parameters(model), exact)
        assert same(kept(belay, "still"), first)
        assert_copied(kept(belay, "target"), target, exact)


def test_stats_and_repr_of_an_average_that_stands_still() -> None:
    _, optimizer, belay, _ = attached(methods.ema(1.0), "foreach")
    for group in optimizer.param_groups:
        group["lr"] = 0.25
    assert belay.stats()["effective_lr"] == 0.25
    assert belay.stats()["tension"] == 0
    assert "ema(decay=1.0" in repr(belay)


def test_averaged_buffers_copy_or_stand_still_too() -> None:
    model = with_batchnorm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spectators = {"still": methods.ema(1.0)}
    belay = tb.Belay(model, optimizer, methods.ema(0.0), spectators=spectators, buffers="average")
    first = values(model)
    train(model, optimizer, 4)
    copied, still = belay.average_state_dict(), belay.average_state_dict("still")
    for name in ("1.running_mean", "1.running_var"):
        assert torch.equal(copied[name], model.state_dict()[name])
        assert not torch.equal(first[name], model.state_dict()[name])
        assert torch.equal(still[name], first[name])


# Scheduled ones ------------------------------------------------------------------------------------------------------

SCHEDULED: dict[str, Any] = {
    "ema": methods.ema(cosine(0.5, 1.0, steps=6)),
    "ema, ramp-up": methods.ema(half_life=9.0, rampup_ratio=0.5),
    "ema, warm-up": methods.ema(0.99, warmup="inverse-power", inv_gamma=4.0, power=0.8),
    "ema, least decay": methods.ema(0.99, warmup="ratio", min_decay=0.4),
    "ema_nesterov": methods.ema_nesterov(linear(0.0, 0.5, steps=6), 0.8),
    "centred": methods.centred(linear(-0.4, 0.4, steps=6), cosine(0.9, 0.1, steps=5)),
    "centred, before": methods.centred(linear(0.4, -0.4, steps=6), 0.2, "before"),
}
every_schedule = pytest.mark.parametrize("how", SCHEDULED)


@every_schedule
@pytest.mark.parametrize("kind", [torch.optim.SGD, optim.SGD], ids=["SGD", "our SGD"])
def test_kernels_move_scheduled_averages_as_the_reference_does(kind: Any, how: str) -> None:
    runs = [attached(SCHEDULED[how], backend, kind=kind) for backend in ("triton", "reference")]
    for model, optimizer, _, _ in runs:
        train(model, optimizer, 9)
    (mine, _, belay, _), (other, _, plain, _) = runs
    torch.testing.assert_close(parameters(mine), parameters(other), rtol=0, atol=2e-6)
    torch.testing.assert_close(kept(belay), kept(plain), rtol=0, atol=2e-6)


@every_schedule
@pytest.mark.parametrize("at", [1, 4, 8])
def test_a_scheduled_average_resumes_to_the_last_bit(how: str, at: int) -> None:
    model, optimizer, belay, _ = attached(SCHEDULED[how], "foreach")
    train(model, optimizer, at)
    saved = model.state_dict(), optimizer.state_dict(), belay.state_dict()
    other, its, resumed, _ = attached(SCHEDULED[how], "foreach")
    for part, state in zip((other, its, resumed), saved, strict=True):
        part.load_state_dict(state)
    for each, stepping in ((model, optimizer), (other, its)):
        train(each, stepping, 10 - at, first=at)
    assert same(values(other), values(model))
    assert same(resumed.state_dict(), belay.state_dict())


def test_a_state_of_another_schedule_is_refused() -> None:
    _, _, belay, _ = attached(methods.ema(cosine(0.5, 1.0, steps=6)), "foreach")
    _, _, other, _ = attached(methods.ema(cosine(0.5, 1.0, steps=7)), "foreach")
    with pytest.raises(ValueError, match=r"steps=7"):
        other.load_state_dict(belay.state_dict())


def test_a_bare_function_trains_and_resumes_with_a_warning() -> None:
    model, optimizer, belay, _ = attached(methods.ema(lambda step: 1 - 1 / step), "foreach")
    train(model, optimizer, 4)
    other, its, resumed, _ = attached(methods.ema(lambda step: 1 - 1 / step), "foreach")
    other.load_state_dict(model.state_dict())
    its.load_state_dict(optimizer.state_dict())
    with pytest.warns(
        tb.BelayWarning, match=r"all of the method of 'average' \(ema\.decay=<function .*couplings of 13 steps"
    ):
        resumed.load_state_dict(belay.state_dict())
    for each, stepping in ((model, optimizer), (other, its)):
        train(each, stepping, 3, first=4)
    assert same(resumed.state_dict(), belay.state_dict())
    _, _, another, _ = attached(methods.ema(lambda step: 1 - 1 / (step + 1)), "foreach")
    with pytest.raises(ValueError, match=r"differs: ema\(at_1=.* in the checkpoint, ema\(at_1=.* strict=False"):
        another.load_state_dict(belay.state_dict())


def test_a_function_out_of_range_stops_the_step_before_anything_has_moved() -> None:
    model, optimizer, belay, _ = attached(methods.ema(lambda step: step / 3), "foreach")
    train(model, optimizer, 3)
    before, average = values(model), belay.average_state_dict()
    x = batch(9)
    model(x).sum().backward()
    with pytest.raises(ValueError, match=r"at step 4: decay=1\.333\S* is out of range; it needs decay ≥ 0"):
        optimizer.step()
    assert same(values(model), before)
    assert same(dict(belay.average_state_dict()), dict(average))
    assert belay.step == 3


@pytest.mark.parametrize(
    "method",
    [
        methods.centred(lambda step: 0.0 if step < 100 else 0.5, 0.1),
        methods.ema_nesterov(linear(0.0, 0.5, steps=6), 0.8),
    ],
    ids=["centred", "ema_nesterov"],
)
def test_a_schedule_that_pulls_only_later_cannot_watch(method: Any) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="the spectator 'one' would pull the weights"):
        tb.Belay(model, optimizer, methods.ema(0.9), spectators={"one": method})
    with pytest.raises(ValueError, match=r"device='cpu' keeps 'average' .* pulls the weights"):
        tb.Belay(model, optimizer, method, device="cpu")


def test_the_effective_rate_of_a_moving_theta_is_the_optimizers() -> None:
    model, optimizer, belay, _ = attached(SCHEDULED["centred"], "foreach")
    for step in range(8):
        train(model, optimizer, 1, first=step)
        assert belay.stats()["effective_lr"] == 0.1


@pytest.mark.parametrize("how", ["foreach", "reference"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_every_nth_step_makes_up_for_those_between_also_if_a_schedule_ends_at_rest(how: Any, by_hand: bool) -> None:
    decay = linear(0.5, 1.0, steps=4)  # a decay of 1 at step 4: the coupling there is that of step 3, then a rest
    model = nn.Linear(2, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, None if by_hand else optimizer, methods.ema(decay), every=2, impl=how)
    expected = model.weight.detach().clone()
    for step in range(1, 7):
        model(torch.randn(3, 2, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        if by_hand:
            belay.update()
        if step % 2 == 0:
            left = decay(step - 1) * decay(step)
            expected += (1 - left) * (model.weight.detach() - expected)
        assert torch.allclose(belay.average_state_dict()["weight"], expected, rtol=0, atol=1e-14)
