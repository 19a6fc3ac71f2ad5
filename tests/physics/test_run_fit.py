"""The quadratic behind a run, from runs whose quadratic is known."""

from statistics import median

import numpy as np
import pytest

from helpers.spectra import best_of_grid, losses, random_cases
from torchbelay.physics.coupling import watch
from torchbelay.physics.quadratics import Quadratic
from torchbelay.physics.recommend import recommend
from torchbelay.physics.run_fit import _curves, fit_run

DECAY, MINIMUM = 0.99, 0.3


def reports(problem: Quadratic, lr: float, steps: list[int]) -> list[dict[str, float]]:
    """The expected losses of a run with an EMA, step by step in numpy."""
    states = [(np.ones(2), np.zeros((2, 2))) for _ in problem.directions]
    found = []
    for t in range(steps[-1] + 1):
        if t in steps:
            w1 = w2 = MINIMUM
            for (mean, moments), (h, n, start, noise) in zip(states, problem.directions, strict=True):
                w1 += n * h * (start * mean[0] ** 2 + noise * lr**2 * moments[0, 0]) / 2
                w2 += n * h * (start * mean[1] ** 2 + noise * lr**2 * moments[1, 1]) / 2
            found.append({"step": t, "lr": lr, "w1": w1, "w2": w2})
        for i, ((mean, moments), (h, *_)) in enumerate(zip(states, problem.directions, strict=True)):
            rows = np.array([[1 - lr * h, 0], [(1 - DECAY) * (1 - lr * h), DECAY]])
            kick = np.array([1, 1 - DECAY])
            states[i] = rows @ mean, rows @ moments @ rows.T + np.outer(kick, kick)
    return found


def test_a_run_on_a_spectrum_of_the_fit_is_explained_exactly() -> None:
    curvatures = [0.8 * 10 ** (-i / 2) for i in range(9)]
    problem = Quadratic.of(curvatures, counts=[(h / 0.8) ** -0.5 for h in curvatures], start=2.0, noise=0.05)
    lr = 2 * 0.95 * 10 ** (-3 / 4) / 0.8  # one of the pushes that the fit tries
    found = fit_run(reports(problem, lr, [0, 1, 3, 8, 20, 50, 120, 250]), decay=DECAY)
    assert found.error < 1e-6
    assert (found.minimum, found.problem.start) == pytest.approx((MINIMUM, 2.0), rel=1e-4)
    assert found.problem.largest == pytest.approx(0.8)
    assert [each.noise for each in found.problem.directions] == pytest.approx([0.05 * h for h in curvatures], rel=1e-3)
    assert (found.lr, found.caveats) == (lr, ())


@pytest.mark.thorough
def test_advice_from_a_run_alone_is_mostly_good() -> None:
    """It knows two curves of an EMA at a tenth of the stable rate, and nothing of the spectrum."""
    regrets = []
    for case in random_cases(seed=7, count=5):
        steps = sorted({int(t) for t in np.geomspace(1, case.steps, 16)})
        lr = 0.1 * case.limit
        curves = _curves(case.problem.directions, watch(1 - DECAY), lr, case.beta1, steps)
        run = [
            {"step": t, "lr": lr, "w1": MINIMUM + start1 + noise1, "w2": MINIMUM + start2 + noise2}
            for t, (start1, noise1, start2, noise2) in zip(steps, curves, strict=True)
        ]
        found = fit_run(run, decay=DECAY, beta1=case.beta1)
        assert found.error < 0.1
        advice = recommend(case.steps, curvatures=found.problem, beta1=case.beta1)
        method = advice.method
        rate, theta = getattr(method, "rate", 1 / case.steps), getattr(method, "theta", -0.9)
        regrets.append(float(losses(case, theta, rate, advice.lr)) / best_of_grid(case))
    assert median(regrets) < 1.25, regrets


