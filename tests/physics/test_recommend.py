"""The advice, against the best of a grid on random quadratics that it never saw, and its words."""

import math

import numpy as np
import pytest

import torchbelay as tb
from helpers.spectra import best_of_grid, losses, random_cases
from torchbelay.physics import recommend_words, theta_floor
from torchbelay.physics.quadratics import Quadratic
from torchbelay.physics.recommend import SIMPLER, recommend
from torchbelay.physics.run_fit import fit_run
from torchbelay.physics.search import CLEAR

THREE = [2.0, 0.2, 0.02]


@pytest.mark.thorough
def test_on_20_random_spectra_the_advice_is_within_10_percent_of_the_best_of_a_grid() -> None:
    regrets = []
    for case in random_cases(seed=2023, count=20):
        advice = recommend(case.steps, curvatures=case.curvatures, noise=case.noise, batch=1, beta1=case.beta1)
        method = advice.method
        if isinstance(method, tb.methods.schedule_free):
            ours = case.problem.loss_free(method.beta, advice.lr, case.steps).total
        else:
            ours = float(losses(case, method.theta, method.rate, advice.lr))
        regrets.append(ours / best_of_grid(case))
    assert max(regrets) <= 1.1, regrets


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
    wide = [0.18, 5e-4, 5e-4]
    free = recommend(500, curvatures=wide, noise=6.0, batch=1)
    assert free.method == tb.methods.schedule_free(0.9)
    assert free.explain().startswith("Use tb.methods.schedule_free(0.9) at a learning rate of")
    assert "needs no averaging rate: Generalized Primal Averaging with c = 1/t." in free.explain()
    assert free.floor == -1
    held = recommend(500, curvatures=wide, noise=6.0, batch=1, beta1=0.9)
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


def test_what_is_doubtful_is_said() -> None:
    assert not recommend(3000, curvatures=[1.0, 0.1], noise=1.0).warnings
    assert "typical spectrum" in recommend(300).warnings[0]
    assert not any("typical" in warning for warning in recommend(300, lr=1e-3).warnings)
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


def test_near_a_known_rate_it_stays_within_a_factor_of_2_and_says_so() -> None:
    free = recommend(500, curvatures=THREE, noise=0.2, batch=1)
    for known in (free.lr / 50, free.lr * 0.8, free.lr * 1.2):
        advice = recommend(500, curvatures=THREE, noise=0.2, batch=1, near=known)
        assert known / 2.001 <= advice.lr <= 2.001 * known
        said = any("further from the run's" in warning for warning in advice.warnings)
        assert said is (known == free.lr / 50)
    assert advice.loss.total == pytest.approx(free.loss.total, rel=0.1)


def test_if_schedule_free_is_better_far_from_the_known_rate_it_says_so() -> None:
    advice = recommend(50, curvatures=[1.0, 0.5], noise=0.0, beta1=0.5, near=0.01)
    assert advice.alternatives["schedule-free"].loss.total < advice.loss.total
    assert any("schedule-free averaging is better, but at a learning rate of 1.32" in each for each in advice.warnings)


def test_a_spring_without_noise_is_told_to_be_of_use_for_the_speed() -> None:
    """Its average reaches back over less than two steps; it is not of no use, as an EMA would be."""
    run = [{"step": t, "lr": 0.1, "w1": 0.51 + 0.5 * 0.8**t} for t in range(0, 40, 4)]
    found = fit_run(run)
    advice = recommend(1000, curvatures=found.problem, near=found.lr)
    assert isinstance(advice.method, tb.methods.centred)
    assert advice.method.theta < 0
    assert advice.method.rate > 0.5
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
        ({"caveats": "it rains."}, TypeError, "^caveats='it rains.' is a text; give a list of texts"),
        ({"start": 0.0}, ValueError, "^start=0 begins at the minimum"),
        ({"curvatures": [1e-300]}, ArithmeticError, "too small to compute with"),
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
    advice = tb.recommend(10**6, curvatures=[1.0, 0.1], noise=1e-3)
    assert isinstance(advice.best.method, tb.methods.schedule_free)
    assert "Above 2 its first steps let the loss grow." in advice.explain()
    assert "diverges" not in advice.explain()
    assert "diverges" in tb.recommend(500, curvatures=[1.0, 0.1], beta1=0.9).explain()


def test_an_ema_near_a_rate_at_which_it_diverges_is_tuned_below_it() -> None:
    advice = tb.recommend(500, curvatures=[1.0, 0.1], near=3.3)
    ema = advice.alternatives["EMA"]
    assert math.isfinite(ema.loss.total)
    assert 3.3 / 2 <= ema.lr < ema.limit
