"""Which settings runs say something about, and that advice from runs stays among them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbelay.physics.inner_momentum import theta_floor
from torchbelay.physics.quadratics import Quadratic
from torchbelay.physics.recommend import recommend
from torchbelay.physics.region import LOUD, NEAR, QUIET, SAME, Region, Tried
from torchbelay.physics.run_fit import RunFit
from torchbelay.physics.search import CLEAR, _Landscape

PROBLEM = Quadratic.of([1.0, 0.1, 0.01], noise=0.2, batch=8)


def fit(
    share: float | None = 0.01, *, lr: float = 0.1, end: float = 0.5, rate: float | None = 0.02, beta1: float = 0.0
) -> RunFit:
    return RunFit(PROBLEM, lr, 0.0, 0.0, (), steps=500, end=end, beta1=beta1, rate=rate, share=share)


# One run --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "low", "high", "case"),
    [
        (None, 0.5, 2.0, "near"),
        (0.0, 0.5, 2.0, "low"),
        (QUIET, 0.5, 2.0, "low"),
        (1.01 * QUIET, 0.5, 1.0, "right"),
        (LOUD, 0.5, 1.0, "right"),
        (1.01 * LOUD, 0.25, 0.5, "high"),
        (math.inf, 0.25, 0.5, "high"),
    ],
)
def test_noise_decides_how_far_the_learning_rate_may_rise(
    share: float | None, low: float, high: float, case: str
) -> None:
    region = Region.of_run(0.3, share=share)
    assert region.lrs == pytest.approx((0.3 * low, 0.3 * high))
    assert region.case == case


def test_a_longer_run_may_average_over_the_same_part_of_it() -> None:
    region = Region.near(0.3)
    assert region.averaging_near(0.01, ran=100, steps=100).rates == pytest.approx((0.005, 0.02))
    assert region.averaging_near(0.01, ran=100, steps=1000).rates == pytest.approx((0.0005, 0.02))
    assert region.averaging_near(0.01, ran=100, steps=50).rates == pytest.approx((0.005, 0.04))
    assert region.averaging_near(0.9, ran=100, steps=100).rates == pytest.approx((0.45, 1.0))
    part = region.averaging_near(0.01, ran=100, steps=50)
    assert (part.lrs, part.case) == (region.lrs, region.case)
    assert (region.highest_theta, part.highest_theta) == (math.inf, 0.0)


@given(
    rate=st.floats(1e-8, 1),
    lr=st.floats(1e-9, 1e3),
    at=st.tuples(*[st.floats(-50, 50)] * 3) | st.tuples(*[st.floats(-50, 50)] * 2),
    share=st.none() | st.floats(0, 1),
)
def test_every_place_of_a_search_is_inside(rate: float, lr: float, at: tuple[float, ...], share: float | None) -> None:
    region = Region.of_run(lr, share=share).averaging_near(rate, 100, 100)
    land = _Landscape(Quadratic.of([1.0]), 100, 0.9, region)
    theta, c, eta = land.setting(at)
    assert (c, eta) in region
    assert CLEAR * theta_floor(0.9, c) <= theta <= region.highest_theta
    assert theta == 0 or len(at) == 3
    for count in (2, 5):
        assert all(land.setting(place)[1:] in region for place in land.grid(0.0, count))
    assert (0.5, lr) in Region()
    assert (0.5, lr * NEAR * 1.01) not in Region.near(lr)


@pytest.mark.parametrize("share", [None, 0.01, 0.05, 0.2])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_advice_from_a_run_stays_near_it(share: float | None, beta1: float) -> None:
    run = fit(share, beta1=beta1)
    advice = recommend(500, curvatures=run)
    lrs = Region.of_run(run.lr, share=share).lrs
    assert lrs is not None
    assert lrs[0] <= advice.lr <= lrs[1]
    assert 0.01 < advice.method.rate < 0.04  # type: ignore[union-attr, operator]
    assert advice.method.theta <= 0  # type: ignore[union-attr, operator]
    assert (advice.near, advice.runs, advice.share, advice.beta1) == (run.lr, 1, share, beta1)
    assert advice == recommend(500, curvatures=[run]) == recommend(500, curvatures=iter([run]))


def test_without_an_average_in_the_run_only_its_learning_rate_holds() -> None:
    alone, known = recommend(500, curvatures=fit(None, rate=None)), recommend(500, curvatures=PROBLEM, near=0.1)
    assert 0.05 <= alone.lr <= 0.2
    assert (alone.best, alone.region, alone.share) == (known.best, known.region, None)


def test_another_learning_rate_takes_the_place_of_the_run_and_its_noise_says_nothing_there() -> None:
    advice, known = recommend(500, curvatures=fit(0.2), near=0.02), recommend(500, curvatures=PROBLEM, near=0.02)
    assert (advice.best, advice.region, advice.share) == (known.best, known.region, None)


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.012, "noise adds 1.2% of what the run had to gain to the loss of its weights. Below 3% the learning"),
        (0.05, "From 3% to 6% is usual near the best learning rate of a network: the advice does not raise it."),
        (0.2, "Above 6% the learning rate was high: the advice is a quarter to a half of it. Run there, and ask again"),
    ],
)  # fmt: skip
def test_the_noise_of_the_run_is_said(share: float, said: str) -> None:
    assert said in recommend(500, curvatures=fit(share)).explain()


def test_without_a_share_nothing_is_said_of_noise_in_the_run() -> None:
    for advice in (recommend(500, curvatures=fit(None, rate=None)), recommend(500, curvatures=[1.0, 0.1])):
        assert "had to gain" not in advice.explain()


# Several runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runs", "share", "case", "low", "high"),
    [
        ([(0.1, 0.5), (0.2, 0.4)], 0.2, "up", 0.2 * math.sqrt(2), 0.4),  # the lower rate is worse, whatever the noise
        ([(0.1, 0.4), (0.2, 0.5)], 0.0, "down", 0.1 / 2.2, 0.05),  # the higher one is worse
        ([(0.1, 0.4), (0.1, 0.5)], 0.01, "up", 0.1 * math.sqrt(2), 0.2),  # nothing near was tried: by the noise
        ([(0.1, 0.4), (0.1, 0.5)], None, "up", 0.1 * math.sqrt(2), 0.2),
        ([(0.1, 0.4), (0.1, 0.5)], 0.2, "down", 0.1 / 2.2, 0.05),
        ([(0.1, 0.4), (0.8, 0.5)], 0.01, "up", 0.1 * math.sqrt(2), 0.2),  # 8 times the rate is not near
        ([(0.1, 0.4), (0.105, 0.5)], 0.01, "up", 0.1 * math.sqrt(2), 0.2),  # and 1.05 times is the same
        ([(0.1, 0.4), (0.2, math.inf)], 0.0, "down", 0.1 / 2.2, 0.05),  # lost
        ([(0.1, 0.5), (0.2, 0.4), (0.4, 0.5)], 0.0, "between", 0.2 / SAME, 0.2 * SAME),
        ([(0.4, 0.5), (0.2, 0.4), (0.1, 0.5)], 0.0, "between", 0.2 / SAME, 0.2 * SAME),  # in any order
        ([(0.1, 0.5), (0.2, 0.5), (0.4, 0.5)], 0.0, "down", 0.1 / 2.2, 0.05),  # of equals the first
    ],
)
def test_the_next_learning_rate(runs: list[Tried], share: float | None, case: str, low: float, high: float) -> None:
    region = Region.of_runs(runs, share=share)
    assert region.case == case
    assert region.lrs == pytest.approx((low, high))


@given(
    best=st.floats(1e-6, 10),
    left=st.floats(1.2, 2.1),
    right=st.floats(1.2, 2.1),
    rises=st.tuples(st.floats(1.0001, 1e3), st.floats(1.0001, 1e3)),
)
def test_between_two_worse_runs_it_is_the_vertex_of_the_parabola_over_logarithms(
    best: float, left: float, right: float, rises: tuple[float, float]
) -> None:
    runs = [(best / left, rises[0]), (best, 1.0), (best * right, rises[1])]
    region = Region.of_runs(runs, share=None)
    assert region.case == "between"
    assert region.lrs is not None
    x, y = np.log([lr / best for lr, _ in runs]), np.log([loss for _, loss in runs])
    a, b, _ = np.polyfit(x, y, 2)
    assert math.log(math.sqrt(math.prod(region.lrs)) / best) == pytest.approx(-b / (2 * a), abs=1e-6)
    assert best / left < math.sqrt(math.prod(region.lrs)) < best * right


def test_a_lost_run_pushes_the_vertex_to_the_middle_of_the_other_side() -> None:
    region = Region.of_runs([(0.1, 0.5), (0.2, 0.4), (0.4, math.inf)], share=None)
    assert region.lrs is not None
    assert math.sqrt(math.prod(region.lrs)) == pytest.approx(0.1 * math.sqrt(2), rel=1e-2)


@pytest.mark.parametrize("optimum", [0.003, 0.05, 0.9])
@pytest.mark.parametrize("first", [0.01, 0.1])
def test_a_search_ends_near_the_best_learning_rate_of_a_smooth_loss(optimum: float, first: float) -> None:
    """The highest rate of each region is taken, as the quadratic of a network nearly always asks."""

    def run(lr: float) -> Tried:
        return lr, 1 + 0.3 * math.log(lr / optimum) ** 2

    runs, cases = [run(first)], []
    while "between" not in cases:
        region = Region.of_runs(runs, share=0.01)
        assert region.lrs is not None
        cases.append(region.case)
        runs.append(run(region.lrs[1]))
        assert len(runs) < 15
    assert 1 / 1.3 < min(runs, key=lambda each: each[1])[0] / optimum < 1.3
    downs = [lr for lr, _ in runs]
    assert len({round(lr, 9) for lr in downs}) == len(downs)  # never the same one twice


@given(
    lrs=st.lists(st.floats(1e-4, 1), min_size=1, max_size=6),
    losses=st.lists(st.floats(0.1, 10), min_size=6, max_size=6),
    share=st.none() | st.floats(0, 1),
)
def test_what_is_next_is_near_the_best_and_twice_and_half_its_rate_are_new(
    lrs: list[float], losses: list[float], share: float | None
) -> None:
    runs = list(zip(lrs, losses, strict=False))
    best, _ = min(runs, key=lambda run: run[1])
    region = Region.of_runs(runs, share=share)
    assert region.lrs is not None
    low, high = region.lrs
    assert low < high <= best * NEAR * SAME
    assert best / (NEAR * SAME) <= low * 1.0001
    if region.case == "up":
        assert not any(best * SAME < lr <= best * NEAR * SAME for lr in lrs)
    if region.case == "down":
        assert not any(best / (NEAR * SAME) <= lr < best / SAME for lr in lrs)
    if region.case == "between":  # only by runs on both sides
        assert min(lrs) < best < max(lrs)


def test_advice_from_several_runs_is_from_the_best_one_and_says_what_is_tried_next() -> None:
    runs = [fit(0.01, lr=0.1, end=0.6), fit(0.04, lr=0.2, end=0.5), fit(0.1, lr=0.4, end=0.7)]
    low = recommend(500, curvatures=runs[:1])
    assert low.region.case == "low"
    up = recommend(500, curvatures=runs[:2])
    assert (up.near, up.runs, up.share, up.region.case) == (0.2, 2, 0.04, "up")
    said = "Of 2 runs, the one at a learning rate of 0.2 ended best. There is none near twice that rate, so it is tried"
    assert said in up.explain()
    lost = recommend(500, curvatures=runs[:2], lost=np.array([0.4]))  # type: ignore[arg-type]
    assert (lost.runs, lost.region.case) == (3, "between")
    between = recommend(500, curvatures=runs)
    assert 0.2 / SAME**2 < between.lr < 0.2 * SAME**2
    assert "Lower and higher rates near it are no better: the advice is at the vertex" in between.explain()
    down = recommend(500, curvatures=runs[1:])
    assert down.lr == pytest.approx(0.1, rel=0.1)
    assert "There is none near half that rate" in down.explain()


def test_only_without_the_noise_of_the_run_a_rate_further_away_is_said_to_be_better() -> None:
    def further(*runs: RunFit) -> bool:
        return any("further from the run's" in each for each in recommend(500, curvatures=runs).warnings)

    assert further(fit(None, rate=None))
    assert not any(further(fit(share)) for share in (0.01, 0.05, 0.2))
    assert not further(fit(end=0.4), fit(lr=0.2))


@pytest.mark.parametrize(
    ("curvatures", "more", "error", "message"),
    [
        ([fit(), 1.0], {}, TypeError, "curvatures has fitted runs and other things; give fitted runs alone"),
        ([fit(), fit(beta1=0.9)], {}, ValueError, "the runs were fitted with several beta1"),
        ([1.0], {"lost": [0.1]}, ValueError, r"lost=\[0.1\] goes with fitted runs"),
        ([fit()], {"lost": 0.1}, TypeError, r"lost=0\.1 is not a list; give a list of learning rates"),
        ([fit()], {"lost": [0.2], "near": 0.1}, ValueError, r"near=0\.1 takes the place of all runs, also of lost="),
        ([fit()], {"noise": 2.0}, ValueError, r"^noise=2\.0, batch=128\.0 and start=1\.0 are known of"),
        ([fit()], {"lr": 0.1}, ValueError, r"lr=0\.1 gives curvatures their size, and those of fitted runs have one"),
        ([fit(), fit(None, rate=None)], {}, ValueError, "some runs have losses of an average, and others have not"),
        ([fit()], {"lost": [-0.1]}, ValueError, r"^lost=-0\.1 "),
    ],
)
def test_refused(curvatures: list[object], more: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        recommend(500, curvatures=curvatures, **more)  # type: ignore[arg-type]


def test_runs_of_several_lengths_are_refused() -> None:
    short = RunFit(PROBLEM, 0.1, 0.0, 0.0, (), steps=100, end=0.5, rate=0.02)
    with pytest.raises(ValueError, match="the runs have 100 to 500 steps, so their losses cannot be compared"):
        recommend(500, curvatures=[fit(), short])


@pytest.mark.parametrize("factor", [1.05, 1.09, 1.15, 1.9, 2.15, 2.4, 2.45])
def test_a_run_is_a_neighbour_if_it_is_neither_the_same_nor_far_away(factor: float) -> None:
    region = Region.of_runs([(0.1, 0.4), (0.1 * factor, 0.5)], share=0.01)
    assert (region.case == "down") is (SAME < factor <= NEAR * SAME**2)


# The quadratic of the best run ----------------------------------------------------------------------------------------


def test_a_search_goes_beyond_what_the_quadratic_of_the_best_run_bears_and_says_so() -> None:
    """Its limit is 2; a network may bear more, and only runs can tell."""
    steep = [fit(0.04, lr=0.9, end=0.6), fit(0.04, lr=1.8, end=0.5)]
    up = recommend(500, curvatures=steep)
    assert (up.region.case, up.runs) == ("up", 2)
    assert 1.8 * math.sqrt(2) / 1.01 < up.lr <= 3.6
    assert math.isfinite(up.loss.total)
    assert any("diverges above a learning rate of 2. Networks often bear more" in each for each in up.warnings)
    assert up.best.limit == up.alternatives["EMA"].limit == pytest.approx(2.0)  # of the quadratic as it was fitted
    assert "The quadratic that fits the best run diverges above 2, and runs were made at higher rates" in up.explain()
    assert not any("begin at half of it" in each for each in up.warnings)
    down = recommend(500, curvatures=steep[::-1][:1], lost=[3.6])
    assert not any("diverges above" in each for each in down.warnings)


def test_the_learning_rate_of_a_run_can_be_advised_although_its_quadratic_hardly_bears_it() -> None:
    advice = recommend(500, curvatures=fit(0.04, lr=1.95))
    assert 1.9 / 2 < advice.lr <= 1.95
    assert Quadratic.of([1.0, 0.1]).bounded(2.0) == Quadratic.of([1.0, 0.1])
    bounded = PROBLEM.bounded(0.5)
    assert [each.curvature for each in bounded.directions] == [0.5, 0.1, 0.01]
    assert bounded.start == pytest.approx(PROBLEM.start)


def test_an_average_longer_than_its_run_is_no_guide() -> None:
    advice = recommend(500, curvatures=fit(None, rate=1e-5))
    assert advice.region.rates == (0.0, 1.0)
    assert advice.method.rate > 1e-3  # type: ignore[union-attr, operator]


def test_it_says_if_the_averaging_rate_is_at_the_end_of_what_is_near() -> None:
    noisy = RunFit(Quadratic.of([1.0, 0.1], noise=20.0), 0.3, 0.0, 0.0, (), 500, 0.5, rate=0.1, share=0.05)
    said = recommend(500, curvatures=noisy).explain()
    assert "Its averaging rate is as far from the run's as it may be: ask again from a run with it." in said
    assert "no centred(θ) with θ ≤ 0 near the rates of the run is better by more than 3%." in said
    again = RunFit(noisy.problem, 0.3, 0.0, 0.0, (), 500, 0.5, rate=0.005, share=0.05)
    assert "as far from the run's" not in recommend(500, curvatures=again).explain()


def test_an_average_that_is_of_no_use_is_not_asked_for_again() -> None:
    calm = Quadratic.of([1.0], noise=0.001)
    ends = {0.01: 0.5, 0.02: 0.4}
    runs = [RunFit(calm, lr, 0.0, 0.0, (), 100, end, beta1=0.9, rate=0.3, share=0.0) for lr, end in ends.items()]
    said = recommend(100, curvatures=runs).explain()
    assert said.startswith("Train without an average")
    assert "ask again from a run with it" not in said


@pytest.mark.parametrize(("lost", "said"), [(0.1, True), (0.05, True), (0.105, True), (0.2, False)])
def test_a_lost_run_at_the_rate_of_the_best_one_or_below_is_said(lost: float, said: bool) -> None:
    warnings = recommend(500, curvatures=[fit()], lost=[lost]).warnings
    text = f"A run at {lost:.3g} was lost, and the best one is at 0.1: such rates are not safe. Try several seeds."
    assert (text in warnings) is said


def test_caveats_of_all_runs_are_said_with_their_rates() -> None:
    bad = RunFit(PROBLEM, 0.2, 0.0, 0.3, ("It rains.",), 500, 0.7, rate=0.02, share=0.01)
    assert "Run at 0.2: It rains." in recommend(500, curvatures=[fit(), bad]).warnings
    assert "It rains." in recommend(500, curvatures=bad).warnings