def test_without_the_average_it_says_that_noise_is_unknown() -> None:
    run = reports(Quadratic.of([1.0, 0.1], noise=0.1), 0.1, [0, 5, 10, 20, 40])
    (caveat,) = fit_run(run).caveats
    assert caveat.startswith("The run has losses of the average (w2), and its decay was not given: they are not used")
    for line in run:
        line["loss"] = line.pop("w1")
        del line["w2"]
    (caveat,) = fit_run(run).caveats
    assert caveat == "Without losses of the average (w2) noise cannot be told from the loss at the minimum."
    assert fit_run(run, decay=0.9).caveats == (caveat,)


def test_a_run_that_is_no_quadratic_is_far_from_one() -> None:
    rough = [3.0, 0.5, 2.8, 0.4, 2.9, 0.6, 3.1]
    run = [{"step": t, "lr": 0.1, "w1": loss, "w2": loss} for t, loss in enumerate(rough)]
    found = fit_run(run, decay=DECAY)
    assert found.error > 0.1
    missed = f"The best quadratic misses the losses of the run by {found.error:.0%}: the model is far from a quadratic"
    assert found.caveats[-1].startswith(missed)


def test_losses_as_torchbelay_train_writes_them() -> None:
    plain = reports(Quadratic.of([1.0, 0.1], noise=0.1), 0.1, [0, 5, 10, 20, 40])
    nested = [line | {key: {"train": 9.0, "test": line[key]} for key in ("w1", "w2")} for line in plain]
    assert fit_run(nested, decay=DECAY) == fit_run(plain, decay=DECAY)
    only_train = [line | {key: {"train": line[key]} for key in ("w1", "w2")} for line in plain]
    assert fit_run(only_train, decay=DECAY) == fit_run(plain, decay=DECAY)


def test_many_reports_and_a_schedule_of_the_rate() -> None:
    run = reports(Quadratic.of([1.0, 0.1], noise=0.1), 0.1, list(range(60)))
    few = fit_run(run, decay=DECAY)
    assert few.error < 0.05
    run[40]["lr"] = 0.2
    changed = fit_run(run[::-1], decay=DECAY)  # in any order
    assert "changes; the fit takes it as its median, 0.1" in changed.caveats[0]
    assert changed.problem == few.problem


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 1.5}, "^line 2 of the run has step=1.5; it needs a whole number"),
        ({"step": -1}, "^line 2 of the run has step=-1; it needs a whole number of at least 0"),
        ({"w1": 10**400}, "^line 2 of the run has the loss 1000"),
        ({"step": None}, "^line 2 of the run has step=None"),
        ({"w1": None}, "^line 2 of the run has the loss None"),
        ({"w1": -1.0}, "^line 2 of the run has the loss -1.0; the fit needs positive finite numbers"),
        ({"lr": None}, "^lr of line 2=None is not a number"),
        ({"lr": -1.0}, "^lr of line 2=-1.0 "),
    ],
    ids=str,
)
def test_refused_lines(change: dict[str, object], message: str) -> None:
    run = reports(Quadratic.of([1.0, 0.1], noise=0.1), 0.1, [0, 5, 10, 20, 40])
    run[1] |= change  # type: ignore[arg-type]
    with pytest.raises((ValueError, TypeError), match=message):
        fit_run(run)


def test_refused_runs() -> None:
    run = reports(Quadratic.of([1.0, 0.1], noise=0.1), 0.1, [0, 5, 10, 20, 40])
    with pytest.raises(ValueError, match="has reports at 3 steps; the fit needs losses at 4 steps"):
        fit_run(run[:3])
    with pytest.raises(ValueError, match="do not fall"):
        fit_run([line | {"w1": 1.0} for line in run])
    with pytest.raises(ValueError, match="lr=0 at most"):
        fit_run([line | {"lr": 0.0} for line in run])
    with pytest.raises(ValueError, match=r"^decay=1\.0 "):
        fit_run(run, decay=1.0)
    with pytest.raises(ValueError, match=r"^line 2 of the run has no lr"):
        fit_run([{key: value for key, value in line.items() if key != "lr"} for line in run])
    for change in ({"lr": 1e-300}, {"lr": 1e300}, {"w1": 1e-300}, {"w1": 1e300}):
        with pytest.raises(OverflowError, match="use moderate units"):
            fit_run([line | change for line in run])


