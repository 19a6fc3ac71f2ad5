"""The advice, against the best of a grid on random quadratics that it never saw, and its words."""

import math
from typing import Any

import numpy as np
import pytest

import torchbelay as tb
from helpers.spectra import Case, best_of_grid, best_smooth_of_grid, losses, random_cases, smooth_losses
from torchbelay.physics import recommend_words, theta_floor
from torchbelay.physics.quadratics import Direction, Quadratic
from torchbelay.physics.recommend import MOST, SIMPLER, recommend
from torchbelay.physics.run_fit import RunFit, fit_run
from torchbelay.physics.search import CLEAR, tune_free

THREE = [2.0, 0.2, 0.02]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [2023, 1, 2, 3, 4])
def test_on_20_random_spectra_the_advice_is_within_10_percent_of_the_best_of_a_grid(seed: int) -> None:
    regrets, nearer = [], []
    for case in random_cases(seed=seed, count=20):
        advice = recommend(case.steps, curvatures=case.curvatures, noise=case.noise, batch=1, beta1=case.beta1)
        method = advice.method
        if isinstance(method, tb.methods.schedule_free):
            ours = case.problem.loss_free(method.beta, advice.lr, case.steps).total
        else:
            ours = float(losses(case, method.theta, method.rate, advice.lr))
        regrets.append(ours / best_of_grid(case, clear=CLEAR))
        nearer.append(ours / best_of_grid(case))
    assert max(regrets) <= 1.1, regrets
    assert max(nearer) <= 1.13, nearer


@pytest.mark.thorough
@pytest.mark.parametrize("beta1", [0.0, 0.9])
@pytest.mark.parametrize(
    ("steps", "curvatures", "noise"),
    [
        (2500, [1.0], 1e-3),
        (2500, [1.0], 0.1),
        (538, [1.0], 1.4477),
        (5000, [1.0], 1e-5),
        (1_000_000, [1.0], 1e-3),
        (100_000, [1.0, 2e-8], 0.01),
        (8414, [1.0, 0.011081941556956723], 0.4951518993053505),
    ],
)
def test_with_one_or_two_curvatures_no_learning_rate_is_a_lucky_one(
    steps: int, curvatures: list[float], noise: float, beta1: float
) -> None:
    """The error of one curvature swings through 0, so that a search may find rates at which it is 0 by chance."""
    case = Case(curvatures, steps, noise, beta1)
    advice = recommend(steps, curvatures=curvatures, noise=noise, batch=1, beta1=beta1)
    if isinstance(advice.method, tb.methods.schedule_free):
        advice_loss = advice.loss.total
    else:
        advice_loss = float(smooth_losses(case, advice.method.theta, advice.method.rate, advice.lr))
    assert advice_loss <= 1.12 * best_smooth_of_grid(case, CLEAR)


@pytest.mark.parametrize(
    ("steps", "curvatures", "noise", "best"),
    [(8414, [1.0, 0.011081941556956723], 0.4951518993053505, 1.905e-4), (538, [1.0], 1.4477, 1.68e-3)],
)
def test_schedule_free_is_tuned_as_well(steps: int, curvatures: list[float], noise: float, best: float) -> None:
    free = tune_free(Quadratic.of(curvatures, noise=noise), steps)
    assert free.loss.total <= 1.05 * best


@pytest.mark.parametrize(
    ("steps", "curvatures", "noise", "beta1", "known"),
    [
        (2000, [1.0], 1.0, 0.0, (-0.75, 0.00035, 0.00713)),  # each was better than what a search along axes found
        (2614, [0.41318006, 0.10917511], 0.0012468, 0.0, (-0.15, 0.002837, 0.02967)),
    ],
)
def test_no_setting_that_is_known_is_better(
    steps: int, curvatures: list[float], noise: float, beta1: float, known: tuple[float, float, float]
) -> None:
    advice = recommend(steps, curvatures=curvatures, noise=noise, batch=1, beta1=beta1)
    theta, rate, lr = known
    other = advice.problem.loss(tb.methods.centred(theta, rate).coupling(1, lr), lr, steps, beta1)
    assert advice.loss.total <= 1.03 * other.total


