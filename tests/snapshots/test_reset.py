"""Averages that begin again, by `reset()`: what is made of the snapshots begins again too."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.recorded_runs import Walk, relative_error
from torchbelay.snapshots import Recorder, folder, synthesize, window
from torchbelay.snapshots.folder import Folder
from torchbelay.snapshots.least_squares import combine_powers

TARGET = tb.methods.ema(half_life=30.0)
EMA = tb.methods.ema(0.9)


def walk(**options: Any) -> Walk:
    return Walk(size=1000, along={"target": TARGET}, **options)


def load(run: Walk, value: float) -> None:
    """Load other weights into the model, and begin again at them."""
    with torch.no_grad():
        run.model.weight.fill_(value)
    run.belay.reset()
    run.points = [run.weight]


def check(run: Walk, folder: Path, *, begin: int) -> None:
    """The target is the average that was trained along, up to the error that is predicted."""
    found = synthesize(folder, TARGET, max_error=0.2)
    assert (found.begin, found.at) == (begin, run.belay.step)
    actual = relative_error(found.state_dict()["weight"], run.average("target"), run.weight)
    assert actual == pytest.approx(found.predicted_error, rel=0.2)
    mean = synthesize(folder, window(10), max_error=0.5)
    actual = relative_error(mean.state_dict()["weight"], torch.stack(run.points[-10:]).mean(0), run.weight)
    assert actual == pytest.approx(mean.predicted_error, rel=0.2)


def resumed(run: Walk, state: dict[str, Any], **options: Any) -> Walk:
    """The run in another process."""
    again = walk(seed=1, **options)
    again.model.load_state_dict(state["model"])
    again.belay.load_state_dict(state["belay"])
    again.points = list(run.points)
    return again


def state_of(run: Walk) -> dict[str, Any]:
    return copy.deepcopy({"model": run.model.state_dict(), "belay": run.belay.state_dict()})


# In one process ------------------------------------------------------------------------------------------------------


def test_weights_that_are_loaded_before_the_first_step_are_the_first_ones(tmp_path: Path) -> None:
    run = walk()
    with run.record(tmp_path, every=20):
        load(run, 1000.0)
        run.steps(40)  # a long average still holds a part of the first weights
    check(run, tmp_path, begin=0)
    (first,) = [each for each in Folder(tmp_path).snapshots if each.is_first]
    with first.open() as file:
        assert torch.equal(file.read("weight"), run.points[0])
    assert Folder(tmp_path).stale == []


@pytest.mark.parametrize("steps", [20, 27], ids=["at a snapshot", "between two"])
def test_after_a_reset_everything_begins_at_the_weights_as_they_were_then(tmp_path: Path, steps: int) -> None:
    run = walk()
    with run.record(tmp_path, every=10):
        run.steps(steps)
        before = run.average("target"), run.weight
        load(run, 1000.0)
        run.steps(35)
    check(run, tmp_path, begin=steps)
    text = f"ema(half_life=30.0) at step {steps + 35} (begun again by reset() at step {steps}) from "
    assert str(synthesize(tmp_path, TARGET, max_error=0.2)).startswith(text)
    if steps == 20:  # the end of what was before it
        old = synthesize(tmp_path, TARGET, at=20, max_error=0.2)
        assert old.begin == 0
        actual = relative_error(old.state_dict()["weight"], *before)
        assert actual == pytest.approx(old.predicted_error, rel=0.2)


def test_several_resets_at_one_step_and_later_leave_the_last(tmp_path: Path) -> None:
    run = walk()
    with run.record(tmp_path, every=10) as made:
        run.steps(15)
        load(run, 1000.0)
        load(run, -500.0)
        made.record()
        load(run, 300.0)
        run.steps(20)
        load(run, 7.0)
        run.steps(25)
    check(run, tmp_path, begin=35)
    assert [(each.start, each.begin) for each in Folder(tmp_path).sessions] == [(0, 0), (15, 15), (35, 35)]
    assert made.recorded == Folder(tmp_path).steps == [0, 10, 15, 20, 30, 35, 40, 50, 60]
    middle = synthesize(tmp_path, TARGET, at=30, max_error=0.2)
    assert {step for _, step in middle.weights} == {15, 20, 30}


def test_what_asks_for_steps_from_before_a_reset_is_refused(tmp_path: Path) -> None:
    run = walk()
    with run.record(tmp_path, every=10):
        run.steps(50)
        load(run, 3.0)
        run.steps(20)
    with pytest.raises(ValueError, match=r"window\(steps=30\) asks .* than the 20 .* since reset\(\) at step 50"):
        synthesize(tmp_path, window(30))
    with pytest.raises(ValueError, match=r"at=55: the averages had begun again by reset\(\) at step 50, .* at=60"):
        synthesize(tmp_path, TARGET, at=55)


def test_a_reset_after_the_last_step_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    run = walk()
    with run.record(tmp_path, every=10):
        run.steps(40)
        wanted, weights = run.average("target"), run.weight
        load(run, 3.0)
    found = synthesize(tmp_path, TARGET, max_error=0.2)
    assert (found.at, found.begin) == (40, 0)
    actual = relative_error(found.state_dict()["weight"], wanted, weights)
    assert actual == pytest.approx(found.predicted_error, rel=0.2)


def test_before_averages_begin_a_reset_counts_too(tmp_path: Path) -> None:
    run = walk(start=15)
    with run.record(tmp_path, every=10):
        run.steps(5)
        load(run, 1000.0)
        run.steps(45)
    found = synthesize(tmp_path, TARGET, max_error=0.5)
    assert found.begin == 5
    rate = 1 - 0.5 ** (1 / 30)
    wanted = run.points[0]
    for point in run.points[1:]:
        wanted = wanted + rate * (point - wanted)
    actual = relative_error(found.state_dict()["weight"], wanted, run.weight)
    assert actual == pytest.approx(found.predicted_error, rel=0.2)


@pytest.mark.parametrize("method", [tb.Spring(k=1.0, m1=20.0, m2=40.0), tb.methods.lookahead(k=5, alpha=0.5)])
def test_a_run_that_is_pulled_begins_again(tmp_path: Path, method: tb.Method) -> None:
    run = walk(method=method)
    with run.record(tmp_path, every=5):
        run.steps(23)
        load(run, 1000.0)
        run.steps(30)
    found = synthesize(tmp_path, TARGET, max_error=0.5)
    assert found.begin == 23
    actual = relative_error(found.state_dict()["weight"], run.average("target"), run.weight)
    assert actual < 3 * found.predicted_error
    own = synthesize(tmp_path, method).state_dict()["weight"]
    torch.testing.assert_close(own, run.average("average"))


def test_a_method_that_needs_learning_rates_has_its_couplings_from_the_reset_on(tmp_path: Path) -> None:
    run = walk(method=tb.methods.schedule_free(0.8))
    with run.record(tmp_path, every=10):
        run.steps(13)
        load(run, 1000.0)
        run.steps(27)
    found = synthesize(tmp_path, tb.methods.schedule_free(0.8))
    assert found.weights["average", 40] == pytest.approx(1.0)
    torch.testing.assert_close(found.state_dict()["weight"], run.average("average"))


def test_power_functions_have_the_published_weights_by_the_time_since_the_reset(tmp_path: Path) -> None:
    run = walk()
    with run.record(tmp_path, every=10, averages=["power_05", "power_10"]):
        run.steps(25)
        load(run, 1000.0)
        run.steps(75)
    found = synthesize(tmp_path, "power_ema(sigma_rel=0.08)", norm="profile", max_error=0.5)
    gamma = {f"power_{100 * s:02.0f}": tb.methods.power_ema(sigma_rel=s).exponent for s in (0.05, 0.10)}
    weights = {key: weight for key, weight in found.weights.items() if key[0] is not None}
    times = [(float(step - 25), gamma[str(name)]) for name, step in weights]
    expected = combine_powers(times, (75.0, tb.methods.power_ema(sigma_rel=0.08).exponent)).weights
    assert list(weights.values()) == pytest.approx(expected.tolist(), abs=1e-12)
    assert min(step for _, step in weights) == 30


def test_optimizers_that_step_unequally_begin_again_by_their_own_counts(tmp_path: Path) -> None:
    model = nn.Module()
    model.often, model.seldom = (nn.Parameter(torch.zeros(3000, dtype=torch.float64)) for _ in range(2))
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in model.parameters()]
    spectators = {**tb.snapshots.defaults(), "target": tb.methods.ema(half_life=10.0)}
    belay = tb.Belay(model, optimizers, tb.methods.ema(0.9), spectators=spectators)
    generator = torch.Generator().manual_seed(0)
    with Recorder(belay, tmp_path, every=6, averages=["average", "power_05", "power_10"]):
        for step in range(1, 151):
            for i, optimizer in ((1, optimizers[1]), (0, optimizers[0])):
                (p,) = optimizer.param_groups[0]["params"]
                p.grad = torch.randn(3000, dtype=torch.float64, generator=generator)
                if i == 0 or step % 3 == 0:
                    optimizer.step()
            if step == 31:
                with torch.no_grad():
                    model.often.fill_(100.0), model.seldom.fill_(-100.0)
                belay.reset()
    found = synthesize(tmp_path, tb.methods.ema(half_life=10.0), max_error=0.5)
    assert found.begin == 31
    wanted, state = belay.average_state_dict("target"), found.state_dict()
    for solution in found.solutions:
        (name,) = solution.names
        actual = relative_error(state[name], wanted[name], model.state_dict()[name])
        assert actual == pytest.approx(solution.predicted_error, rel=0.1)


def test_a_rate_that_was_given_before_a_reset_does_no_harm_after_it(tmp_path: Path) -> None:
    model = nn.Linear(20, 1)
    belay = tb.Belay(model, None, tb.methods.ema(0.9))
    with Recorder(belay, tmp_path, every=5):
        belay.update()
        with pytest.warns(tb.BelayWarning, match="synthesize"):
            belay.update(rate=0.5)
        belay.reset()
        for _ in range(10):
            nn.init.normal_(model.weight)
            belay.update()
    found = synthesize(tmp_path, tb.methods.ema(0.9))
    assert found.weights["average", 12] == pytest.approx(1.0, rel=1e-4)
    torch.testing.assert_close(found.state_dict()["weight"], belay.average_state_dict()["weight"])


@pytest.mark.parametrize("same_recorder", [True, False])
def test_what_was_done_to_averages_before_a_reset_is_known_when_it_is_given_up(
    tmp_path: Path, same_recorder: bool
) -> None:
    """A state from before the reset has averages that their methods do not tell."""
    model = nn.Linear(200, 1).double()
    belay = tb.Belay(model, None, EMA, spectators={**tb.snapshots.defaults(), "changed": EMA, "target": TARGET})
    names = ["average", "changed", *tb.snapshots.defaults()]

    def steps(count: int) -> None:
        for _ in range(count):
            nn.init.normal_(model.weight)
            belay.update()

    made = Recorder(belay, tmp_path, every=2, averages=names)
    steps(3)
    belay.change(tb.methods.ema(0.5), "changed")
    with pytest.warns(tb.BelayWarning, match="synthesize"):
        belay.update(rate=0.5)
    steps(3)
    state = copy.deepcopy((model.state_dict(), belay.state_dict()))
    belay.reset()
    steps(4)
    if not same_recorder:
        made.close()
        spectators = {**tb.snapshots.defaults(), "changed": tb.methods.ema(0.5), "target": TARGET}
        belay.detach()
        belay = tb.Belay(model, None, EMA, spectators=spectators)
    model.load_state_dict(state[0])
    belay.load_state_dict(state[1])
    made = made if same_recorder else Recorder(belay, tmp_path, every=2, averages=names)
    steps(6)
    made.close()
    found = synthesize(tmp_path, TARGET, max_error=0.5)
    assert {key for key in found.weights if key[0] in ("average", "changed")} == {("average", 2), ("changed", 2)}
    actual = relative_error(
        found.state_dict()["weight"], belay.average_state_dict("target")["weight"], model.weight.detach()
    )
    assert actual < 3 * found.predicted_error + 1e-9


def test_keep_counts_the_snapshots_and_keeps_the_weights_at_which_they_began(tmp_path: Path) -> None:
    run = walk()
    with run.record(tmp_path, every=5, keep=3) as made:
        run.steps(20)
        load(run, 1000.0)
        run.steps(5)
        made.wait()
        assert Folder(tmp_path).steps == [0, 15, 20, 25]
        assert [each.step for each in Folder(tmp_path).snapshots if each.is_first] == [0, 20]
        run.steps(15)
    assert Folder(tmp_path).steps == [20, 30, 35, 40]
    check(run, tmp_path, begin=20)


@pytest.mark.parametrize("method", [tb.methods.ema(0.9), tb.methods.schedule_free(0.9)], ids=["told", "noted"])
def test_a_reset_goes_through_if_the_folder_is_gone_and_is_recorded_when_it_comes_back(
    tmp_path: Path, method: tb.methods.Method
) -> None:
    folder, aside = tmp_path / "run", tmp_path / "aside"
    run = walk(method=method)
    made = run.record(folder, every=5)
    run.steps(20)
    made.wait()
    folder.rename(aside)
    load(run, 1000.0)
    made._background.wait()  # the next snapshot is to know
    with pytest.warns(tb.BelayWarning, match="a snapshot was not written: FileNotFoundError"):
        run.steps(11)
    with pytest.raises(FileNotFoundError):
        made.wait()
    aside.rename(folder)
    run.steps(20)
    made.close()
    assert [each.begin for each in Folder(folder).sessions] == [0, 20]
    assert Folder(folder).steps == [0, 5, 10, 15, 20, 35, 40, 45, 50, 51]
    assert {step for _, step in synthesize(folder, window(2), max_error=0.9).weights} <= {35, 40, 45, 50, 51}


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), FileNotFoundError(2, "one file was taken away")])
def test_a_folder_that_is_there_and_cannot_be_read_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    run = walk()
    with run.record(tmp_path, every=5) as made:
        run.steps(20)
    snapshots, calls = folder._snapshots, []

    def fail_once(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 3:  # when the session begins
            raise error
        return snapshots(*given)

    monkeypatch.setattr(folder, "_snapshots", fail_once)
    with pytest.raises(type(error)):
        run.record(tmp_path, every=5)
    assert len(calls) == 3
    made = run.record(tmp_path, every=5)
    run.steps(10)
    made.close()
    assert Folder(tmp_path).steps == [0, 5, 10, 15, 20, 25, 30]


def test_a_closed_recorder_does_not_see_a_reset(tmp_path: Path) -> None:
    run = walk()
    made = run.record(tmp_path, every=5)
    run.steps(5)
    made.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    load(run, 1000.0)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert run.belay._reset_observers == ()


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_reset_that_an_earlier_version_recorded_like_any_step_is_known_from_the_averages(
    tmp_path: Path, goes_on: bool
) -> None:
    run = walk()
    with run.record(tmp_path, every=10, weights=True):
        run.steps(25)
        run.belay._reset_observers = ()
        load(run, 1000.0)
        run.steps(20)
    if goes_on:
        run = resumed(run, state_of(run))
        with run.record(tmp_path, every=10):
            run.steps(20)
    found = synthesize(tmp_path, TARGET, max_error=0.2)
    assert min(step for _, step in found.weights) == 30
    actual = relative_error(found.state_dict()["weight"], run.average("target"), run.weight)
    assert actual == pytest.approx(found.predicted_error, rel=0.2)
    with pytest.raises(ValueError, match="predicted error"):
        synthesize(tmp_path, window(run.belay.step - 20))


# After a resume ------------------------------------------------------------------------------------------------------


def test_a_run_that_is_resumed_after_a_reset_began_there(tmp_path: Path) -> None:
    run = walk()
    with run.record(tmp_path, every=10):
        run.steps(25)
        load(run, 1000.0)
        run.steps(8)
    run = resumed(run, state_of(run))
    with run.record(tmp_path, every=10):
        run.steps(20)
    check(run, tmp_path, begin=25)
    assert (None, 25) in synthesize(tmp_path, TARGET, max_error=0.2).weights


@pytest.mark.parametrize("after", [True, False])
def test_a_state_of_the_very_step_of_a_reset_is_known_to_be_of_before_or_after(tmp_path: Path, after: bool) -> None:
    run = walk()
    recorder = run.record(tmp_path, every=10)
    run.steps(25)
    states, points = [state_of(run)], [run.points]
    load(run, 1000.0)
    states, points = [*states, state_of(run)], [*points, run.points]
    run.steps(20)
    recorder.close()
    run.points = points[after]
    run = resumed(run, states[after])
    with run.record(tmp_path, every=10):
        run.steps(30)
    check(run, tmp_path, begin=25 if after else 0)
    weights = synthesize(tmp_path, TARGET, max_error=0.2).weights
    assert ((None, 25) if after else (None, 0)) in weights


def test_a_state_from_before_a_reset_gives_the_reset_up(tmp_path: Path) -> None:
    run = walk()
    recorder = run.record(tmp_path, every=10)
    run.steps(15)
    state, points = state_of(run), list(run.points)
    run.steps(15)
    load(run, 1000.0)
    run.steps(10)
    recorder.close()
    run.points = points
    run = resumed(run, state)
    with run.record(tmp_path, every=10):
        run.steps(35)
    check(run, tmp_path, begin=0)
    assert [(each.start, each.begin) for each in Folder(tmp_path).sessions] == [(0, 0), (15, 0)]


def test_a_reset_that_was_not_recorded_is_known_from_the_averages(tmp_path: Path) -> None:
    run = walk()
    with run.record(tmp_path, every=10):
        run.steps(30)
    run.steps(5)
    load(run, 1000.0)
    run.steps(8)
    run = resumed(run, state_of(run))
    with run.record(tmp_path, every=10):
        run.steps(30)
    check(run, tmp_path, begin=35)
    assert [(each.start, each.begin) for each in Folder(tmp_path).sessions] == [(0, 0), (43, 35)]
    assert synthesize(tmp_path, TARGET, at=30, max_error=0.2).begin == 0


def test_a_reset_that_was_not_recorded_is_known_to_a_second_resume_from_one_state(tmp_path: Path) -> None:
    run = walk()
    with run.record(tmp_path, every=10):
        run.steps(30)
    load(run, 1000.0)
    run.steps(8)
    state, points = state_of(run), list(run.points)
    for _ in range(2):
        run.points = list(points)
        run = resumed(run, state)
        with run.record(tmp_path, every=10):
            run.steps(30)
    check(run, tmp_path, begin=30)


def test_a_reset_after_a_resume_does_not_bring_back_what_was_given_up(
    tmp_path: Path,
) -> None:
    run = walk()
    recorder = run.record(tmp_path, every=10)
    run.steps(20)
    state, points = state_of(run), list(run.points)
    run.steps(2)
    recorder.close()
    run.points = points
    run = resumed(run, state)
    with run.record(tmp_path, every=10):
        run.steps(3)
        before = run.average("target"), run.weight
        load(run, 1000.0)
        run.steps(30)
    check(run, tmp_path, begin=23)
    old = synthesize(tmp_path, TARGET, at=23, max_error=0.5)
    assert {step for _, step in old.weights} == {0, 10, 20}
    assert relative_error(old.state_dict()["weight"], *before) < 2 * old.predicted_error


@pytest.mark.parametrize("before", [0, 12])
def test_what_was_recorded_before_another_runs_state_was_loaded_is_not_used(tmp_path: Path, before: int) -> None:
    run = walk()
    run.steps(25)
    state = state_of(run)
    run = walk(seed=3)  # other first weights
    with run.record(tmp_path, every=10):
        run.steps(before)
        run.model.load_state_dict(state["model"])
        run.belay.load_state_dict(state["belay"])
        run.points = [run.weight]
        run.steps(30)
    found = synthesize(tmp_path, TARGET, max_error=0.2)
    assert min(step for _, step in found.weights) == 30
    actual = relative_error(found.state_dict()["weight"], run.average("target"), run.weight)
    assert actual < 3 * found.predicted_error
