"""A training: the loss falls, and after any interruption the run continues bit for bit."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from helpers import score_command
from helpers.problems import different, everything
from helpers.score_models import EDM_PRESET, NCSN_PRESET, squares
from torchbelay.lab import records
from torchbelay.lab.part import LabError, Record
from torchbelay.lab.score import data
from torchbelay.lab.score.training import folder as folder_module
from torchbelay.lab.score.training import train
from torchbelay.lab.score.training.budget import Budget, Plan, Speed
from torchbelay.lab.score.training.folder import Folder
from torchbelay.lab.score.training.presets import Preset
from torchbelay.lab.score.training.request import TrainingRequest
from torchbelay.lab.score.training.training_run import TrainingRun

FILES = {"options.json", "stats.jsonl", "checkpoint.pt", "samples.png"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which data sets were loaded; all of them are made up."""
    names: list[str] = []

    def load(name: str, path: Path | None) -> data.Images:
        names.append(name)
        return squares((1, 28, 28) if name == "mnist" else (1, 8, 8))

    monkeypatch.setattr(data, "load", load)
    monkeypatch.setattr(train, "MEASURE_S", 0.1)
    return names


EDM_SMALL = replace(EDM_PRESET, dataset="cifar10")  # its images are of another size
PRESETS = {"ncsn": NCSN_PRESET, "edm": EDM_SMALL}


class Outcome:
    """A run that has ended: what it printed, what it wrote."""

    def __init__(self, preset: Preset, out: Path, **options: Any) -> None:
        console = Console(file=io.StringIO(), width=200)
        self.folder = Folder(out)
        try:
            self.status = train.train(TrainingRequest(preset, out, device="cpu", **options), console)
        finally:
            self.printed = console.file.getvalue()  # type: ignore[attr-defined]

    @property
    def stats(self) -> list[Record]:
        return [json.loads(line) for line in self.folder.stats.read_text().splitlines()]

    @property
    def untimed(self) -> list[Record]:
        return [records.without_times(line) for line in self.stats]

    def everything(self) -> dict[str, Any]:
        """All that the checkpoint holds but times."""
        state = self.folder.load()
        assert state is not None
        del state["wall_s"]
        return everything(checkpoint=_State(state))


class _State:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state_dict = lambda: state


def at_run(monkeypatch: pytest.MonkeyPatch, step: int, what: Callable[[TrainingRun], object]) -> None:
    """Let something happen to a run right after a step."""
    take = TrainingRun.advance

    def advance(run: TrainingRun) -> None:
        take(run)
        if run.step == step:
            what(run)

    monkeypatch.setattr(TrainingRun, "advance", advance)


def at(monkeypatch: pytest.MonkeyPatch, step: int, what: Callable[[], object]) -> None:
    """Let something happen right after a step."""
    at_run(monkeypatch, step, lambda _: what())


# Learning -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_the_loss_falls(name: str, tmp_path: Path, loaded: list[str]) -> None:
    preset = replace(PRESETS[name], images=40 * PRESETS[name].batch, lr=3e-3)
    outcome = Outcome(preset, tmp_path / "run", every=20)
    assert outcome.status == 0
    assert loaded == [preset.dataset]
    half, end = outcome.stats
    assert (half["step"], end["step"], end["images"]) == (20, 40, preset.images)
    assert end["loss"] < half["loss"]
    for weights in ("w1", "w2"):
        for part in ("train", "test"):
            assert end[weights][part] < half[weights][part]
    assert end["w1"]["train"] < 0.9 * half["loss"]
    assert end["wall_s"] > half["wall_s"] > 0
    assert end["images_per_s"] > 0
    assert {path.name for path in (tmp_path / "run").iterdir()} == FILES


def test_everything_is_written_down(tmp_path: Path) -> None:
    outcome = Outcome(EDM_SMALL, tmp_path, seed=3, lr=2e-3, every=10)
    options = json.loads(outcome.folder.options.read_text())
    assert (options["preset"], options["seed"], options["lr"], options["budget"]) == ("tiny-edm", 3, 2e-3, None)
    resolved = options["resolved"]
    assert (resolved["steps"], resolved["images"], resolved["every"], resolved["batch"]) == (16, 128, 10, 8)
    assert (resolved["method"], resolved["inner_lr"]) == (repr(EDM_PRESET.spring), 2e-3)
    assert resolved["beta1"] == 0.9
    assert resolved["model"] == "edm"
    assert options["versions"]["torch"] == torch.__version__
    assert [line["step"] for line in outcome.stats] == [10, 16]
    assert "step 16 of 16" in outcome.printed
    assert outcome.folder.samples.read_bytes().startswith(b"\x89PNG")