@pytest.mark.parametrize("beta1", [0.0, 0.9])
@pytest.mark.parametrize("count", [13, 40, 300])
def test_its_losses_are_those_of_the_whole_quadratic(count: int, beta1: float) -> None:
    """Exactly for up to 100 curvatures; of more, neighbours are merged."""
    advice = recommend(100_000, curvatures=np.geomspace(1e-4, 1, count).tolist(), noise=0.01, beta1=beta1)
    assert len(advice.problem.directions) == count
    for setting in (advice.best, advice.alternatives["EMA"]):
        exact = advice.problem.loss(setting.method.coupling(1, setting.lr), setting.lr, 100_000, beta1)
        assert setting.loss == pytest.approx(exact, rel=1e-12 if count <= MOST else 0.005)


def test_a_run_that_is_short_for_its_momentum_says_so() -> None:
    short, long = (recommend(steps, curvatures=THREE, beta1=0.9) for steps in (99, 101))
    assert any("99 steps are few for a momentum of 0.9" in each for each in short.warnings)
    assert not any("are few for a momentum" in each for each in long.warnings)
    assert any("Ask for at least 1,000 steps." in each for each in recommend(500, beta1=0.99).warnings)
    assert not any("few" in each for each in recommend(100, curvatures=THREE, beta1=0.9).warnings)  # 100, not 101
    assert any("Ask for at least 1,000,000 steps." in each for each in recommend(100, beta1=0.99999).warnings)
    (said,) = (each for each in recommend(9, curvatures=THREE).warnings if "few" in each)
    assert "9 steps are few: errors" in said
    assert "at least 10 steps" in said


@pytest.mark.parametrize(
    ("width", "noise", "beta1", "is_lowest"),
    [(1e7, 1e-4, 0.0, True), (1e7, 1e-8, 0.9, True), (1e5, 1e-8, 0.9, False), (1e3, 1e-4, 0.0, False)],
)
def test_where_theta_is_as_low_as_the_advice_goes_it_says_so(
    width: float, noise: float, beta1: float, is_lowest: bool
) -> None:
    """Wide spectra with little noise would have it nearer to the floor."""
    curvatures = np.geomspace(1 / width, 1, 12).tolist()
    advice = recommend(10_000, curvatures=curvatures, noise=noise, batch=1, beta1=beta1)
    assert advice.method.theta < 0  # type: ignore[union-attr]
    assert advice.is_at_the_lowest_theta is is_lowest
    lowest = f"That is three quarters of the floor of θ = {advice.floor:.3g}, and the advice goes no lower"
    assert (lowest in advice.explain()) is is_lowest


def test_whole_numbers_of_numpy_are_steps() -> None:
    advice = recommend(np.int64(300), curvatures=THREE)  # type: ignore[arg-type]
    assert type(advice.steps) is int
    assert advice == recommend(300, curvatures=THREE)


@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_its_numbers_are_consistent(beta1: float) -> None:
    advice = recommend(800, curvatures=THREE, noise=0.5, batch=1, beta1=beta1)
    problem, best = Quadratic.of(THREE, noise=0.5), advice.best
    coupling = best.method.coupling(1, best.lr)
    assert best.loss == pytest.approx(problem.loss(coupling, best.lr, 800, beta1), rel=1e-12)
    assert best.limit == pytest.approx(coupling.max_stable_lr(2.0, momentum=beta1))
    low, high = best.lrs
    assert low <= best.lr <= high < best.limit
    for lr, inside in ((low, True), (high, True), (0.9 * low, False), (1.1 * high, False)):
        assert (problem.loss(coupling, lr, 800, beta1).total <= 1.1 * best.loss.total) is inside
    assert best.width == high / low
    ema = advice.alternatives["EMA"]
    assert ema.method.theta == 0
    assert best.loss.total <= ema.loss.total
    assert advice.problem == Quadratic.of(THREE, noise=0.5)


