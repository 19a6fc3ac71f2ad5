"""Paired ratios, equivalence and working ranges: against tables, closed forms and numbers worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbelay.lab.statistics import (
    MARGIN,
    Range,
    _equivalence_p,
    difference_interval,
    exceeds,
    fit_power,
    mcnemar,
    ratio,
    share_interval,
    t_quantile,
    working_range,
)

# Student's distribution ---------------------------------------------------------------------------------------------

TABLE = {  # as printed in every table: 97.5% and 95%
    1: (12.7062, 6.31375),
    2: (4.30265, 2.91999),
    3: (3.18245, 2.35336),
    4: (2.77645, 2.13185),
    9: (2.26216, 1.83311),
    10: (2.22814, 1.81246),
    30: (2.04227, 1.69726),
    120: (1.97993, 1.65765),
}
SIXTEEN_DIGITS = {  # of the 97.5% quantile: the root of a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)
    1: 12.706204736174707,
    2: 4.302652729749464,
    3: 3.182446305283710,
    4: 2.776445105197799,
    9: 2.262157162798205,
    10: 2.228138851986274,
    30: 2.042272456301238,
}


@pytest.mark.parametrize("df", TABLE)
def test_quantiles_are_those_of_the_tables(df: int) -> None:
    found = t_quantile(0.975, df), t_quantile(0.95, df)
    assert found == pytest.approx(TABLE[df], rel=3e-6)  # half of the last printed digit


@pytest.mark.parametrize("df", SIXTEEN_DIGITS)
def test_quantiles_are_exact_to_twelve_digits(df: int) -> None:
    assert t_quantile(0.975, df) == pytest.approx(SIXTEEN_DIGITS[df], rel=1e-12)
    assert t_quantile(0.025, df) == pytest.approx(-SIXTEEN_DIGITS[df], rel=1e-12)


@given(share=st.floats(0.001, 0.999))
def test_one_and_two_degrees_of_freedom_have_closed_forms(share: float) -> None:
    assert t_quantile(share, 1) == pytest.approx(math.tan(math.pi * (share - 0.5)), rel=1e-12, abs=1e-12)
    twice = 2 * share - 1
    assert t_quantile(share, 2) == pytest.approx(twice * math.sqrt(2 / (1 - twice**2)), rel=1e-12, abs=1e-12)


@given(share=st.floats(0.001, 0.998), df=st.integers(1, 60))
def test_quantiles_are_odd_and_grow(share: float, df: int) -> None:
    assert t_quantile(share, df) == pytest.approx(-t_quantile(1 - share, df), rel=1e-9, abs=1e-12)
    assert t_quantile(share, df) < t_quantile(share + 0.001, df)


@pytest.mark.parametrize(("df", "t"), [(1, 0.7), (2, 1.3), (3, 2.1), (4, 0.4), (9, 1.9), (10, 2.6), (30, 1.1)])
def test_the_p_of_equivalence_is_a_finite_sum(df: int, t: float) -> None:
    """Student's distribution for whole degrees of freedom, by Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(df))
    odd = df % 2
    total, term = 0.0, math.cos(angle) ** odd
    for power in range(odd, df - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
    total *= math.sin(angle)
    below = (1 + (2 / math.pi * (angle + total) if odd else total)) / 2
    assert _equivalence_p(math.log(MARGIN) + t, 1.0, df, MARGIN) == pytest.approx(below, rel=1e-12)
    assert _equivalence_p(0.0, math.log(MARGIN) / t, df, MARGIN) == pytest.approx(1 - below, rel=1e-11)


# Lost seeds -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 12), st.integers(0, 12))
def test_mcnemars_p_is_the_share_of_tosses_with_as_many_heads_or_more(one: int, other: int) -> None:
    ways = sum(math.comb(one + other, heads) for heads in range(other, one + other + 1))
    assert mcnemar(one, other) == pytest.approx(ways / 2 ** (one + other), rel=1e-12)


def test_mcnemars_p_looks_at_pairs_that_differ_only() -> None:
    assert mcnemar(0, 4) == 1 / 16
    assert mcnemar(0, 0) == 1.0  # nothing differs


# Shares ---------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 400), st.data())
def test_the_interval_of_a_share_holds_every_share_that_is_not_too_far_off(size: int, data: st.DataObject) -> None:
    """Wilson's interval: the shares whose distance from the count is at most 1.96 of their own standard deviations."""
    count = data.draw(st.integers(0, size))
    low, high = share_interval(count, size)
    assert 0 <= low <= count / size + 1e-12
    assert count / size - 1e-12 <= high <= 1
    for p, end in ((low, 0.0), (high, 1.0)):
        if abs(p - end) > 1e-9:
            z = abs(count / size - p) / math.sqrt(p * (1 - p) / size)
            assert z == pytest.approx(1.959963984540054, rel=1e-6)


def test_the_interval_of_a_difference_has_a_known_value() -> None:
    """Newcombe's own example, 56 of 70 against 48 of 80: 0.0524 to 0.3339."""
    assert difference_interval((56, 70), (48, 80)) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_a_bar_inside_an_interval_is_neither_passed_nor_missed() -> None:
    assert [exceeds((0.8, 0.9), bar) for bar in (0.7, 0.8, 0.85, 0.9, 0.91)] == [True, True, None, None, False]


# Noise that all pairs share -------------------------------------------------------------------------------------------


def test_noise_that_all_pairs_share_widens_the_interval_and_moves_no_mean() -> None:
    ones, others = [1.1, 1.2, 1.15], [1.0, 1.05, 1.02]
    plain, noisy = ratio(ones, others), ratio(ones, others, noise=0.01)
    assert plain is not None
    assert noisy is not None
    assert plain.mean == noisy.mean
    t = t_quantile(0.975, 2)
    before, after = (math.log(found.high / found.mean) / t for found in (plain, noisy))
    assert after**2 == pytest.approx(before**2 + 2 * 0.01**2)
    assert noisy.p_equal > plain.p_equal or plain.p_equal > 0.5


# A fitted power -------------------------------------------------------------------------------------------------------


def test_a_power_is_found() -> None:
    assert fit_power([1.0, 10.0, 100.0], [3.0, 0.03, 0.0003]) == pytest.approx(-2, rel=1e-14)
    assert fit_power([1.0, 10.0], [0.0, 0.0]) == 0.0


# Ratios of pairs ------------------------------------------------------------------------------------------------------

ONES, OTHERS = [math.exp(0.1), math.exp(0.3), math.exp(0.2) * 5], [1.0, 1.0, 5.0]  # logs 0.1, 0.3, 0.2


def test_a_ratio_and_its_interval_worked_out_by_hand() -> None:
    found = ratio(ONES, OTHERS)
    assert found is not None
    reach = 4.302653 * 0.1 / math.sqrt(3)  # the standard deviation of 0.1, 0.2, 0.3 is 0.1
    assert found.pairs == 3
    assert found.mean == pytest.approx(math.exp(0.2), rel=1e-12)
    assert math.log(found.low) == pytest.approx(0.2 - reach, rel=1e-6)
    assert math.log(found.high) == pytest.approx(0.2 + reach, rel=1e-6)
    # two degrees of freedom have a closed form; the mean is beyond the margin, and so p is above ½
    t = (0.2 - math.log(MARGIN)) / (0.1 / math.sqrt(3))
    assert found.p_equal == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), rel=1e-9)
    assert found.reading == "open"


