"""A checkpoint of version 0.1.0 loads, and training goes on from it as it went on then.

The files in tests/data/version-0.1.0 were written by that version and are not to be written again. They hold a model
with velocities, a method that remembers learning rates, one with a period, spectators, averaged buffers and two groups
of the optimizer.
"""

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import torchbelay as tb
from helpers.root import ROOT

OLD = ROOT / "tests" / "data" / "version-0.1.0"
STEPS, MORE = 7, 5


def method(name: str, _: Tensor) -> tb.Method:
    """The method of each parameter in that run."""
    if name.startswith("0"):
        return tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0)
    return tb.methods.schedule_free(0.9) if name.startswith("3") else tb.methods.lookahead(k=4, alpha=0.5)


class Run:
    """The training of that time, from other weights."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
        rest = [*self.model[1].parameters(), *self.model[3].parameters()]
        groups = [{"params": self.model[0].parameters()}, {"params": rest, "lr": 0.02}]
        self.optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        spectators = {"ema": tb.methods.ema(0.9, warmup="ratio"), "swa": tb.methods.swa()}
        self.belay = tb.Belay(self.model, self.optimizer, method, spectators=spectators, buffers="average")

    def train(self, steps: range) -> None:
        for step in steps:
            x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1000 + step))
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            self.optimizer.step()


def leaves(prefix: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in leaves(f"{prefix}/{key}", item).items()}
    return {prefix: value}


def differences(one: Any, other: Any, *, exact: bool) -> list[str]:
    """The names under which two states differ."""
    ones, others = leaves("", one), leaves("", other)
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    found = sorted(ones.keys() ^ others.keys())
    for name in ones.keys() & others.keys():
        x, y = ones[name], others[name]
        if not isinstance(x, Tensor):
            alike = x == y if exact else x == pytest.approx(y)
        else:
            alike = x.shape == y.shape and torch.allclose(x.double(), y.double(), **tolerance)
        found += [] if alike else [name]
    return found


@pytest.fixture
def old() -> dict[str, Any]:
    return torch.load(OLD / "checkpoint.pt", weights_only=True)


@pytest.fixture
def later() -> dict[str, Any]:
    return torch.load(OLD / "five_steps_later.pt", weights_only=True)


def test_it_loads_and_training_goes_on_as_it_did(old: dict[str, Any], later: dict[str, Any]) -> None:
    run = Run()
    assert differences(run.belay.state_dict(), old["belay"], exact=True)  # the comparison can fail
    run.model.load_state_dict(old["model"])
    run.optimizer.load_state_dict(old["optimizer"])
    run.belay.load_state_dict(old["belay"])
    assert run.belay.step == STEPS
    assert differences(run.belay.state_dict(), old["belay"], exact=True) == []
    run.train(range(STEPS, STEPS + MORE))
    assert differences(run.belay.state_dict(), later["belay"], exact=False) == []
    assert differences(run.model.state_dict(), later["model"], exact=False) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
def test_a_distributed_checkpoint_loads_too(old: dict[str, Any]) -> None:
    run = Run()
    state = {"model": run.model.state_dict(), "belay": run.belay}
    dcp.load(state, checkpoint_id=str(OLD / "distributed"))
    assert run.belay.step == STEPS
    assert differences(run.belay.state_dict(), old["belay"], exact=True) == []
    assert differences(state["model"], old["model"], exact=True) == []


def test_the_format_is_still_the_first(old: dict[str, Any]) -> None:
    assert old["belay"]["format"] == Run().belay.state_dict()["format"] == 1
    assert leaves("", old["belay"]).keys() == leaves("", Run().belay.state_dict()).keys()