@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("steps", [10, 300])
def test_theta_stays_clear_of_the_floor(steps: int, beta1: float) -> None:
    advice = recommend(steps, curvatures=THREE, noise=0.01, beta1=beta1)
    if not isinstance(advice.method, tb.methods.schedule_free):
        floor = theta_floor(beta1, advice.method.rate)
        assert advice.floor == floor
        assert advice.method.theta >= CLEAR * floor


def test_an_ema_is_recommended_if_it_is_nearly_as_good() -> None:
    advice = recommend(300, curvatures=THREE, noise=30.0, batch=1)
    assert advice.best == advice.alternatives["EMA"]
    assert "It is an ordinary EMA" in advice.explain()
    assert "Primal" not in advice.explain()
    assert advice.explain().startswith("Use tb.methods.ema(0.9")
    assert SIMPLER == 1.03


def test_schedule_free_is_recommended_only_without_momentum() -> None:
    long: dict[str, Any] = {"curvatures": [0.55, 0.006], "noise": 1e-7, "batch": 1}
    free = recommend(150_000, **long)
    assert free.method == tb.methods.schedule_free(0.9)
    assert free.explain().startswith("Use tb.methods.schedule_free(0.9) at a learning rate of")
    assert "needs no averaging rate: Generalized Primal Averaging with c = 1/t." in free.explain()
    assert free.floor == -1
    held = recommend(150_000, **long, beta1=0.9)
    assert isinstance(held.method, tb.methods.centred)
    assert "around an optimizer with β1 = 0" in held.explain()


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_no_advice_lets_the_loss_grow_on_the_way(noise: float) -> None:
    """At 15 times 1/(largest curvature) schedule-free averaging ends low, after a loss of 1e10 times the first."""
    advice = recommend(500, noise=noise)
    h, number, start, variance = np.array(advice.problem.directions).T
    for setting in (advice.best, *advice.alternatives.values()):
        moments = np.multiply.outer(start, np.ones((2, 2)))
        for t in range(1, 501):
            c = setting.method.coupling(t, setting.lr)
            kick = np.array([c.p, c.q])
            m = np.array([[1 - c.a, c.a], [c.b, 1 - c.b]]) - setting.lr * np.einsum("n,i,j->nij", h, kick, [1.0, 0.0])
            moments = m @ moments @ m.transpose(0, 2, 1)
            moments += setting.lr**2 * np.multiply.outer(variance, np.outer(kick, kick))
            assert (number * h * moments[:, 0, 0]).sum() / 2 <= 2 * advice.problem.start


def test_rates_scale_with_the_curvatures_or_with_the_rate_of_the_best_ema() -> None:
    one, ten = (recommend(500, curvatures=[k * h for h in THREE], noise=0.2) for k in (1, 10))
    assert ten.lr == pytest.approx(one.lr / 10, rel=0.05)
    assert ten.loss.total == pytest.approx(one.loss.total, rel=0.01)
    known = recommend(500, curvatures=THREE, noise=0.2, lr=7e-4)
    assert known.alternatives["EMA"].lr == pytest.approx(7e-4)
    assert known.lr / 7e-4 == pytest.approx(one.lr / one.alternatives["EMA"].lr)
    assert known.best.limit / known.lr == pytest.approx(one.best.limit / one.lr)


def noisy_run(problem: Quadratic, lr: float, steps: int) -> RunFit:
    """A run with an EMA of rate 0.07, as its losses tell it."""
    ema, weights = tb.Coupling(0.0, 0.07, 1.0, 0.07), tb.Coupling(0.0, 1.0, 1.0, 1.0)

    def told(t: int) -> dict[str, float]:
        w1, w2 = (0.1 + problem.loss(coupling, lr, t).total for coupling in (weights, ema))
        return {"step": t, "lr": lr, "w1": w1, "w2": w2}

    return fit_run([told(t) for t in range(5, steps + 1, 5)], decay=0.93)


