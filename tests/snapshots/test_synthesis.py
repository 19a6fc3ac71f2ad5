"""Synthesis: averages that were not trained along, rebuilt from snapshots, and the errors that were predicted."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.recorded_runs import Walk, relative_error
from helpers.small import batch, same
from torchbelay.physics.method import Method
from torchbelay.snapshots import Recorder, decay, synthesize, window
from torchbelay.snapshots.least_squares import combine_powers
from torchbelay.snapshots.synthesis import synthesize_all

TARGETS: dict[str, Method] = {
    **{f"ema {n}": tb.methods.ema(half_life=float(n)) for n in (10, 20, 40, 80, 120, 200, 350)},
    **{f"power {s}": tb.methods.power_ema(sigma_rel=s) for s in (0.03, 0.07, 0.15, 0.25)},
    "swa": tb.methods.swa(),
    "lagged": tb.methods.ema(half_life=60.0, follow="before"),
    "warm": tb.methods.ema(0.995, warmup="inverse-power"),
}
CUT = {"window 100": window(100), "window 333": window(333), "cosine": decay(200, "cosine")}
CUT |= {"root": decay(300, "1-sqrt"), "linear": decay(77), "cosine, long": decay(800, "cosine")}


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> tuple[Walk, Path]:
    folder = tmp_path_factory.mktemp("walk")
    run = Walk(size=6000, along=TARGETS)
    with run.record(folder, every=50, averages=["power_05", "power_10"]):
        run.steps(1000)
    return run, folder


def truth(run: Walk, name: str) -> torch.Tensor:
    """Return the target, trained along or computed from all points of the run."""
    if name in TARGETS:
        return run.average(name)
    points = torch.stack(run.points)
    n = CUT[name].steps
    if isinstance(CUT[name], window):
        return points[-n:].mean(0)
    x = [k / n for k in range(n)]
    left = {
        "linear": [1 - each for each in x],
        "cosine": [(1 + math.cos(math.pi * each)) / 2 for each in x],
        "1-sqrt": [1 - math.sqrt(each) for each in x],
    }[CUT[name].shape]
    return points[-n - 1] + torch.tensor(left, dtype=torch.float64) @ points[-n - 1 :].diff(dim=0)


@pytest.mark.thorough
@pytest.mark.parametrize("norm", ["updates", "profile"])
def test_on_white_updates_the_error_is_the_predicted_one(walk: tuple[Walk, Path], norm: Any) -> None:
    run, folder = walk
    targets = TARGETS | CUT
    assert len(targets) == 20
    found = synthesize_all(folder, list(targets.values()), norm=norm, max_error=None)
    ratios = {}
    for name, each in zip(targets, found, strict=True):
        assert 1e-6 < each.predicted_error < 0.3
        actual = relative_error(each.state_dict()["weight"], truth(run, name), run.weight)
        ratios[name] = actual / each.predicted_error
    assert all(0.95 < ratio < 1.05 for ratio in ratios.values()), ratios


def test_the_norm_of_updates_has_the_least_predicted_error(walk: tuple[Walk, Path]) -> None:
    _, folder = walk
    for target in (window(333), tb.methods.power_ema(sigma_rel=0.15), tb.methods.ema(half_life=80.0)):
        updates, profile = (synthesize(folder, target, norm=norm) for norm in ("updates", "profile"))
        assert updates.predicted_error < profile.predicted_error < 20 * updates.predicted_error


def test_the_norm_of_profiles_has_the_published_weights_for_power_functions(walk: tuple[Walk, Path]) -> None:
    _, folder = walk
    found = synthesize(folder, "power_ema(sigma_rel=0.08)", norm="profile", at=900)
    gamma = {f"power_{100 * s:02.0f}": tb.methods.power_ema(sigma_rel=s).exponent for s in (0.05, 0.10)}
    weights = {key: weight for key, weight in found.weights.items() if key[1] > 0}
    times = [(float(step), gamma[name]) for name, step in weights]
    expected = combine_powers(times, (900.0, tb.methods.power_ema(sigma_rel=0.08).exponent)).weights
    assert list(weights.values()) == pytest.approx(expected.tolist(), abs=1e-12)
    assert found.weights[None, 0] == 0
    assert len(weights) == 2 * 18


def test_a_step_before_the_last_uses_the_snapshots_up_to_it(walk: tuple[Walk, Path]) -> None:
    run, folder = walk
    found = synthesize(folder, window(200), at=600)
    assert max(step for _, step in found.weights) == 600
    expected = torch.stack(run.points)[401:601].mean(0)
    actual = relative_error(found.state_dict()["weight"], expected, run.points[600])
    assert actual == pytest.approx(found.predicted_error, rel=0.1)


def test_weights_sum_to_one_and_the_average_that_was_recorded_is_found_exactly(walk: tuple[Walk, Path]) -> None:
    run, folder = walk
    found = synthesize(folder, tb.methods.power_ema(sigma_rel=0.05), at=1000)
    assert sum(found.weights.values()) == pytest.approx(1.0, abs=1e-12)
    assert found.weights["power_05", 1000] == pytest.approx(1.0, abs=1e-9)
    assert found.predicted_error < 1e-12
    torch.testing.assert_close(found.state_dict()["weight"], run.average("power_05"), rtol=1e-10, atol=1e-10)


def test_profiles_of_target_and_synthesis_differ_by_the_predicted_error(walk: tuple[Walk, Path]) -> None:
    _, folder = walk
    found = synthesize(folder, window(333))
    target, made = found.profiles()
    assert len(target) == len(made) == 1000
    assert float((made - target).norm() / (target - 1).norm()) == pytest.approx(found.predicted_error, rel=1e-6)


def test_in_float32_rounding_errors_are_part_of_the_prediction(tmp_path: Path) -> None:
    """Updates of a thousandth of a weight. Without that part, some predictions would be 50 times too small."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(2000, generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    targets = {f"{n}": tb.methods.ema(half_life=float(n)) for n in (10, 40, 160, 640)}
    spectators = {**tb.snapshots.defaults(), **targets}
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.99), spectators=spectators)
    with Recorder(belay, tmp_path, every=50, averages=["average", "power_05", "power_10"]):
        for _ in range(2000):
            model.weight.grad = torch.randn(2000, generator=generator)
            optimizer.step()
    for name, target in targets.items():
        found = synthesize(tmp_path, target, max_error=1.0)
        wanted = belay.average_state_dict(name)["weight"].double()
        made = found.state_dict()["weight"].double()
        actual = relative_error(made, wanted, model.weight.detach().double())
        assert found.predicted_error / 5 < actual < 3 * found.predicted_error, name


