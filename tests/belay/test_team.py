"""Workers that share an average, as far as one process can show; helpers/rank_checks/workers.py has several."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchbelay as tb
from helpers.small import mlp, same
from torchbelay.ops.workers import Workers

DILOCO = tb.methods.diloco(every=3, lr=0.6, momentum=0.8)
METHODS = {
    "easgd": tb.methods.easgd(0.1),
    "easgd, seldom": tb.methods.easgd(rho=2.0, every=2),
    "belay": tb.Spring(k=1.0, m1=10.0, m2=20.0),
    "belay, after": tb.Spring(k=1.0, m1=10.0, m2=20.0, follow="after"),
    "diloco": DILOCO,
    "lookahead": tb.methods.lookahead(k=2),
}


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def run(method: Any, steps: int = 7, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, tb.Belay]:
    model = mlp().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    belay = tb.Belay(model, optimizer, method, **options)
    for step in range(steps):
        train(model, optimizer, step)
    return model, optimizer, belay


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("how", METHODS)
def test_one_worker_is_what_it_is_without_a_group(alone: Any, how: str) -> None:
    model, _, belay = run(METHODS[how], workers=alone)
    other, _, plain = run(METHODS[how])
    for mine, theirs in ((model.state_dict(), other.state_dict()), (belay, plain)):
        pairs = (each if isinstance(each, dict) else each.average_state_dict() for each in (mine, theirs))
        for x, y in zip(*(pair.values() for pair in pairs), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    assert belay.stats() == pytest.approx(plain.stats())
    assert "foreach, 1 workers" in repr(belay)


def test_a_state_goes_on_bit_for_bit(alone: Any) -> None:
    undisturbed, _, belay = run(DILOCO, 7, workers=alone)
    model, optimizer, first = run(DILOCO, 4, workers=alone)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), first.state_dict()])
    assert saved[2]["options"]["workers"] == 1
    again, other, second = run(DILOCO, 0, workers=alone)
    for part, state in zip((again, other, second), saved, strict=True):
        part.load_state_dict(state)
    for step in range(4, 7):
        train(again, other, step)
    assert same(again.state_dict(), undisturbed.state_dict())
    assert same(second.average_state_dict(), belay.average_state_dict())
    _, _, without = run(DILOCO, 0)
    without.load_state_dict(saved[2])  # one worker is no other training
    assert without.step == 4


def test_workers_need_processes_that_know_each_other() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"workers=.* call torch\.distributed\.init_process_group\(\) first"):
        tb.Belay(model, optimizer, DILOCO, workers=object())
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        (tb.methods.swa(), {}, "says nothing of several workers: use methods.easgd"),
        (tb.methods.heavy_ball(0.9), {}, "says nothing of several workers"),
        (tb.Spring.ema(decay=0.9), {}, "would let every worker go its own way"),
        (tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0), {}, "does not go with velocities"),
        (DILOCO, {"start": 3}, "start=3 does not go with workers="),
        (DILOCO, {"buffers": "average"}, "buffers='average' does not go with workers="),
        (DILOCO, {"impl": "reference"}, "impl='reference' does not go with workers="),
        (DILOCO, {"rounding": "stochastic"}, "rounding='stochastic' does not go with workers="),
        (DILOCO, {"device": "cpu"}, "device='cpu' does not go with workers="),
        (DILOCO, {"bits": 24}, "bits=24 does not go with workers="),
        (DILOCO, {"spectators": {"short": tb.Spring.ema(decay=0.9)}}, "spectators=['short'] do not go with workers="),
        (DILOCO, {"save_with_optimizer": True}, "save_with_optimizer=True does not go with workers="),
    ],
)
def test_what_does_not_go_with_workers_is_refused(alone: Any, method: Any, options: Any, words: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the words are compared below
        tb.Belay(model, optimizer, method, workers=alone, **options)
    assert words in str(caught.value)
    assert not optimizer._optimizer_step_pre_hooks


class Halfway:
    """A method that says of itself that workers meet, and lets them meet halfway."""

    varies, pulls = "never", True

    def __init__(self, gathering: str) -> None:
        self.gathering = gathering

    def coupling(self, step: int, lr: float) -> tb.Coupling:
        return tb.Coupling(0.25, 0.25, 0.75, 0.25)


def test_a_method_of_ones_own_takes_part_if_it_says_how(alone: Any) -> None:
    assert run(Halfway("spring"), 3, workers=alone)[2].step == 3
    with pytest.raises(ValueError, match=r"says that workers meet.*its weights and average do not: a \+ b = 0\.5"):
        run(Halfway("mean"), 0, workers=alone)
    with pytest.raises(ValueError, match=r"gathering='springs' of .* is unknown; it is 'spring' or 'mean'"):
        run(Halfway("springs"), 0, workers=alone)


def test_an_average_of_workers_cannot_be_changed_in_place(alone: Any) -> None:
    _, _, belay = run(DILOCO, 1, workers=alone)
    with pytest.raises(RuntimeError, match=r"change\(\) of an average that several workers share: make a new Belay"):
        belay.change(tb.methods.easgd(0.1))


def test_snapshots_of_an_average_of_workers_are_refused(alone: Any, tmp_path: Path) -> None:
    _, _, belay = run(DILOCO, 1, workers=alone)
    with pytest.raises(ValueError, match=r"belay has an average that several workers share.*record a second Belay"):
        tb.snapshots.Recorder(belay, tmp_path / "snapshots", every=1)
    assert not (tmp_path / "snapshots").exists()


def test_reset_and_late_parameters_begin_at_the_weights(alone: Any) -> None:
    model, optimizer, belay = run(DILOCO, 4, workers=alone)
    belay.reset()
    assert same(belay.average_state_dict(), model.state_dict())
    model.late = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer.add_param_group({"params": [model.late]})
    with pytest.warns(tb.BelayWarning, match=r"1 parameter\(s\) were added"):
        train(model, optimizer, 4)
    assert torch.equal(belay.average_state_dict()["late"], torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
def test_a_sync_with_weights_that_are_not_finite_does_not_take_place(alone: Any, on_nonfinite: str) -> None:
    model, optimizer, belay = run(tb.methods.easgd(0.1, every=2), 1, workers=alone, on_nonfinite=on_nonfinite)
    before = belay.average_state_dict()
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] = float("inf")
    if on_nonfinite == "raise":
        with pytest.raises(FloatingPointError, match="not finite at the sync of step 2"):
            train(model, optimizer, 1)
    else:
        train(model, optimizer, 1)
    assert same(belay.average_state_dict(), before)
    assert belay.step == 1
    with pytest.raises(ValueError, match="is not finite: no average can begin there"):
        belay.reset()


def test_a_worker_that_begins_elsewhere_is_warned_once(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers, of whom the first has other weights: what it sends is made up here."""
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "broadcast", lambda vector, src, group: vector.add_(1.0))
    monkeypatch.setattr("torchbelay.belay.agreement.agree", lambda group, facts, problem=None: None)
    monkeypatch.setattr(dist, "all_reduce", lambda vector, group: None)
    model, optimizer, belay = run(tb.methods.easgd(0.1), 0, workers=alone)
    name, first = next(iter(model.named_parameters()))
    torch.testing.assert_close(belay.average_state_dict()[name], first + 1.0)
    with pytest.warns(tb.BelayWarning, match=f"began with other weights than the first one .'{name}' differs"):
        train(model, optimizer, 0)
    train(model, optimizer, 1)
    assert isinstance(belay._stepper.backend, Workers)