def test_no_learning_rate_is_told_above_the_limit_of_the_fitted_quadratic() -> None:
    advice = recommend(100, curvatures=noisy_run(Quadratic.of([1.0], noise=3e-3), 1.9, 100))
    assert advice.best.lrs[1] <= advice.best.limit
    problem = Quadratic.of([1.0, 0.01], noise=1e-3)
    advice = recommend(300, curvatures=[noisy_run(problem, lr, 300) for lr in (0.2, 0.4, 0.8, 1.6)])
    assert advice.lr > advice.best.limit
    assert "The quadratic that fits the best run diverges above 2.99" in " ".join(advice.explain().split())
    assert "leave at most 10% more loss" not in advice.explain()


def test_a_run_that_was_lost_right_above_the_best_one_bounds_the_search() -> None:
    def run(lr: float, end: float) -> RunFit:
        told = [{"step": t, "lr": lr, "w1": end + 0.5 * 0.9**t, "w2": end + 0.6 * 0.92**t} for t in range(0, 80, 4)]
        return fit_run(told, decay=0.9)

    runs = [run(0.1, 0.5), run(0.05, 0.6)]
    assert recommend(76, curvatures=runs).lr > 0.1
    assert recommend(76, curvatures=runs, lost=[0.105]).lr < 0.1
    assert recommend(76, curvatures=runs, lost=[0.102]).lr < 0.1


def test_a_rate_that_only_denormal_numbers_hold_ends_the_search() -> None:
    with pytest.raises((ArithmeticError, ValueError)):
        recommend(20, curvatures=[1.0, 0.1], near=1e-319)


def test_what_is_doubtful_is_said() -> None:
    assert not recommend(3000, curvatures=[1.0, 0.1], noise=1.0).warnings
    assert "typical spectrum" in recommend(300).warnings[0]
    assert "may be quite different" in recommend(300, lr=1e-3).warnings[0]
    assert not any("typical" in each for each in recommend(300, curvatures=THREE, lr=1e-3).warnings)
    assert any("too short" in warning for warning in recommend(3, curvatures=[1.0, *[1e-4] * 20_000]).warnings)
    steep = recommend(1000, curvatures=[1.0, 1e-3, 1e-3], noise=0.0, beta1=0.5)
    assert any("more than half of the largest stable" in warning for warning in steep.warnings)
    said = recommend(300, curvatures=THREE, caveats=("it rains.",)).explain()
    assert "\n\nWarning: it rains.\n\n" in said


def test_if_there_is_nothing_to_average_it_says_so() -> None:
    advice = recommend(50, curvatures=[1.0, 0.5], noise=0.0, beta1=0.5, near=0.01)
    said = advice.explain()
    assert said.startswith("Train without an average at a learning rate of ")
    assert "An EMA is of no use here" in said
    assert "No centred(θ) near the learning rate of the run is better by more than 3%." in said
    for contradiction in ("reaches back", "Use tb.methods.ema", "averaging rate as well", "no spring"):
        assert contradiction not in said


def test_a_known_learning_rate_beside_curvatures_is_said_to_set_their_size() -> None:
    advice = recommend(300, curvatures=[1.0], lr=0.1)
    (said,) = [each for each in advice.warnings if "sets the size of the curvatures" in each]
    taken = float(said.split("taken as ")[1].split(",")[0])
    ema = advice.alternatives["EMA"]
    assert ema.limit * taken == pytest.approx(2 + 0.0, rel=0.01)  # the limit of plain SGD
    assert said.endswith(", not 1.")
    for others in ({"curvatures": [1.0]}, {"lr": 0.1}):
        assert not any("sets the size" in each for each in recommend(300, **others).warnings)


def test_with_momentum_it_says_for_which_dampening_rates_are() -> None:
    said = recommend(300, curvatures=[1.0, 0.1], beta1=0.9).explain()
    assert "those of Adam, or of SGD with dampening = momentum" in said
    assert "multiply them by 0.1 for SGD(momentum=0.9), which has no dampening by default" in said
    assert "dampening" not in recommend(300, curvatures=[1.0, 0.1]).explain()


def test_without_noise_a_loss_of_0_is_told_in_words() -> None:
    advice = recommend(500, curvatures=[1.0], noise=0.0)
    assert advice.loss.total == 0
    left = advice.alternatives["schedule-free"].loss.total
    assert "falls from 1 to 0, and 0% of what remains is noise" in advice.explain()
    assert f"leaves a loss of {left:.3g}." in advice.explain()


