"""Schedules: the numbers of each step, what is refused, and what a checkpoint says of them."""

import math
import pickle
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchbelay as tb
from helpers.ids import without_address
from torchbelay.physics import schedules
from torchbelay.physics.identity import describe
from torchbelay.physics.schedules import Bounds, cosine, linear

UNIT = Bounds(0, 1, open_low=False, open_high=False)
NUMBERS = st.floats(-1e6, 1e6)
LENGTHS = st.integers(2, 10**7)
RAMPS = pytest.mark.parametrize("ramp", [cosine, linear])


@RAMPS
@given(start=NUMBERS, end=NUMBERS, steps=LENGTHS)
def test_a_ramp_begins_at_step_1_and_is_at_its_end_from_its_last_step_on(ramp, start, end, steps) -> None:
    schedule = ramp(start, end, steps)
    assert [schedule(t) for t in (-3, 0, 1)] == [start] * 3
    assert [schedule(t) for t in (steps, steps + 1, 10 * steps)] == [end] * 3


@RAMPS
@given(start=NUMBERS, end=NUMBERS, steps=LENGTHS, share=st.floats(0, 1))
def test_a_ramp_never_turns_and_stays_between_its_ends(ramp, start, end, steps, share) -> None:
    schedule, t = ramp(start, end, steps), 1 + int(share * (steps - 1))
    slack = 1e-9 * (1 + abs(start) + abs(end))
    assert min(start, end) - slack <= schedule(t) <= max(start, end) + slack
    assert (schedule(t + 1) - schedule(t)) * (end - start) >= -slack * abs(end - start)


@pytest.mark.parametrize("t", [1, 2, 50, 99, 100])
def test_the_numbers_are_those_of_the_formulas(t: int) -> None:
    assert linear(-0.5, 2.0, 100)(t) == pytest.approx(-0.5 + 2.5 * (t - 1) / 99, rel=1e-14, abs=1e-15)
    assert cosine(-0.5, 2.0, 100)(t) == pytest.approx(0.75 - 1.25 * math.cos(math.pi * (t - 1) / 99), abs=1e-15)


@pytest.mark.parametrize("t", [1, 2, 37, 100])
def test_a_run_of_N_steps_has_dinos_momentum(t: int) -> None:
    base, final, n = 0.996, 1.0, 100
    dino = final + 0.5 * (base - final) * (1 + math.cos(math.pi * (t - 1) / n))  # of its iteration t − 1, of n
    byol = 1 - (1 - base) * (math.cos(math.pi * (t - 1) / n) + 1) / 2
    assert cosine(base, final, n + 1)(t) == pytest.approx(dino, abs=1e-15) == pytest.approx(byol, abs=1e-15)


@RAMPS
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"start": math.nan}, ValueError, "^start=nan is out of range"),
        ({"end": math.inf}, ValueError, "^end=inf is out of range"),
        ({"end": "1"}, TypeError, "^end='1' is not a number; give a float"),
        ({"steps": 1}, ValueError, "^steps=1 is too small; it needs steps ≥ 2"),
        ({"steps": 10.0}, TypeError, r"^steps=10\.0 is not a whole number; give an int of at least 2"),
    ],
)
def test_refused(ramp: Any, bad: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ramp(**({"start": 0.0, "end": 1.0, "steps": 10} | bad))


@RAMPS
def test_a_ramp_is_told_pickled_and_compared_by_its_numbers(ramp: Any) -> None:
    one, same, other = ramp(0, 1, 10), ramp(0.0, 1.0, 10), ramp(0.0, 1.0, 11)
    assert describe(one) == describe(same) == f"{ramp.__name__}(start=0.0, end=1.0, steps=10)"
    assert one == same != other
    assert hash(one) == hash(same)
    assert pickle.loads(pickle.dumps(one)) == one
    assert eval(repr(one), vars(schedules)) == one


def test_the_two_ramps_differ() -> None:
    assert linear(0, 1, 10) != cosine(0, 1, 10)
    assert tb.schedules is schedules


# What stands in place of a number ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [0.25, linear(0.0, 0.5, 3), lambda step: step / 8, lambda step: Real(0.25)], ids=without_address
)
def test_a_number_or_the_number_of_a_step(given: Any) -> None:
    schedules.check("decay", given, UNIT)
    assert schedules.at("decay", given, 2, UNIT) == 0.25


class Real:
    """A number of another library."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value


def two(step: int) -> float:
    return 2.0


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (2.0, ValueError, r"^decay=2\.0 is out of range; it needs decay ≥ 0 and decay ≤ 1$"),
        (two, ValueError, r"^decay=<function two .*> at step 1: decay=2\.0 is out of range; it needs"),
        (linear(0.0, 2.0, 9), ValueError, r"^decay=linear\(.*\) at step 9: decay=2\.0 is out of range"),
        (linear(-0.1, 1.0, 9), ValueError, r"^decay=linear\(.*\) at step 1: decay=-0\.1 is out of range"),
        (lambda step: "0.5", TypeError, r"^decay=<function .*> at step 1: decay='0\.5' is not a number"),
        (lambda step: None, TypeError, r"^decay=<function .*> at step 1: decay=None is not a number"),
        (cosine, TypeError, r"^decay=cosine was not called; give the schedule that it makes, as cosine\(\.\.\.\)"),
        (partial(cosine, 0.0), TypeError, "^decay=cosine was not called"),
        ("0.5", TypeError, r"^decay='0\.5' is not a number; give a float"),
    ],
    ids=without_address,
)
def test_what_is_out_of_range_is_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        schedules.check("decay", given, UNIT)


def test_a_function_that_leaves_the_range_later_is_refused_then() -> None:
    given = lambda step: step / 10  # noqa: E731
    schedules.check("decay", given, UNIT)
    assert schedules.at("decay", given, 10, UNIT) == 1.0
    with pytest.raises(ValueError, match=r"at step 11: decay=1\.1 is out of range"):
        schedules.at("decay", given, 11, UNIT)


def test_the_horizon_is_the_last_step_that_any_schedule_says() -> None:
    class Told:
        steps = "many"

        def __call__(self, step: int) -> float:
            return 0.5

    assert schedules.horizon(linear(0, 1, 10), cosine(0, 1, 20), 0.5, two, Told()) == 20
    assert schedules.horizon(0.5, two, Told(), None) == 0