# A run that is pulled ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        tb.Spring(k=1.0, m1=20.0, m2=40.0),
        tb.Spring(k=1.0, m1=20.0, m2=40.0, c1=5.0, c2=10.0),
        tb.methods.lookahead(k=5, alpha=0.5),
        tb.methods.centred(theta=-0.5, rate=0.05),
        tb.methods.switch_ema(0.9, every=10),
    ],
    ids=lambda m: type(m).__name__,
)
def test_averages_of_a_run_that_is_pulled_are_rebuilt(tmp_path: Path, method: Method) -> None:
    """The average that pulls serves as a basis, too: with it alone, an unrelated one is found within the prediction."""
    run = Walk(method, size=2000, along={"long": tb.methods.ema(half_life=50.0)}, spectators={})
    with run.record(tmp_path, every=10):
        run.steps(300)
    found = synthesize(tmp_path, tb.methods.ema(half_life=50.0), max_error=0.9)
    actual = relative_error(found.state_dict()["weight"], run.average("long"), run.weight)
    assert actual == pytest.approx(found.predicted_error, rel=0.06)
    own = synthesize(tmp_path, method, at=290)
    assert own.predicted_error < 1e-9
    assert own.weights["average", 290] == pytest.approx(1.0)


def test_belays_own_average_is_found_at_a_step_without_a_snapshot(tmp_path: Path) -> None:
    spring = tb.Spring(k=1.0, m1=50.0, m2=20.0)
    run = Walk(spring, size=2000)
    recorder = run.record(tmp_path, every=20)
    run.steps(200)
    expected = run.average("average")
    run.steps(7)
    between, points = run.average("average"), run.weight
    run.steps(13)
    recorder.close()
    found = synthesize(tmp_path, spring, at=200)
    torch.testing.assert_close(found.state_dict()["weight"], expected, rtol=1e-9, atol=1e-9)
    late = synthesize(tmp_path, spring, at=207, max_error=0.9)  # the last updates are in no snapshot
    actual = relative_error(late.state_dict()["weight"], between, points)
    assert late.predicted_error > 0.03
    assert actual == pytest.approx(late.predicted_error, rel=0.2)


def test_a_method_that_pulls_and_was_not_part_of_the_run_gets_the_same_updates(tmp_path: Path) -> None:
    """On white noise gradients do not depend on weights: the run with BELAY is the one that is asked for."""
    spring = tb.Spring(k=1.0, m1=60.0, m2=30.0)
    run, other = Walk(size=1000), Walk(spring, size=1000)
    with run.record(tmp_path, every=10):
        run.steps(200)
    other.steps(200)
    with pytest.warns(tb.BelayWarning, match="pulls the weights and was not part of this run"):
        found = synthesize(tmp_path, spring, max_error=0.1)
    actual = relative_error(found.state_dict()["weight"], other.average("average"), other.weight)
    assert found.predicted_error < 0.01
    assert actual == pytest.approx(found.predicted_error, rel=0.1)


