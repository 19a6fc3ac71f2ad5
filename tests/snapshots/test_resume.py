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
    with pytest.raises(ValueError, match=r"not what Recorder\.state_dict"):
        again.load_state_dict({})
    with pytest.raises(ValueError, match="saved after step 99"):
        again.load_state_dict({"low": 99, "runs": {}})
    again.close()
    found = synthesize(tmp_path, window(10), max_error=2.0)
    assert {name for name, step in found.weights if step > 10} == {"power_05", "power_10"}


def gone_back_twice(folder: Path, *, told: bool) -> tuple[float, float]:
    """Go back to step 10, train to 30 once more, then go back to step 23 of the first time; return two errors.

    These are the relative error of an average that is made afterwards, and the one that is predicted.
    """
    first = Walk(size=400)
    recording = first.record(folder, every=5)
    states = {}
    for step in (10, 23, 30):
        first.steps(step - first.belay.step)
        states[step] = state_of(first) | {"recorder": copy.deepcopy(recording.state_dict())}
    recording.close()
    second = resumed(states[10], seed=1, size=400)
    again = second.record(folder, every=5)
    second.steps(20)
    again.close()
    third = resumed(states[23], seed=2, size=400)
    once_more = third.record(folder, every=5)
    if told:
        once_more.load_state_dict(states[23]["recorder"])
        assert [session.start for session in once_more.sessions] == [0, 23]
    third.steps(17)
    once_more.close()
    made = synthesize(folder, window(20), max_error=0.9)
    expected = torch.stack(third.points)[-20:].mean(0)
    return relative_error(made.state_dict()["weight"], expected, third.weight), made.predicted_error


def test_the_recorders_state_says_which_snapshots_lead_to_a_checkpoint(tmp_path: Path) -> None:
    wrong, promised = gone_back_twice(tmp_path / "by the folder", told=False)
    assert wrong > 2 * promised  # the folder knows the second part last, and this checkpoint is not of it
    actual, predicted = gone_back_twice(tmp_path / "told", told=True)
    assert predicted / 2 < actual < 2 * predicted


def test_the_states_of_belay_and_recorder_may_be_loaded_while_recording(tmp_path: Path) -> None:
    run = Walk(size=20)
    with run.record(tmp_path, every=5) as made:
        run.steps(12)
        state = state_of(run) | {"recorder": made.state_dict()}
        run.steps(10)
        run.belay.load_state_dict(state["belay"])
        assert "sessions" not in made.state_dict()  # those of the steps before the load
        made.load_state_dict(state["recorder"])
        run.steps(8)
        assert [session.start for session in made.sessions] == [0, 12]
        assert made.state_dict()["sessions"] == [list(session) for session in made.sessions]
        with pytest.raises(RuntimeError, match=r"load_state_dict\(\) at step 20, and the Recorder began at step 12"):
            made.load_state_dict(state["recorder"])
    assert Folder(tmp_path).steps == [0, 5, 10, 15, 20]


@pytest.mark.parametrize("sessions", [3, ["0-a"], [["0-a", "x"]], [[]], [["a", 0, 0]], [["-1-a", 0, 0]]], ids=repr)
def test_damaged_sessions_are_refused(tmp_path: Path, sessions: Any) -> None:
    run = Walk(size=20)
    made = run.record(tmp_path, every=5)
    run.steps(7)
    before, state = made.sessions, state_of(run)
    run.belay.load_state_dict(state["belay"])
    with pytest.raises(ValueError, match="are not lists of a name and steps"):
        made.load_state_dict(made.state_dict() | {"sessions": sessions})
    assert made.sessions == before
    run.steps(3)  # no session has begun for the state yet: this step begins one
    assert [session.start for session in made.sessions] == [0, 7]
    made.close()


def test_a_state_that_is_saved_right_after_the_belay_loaded_one_can_be_loaded(tmp_path: Path) -> None:
    run = Walk(size=20, method=tb.methods.schedule_free(0.8))
    with run.record(tmp_path, every=5) as made:
        run.steps(7)
        early = state_of(run)
        run.steps(10)
        run.belay.load_state_dict(early["belay"])
        state = made.state_dict()  # nothing that was noted up to step 17 leads to step 7
    again = resumed(early, seed=1, size=20, method=tb.methods.schedule_free(0.8))
    once_more = again.record(tmp_path, every=5)
    once_more.load_state_dict(state)
    again.steps(5)
    once_more.close()
    found = Folder(tmp_path)
    tables = {story.table for each in found.snapshots for story in each.told.stories}
    (table,) = tables - {None}
    assert [session.start for session in found.sessions] == [0, 7]
    assert found.couplings(str(table), 0, 12) is not None