def test_the_learning_rate_grows_over_the_ramp(tmp_path: Path) -> None:
    outcome = Outcome(EDM_SMALL, tmp_path, every=1)  # 25% of 16 steps
    assert [line["lr"] for line in outcome.stats][:6] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])
    state = outcome.folder.load()
    assert state is not None
    assert state["trainee"]["optimizer"]["param_groups"][0]["lr"] == 1e-3


def test_seeds_differ_and_the_same_seed_does_not(tmp_path: Path) -> None:
    one, again, other = (
        Outcome(replace(EDM_SMALL, images=24), tmp_path / name, seed=seed)
        for name, seed in (("one", 0), ("again", 0), ("other", 1))
    )
    assert different(one.everything(), again.everything()) == []
    assert one.untimed == again.untimed
    assert one.untimed[0]["w1"] != other.untimed[0]["w1"]


def test_a_report_has_the_mean_of_the_steps_since_the_last_one(whole: "dict[str, Outcome]", tmp_path: Path) -> None:
    each = [line["loss"] for line in Outcome(EDM_SMALL, tmp_path, every=1).stats]
    means = [math.fsum(each[begin : begin + 4]) / 4 for begin in range(0, 16, 4)]
    assert [line["loss"] for line in whole["edm"].stats] == pytest.approx(means, rel=1e-4)
    assert [line["step"] for line in whole["edm"].stats] == [4, 8, 12, 16]


# Stopping and going on ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Runs without an interruption."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "load", lambda name, path: squares((1, 28, 28) if name == "mnist" else (1, 8, 8)))
        return {
            name: Outcome(preset, tmp_path_factory.mktemp(name) / "run", every=4) for name, preset in PRESETS.items()
        }


