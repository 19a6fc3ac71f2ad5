"""A checkpoint of version 0.1.0, which is of format 1, loads, and training goes on from it as it went on then.

The files in tests/data/version-0.1.0 were written by that version and are not to be written again. They hold a model
with velocities, a method that remembers learning rates, one with a period, spectators, averaged buffers and two groups
of the optimizer.

Averaged buffers moved like their average's first parameter then, and move by their own rule now: those of the average
with several methods go on otherwise than they did.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import torchbelay as tb
from helpers.root import ROOT

OLD = ROOT / "tests" / "data" / "version-0.1.0"
STEPS, MORE = 7, 5
OWN_RULE = [f"/averages/average/buffers/1.{name}" for name in ("running_mean", "running_var")]

# Without other processes torch warns that it reads alone.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninit:UserWarning")


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
    """The names under which two states differ, apart from what format 2 says otherwise."""
    ones, others = leaves("", one), leaves("", other)
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    found = sorted(ones.keys() ^ others.keys())
    for name in ones.keys() & others.keys():
        x, y = ones[name], others[name]
        if not isinstance(x, Tensor):
            alike = x == y if exact else x == pytest.approx(y)
        else:
            alike = x.shape == y.shape and torch.allclose(x.double(), y.double(), **tolerance)
        found += [] if alike or name == "/format" or name.endswith("/own_buffers") else [name]
    return sorted(found)


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
    assert differences(run.belay.state_dict(), later["belay"], exact=False) == OWN_RULE
    assert differences(run.model.state_dict(), later["model"], exact=False) == []


def test_a_distributed_checkpoint_loads_too(old: dict[str, Any]) -> None:
    run = Run()
    state = {"model": run.model.state_dict(), "belay": run.belay}
    dcp.load(state, checkpoint_id=str(OLD / "distributed"))
    assert run.belay.step == STEPS
    assert differences(run.belay.state_dict(), old["belay"], exact=True) == []
    assert differences(state["model"], old["model"], exact=True) == []


def test_the_names_of_format_2_are_those_of_format_1(old: dict[str, Any]) -> None:
    """torch.distributed.checkpoint reads only directories in which it finds every name."""
    new = Run().belay.state_dict()
    assert (old["belay"]["format"], new["format"]) == (1, 2)
    assert leaves("", old["belay"]).keys() == leaves("", new).keys()


def test_a_run_of_format_1_goes_on_through_format_2(old: dict[str, Any]) -> None:
    run, again = Run(), Run()
    for target, key in ((run.model, "model"), (run.optimizer, "optimizer"), (run.belay, "belay")):
        target.load_state_dict(old[key])
    saved = copy.deepcopy([run.model.state_dict(), run.optimizer.state_dict(), run.belay.state_dict()])
    for target, state in zip((again.model, again.optimizer, again.belay), saved, strict=True):
        target.load_state_dict(state)
    for each in (run, again):
        each.train(range(STEPS, STEPS + MORE))
    assert differences(again.belay.state_dict(), run.belay.state_dict(), exact=True) == []


# What format 1 made of methods and buffers that are not in those files -----------------------------------------------


@dataclass(frozen=True)
class Mine:
    rate: float
    every: int = 1

    def coupling(self, step: int, lr: float) -> tb.Coupling:
        return tb.Coupling(0.0, self.rate, 1.0, self.rate)


class Bare:
    def coupling(self, step: int, lr: float) -> tb.Coupling:
        return tb.Coupling(0.0, 0.1, 1.0, 0.1)


class WithARate(Bare):
    def __init__(self) -> None:
        self.rate = 0.1


METHODS = {
    "whole numbers": (
        tb.methods.ema(half_life=50),
        "ema(decay=None, half_life=50, half_life_samples=None, batch_size=None, warmup=None, "
        "power=0.6666666666666666, follow='after')",
    ),
    "a dataclass": (Mine(rate=1), "Mine(rate=1, every=1)"),
    "a bare class": (Bare(), f"{Bare.__module__}.Bare"),
    "a class with attributes": (WithARate(), f"{WithARate.__module__}.WithARate"),
}


def small(method: tb.Method, **options: Any) -> tuple[nn.Module, tb.Belay]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    return model, tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), method, **options)


def as_format_1(state: dict[str, Any], text: str) -> dict[str, Any]:
    """The state as version 0.1.0 would have written it: with the method's repr, and buffers in the model's dtype."""
    old = copy.deepcopy(state)
    old["format"] = 1
    for average in old["averages"].values():
        average["methods"] = dict.fromkeys(average["methods"], text)
        average["own_buffers"] = int(average["own_buffers"] != 0)
    facts = [fact if "=" in fact[:8] else f"'average': {text} in float32" for fact in state["made_with"]]
    old["made_with"] = dict.fromkeys(facts, 1)
    return old


@pytest.mark.parametrize(("method", "text"), METHODS.values(), ids=METHODS)
def test_a_method_is_known_by_the_repr_that_format_1_had(method: tb.Method, text: str) -> None:
    _, belay = small(method)
    old = as_format_1(belay.state_dict(), text)
    old["averages"]["average"]["weights"]["0.weight"].fill_(7.0)
    belay.load_state_dict(old)
    assert bool((belay.average_state_dict()["0.weight"] == 7).all())
    old["averages"]["average"]["methods"]["0.weight"] = text + "?"
    with pytest.raises(ValueError, match=r"the method of '0.weight' in average 'average' differs"):
        belay.load_state_dict(old)


def test_whole_numbers_in_a_directory_of_format_1_are_read_by_way_of_a_file(tmp_path: Path) -> None:
    """Its names have the number as it was written, `half_life=50`; the text of today has 50.0."""
    method, text = METHODS["whole numbers"]
    _, belay = small(method)
    old = as_format_1(belay.state_dict(), text)
    dcp.save({"belay": old}, checkpoint_id=tmp_path / "directory")
    with pytest.raises(BaseException, match=r"Missing key .*half_life=50\.0"):  # torch's CheckpointException
        dcp.load({"belay": belay}, checkpoint_id=tmp_path / "directory")
    dcp_to_torch_save(tmp_path / "directory", tmp_path / "file.pt")
    belay.load_state_dict(torch.load(tmp_path / "file.pt", weights_only=True)["belay"])


@pytest.mark.filterwarnings("ignore:.* will hardly move")  # a bfloat16 average of many steps
@pytest.mark.parametrize("asked", [None, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("way", ["file", "directory"])
def test_averaged_buffers_of_16_bits_are_cast_up(way: str, asked: torch.dtype | None, tmp_path: Path) -> None:
    _, source = small(tb.methods.swa(), buffers="average", dtype=asked)
    old = as_format_1(source.state_dict(), "swa(every=1)")
    kept = asked or torch.float32
    old["made_with"] = {fact.replace("float32", str(kept).removeprefix("torch.")): 1 for fact in old["made_with"]}
    buffers = old["averages"]["average"]["buffers"]
    buffers["1.running_mean"] = torch.full((4,), 0.3, dtype=torch.bfloat16)
    _, belay = small(tb.methods.swa(), buffers="average", dtype=asked)
    if way == "file":
        belay.load_state_dict(old)
    else:
        dcp.save({"belay": old}, checkpoint_id=tmp_path)
        dcp.load({"belay": belay}, checkpoint_id=tmp_path)
    found = belay.state_dict()["averages"]["average"]["buffers"]["1.running_mean"]
    assert found.dtype == kept
    assert torch.equal(found, buffers["1.running_mean"].to(kept))


def test_with_strict_false_it_goes_on_with_another_method(old: dict[str, Any]) -> None:
    run = Run()
    run.model.load_state_dict(old["model"])
    spectators = {"ema": tb.methods.ema(0.99, warmup="ratio"), "swa": tb.methods.swa()}
    run.belay.detach()
    belay = tb.Belay(run.model, run.optimizer, tb.methods.ema(0.9), spectators=spectators, buffers="average")
    with pytest.warns(tb.BelayWarning) as caught:
        belay.load_state_dict(old["belay"], strict=False)
    (said,) = [str(each.message) for each in caught]
    assert "was ema(decay=0.9, …) and is ema(decay=0.99, …)" in said
    assert "'swa'" not in said
    found, saved = belay.state_dict()["averages"], old["belay"]["averages"]
    for name in saved:
        assert differences(found[name]["weights"], saved[name]["weights"], exact=True) == []
        assert found[name]["ages"] == saved[name]["ages"]
        assert [row[2] for row in found[name]["own_buffers"]] == [STEPS, STEPS]
    run.train(range(STEPS, STEPS + 2))
    assert belay.step == STEPS + 2