def test_exchanging_the_two_turns_the_ratio_over() -> None:
    one, other = ratio(ONES, OTHERS), ratio(OTHERS, ONES)
    assert one is not None
    assert other is not None
    assert other.mean * one.mean == pytest.approx(1, rel=1e-12)
    assert (other.low * one.high, other.high * one.low) == pytest.approx((1, 1), rel=1e-12)
    assert other.p_equal == pytest.approx(one.p_equal, rel=1e-9)


@given(logs=st.lists(st.floats(-0.2, 0.2), min_size=3, max_size=12), shift=st.floats(-0.08, 0.08))
def test_equal_means_that_the_90_percent_interval_is_within_the_margin(logs: list[float], shift: float) -> None:
    values = [shift + 0.2 * x for x in logs]
    found = ratio([math.exp(x) for x in values], [1.0] * len(values))
    assert found is not None
    n, mean = len(values), sum(values) / len(values)
    error = math.sqrt(sum((x - mean) ** 2 for x in values) / (n - 1) / n)
    reach = abs(mean) + t_quantile(0.95, n - 1) * error
    if abs(reach - math.log(MARGIN)) > 1e-9:  # on the border rounding decides
        assert found.equal == (reach < math.log(MARGIN))


@pytest.mark.parametrize(
    ("ratios", "reading"),
    [
        ([0.70, 0.71, 0.69, 0.70], "lower"),
        ([1.30, 1.31, 1.29, 1.30], "higher"),
        ([1.00, 1.01, 0.99, 1.00], "equal"),
        ([1.02, 1.021, 1.019, 1.02], "equal"),  # certainly above 1, and certainly by less than 5%
        ([0.5, 2.0, 0.7, 1.5], "open"),
        ([1.06, 1.04, 1.05, 1.05], "higher"),  # on the margin: not shown to be within
    ],
)
def test_readings(ratios: list[float], reading: str) -> None:
    found = ratio(ratios, [1.0] * len(ratios))
    assert found is not None
    assert found.reading == reading