def test_a_method_that_depends_on_the_learning_rate_is_known_by_its_history(tmp_path: Path) -> None:
    run = Walk(tb.methods.schedule_free(0.8), size=1500, along={"swa": tb.methods.swa()}, spectators={})
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda k: min(1.0, (k + 1) / 20))
    with run.record(tmp_path, every=10):
        for _ in range(120):
            run.steps(1)
            schedule.step()
    found = synthesize(tmp_path, tb.methods.schedule_free(0.8), at=110)
    assert found.weights["average", 110] == pytest.approx(1.0)
    mean = synthesize(tmp_path, tb.methods.swa(), max_error=0.5)
    actual = relative_error(mean.state_dict()["weight"], run.average("swa"), run.weight)
    assert actual < 3 * mean.predicted_error < 0.6
    with pytest.raises(ValueError, match="depend on the learning rate"):
        synthesize(tmp_path, tb.methods.heavy_ball(0.9))


class Mine:
    """A method of one's own, of which a checkpoint could only tell the name."""

    varies = "step"

    def __init__(self) -> None:
        self.rate = lambda step: 0.2 if step % 3 else 0.05

    def coupling(self, step: int, lr: float) -> tb.Coupling:
        return tb.Coupling(0.0, self.rate(step), 1.0, self.rate(step))


class Unsaid(Mine):
    """It does not say when it varies, and is asked at every step."""

    varies = "unsaid"


@pytest.mark.parametrize("kind", [Mine, Unsaid])
def test_a_method_of_ones_own_is_known_by_its_history(tmp_path: Path, kind: type[Mine]) -> None:
    run = Walk(size=1000, spectators={"mine": kind()}, along={"short": tb.methods.ema(0.9)})
    with run.record(tmp_path, every=4, averages=["mine"], weights=True):
        run.steps(80)
    found = synthesize(tmp_path, tb.methods.ema(0.9), max_error=0.5)
    actual = relative_error(found.state_dict()["weight"], run.average("short"), run.weight)
    assert actual == pytest.approx(found.predicted_error, rel=0.1)
    assert {story.method for each in found.folder.snapshots for story in each.told.stories} == {kind.__name__}


# Refusals ------------------------------------------------------------------------------------------------------------


def test_a_target_that_is_predicted_badly_is_refused_with_the_number_and_the_cure(walk: tuple[Walk, Path]) -> None:
    _, folder = walk
    with pytest.raises(
        ValueError, match=r"error of ema\(half_life=2.0\) at step 1000 is 1\.\d of .*max_error=0.01: record more"
    ):
        synthesize(folder, tb.methods.ema(half_life=2.0))
    with pytest.raises(ValueError, match=r"choose at=1000, which has snapshots"):
        synthesize(folder, window(100), at=980)
    assert synthesize(folder, tb.methods.ema(half_life=2.0), max_error=2.0).predicted_error > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"at": 1001}, "at=1001: the snapshots in .* are of the steps 0 to 1000"),
        ({"at": 0}, "at=0"),
        ({"at": 2.5}, "at=2.5"),
        ({"norm": "l1"}, "norm='l1'"),
        ({"max_error": -1.0}, "max_error=-1.0"),
        ({"max_error": math.nan}, "max_error=nan"),
    ],
)
def test_bad_arguments_are_refused_by_name(walk: tuple[Walk, Path], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        synthesize(walk[1], window(10), **arguments)


def test_a_folder_without_snapshots_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no snapshots"):
        synthesize(tmp_path, window(10))
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        synthesize(tmp_path / "nothing", window(10))


def test_saving_that_is_stopped_leaves_the_old_file(walk: tuple[Walk, Path], tmp_path: Path) -> None:
    found = synthesize(walk[1], window(100))
    path = tmp_path / "average.safetensors"
    path.write_text("old")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        found.save(path, progress=stop)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_progress_counts_the_bytes_that_are_read(walk: tuple[Walk, Path], tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    found = synthesize(walk[1], window(100))
    found.save(tmp_path / "average.safetensors", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (41 * 6000 * 8, 41 * 6000 * 8)


def test_nothing_warns_or_depends_on_the_default_dtype(walk: tuple[Walk, Path]) -> None:
    _, folder = walk
    expected = synthesize(folder, window(333))
    torch.set_default_dtype(torch.float16)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = synthesize(folder, window(333))
        assert found.weights == expected.weights
        assert found.state_dict()["weight"].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert "window(333) at step 1,000 from 41 snapshots: predicted error" in str(found)


def test_batches_are_those_of_the_helpers() -> None:
    """The training of the tests is the same at every run, so that its numbers are."""
    assert same(batch(3), batch(3))