@pytest.mark.parametrize("told", [True, False])
def test_couplings_are_looked_for_in_what_leads_to_the_checkpoint(tmp_path: Path, told: bool) -> None:
    """Not in the part that was recorded last, which ends before the checkpoint; nor in a folder that is empty."""
    options: dict[str, Any] = {"size": 20, "method": tb.methods.schedule_free(0.8), "spectators": {}}
    first = Walk(**options)
    recording = first.record(tmp_path / "one", every=5)
    states = {}
    for step in (3, 23):
        first.steps(step - first.belay.step)
        states[step] = state_of(first) | {"recorder": copy.deepcopy(recording.state_dict())}
    recording.close()
    second = resumed(states[3], seed=1, **options)
    again = second.record(tmp_path / "one", every=5)
    again.load_state_dict(states[3]["recorder"])
    second.steps(6)
    again.close()
    third = resumed(states[23], seed=2, **options)
    once_more = third.record(tmp_path / ("one" if told else "another"), every=5)
    if told:
        once_more.load_state_dict(states[23]["recorder"])
        third.steps(10)
    else:
        with pytest.warns(tb.BelayWarning, match="couplings of steps before 23 of average: schedule_free"):
            third.steps(10)
    once_more.close()
    found = Folder(once_more.folder)
    (story,) = found.snapshots[-1].told.stories
    assert story.table is not None
    assert (found.couplings(story.table, 0, 33) is not None) == told


@pytest.mark.parametrize("what", ["given", "changed"])
def test_what_no_method_tells_is_known_after_a_resume_even_without_a_snapshot_of_it(tmp_path: Path, what: str) -> None:
    model = torch.nn.Linear(200, 1).double()
    points = []

    def attach(main: tb.Method) -> tb.Belay:
        return tb.Belay(model, None, main)

    def update(belay: tb.Belay, rate: float | None = None) -> None:
        torch.nn.init.normal_(model.weight)
        belay.update(rate=rate)
        points.append(model.weight.detach().clone())

    belay = attach(tb.methods.ema(0.9))
    made = Recorder(belay, tmp_path, every=5, weights=True)
    for _ in range(7):
        update(belay)
    if what == "given":
        with pytest.warns(tb.BelayWarning, match="moves 'average'"):
            update(belay, rate=0.5)
    else:
        belay.change(tb.methods.ema(0.8))
        update(belay)
    state = copy.deepcopy((model.state_dict(), belay.state_dict(), made.state_dict()))
    made._end(record=False)  # as a process that was killed
    belay.detach()
    belay = attach(tb.methods.ema(0.9 if what == "given" else 0.8))
    model.load_state_dict(state[0])
    belay.load_state_dict(state[1])
    with Recorder(belay, tmp_path, every=5, weights=True) as again:
        again.load_state_dict(state[2])
        for _ in range(2):
            update(belay)
        assert again.state_dict()["given"] == (what == "given")
        assert again.state_dict()["changed"] == (["average"] if what == "changed" else [])
    found = synthesize(tmp_path, window(4), max_error=1.0)
    assert ("average", 10) not in found.weights
    actual = relative_error(found.state_dict()["weight"], torch.stack(points)[-4:].mean(0), model.weight.detach())
    assert actual < 2 * found.predicted_error


@pytest.mark.parametrize(
    "damage",
    [{"given": "no"}, {"changed": 3}, {"changed": "average"}, {"changed": [1]}, {"low": "x"}, {"runs": {"a": [1]}}],
    ids=repr,
)
def test_a_damaged_state_changes_nothing(tmp_path: Path, damage: dict[str, Any]) -> None:
    run = Walk(size=20)
    with run.record(tmp_path, every=5) as made:
        before = copy.deepcopy(made.state_dict())
        with pytest.raises(ValueError, match=r"not what Recorder\.state_dict\(\) returned"):
            made.load_state_dict(before | {"given": True} | damage)
        assert made.state_dict() == before


def test_a_state_is_not_loaded_into_a_recorder_that_has_ended(tmp_path: Path) -> None:
    run = Walk(size=20)
    made = run.record(tmp_path, every=5)
    with pytest.raises(TypeError, match=r"state=3 is not a dict; give what Recorder\.state_dict\(\) returned"):
        made.load_state_dict(3)  # type: ignore[arg-type]
    state = made.state_dict()
    made.close()
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\) after close\(\): make a new Recorder"):
        made.load_state_dict(state)
