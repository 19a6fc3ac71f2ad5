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
    with pytest.raises(ValueError, match="has 3 reports; the fit needs losses at 4 steps"):
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


def test_a_run_whose_weights_are_noisier_than_its_average_is_told_to_be_so() -> None:
    run = reports(Quadratic.of([1.0, 0.1], noise=0.1), 0.1, [0, 5, 10, 20, 40, 80, 160, 320])
    for line in run[-2:]:  # the last quarter
        line["w2"] = line["w1"] / 1.3
    noisy = fit_run(run, decay=DECAY)
    assert noisy.gap == pytest.approx(1.3)
    assert "the loss of the weights is 1.30 times that of the average" in noisy.caveats[-1]
    quiet = fit_run([line | {"w2": line["w1"] / 1.05} for line in run], decay=DECAY)
    assert quiet.gap == pytest.approx(1.05)
    assert not any("times that of the average" in each for each in quiet.caveats)
    assert fit_run(run).gap is None