@pytest.mark.parametrize("case", [{"steps": 1000}, {"steps": 12, "beta1": 0.99}], ids=str)
def test_an_ema_without_noise_is_not_said_to_average_it(case: dict[str, Any]) -> None:
    advice = recommend(**case, curvatures=[1.0], noise=0.0)
    assert advice.best == advice.alternatives["EMA"]
    assert "There is no noise to average: at most, the average evens out errors that swing." in advice.explain()
    assert "of the noise" not in advice.explain()


def test_near_a_known_rate_it_stays_within_a_factor_of_2_and_says_so() -> None:
    free = recommend(500, curvatures=THREE, noise=0.2, batch=1)
    for known in (free.lr / 50, free.lr * 0.8, free.lr * 1.2):
        advice = recommend(500, curvatures=THREE, noise=0.2, batch=1, near=known)
        assert known / 2.001 <= advice.lr <= 2.001 * known
        said = any("further from the run's" in warning for warning in advice.warnings)
        assert said is (known == free.lr / 50)
    assert advice.loss.total == pytest.approx(free.loss.total, rel=0.1)


@pytest.mark.parametrize("factor", [1.75, 1.85, 0.56])
def test_a_best_rate_beside_the_end_of_those_near_a_run_is_not_said_to_be_beyond_it(factor: float) -> None:
    """The best rate of all is within 15% of the end, so that the search finds it, and none further away is better."""
    known: dict[str, Any] = {"curvatures": [1.0, 0.1], "noise": 0.04, "batch": 1, "beta1": 0.5}
    free = recommend(945, **known)
    advice = recommend(945, **known, near=factor * free.lr)
    assert advice.loss.total == pytest.approx(free.loss.total, rel=0.01)
    assert not advice.warnings
    for near, lr in ((0.4 * free.lr, 0.8 * free.lr), (3 * free.lr, 1.5 * free.lr)):  # these are at the end
        held = recommend(945, **known, near=near)
        assert held.lr == pytest.approx(lr)
        assert any("further from the run's" in warning for warning in held.warnings)


def test_if_schedule_free_is_better_far_from_the_known_rate_it_says_so() -> None:
    advice = recommend(50, curvatures=[1.0, 0.5], noise=0.0, beta1=0.5, near=0.01)
    assert advice.alternatives["schedule-free"].loss.total < advice.loss.total
    assert any("schedule-free averaging is better, but at a learning rate of 1.73" in each for each in advice.warnings)


def test_a_spring_without_noise_is_told_to_be_of_use_for_the_speed() -> None:
    """Next to nothing of its loss is noise; it is not of no use, as an EMA would be."""
    run = [{"step": t, "lr": 0.1, "w1": 0.51 + 0.5 * 0.8**t} for t in range(0, 40, 4)]
    found = fit_run(run)
    advice = recommend(1000, curvatures=found.problem, near=found.lr)
    assert isinstance(advice.method, tb.methods.centred)
    assert advice.method.theta < 0
    assert advice.loss.noise < 0.01 * advice.loss.total
    assert "of use for the speed" in advice.explain()
    assert "of no use" not in advice.explain()


def test_the_fit_of_a_run_brings_its_rate_its_momentum_and_caveats() -> None:
    run = [{"step": t, "lr": 0.1, "w1": 0.51 + 0.5 * 0.8**t} for t in range(0, 40, 4)]
    found = fit_run(run, beta1=0.5)
    advice = recommend(36, curvatures=found)
    known = recommend(36, curvatures=found.problem, beta1=0.5, near=0.1, caveats=found.caveats)
    assert found.caveats
    assert (advice.best, advice.warnings, advice.beta1) == (known.best, known.warnings, 0.5)
    assert recommend(36, curvatures=found, near=0.2).near == 0.2
    with pytest.raises(ValueError, match=r"^beta1=0\.0 is not that of the fitted runs, 0\.5; leave it out"):
        recommend(36, curvatures=found, beta1=0.0)


