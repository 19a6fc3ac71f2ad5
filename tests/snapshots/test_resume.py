"""Recording goes on after a resume: in the same folder, without the steps of a part of the run that was given up."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import torchbelay as tb
from helpers.recorded_runs import Walk, relative_error
from torchbelay.snapshots import Recorder, synthesize, window
from torchbelay.snapshots.folder import Folder


def state_of(run: Walk) -> dict[str, Any]:
    return copy.deepcopy({"model": run.model.state_dict(), "belay": run.belay.state_dict(), "points": run.points})


def resumed(state: dict[str, Any], seed: int, **options: Any) -> Walk:
    run = Walk(seed=seed, **options)
    run.model.load_state_dict(state["model"])
    run.belay.load_state_dict(state["belay"])
    run.points = list(state["points"])
    return run


def test_a_resumed_run_goes_on_in_its_folder_and_leaves_the_abandoned_steps_out(tmp_path: Path) -> None:
    first = Walk(size=500)
    recording = first.record(tmp_path, every=10)
    first.steps(25)
    state = state_of(first)
    first.steps(35)
    recording.close()
    assert Folder(tmp_path).steps == [0, 10, 20, 30, 40, 50, 60]
    second = resumed(state, seed=1, size=500)
    again = second.record(tmp_path, every=10)
    assert Folder(tmp_path).steps == [0, 10, 20, 30, 40, 50, 60]  # nothing is lost before there is something new
    second.steps(5)
    again.wait()
    found = Folder(tmp_path)
    assert found.steps == [0, 10, 20, 30]
    assert [session.start for session in found.sessions] == [0, 25]
    assert found.stale == []
    second.steps(20)
    again.close()
    expected = torch.stack(second.points)[-30:].mean(0)
    made = synthesize(tmp_path, window(30), max_error=0.2)
    actual = relative_error(made.state_dict()["weight"], expected, second.weight)
    assert made.predicted_error / 2 < actual < 2 * made.predicted_error


def test_files_of_an_abandoned_session_are_left_out_even_if_they_are_still_there(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Killed after the first new file was written and before the old ones were removed."""
    first = Walk(size=20)
    recording = first.record(tmp_path, every=10)
    first.steps(15)
    state = state_of(first)
    first.steps(45)
    recording.close()
    monkeypatch.setattr(Recorder, "_tidy", lambda self: None)
    second = resumed(state, seed=1, size=20)
    again = second.record(tmp_path, every=10, averages=["power_05"])
    second.steps(5)
    again.wait()
    found = Folder(tmp_path)
    assert found.steps == [0, 10, 20]
    assert len(found.stale) == 2 + 4 * 3
    assert {each.average for each in found.snapshots if each.step == 20} == {"power_05"}
    third = resumed(state, seed=2, size=20)  # and again from the same checkpoint, by a process that knows both
    assert [session.start for session in third.record(tmp_path, every=10).sessions] == [0, 15]


def test_a_state_that_is_loaded_while_recording_begins_a_new_session(tmp_path: Path) -> None:
    run = Walk(size=300)
    made = run.record(tmp_path, every=10)
    run.steps(12)
    state = state_of(run)
    run.steps(30)
    run.model.load_state_dict(state["model"])
    run.belay.load_state_dict(state["belay"])
    run.points = state["points"]
    run.steps(22)
    made.close()
    found = Folder(tmp_path)
    assert found.steps == made.recorded == [0, 10, 20, 30, 34]
    assert [session.start for session in found.sessions] == [0, 12]
    expected = torch.stack(run.points)[-12:].mean(0)
    synthesis = synthesize(tmp_path, window(12), max_error=0.3)
    actual = relative_error(synthesis.state_dict()["weight"], expected, run.weight)
    assert synthesis.predicted_error / 2 < actual < 2 * synthesis.predicted_error


def test_a_run_recorded_from_its_middle_on_is_known_from_its_beginning(tmp_path: Path) -> None:
    run = Walk(size=2000)
    run.steps(50)
    with run.record(tmp_path, every=10):
        run.steps(50)
    found = synthesize(tmp_path, window(20), max_error=0.2)
    assert found.folder.steps == [60, 70, 80, 90, 100]
    expected = torch.stack(run.points)[-20:].mean(0)
    actual = relative_error(found.state_dict()["weight"], expected, run.weight)
    assert actual == pytest.approx(found.predicted_error, rel=0.1)


def test_the_couplings_of_learning_rates_survive_a_resume_with_the_recorders_state(tmp_path: Path) -> None:
    options: dict[str, Any] = {"size": 800, "method": tb.methods.schedule_free(0.8), "spectators": {}}
    first = Walk(**options)
    recording = first.record(tmp_path, every=10)
    first.steps(15)
    state = state_of(first) | {"recorder": recording.state_dict()}
    first.steps(20)
    recording.close()
    second = resumed(state, seed=1, **options)
    again = second.record(tmp_path, every=10)
    again.load_state_dict(state["recorder"])
    second.steps(25)
    again.close()
    found = synthesize(tmp_path, tb.methods.schedule_free(0.8), at=30)
    assert found.weights["average", 30] == pytest.approx(1.0)
    own = Folder(tmp_path)
    (story,) = own.snapshots[-1].told.stories
    assert story.table is not None
    fresh = tb.methods.schedule_free(0.8)
    expected = [fresh.coupling(t, 1.0) for t in range(1, 41)]
    numbers = own.couplings(story.table, 0, 40)
    assert numbers is not None
    assert numbers.tolist() == [[c.a, c.b, c.p, c.q] for c in expected]


def test_without_the_recorders_state_the_gap_is_told_and_the_average_is_not_used(tmp_path: Path) -> None:
    options: dict[str, Any] = {"size": 20, "method": tb.methods.schedule_free(0.8)}
    first = Walk(**options)
    recording = first.record(tmp_path, every=10)
    first.steps(10)
    recording.close()
    first.steps(5)  # not recorded
    second = resumed(state_of(first), seed=1, **options)
    again = second.record(tmp_path, every=10)
    with pytest.warns(tb.BelayWarning, match=r"couplings of steps before 15 of average: schedule_free.* are not known"):
        second.steps(5)
    second.steps(20)
    again.close()
    found = synthesize(tmp_path, window(10), max_error=2.0)
    assert {name for name, step in found.weights if step > 10} == {"power_05", "power_10"}
    with pytest.raises(ValueError, match=r"not what Recorder\.state_dict"):
        again.load_state_dict({})
    with pytest.raises(ValueError, match="saved after step 99"):
        again.load_state_dict({"low": 99, "runs": {}})
