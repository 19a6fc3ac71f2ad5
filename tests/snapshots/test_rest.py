"""What is not trained: right at every step, and written only when it has changed."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchbelay as tb
from torchbelay.snapshots import Recorder, recorder, synthesize
from torchbelay.snapshots.content import tied
from torchbelay.snapshots.folder import Folder
from torchbelay.snapshots.opening import open_checkpoint

EMA = tb.methods.ema(0.9)


class Model(nn.Module):
    """A layer that is trained, a backbone that is not, and a code that changes at every step without an optimizer."""

    def __init__(self, write: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.head = nn.Linear(3, 1)
        self.backbone = nn.Conv2d(2, 2, 3).requires_grad_(False).to(memory_format=torch.channels_last)
        self.code = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self.code)
        return self.head(x)


def add(code: nn.Parameter) -> None:
    code.data.add_(1.0)


def assign(code: nn.Parameter) -> None:
    code.data = code.data + 1.0


def in_place(code: nn.Parameter) -> None:
    code += 1.0


def attach(write: Callable[[nn.Parameter], Any] = add) -> tuple[Model, torch.optim.Optimizer, tb.Belay]:
    torch.manual_seed(0)
    model = Model(write)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=1e-3)
    return model, optimizer, tb.Belay(model, optimizer, EMA)


def train(model: Model, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()


def written(folder: Path) -> dict[int, set[str]]:
    """Return the names in every file of what is not trained, by its step."""
    found = {}
    for path in sorted(folder.glob("*.rest.*")):
        with open_checkpoint(path) as file:
            found[int(path.name.partition(".")[0])] = set(file.names)
    return found


@pytest.mark.parametrize("write", [add, assign, in_place])
def test_what_changes_without_an_optimizer_is_that_of_the_step(tmp_path: Path, write: Any) -> None:
    model, optimizer, belay = attach(write)
    with Recorder(belay, tmp_path, every=20):
        train(model, optimizer, 205)
    for at, step in ((205, 205), (200, 200), (100, 100), (110, 100)):
        made = synthesize(tmp_path, EMA, at=at, max_error=1.0)
        assert made.state_dict()["code"].tolist() == [float(step)] * 3
    state = synthesize(tmp_path, EMA).state_dict()
    assert torch.equal(state["code"], belay.average_state_dict()["code"])
    assert torch.equal(state["backbone.weight"], model.backbone.weight)
    Model(add).load_state_dict(state, strict=True)


def test_what_stays_is_written_once_and_what_changes_alone_is_written_again(tmp_path: Path) -> None:
    model, optimizer, belay = attach()
    with Recorder(belay, tmp_path, every=5):
        train(model, optimizer, 15)
    everything = {"code", "backbone.weight", "backbone.bias"}
    assert written(tmp_path) == {0: everything, 5: {"code"}, 10: {"code"}, 15: {"code"}}


@pytest.mark.parametrize("reset", [True, False])
def test_a_backbone_that_is_loaded_after_the_recorder_was_made_is_written_again_once(
    tmp_path: Path, reset: bool
) -> None:
    model, optimizer, belay = attach(lambda code: None)
    with Recorder(belay, tmp_path, every=5):
        model.backbone.load_state_dict(nn.Conv2d(2, 2, 3).state_dict())
        if reset:
            belay.reset()
        train(model, optimizer, 15)
    weights = {"backbone.weight", "backbone.bias"}
    assert written(tmp_path) == ({0: {"code", *weights}} if reset else {0: {"code", *weights}, 5: weights})
    state = synthesize(tmp_path, EMA, at=10).state_dict()
    assert torch.equal(state["backbone.weight"], model.backbone.weight)
    assert Folder(tmp_path).stale == []


def test_a_parameter_that_leaves_the_optimizer_and_changes_then_is_that_of_the_step(tmp_path: Path) -> None:
    model, _, _ = attach()
    optimizer = torch.optim.SGD([{"params": [model.head.weight]}, {"params": [model.head.bias]}], lr=1e-3)
    belay = tb.Belay(model, optimizer, EMA)
    with Recorder(belay, tmp_path, every=5):
        train(model, optimizer, 10)
        del optimizer.param_groups[1]
        with pytest.warns(tb.BelayWarning, match="taken from"):
            train(model, optimizer, 7)
        model.head.bias.data.fill_(9.0)
        train(model, optimizer, 8)
    assert synthesize(tmp_path, EMA).state_dict()["head.bias"].tolist() == [9.0]
    assert synthesize(tmp_path, EMA, at=15).state_dict()["head.bias"].tolist() != [9.0]
    assert synthesize(tmp_path, EMA, at=10).weights["average", 10] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("trained", ["first", "second"])
@pytest.mark.parametrize("tied_late", [False, True])
def test_what_is_tied_to_a_trained_parameter_by_its_memory_has_its_average(
    tmp_path: Path, trained: str, tied_late: bool
) -> None:
    model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in ("first", "second")})
    if not tied_late:
        model["second"].weight.data = model["first"].weight.data
    optimizer = torch.optim.SGD(model[trained].parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    with Recorder(belay, tmp_path, every=5):
        for step in range(10):
            if tied_late and step == 7:
                other = "second" if trained == "first" else "first"
                model[other].weight.data = model[trained].weight.data
            model[trained].weight.grad = torch.randn(3, 3)
            optimizer.step()
    assert len(written(tmp_path)) == tied_late
    made, wanted = synthesize(tmp_path, EMA).state_dict(), belay.average_state_dict()
    assert list(made) == ["first.weight", "second.weight"]
    for name, value in wanted.items():
        torch.testing.assert_close(made[name], value)


def test_parameters_whose_address_tells_nothing_are_not_taken_for_one() -> None:
    """Of a tensor that another object keeps, and of one whose memory was given back, the address is 0."""
    model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in ("first", "second", "third")})
    model["second"].to("meta")
    model["third"].to("meta")
    trained = {"second.weight": model["second"].weight}
    assert tied(model, trained) == {}


def test_two_records_of_one_step_leave_the_last_values_and_everything_else(tmp_path: Path) -> None:
    model, optimizer, belay = attach()
    made = Recorder(belay, tmp_path, every=5)
    train(model, optimizer, 3)
    model.backbone.bias.data.fill_(4.0)
    made.record()
    model.code.data.fill_(-1.0)
    made.record()
    made.close()
    state = synthesize(tmp_path, EMA).state_dict()
    assert (state["code"].tolist(), state["backbone.bias"].tolist()) == ([-1.0] * 3, [4.0] * 2)
    assert torch.equal(state["backbone.weight"], model.backbone.weight)


def test_of_a_reset_at_a_snapshot_both_sides_have_their_own_values(tmp_path: Path) -> None:
    model, optimizer, belay = attach()
    with Recorder(belay, tmp_path, every=5):
        train(model, optimizer, 10)
        model.code.data.fill_(100.0)
        belay.reset()
        train(model, optimizer, 10)
    assert synthesize(tmp_path, EMA, at=10).state_dict()["code"].tolist() == [10.0] * 3
    assert synthesize(tmp_path, EMA, at=20).state_dict()["code"].tolist() == [110.0] * 3


def test_keep_leaves_what_its_steps_need(tmp_path: Path) -> None:
    model, optimizer, belay = attach()
    with Recorder(belay, tmp_path, every=5, keep=2):
        train(model, optimizer, 12)
        model.backbone.bias.data.fill_(4.0)
        train(model, optimizer, 18)
    assert written(tmp_path).keys() == {0, 15, 25, 30}  # 15 has the backbone's bias
    for at in (25, 30):
        state = synthesize(tmp_path, EMA, at=at).state_dict()
        assert (state["code"].tolist(), state["backbone.bias"].tolist()) == ([float(at)] * 3, [4.0] * 2)
        assert torch.equal(state["backbone.weight"], model.backbone.weight)


def test_a_resumed_run_writes_nothing_twice_and_gives_up_what_it_did_not_come_to(tmp_path: Path) -> None:
    model, optimizer, belay = attach()
    made = Recorder(belay, tmp_path, every=5)
    train(model, optimizer, 12)
    state = copy.deepcopy({"model": model.state_dict(), "belay": belay.state_dict()})
    model.code.data.fill_(500.0)
    model.backbone.bias.data.fill_(500.0)
    train(model, optimizer, 8)
    made.close()
    assert synthesize(tmp_path, EMA).state_dict()["backbone.bias"].tolist() == [500.0] * 2
    model, optimizer, belay = attach()
    model.load_state_dict(state["model"])
    belay.load_state_dict(state["belay"])
    with Recorder(belay, tmp_path, every=5):
        train(model, optimizer, 8)
    assert written(tmp_path) == {
        0: {"code", "backbone.weight", "backbone.bias"}, 5: {"code"}, 10: {"code"}, 15: {"code"}, 20: {"code"},
    }  # fmt: skip
    found = synthesize(tmp_path, EMA).state_dict()
    assert found["code"].tolist() == [20.0] * 3
    assert torch.equal(found["backbone.bias"], model.backbone.bias)


def test_what_could_not_be_written_is_written_with_the_next_snapshot(tmp_path: Path, monkeypatch: Any) -> None:
    model, optimizer, belay = attach(lambda code: None)
    made = Recorder(belay, tmp_path, every=5)
    model.code.data.fill_(3.0)
    write, full = recorder.write, [True]

    def fails(folder: Path, content: Any) -> None:
        if full:
            raise OSError("no space left")
        write(folder, content)

    monkeypatch.setattr(recorder, "write", fails)
    train(model, optimizer, 5)
    made._background.wait()
    full.clear()
    with pytest.warns(tb.BelayWarning, match="no space left"):
        train(model, optimizer, 5)
    made.close()
    assert synthesize(tmp_path, EMA).state_dict()["code"].tolist() == [3.0] * 3


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ["quantized", "wide"])
def test_what_no_file_can_hold_is_refused_before_the_run_is_trained(tmp_path: Path, kind: str) -> None:
    model, optimizer, belay = attach()
    quantized = torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)
    values = quantized if kind == "quantized" else torch.zeros(3, dtype=torch.complex128)
    model.other = nn.Parameter(values, requires_grad=False)
    with pytest.raises(ValueError, match=r"'other' is torch\..* which safetensors cannot hold"):
        Recorder(belay, tmp_path, every=5)
    del model.other
    with Recorder(belay, tmp_path, every=5):
        train(model, optimizer, 5)
    assert synthesize(tmp_path, EMA).state_dict()["code"].tolist() == [5.0] * 3


def test_killed_after_the_first_file_a_recording_can_begin_again(tmp_path: Path) -> None:
    model, optimizer, belay = attach()
    Recorder(belay, tmp_path, every=5).wait()
    (tmp_path / "000000000.weights.safetensors").unlink()  # what is not trained is written first
    with pytest.raises(ValueError, match="holds no snapshots"):
        synthesize(tmp_path, EMA)
    model, optimizer, belay = attach()
    with Recorder(belay, tmp_path, every=5):
        train(model, optimizer, 5)
    assert synthesize(tmp_path, EMA).state_dict()["code"].tolist() == [5.0] * 3
    assert Folder(tmp_path).stale == []


def test_the_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    model, optimizer, belay = attach(lambda code: None)
    with Recorder(belay, tmp_path, every=5):
        train(model, optimizer, 5)
    (path,) = tmp_path.glob("*.rest.*")
    path.rename(tmp_path / "rest.safetensors")
    state = synthesize(tmp_path, EMA).state_dict()
    assert torch.equal(state["backbone.weight"], model.backbone.weight)
    with pytest.raises(ValueError, match="name of a snapshot"):
        synthesize(tmp_path, EMA).save(tmp_path / "rest.safetensors")
    with pytest.raises(ValueError, match="name of a snapshot"):
        synthesize(tmp_path, EMA).save(tmp_path / path.name)