@pytest.mark.parametrize(("value", "reading"), [(1.0, "equal"), (1.04, "equal"), (1.06, "higher"), (0.9, "lower")])
def test_pairs_without_any_spread_leave_no_doubt(value: float, reading: str) -> None:
    found = ratio([value] * 4, [1.0] * 4)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((value, value), rel=1e-12)
    assert found.reading == reading


def test_lost_runs_leave_their_pairs_out() -> None:
    assert ratio([*ONES, None, 7.0], [*OTHERS, 3.0, None]) == ratio(ONES, OTHERS)
    assert ratio([1.0, None], [1.0, 1.0]) is None
    assert ratio([], []) is None


# Working ranges -------------------------------------------------------------------------------------------------------

LRS = [0.001, 0.01, 0.1, 1.0]


def test_a_range_ends_where_the_line_between_two_points_crosses_the_limit() -> None:
    found = working_range(LRS, [4.0, 1.0, 1.0, 8.0], limit=2.0)
    # on a log scale: half of the way up from 1 to 4, a third of the way up from 1 to 8
    assert found is not None
    assert found.low == pytest.approx(0.01 / math.sqrt(10), rel=1e-12)
    assert found.high == pytest.approx(0.1 * 10 ** (1 / 3), rel=1e-12)
    assert found.width == pytest.approx(10 ** (1 + 1 / 2 + 1 / 3), rel=1e-12)
    assert not found.open_low
    assert not found.open_high


def test_a_range_that_reaches_the_last_rate_tried_says_so() -> None:
    assert working_range(LRS, [1.0, 1.0, 1.0, 1.0], limit=1.5) == Range(0.001, 1.0, open_low=True, open_high=True)


def test_a_range_ends_at_the_last_rate_before_a_lost_run() -> None:
    assert working_range(LRS, [None, 1.0, 1.2, None], limit=1.5) == Range(0.01, 0.1, open_low=False, open_high=False)


def test_a_second_range_beyond_a_bad_rate_does_not_count() -> None:
    found = working_range(LRS, [1.0, 9.0, 1.2, 1.2], limit=1.5)
    assert found is not None
    assert found.high < 0.01


def test_a_method_that_is_nowhere_good_enough_has_no_range() -> None:
    assert working_range(LRS, [3.0, 2.0, 3.0, None], limit=1.5) is None
    assert working_range(LRS, [None] * 4, limit=1.5) is None


@given(scale=st.floats(0.1, 10))
def test_a_change_of_units_moves_a_range_and_leaves_its_width(scale: float) -> None:
    losses = [4.0, 1.0, 1.3, 8.0]
    plain, scaled = working_range(LRS, losses, 1.5), working_range([lr * scale for lr in LRS], losses, 1.5)
    assert plain is not None
    assert scaled is not None
    assert scaled.width == pytest.approx(plain.width, rel=1e-9)
    assert scaled.high == pytest.approx(plain.high * scale, rel=1e-9)