@pytest.mark.parametrize("decay", [0.9, 0.99, 0.995])
@pytest.mark.parametrize("offset", [0.0, 5.0])
def test_the_share_of_noise_is_that_of_the_weights_whatever_the_average_and_the_minimum(
    decay: float, offset: float
) -> None:
    """The weights of a run do not depend on the EMA that watches them. The quadratic is one that the fit tries."""
    curvatures = [0.8 * 10 ** (-i / 2) for i in range(9)]
    problem = Quadratic.of(curvatures, counts=[(h / 0.8) ** -0.5 for h in curvatures], start=2.0, noise=0.05)
    lr, steps = 2 * 0.95 * 10 ** (-3 / 4) / 0.8, [0, 1, 3, 8, 20, 50, 120, 250]
    curves = _curves(problem.directions, watch(1 - decay), lr, 0.0, steps)
    run = [
        {"step": t, "lr": lr, "w1": offset + MINIMUM + s1 + n1, "w2": offset + MINIMUM + s2 + n2}
        for t, (s1, n1, s2, n2) in zip(steps, curves, strict=True)
    ]
    added = 0.0
    for h, count, _, noise in problem.directions:
        kept = (1 - lr * h) ** 2
        added += count * h * noise * lr**2 * (1 - kept**250) / (1 - kept) / 2
    found = fit_run(run, decay=decay)
    assert found.share == pytest.approx(added / 2.0, rel=1e-3)
    assert (found.rate, found.steps) == (pytest.approx(1 - decay), 250)


def test_a_run_that_is_shorter_than_its_average_says_nothing_about_noise() -> None:
    run = reports(Quadratic.of([1.0, 0.1], noise=0.0), 0.2, [0, 1, 3, 8, 20, 40, 80, 120])
    short, long = fit_run(run[:-1], decay=DECAY), fit_run(run, decay=DECAY)
    assert (short.share, short.rate) == (None, pytest.approx(0.01))
    assert short.caveats[0].startswith("The average reaches back over 100 steps, and the run has 80: noise cannot be")
    assert long.share is not None
    assert not any("reaches back" in each for each in long.caveats)


def test_numbers_of_numpy_are_numbers() -> None:
    run = reports(Quadratic.of([1.0, 0.1], noise=0.1), 0.1, [0, 5, 10, 20, 40])
    found = fit_run(
        [{"step": np.int64(line["step"]), **{k: np.float64(line[k]) for k in ("lr", "w1", "w2")}} for line in run]
    )
    assert found == fit_run(run)
    single = fit_run([line | {"w1": np.float32(line["w1"])} for line in run])
    assert single.end == pytest.approx(found.end, rel=1e-6)


def test_of_many_reports_those_with_an_average_are_kept() -> None:
    run = reports(Quadratic.of([1.0, 0.1], noise=0.1), 0.1, list(range(200)))
    some = [line if line["step"] % 5 == 4 else {k: v for k, v in line.items() if k != "w2"} for line in run]
    found = fit_run(some, decay=DECAY)
    assert found.rate == pytest.approx(1 - DECAY)
    assert found.end == run[199]["w2"]
    assert not found.caveats


def test_the_end_is_that_of_the_last_report_with_an_average() -> None:
    run = reports(Quadratic.of([1.0, 0.1], noise=0.1), 0.1, [0, 5, 10, 20, 200])
    del run[-1]["w2"]
    found = fit_run(run, decay=DECAY)
    assert (found.end, found.steps) == (run[-2]["w2"], 20)
    assert fit_run(run).end == run[-1]["w1"]


def test_a_run_without_an_average_has_no_share_of_noise() -> None:
    run = reports(Quadratic.of([1.0, 0.1], noise=0.1), 0.1, [0, 5, 10, 20, 40])
    found = fit_run(run)
    assert (found.share, found.rate, found.steps) == (None, None, 40)