# DiLoCo with one worker ---------------------------------------------------------------------------------------------


def torch_diloco(every: int, lr: float, momentum: float, steps: int) -> tuple[nn.Module, list[torch.Tensor]]:
    """An independent DiLoCo: torch's own SGD with Nesterov momentum, with the displacement as its gradient."""
    model = mlp().double()
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    outer = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    sgd = torch.optim.SGD(outer, lr=lr, momentum=momentum, nesterov=momentum > 0)
    for step in range(steps):
        train(model, inner, step)
        if (step + 1) % every == 0:
            for w2, w1 in zip(outer, model.parameters(), strict=True):
                w2.grad = w2.detach() - w1.detach()
            sgd.step()
            with torch.no_grad():
                for w2, w1 in zip(outer, model.parameters(), strict=True):
                    w1.copy_(w2)
    return model, [w.detach() for w in outer]


@pytest.mark.parametrize("impl", ["foreach", "reference"])
@pytest.mark.parametrize(("every", "lr", "momentum"), [(3, 0.7, 0.9), (1, 0.5, 0.5), (5, 1.0, 0.0), (2, 0.5, 1 - 1e-9)])
def test_diloco_equals_an_independent_one(impl: str, every: int, lr: float, momentum: float) -> None:
    model, _, belay = run(tb.methods.diloco(every, lr, momentum), 30, impl=impl)
    other, outer = torch_diloco(every, lr, momentum, 30)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    names = [name for name, _ in model.named_parameters()]
    for name, theirs in zip(names, outer, strict=True):
        torch.testing.assert_close(belay.average_state_dict()[name], theirs, rtol=0, atol=1e-12)
    if 30 % every == 0 and impl == "foreach":
        assert same(dict(model.named_parameters()), belay.average_state_dict())


def test_diloco_whose_numbers_do_not_pull_still_carries_its_momentum() -> None:
    """With α(1+μ) = 1 the four numbers are those of a copy, a = 0 and p = 1: only the velocity moves the weights."""
    method = tb.methods.diloco(2, lr=0.8, momentum=0.25)
    assert method.coupling(2, 0.0) == tb.Coupling(0.0, 1.0, 1.0, 1.0)
    model, _, _ = run(method, 6)
    other, _ = torch_diloco(2, 0.8, 0.25, 6)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_diloco_against_torchft() -> None:
    local_sgd = pytest.importorskip("torchft.local_sgd")
    from unittest.mock import MagicMock

    manager = MagicMock()
    manager._use_async_quorum = False
    manager.should_commit.return_value = True
    manager.current_step.return_value = 0
    model = mlp().double()
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with local_sgd.DiLoCo(manager, [model], inner, outer, sync_every=3, backup_device=torch.device("cpu")):
        for step in range(12):
            train(model, inner, step)
    mine, _, _ = run(tb.methods.diloco(every=3), 12)
    for ours, theirs in zip(mine.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