@pytest.mark.parametrize(
    ("name", "step", "which"),
    [
        ("ncsn", 6, signal.SIGINT),
        ("edm", 1, signal.SIGINT),
        ("edm", 3, signal.SIGTERM),
        ("edm", 8, signal.SIGINT),
        ("edm", 13, signal.SIGINT),
    ],
)
def test_a_signal_stops_it_after_the_step_and_it_goes_on_bit_for_bit(
    name: str,
    step: int,
    which: signal.Signals,
    whole: dict[str, Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        at(patch, step, lambda: signal.raise_signal(which))
        first = Outcome(PRESETS[name], tmp_path, every=4)
    assert first.status == 128 + which
    assert f"stopped after step {step} of" in first.printed
    assert "the same command goes on" in first.printed
    assert first.folder.step() == step
    assert not first.folder.samples.exists()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers

    second = Outcome(PRESETS[name], tmp_path, every=4)
    assert second.status == 0
    assert different(second.everything(), whole[name].everything()) == []
    assert second.untimed == whole[name].untimed
    assert second.folder.samples.read_bytes() == whole[name].folder.samples.read_bytes()
    walls = [line["wall_s"] for line in second.stats]
    assert walls == sorted(walls)


def test_after_a_crash_it_goes_on_from_the_checkpoint_and_reports_again_what_came_after(
    whole: dict[str, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash() -> None:
        raise RuntimeError("the power fails")

    with monkeypatch.context() as patch:
        at(patch, 5, lambda: signal.raise_signal(signal.SIGINT))
        Outcome(EDM_SMALL, tmp_path, every=4)  # a checkpoint of step 5
        at(patch, 9, crash)
        with pytest.raises(RuntimeError, match="the power fails"):
            Outcome(EDM_SMALL, tmp_path, every=4)  # which gets as far as the report of step 8
    assert Folder(tmp_path).step() == 5
    assert [json.loads(line)["step"] for line in Folder(tmp_path).stats.read_text().splitlines()] == [4, 8]
    last = Outcome(EDM_SMALL, tmp_path, every=4)
    assert different(last.everything(), whole["edm"].everything()) == []
    assert last.untimed == whole["edm"].untimed


def test_checkpoints_on_the_way_change_nothing(whole: dict[str, Outcome], tmp_path: Path) -> None:
    often = Outcome(EDM_SMALL, tmp_path, every=4, checkpoint_s=0.0)
    assert different(often.everything(), whole["edm"].everything()) == []
    assert often.untimed == whole["edm"].untimed


@pytest.mark.parametrize("forgotten", ["batches", "dice", "total", "belay", "optimizer"])
def test_the_comparison_notices_what_a_checkpoint_forgets(
    forgotten: str, whole: dict[str, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this the tests above could pass for a run whose parts have no say."""
    with monkeypatch.context() as patch:
        at(patch, 6, lambda: signal.raise_signal(signal.SIGINT))
        first = Outcome(EDM_SMALL, tmp_path, every=4)
    state, fresh = first.folder.load(), Outcome(replace(EDM_SMALL, images=16), tmp_path / "fresh").folder.load()
    assert state is not None
    assert fresh is not None
    if forgotten in ("dice", "total"):
        state["ranks"][0][forgotten] = fresh["ranks"][0][forgotten]
    elif forgotten in ("belay", "optimizer"):
        state["trainee"][forgotten] = fresh["trainee"][forgotten]
        state["trainee"]["belay"]["made_with"] = first.folder.load()["trainee"]["belay"]["made_with"]  # type: ignore[index]
    else:
        state[forgotten] = fresh[forgotten]
    first.folder.save(state)
    second = Outcome(EDM_SMALL, tmp_path, every=4)
    assert second.untimed != whole["edm"].untimed


def test_a_finished_run_says_so_and_does_nothing(tmp_path: Path, loaded: list[str]) -> None:
    preset = replace(EDM_SMALL, images=16)
    Outcome(preset, tmp_path)
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()}
    again = Outcome(preset, tmp_path)
    assert (again.status, loaded) == (0, ["cifar10"])
    assert again.printed == f"{tmp_path} is finished: 2 steps\n"
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()} == before


def test_pictures_that_are_missing_at_the_end_are_made(tmp_path: Path) -> None:
    preset = replace(EDM_SMALL, images=16)
    first = Outcome(preset, tmp_path)
    picture, checkpoint = first.folder.samples.read_bytes(), first.folder.checkpoint.read_bytes()
    first.folder.samples.unlink()
    again = Outcome(preset, tmp_path)
    assert again.folder.samples.read_bytes() == picture
    assert again.folder.checkpoint.read_bytes() == checkpoint
    assert len(again.stats) == 2


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seed": 1}, "--seed 0, not --seed 1"),
        ({"lr": 0.5}, "no --lr, not --lr 0.5"),
        ({"every": 5}, "--every 1, not --every 5"),
        ({"budget": Budget.parse("32img")}, "no --budget, not --budget 32img"),
        ({"budget": Budget.parse("1h")}, "no --budget, not --budget 1h"),
        ({"compile": True}, "no --compile, not --compile"),
    ],
)
def test_other_options_for_the_same_folder_are_refused(
    changed: dict[str, Any], said: str, tmp_path: Path, loaded: list[str]
) -> None:
    Outcome(replace(EDM_SMALL, images=16), tmp_path, every=1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(LabError) as error:
        Outcome(replace(EDM_SMALL, images=16), tmp_path, **({"every": 1} | changed))
    assert f"was begun with {said};" in str(error.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert len(loaded) == 1


def test_a_preset_that_means_something_else_now_is_refused(tmp_path: Path) -> None:
    Outcome(replace(EDM_SMALL, images=16), tmp_path)
    with pytest.raises(LabError, match=r"has changed: ramp was 0\.25, and is 0\.5 now"):
        Outcome(replace(EDM_SMALL, images=16, ramp=0.5), tmp_path)


def test_what_does_not_change_the_numbers_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        at(patch, 1, lambda: signal.raise_signal(signal.SIGINT))
        Outcome(replace(EDM_SMALL, images=16), tmp_path)
    assert (
        Outcome(replace(EDM_SMALL, images=16), tmp_path, keep_going=True, checkpoint_s=9.0, data=Path("x")).status == 0
    )


# Budgets --------------------------------------------------------------------------------------------------------------


def test_a_budget_of_images_scales_the_run(tmp_path: Path) -> None:
    outcome = Outcome(EDM_SMALL, tmp_path, budget=Budget.parse("64img"))
    resolved = json.loads(outcome.folder.options.read_text())["resolved"]
    assert (resolved["steps"], resolved["images"]) == (8, 64)
    assert resolved["method"] == "Spring(k=1.0, m1=20.0, m2=5.0)"
    assert outcome.stats[0]["lr"] == pytest.approx(1e-3 / 2)  # the ramp has 2 steps


def test_a_budget_of_time_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[float] = []
    measure = Plan.fit_time

    def within(seconds: float, speed: Speed, *rest: Any, **options: Any) -> Plan:
        measured.append(seconds)
        assert 0 < speed.step_s < 5
        assert 0 < speed.report_s < 5
        measure(3600.0, speed, *rest, **options)  # whatever was measured, it fits an hour
        return measure(seconds, Speed(0.2, 0.01), *rest, **options)

    monkeypatch.setattr(Plan, "fit_time", within)
    with monkeypatch.context() as patch:
        patch.setattr(train.TrainingLoop, "run_to_end", lambda _: 130)
        first = Outcome(EDM_SMALL, tmp_path, budget=Budget.parse("2s"))
    resolved = json.loads(first.folder.options.read_text())["resolved"]
    assert (first.status, resolved["steps"]) == (130, 9)
    second = Outcome(EDM_SMALL, tmp_path, budget=Budget.parse("2s"))
    assert (second.status, measured) == (0, [2.0])
    assert second.stats[-1]["step"] == 9
    assert json.loads(second.folder.options.read_text())["resolved"] == resolved


def test_measuring_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.make(EDM_SMALL, images=40)
    monkeypatch.setattr(Plan, "fit_time", lambda *_, **__: plan)
    timed = Outcome(EDM_SMALL, tmp_path / "timed", budget=Budget.parse("2s"))
    counted = Outcome(EDM_SMALL, tmp_path / "counted", budget=Budget.parse("40img"))
    assert different(timed.everything(), counted.everything()) == []
    assert timed.untimed == counted.untimed


# What goes wrong ------------------------------------------------------------------------------------------------------


def fill(run: TrainingRun) -> None:
    with torch.no_grad():
        next(run.learner.network.parameters()).fill_(math.nan)


def spoil(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make the loss NaN from the next step on."""
    at_run(monkeypatch, step, fill)


def test_a_loss_that_is_not_finite_stops_the_run_and_the_last_good_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_run(monkeypatch, 6, lambda run: run.learner._total.fill_(math.nan))
    with pytest.raises(LabError) as error:
        Outcome(EDM_SMALL, tmp_path, every=4, checkpoint_s=0.0)
    assert str(error.value) == (
        "the loss is not finite after step 6, and the checkpoint of step 5 is kept; try a lower --lr with another "
        "--out, or let this one go on with --keep-going"
    )
    assert Folder(tmp_path).step() == 5


def spoil_average(run: TrainingRun) -> None:
    list(run.learner.belay.state_dict()["averages"]["average"]["weights"].values())[-1].view(-1)[-1] = math.inf


@pytest.mark.parametrize("bad", ["weights", "average"])
@pytest.mark.parametrize("step", [6, 16])
def test_weights_that_are_not_finite_are_not_saved_although_the_loss_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str, step: int
) -> None:
    at_run(monkeypatch, step, fill if bad == "weights" else spoil_average)
    with pytest.raises(LabError) as error:
        Outcome(EDM_SMALL, tmp_path, every=4, checkpoint_s=0.0)
    assert str(error.value).startswith(
        f"weights are not finite after step {step}, and the checkpoint of step {step - 1} is kept; try a lower --lr"
    )
    assert Folder(tmp_path).step() == step - 1
    assert not Folder(tmp_path).samples.exists()


def test_weights_that_are_not_finite_are_saved_with_keep_going(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_run(monkeypatch, 16, fill)
    outcome = Outcome(EDM_SMALL, tmp_path, every=4, keep_going=True)
    assert (outcome.status, outcome.folder.step()) == (0, 16)
    state = outcome.folder.load()
    assert state is not None
    assert any(w.isnan().any() for w in state["trainee"]["network"].values())


def test_a_report_says_that_the_loss_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, 6)
    with pytest.raises(LabError, match="after step 8, and there is no checkpoint yet; try"):
        Outcome(EDM_SMALL, tmp_path, every=4)
    lines = [json.loads(line) for line in Folder(tmp_path).stats.read_text().splitlines()]
    assert [(line["step"], line["loss"] is None) for line in lines] == [(4, False), (8, True)]
    assert lines[-1]["w1"] == {"train": None, "test": None}


def test_with_keep_going_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, 6)
    outcome = Outcome(EDM_SMALL, tmp_path, every=4, keep_going=True)
    assert outcome.status == 0
    assert outcome.printed.count("the loss is not finite any more; going on") == 1
    assert [line["loss"] is None for line in outcome.stats] == [False, True, True, True]


def test_without_data_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise LabError("no data")

    monkeypatch.setattr(data, "load", load)
    with pytest.raises(LabError, match="no data"):
        Outcome(EDM_SMALL, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("device", ["gpu", "mps", "cuda:99"])
def test_a_device_that_is_none_is_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(LabError, match=rf"^--device '{device}'.*cpu$"):
        train.train(TrainingRequest(EDM_SMALL, tmp_path / "run", device=device), Console(quiet=True))
    assert not (tmp_path / "run").exists()


# In a process of its own, with signals that come when they come -------------------------------------------------------


def started(
    out: Path, *arguments: str, hold: int = 0, deaf: bool = False, marks: Path | str = ""
) -> "subprocess.Popen[str]":
    """Start the command; after the step `hold` it waits for a signal, or, if it is deaf, for ever."""
    paths = [str(Path(score_command.__file__).parents[1]), *sys.path]
    environment = os.environ | {
        "TINY_HOLD": str(hold),
        "TINY_DEAF": "1" if deaf else "",
        "TINY_MARKS": str(marks),
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",
    }
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    line = [
        sys.executable,
        score_command.__file__,
        "train",
        "tiny-edm",
        "--out",
        str(out),
        "--device",
        "cpu",
        *arguments,
    ]
    return subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def until(what: Callable[[], object], process: "subprocess.Popen[str]") -> None:
    while not what():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
def test_ctrl_c_and_kill_in_a_real_process(tmp_path: Path, whole: dict[str, Outcome]) -> None:
    folder = Folder(tmp_path / "run")
    process = started(folder.path, "--every", "4", hold=6, marks=tmp_path)
    until((tmp_path / "step6").exists, process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, err) == (130, "")
    assert "the same command goes on" in out
    assert folder.step() == 6
    assert len(folder.stats.read_text().splitlines()) == 1

    process = started(folder.path, "--every", "4", "--checkpoint", "0", hold=11, marks=tmp_path)
    until(lambda: folder.step() == 10, process)  # whatever is there can be read
    until((tmp_path / "step11").exists, process)
    process.kill()
    process.communicate()
    assert folder_module.fcntl is None or folder.lock.exists()  # but no process holds it any more
    (folder.path / ".checkpoint.pt.0123abcd.tmp").touch()  # had it been killed while writing
    assert folder.step() == 10

    process = started(folder.path, "--every", "4")
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert {path.name for path in folder.path.iterdir()} == FILES
    state = folder.load()
    assert state is not None
    del state["wall_s"]
    assert different(everything(checkpoint=_State(state)), whole["edm"].everything()) == []
    lines = [records.without_times(json.loads(line)) for line in folder.stats.read_text().splitlines()]
    assert lines == whole["edm"].untimed


@pytest.mark.slow
@pytest.mark.skipif(folder_module.fcntl is None, reason="this system has no such locks")
def test_a_second_process_in_the_same_folder_is_refused(tmp_path: Path, loaded: list[str]) -> None:
    folder = Folder(tmp_path / "run")
    process = started(folder.path, "--every", "4", hold=1, marks=tmp_path)
    until((tmp_path / "step1").exists, process)
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    said = f"another process trains in {folder.path}; wait until it ends, or choose another --out"
    with pytest.raises(LabError) as error:
        Outcome(EDM_SMALL, folder.path, every=4)
    assert (str(error.value), loaded) == (said, [])
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before
    process.kill()
    process.communicate()
    with folder.locked():  # as soon as it is dead
        pass


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    process = started(folder.path, "--every", "1", hold=1, deaf=True, marks=tmp_path)  # a step that takes long
    until((tmp_path / "step1").exists, process)
    os.killpg(process.pid, signal.SIGINT)
    until((tmp_path / "signal").exists, process)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    said = "ended at once; the last checkpoint is kept, and the same command goes on from it"
    assert err == f"torchbelay train: {said}\n"
    assert not folder.checkpoint.exists()


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK"])
def test_an_environment_that_no_torchrun_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(name, "two")
    with pytest.raises(LabError, match=rf"^the environment has {name}='two', which is not a number; unset it, or"):
        Outcome(EDM_SMALL, tmp_path / "run")