@pytest.mark.parametrize("steps", [10**6, 10**8, 10**9])
def test_the_decay_of_a_long_run_has_the_digits_that_it_needs(steps: int) -> None:
    ema = recommend(steps, curvatures=[1.0, 0.1]).alternatives["EMA"]
    assert isinstance(ema.method, tb.methods.centred)
    decay = float(recommend_words.call(ema).partition("(")[2].rstrip(")"))
    assert 1 - decay == pytest.approx(ema.method.rate, rel=0.01)


def test_the_words_have_the_numbers() -> None:
    advice = recommend(800, curvatures=THREE, noise=0.02, batch=1, beta1=0.9)
    said, best, ema = advice.explain(), advice.best, advice.alternatives["EMA"]
    assert isinstance(best.method, tb.methods.centred)
    assert best.method.theta < 0
    call = f"tb.methods.centred(theta={best.method.theta:.3g}, rate={best.method.rate:.3g})"
    assert said.startswith(f"Use {call} at a learning rate of {best.lr:.3g}, for 800 steps.")
    assert f"{best.loss.noise / best.loss.total:.0%} of what remains is noise" in said
    assert (
        f"from {best.lrs[0]:.3g} to {best.lrs[1]:.3g}, a factor of {best.width:.2g} (EMA: {ema.width:.2g}), leave"
        in said
    )
    assert f"Above {best.limit:.3g} it diverges" in said
    assert f"floor of θ = {advice.floor:.3g}" in said
    assert "This is Generalized Primal Averaging, of which schedule-free is the case c = 1/t." in said
    assert f"The learning rate is {best.lr / ema.lr:.3g} times that of the best EMA." in said
    assert f"leaves {ema.loss.total / best.loss.total:.3g} times this loss" in said
    assert "A network decides" in said
    assert eval(call, {"tb": tb}) == tb.methods.centred(  # what it says can be run
        theta=float(f"{best.method.theta:.3g}"), rate=float(f"{best.method.rate:.3g}")
    )


def test_an_attractive_spring_is_never_better_than_ema_on_these() -> None:
    for noise in (1e-3, 1.0, 30.0):
        assert getattr(recommend(500, curvatures=THREE, noise=noise).method, "theta", -1.0) <= 0


def quadratic(*curvatures: float, start: float = 1.0) -> Quadratic:
    """A quadratic that is put together from its directions."""
    return Quadratic(tuple(Direction(h, 1.0, start, 1.0) for h in curvatures))


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"steps": 1}, ValueError, "^steps=1 is too small"),
        ({"steps": 1.5}, TypeError, "^steps=1.5 is not a whole number"),
        ({"steps": 10**12}, ValueError, r"^steps=1000000000000 is too large .* needs steps ≤ 1,000,000,000"),
        ({"beta1": 1.0}, ValueError, "^beta1=1.0 "),
        ({"near": 1e3}, ValueError, r"^near=1000\.0 is not a learning rate of a run on these curvatures"),
        ({"noise": np.ones(2)}, TypeError, r"^noise=array\(\[1\., 1\.\]\) is not one number"),
        ({"lr": 0.0}, ValueError, "^lr=0.0 "),
        ({"near": -1.0}, ValueError, "^near=-1.0 "),
        ({"curvatures": []}, ValueError, "has no curvature"),
        ({"noise": -1.0}, ValueError, "^noise=-1.0 "),
        ({"caveats": "it rains."}, TypeError, "^caveats='it rains.' is not a list; give a list of texts"),
        ({"caveats": 5}, TypeError, "^caveats=5 is not a list; give a list of texts"),
        ({"caveats": ["it rains.", 1]}, TypeError, "^caveats has 1, which is not a text"),
        ({"curvatures": {1.0: 3}}, TypeError, r"^curvatures=\{1\.0: 3\} is a mapping; give a list"),
        ({"lr": 0.1, "near": 0.1}, ValueError, r"^lr=0\.1 .* near=0\.1 .*leave one of them out"),
        ({"noise": 1e20}, ArithmeticError, "^noise is so strong that no learning rate lowers the loss by 1e-06"),
        ({"noise": 1e300, "batch": 1e-300}, ArithmeticError, "are not finite; use moderate curvatures, noise"),
        ({"start": 0.0}, ValueError, "^start=0 begins at the minimum"),
        ({"curvatures": [1e-300]}, ArithmeticError, "too small to compute with"),
        ({"curvatures": [1e308, 1e308]}, OverflowError, "are not finite; use moderate curvatures, noise"),
        ({"start": np.ones(2)}, TypeError, r"^start=array\(\[1\., 1\.\]\) is not one number"),
        ({"caveats": np.array(1.0)}, TypeError, r"^caveats=array\(1\.\) is not a list; give a list of texts"),
        ({"lost": np.array(1.0)}, TypeError, r"^lost=array\(1\.\) is not a list; give a list of learning rates"),
        ({"lost": "0.1"}, TypeError, r"^lost='0\.1' is not a list; give a list of learning rates"),
        ({"lr": 1e308}, ValueError, r"^lr=1e\+308 makes rates of the advice that no float holds; use a moderate one"),
        ({"lr": 5e-324}, ValueError, "^lr=5e-324 makes rates of the advice that no float holds"),
        ({"curvatures": quadratic()}, ValueError, "^curvatures is a Quadratic with start=0"),
        ({"curvatures": quadratic(-1.0)}, ValueError, r"^curvature of the Quadratic=-1\.0 is out of range"),
        ({"curvatures": quadratic(1.0, start=math.nan)}, ValueError, "^start of the Quadratic=nan is out of range"),
        ({"curvatures": quadratic(1.0), "noise": 2.0}, ValueError, r"^noise=2\.0, .* known of a Quadratic; leave all"),
    ],
    ids=str,
)
def test_refused(bad: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        recommend(**{"steps": 100, "curvatures": THREE} | bad)  # type: ignore[arg-type]


def test_the_grid_and_the_library_agree() -> None:
    for case in random_cases(seed=5, count=3):
        coupling, lr = tb.methods.centred(-0.3, 0.01).coupling(1, 0.1), case.limit / 7
        expected = case.problem.loss(coupling, lr, case.steps, case.beta1).total
        assert float(losses(case, -0.3, 0.01, lr)) == pytest.approx(expected, rel=1e-6)
        assert math.isfinite(best_of_grid(case, (0.0,)))
        assert np.isinf(losses(case, 0.0, 0.01, 3 * case.limit))


def test_what_is_said_of_schedule_free_above_its_limit_is_true() -> None:
    """Above 2/h the loss grows at first, and falls in the end: it does not diverge."""
    advice = tb.recommend(150_000, curvatures=[0.55, 0.006], noise=1e-7, batch=1)
    assert isinstance(advice.best.method, tb.methods.schedule_free)
    assert "Above 3.64 its first steps let the loss grow." in advice.explain()
    assert "diverges" not in advice.explain()
    assert "diverges" in tb.recommend(500, curvatures=[1.0, 0.1], beta1=0.9).explain()


@pytest.mark.parametrize("near", [3.6, 8.0])
def test_near_a_rate_too_high_for_any_ema_it_is_compared_with_one_at_a_rate_of_its_own(near: float) -> None:
    """A spring that repels bears such rates."""
    advice = tb.recommend(500, curvatures=[1.0, 0.1], near=near)
    assert near / 2 <= advice.lr < advice.best.limit
    assert advice.method.theta < 0  # type: ignore[union-attr]
    ema = tb.recommend(500, curvatures=[1.0, 0.1]).alternatives["EMA"]
    assert advice.alternatives["EMA"] == ema
    assert f"leaves {ema.loss.total / advice.loss.total:.3g} times this loss" in advice.explain()
    assert any("further from the run's" in each for each in advice.warnings)
    assert "inf" not in advice.explain()


def test_an_ema_near_a_rate_at_which_it_diverges_is_tuned_below_it() -> None:
    advice = tb.recommend(500, curvatures=[1.0, 0.1], near=3.3)
    ema = advice.alternatives["EMA"]
    assert math.isfinite(ema.loss.total)
    assert 3.3 / 2 <= ema.lr < ema.limit
