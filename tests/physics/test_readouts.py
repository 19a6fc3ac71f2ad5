"""Readouts: the shares of w0, w1 and w2 that each returns, and what it refuses."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchbelay as tb
from helpers.methods_under_test import METHODS
from torchbelay.physics.readouts import Shares, bema, blend, centre, check, shares_of

EMA = tb.Spring.ema(decay=0.9)
RHYTHMIC = {"lookahead", "lookahead, all the way", "switch_ema", "easgd, every 3", "diloco", "diloco, every step"}
WATCHING = ("ema,", "swa", "power_ema", "hard_sync")
MOVING = {"ema_nesterov, scheduled"}  # while its β moves, z moves with it

shares = st.floats(0, 1)


def stepped(method: tb.Method, steps: int, lr: float = 0.1) -> tb.Method:
    """A method that has been asked for each of its first steps, as a Belay asks."""
    for step in range(1, steps + 1):
        method.coupling(step, lr)
    return method


# Blends ---------------------------------------------------------------------------------------------------------------


@given(shares)
def test_a_blend_has_that_share_of_the_average_and_the_rest_of_the_weights(share: float) -> None:
    assert blend(share).shares("any", EMA, 3, 0.1) == Shares(0.0, 1 - share, share)


def test_the_ends_of_a_blend_have_no_share_of_the_other_end() -> None:
    assert blend(1.0).shares("any", EMA, 3, 0.1) == (0.0, 0.0, 1.0)
    assert blend(0).shares("any", EMA, 3, 0.1) == (0.0, 1.0, 0.0)


def test_of_several_patterns_the_first_one_that_matches_counts() -> None:
    readout = blend({"head.weight": 0.1, "head.*": 0.2, "*.bias": 0.3, "*": 0.4})
    names = {"head.weight": 0.1, "head.bias": 0.2, "body.0.bias": 0.3, "body.0.weight": 0.4, "Head.weight": 0.4}
    assert {name: readout.shares(name, EMA, 3, 0.1).w2 for name in names} == names


def test_a_name_without_a_pattern_is_refused_with_the_cure() -> None:
    with pytest.raises(
        ValueError, match=r"share=\{'head.\*': 0.5\} has no pattern for the parameter 'body.w'; add one"
    ):
        blend({"head.*": 0.5}).shares("body.w", EMA, 3, 0.1)


def test_a_function_of_the_name_gives_the_share() -> None:
    readout = blend(lambda name: len(name) / 10)
    assert readout.shares("1234", EMA, 3, 0.1) == (0.0, 0.6, 0.4)
    with pytest.raises(ValueError, match=r"share of '12345678901'=1.1 is out of range"):
        readout.shares("12345678901", EMA, 3, 0.1)


@pytest.mark.parametrize(
    ("share", "error", "message"),
    [
        (65, ValueError, r"share=65 is out of range; it needs a number from 0 \(the weights\) to 1 \(the average\)"),
        (-0.1, ValueError, "share=-0.1 is out of range"),
        (math.nan, ValueError, "share=nan is out of range"),
        ("0.5", TypeError, "share='0.5' is not a number"),
        (True, TypeError, "share=True is not a number"),
        (None, TypeError, "share=None is not a number"),
        ({"head.*": 2.0}, ValueError, r"share of 'head.\*'=2.0 is out of range"),
        ({3: 0.5}, TypeError, "has the pattern 3; give texts as"),
    ],
)
def test_a_share_that_is_none_is_refused(share: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        blend(share)


# The centre of mass ---------------------------------------------------------------------------------------------------


def test_the_centre_of_belay_is_the_centre_of_its_masses() -> None:
    found = centre().shares("any", tb.Spring(k=1.0, m1=3.0, m2=5.0), 7, 0.1)
    assert found == pytest.approx((0, 3 / 8, 5 / 8), abs=1e-15)
    swinging = tb.Spring(k=1.0, m1=10.0, m2=30.0, c1=5.0, c2=15.0)
    assert centre().shares("any", swinging, 7, 0.1) == (0.0, 0.25, 0.75)


def test_an_infinitely_heavy_model_or_average_is_the_centre() -> None:
    assert centre().shares("any", tb.Spring(k=1.0, m1=math.inf, m2=5.0), 7, 0.1) == (0.0, 1.0, 0.0)
    assert centre().shares("any", tb.Spring(k=1.0, m1=5.0, m2=math.inf), 7, 0.1) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("how", [how for how in METHODS if how not in RHYTHMIC | MOVING])
@given(w1=st.floats(-1e3, 1e3), w2=st.floats(-1e3, 1e3), steps=st.integers(0, 9))
def test_a_step_without_an_update_does_not_move_the_centre(how: str, w1: float, w2: float, steps: int) -> None:
    method = stepped(METHODS[how](), steps)
    _, r1, r2 = centre().shares("any", method, steps, 0.1)
    before = r1 * w1 + r2 * w2
    c = method.coupling(steps + 1, 0.1)
    after1, after2 = w1 + c.a * (w2 - w1), w2 + c.b * (w1 - w2)
    _, r1, r2 = centre().shares("any", method, steps + 1, 0.1)  # θ may have moved
    assert r1 * after1 + r2 * after2 == pytest.approx(before, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    "how", [how for how in METHODS if how not in RHYTHMIC and not hasattr(METHODS[how](), "settled")]
)
def test_an_update_moves_the_centre_by_the_effective_share_of_it(how: str) -> None:
    method, steps = METHODS[how](), 4
    stepped(method, steps)
    _, r1, r2 = centre().shares("any", method, steps, 0.1)
    c = method.coupling(steps + 1, 0.1)
    assert r1 * c.p + r2 * c.q == pytest.approx(c.effective_lr_scale, rel=1e-12)


def test_the_centre_of_schedule_free_and_of_primal_averaging_is_their_base_iterate() -> None:
    x, z, beta = 2.0, -3.0, 0.75  # y = β·x + (1 − β)·z
    y = beta * x + (1 - beta) * z
    for method in (tb.methods.schedule_free(beta), tb.methods.primal_averaging(mu_x=0.9, mu_y=beta)):
        _, r1, r2 = centre().shares("any", stepped(method, 5), 5, 0.1)
        assert r1 * y + r2 * x == pytest.approx(z, rel=1e-12)


@pytest.mark.parametrize("how", [how for how in METHODS if how == "ema" or how.startswith(WATCHING)])
def test_the_centre_of_an_average_that_only_watches_is_the_weights(how: str) -> None:
    for steps in (0, 1, 2, 5, 6):
        assert centre().shares("any", METHODS[how](), steps, 0.1) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize("how", sorted(RHYTHMIC))
def test_a_method_without_a_theta_of_its_own_is_refused_with_the_cure(how: str) -> None:
    for steps in (0, 2, 3):
        with pytest.raises(ValueError, match=r"pulls at some steps only; use blend\(share\)"):
            centre().shares("any", METHODS[how](), steps, 0.1)


@dataclass(frozen=True)
class Scheduled:
    """A method that says by `settled` which θ it has at a step; a/b of its steps is another number."""

    theta: Callable[[int], float]
    rhythm = pulls = True

    def coupling(self, step: int, lr: float) -> tb.Coupling:
        return tb.Coupling(0.5, 0.1, 1.0, 0.0)

    def settled(self, step: int, lr: float) -> tb.Coupling:
        return tb.Coupling(0.1 * self.theta(step), 0.1, 1.0, 0.0)


def test_a_theta_that_varies_is_that_of_the_coming_step() -> None:
    found = centre().shares("any", Scheduled(lambda step: step / 2), 3, 0.1)
    assert found == pytest.approx((0.0, 1 / 3, 2 / 3), abs=1e-15)


@dataclass(frozen=True)
class Fixed:
    theta: float

    def coupling(self, step: int, lr: float) -> tb.Coupling:
        return tb.Coupling(0.0, 0.1, 1.0, 0.1)


@pytest.mark.parametrize("theta", [-1.0, math.nan, -math.inf])
def test_a_theta_without_a_centre_is_refused(theta: float) -> None:
    with pytest.raises(ValueError, match=r"centre\(\) needs θ > −1, and Fixed\(theta=.*use blend\(share\)"):
        centre().shares("any", Fixed(theta), 3, 0.1)


@pytest.mark.parametrize("how", ["heavy_ball", "nesterov", "schedule_free"])
def test_to_ask_for_the_centre_is_not_remembered(how: str) -> None:
    method = stepped(METHODS[how](), 3)
    before = method.memory
    centre().shares("any", method, 3, 0.5)
    assert method.memory == before


def test_the_centre_of_momentum_goes_by_the_learning_rate_of_the_coming_step() -> None:
    method = stepped(tb.methods.heavy_ball(0.8), 3, lr=0.2)
    theta = -0.8 * 0.1 / 0.2
    assert centre().shares("any", method, 3, 0.1) == pytest.approx((0, 1 / (1 + theta), theta / (1 + theta)))


# Bias-corrected EMA ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 10**6), st.floats(0, 2), st.floats(0, 100), st.floats(0.1, 5))
def test_bema_moves_the_average_on_by_alpha_of_the_way_of_the_weights(
    step: int, power: float, lag: float, multiplier: float
) -> None:
    alpha = math.exp(-power * math.log(lag + multiplier * step))
    found = bema(bias_power=power, lag=lag, multiplier=multiplier).shares("any", EMA, step, 0.1)
    assert found == pytest.approx((-alpha, alpha, 1.0), rel=1e-12)


def test_the_defaults_of_bema_are_those_of_trl() -> None:
    assert (bema().bias_power, bema().lag, bema().multiplier) == (0.2, 10, 1.0)
    assert bema().shares("any", EMA, 22, 0.1).w1 == 0.5  # 32^(−1/5)


def test_before_the_first_step_alpha_is_finite() -> None:
    assert bema(lag=0.0, multiplier=4.0, bias_power=0.5).shares("any", EMA, 0, 0.1) == (-0.5, 0.5, 1.0)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"bias_power": -0.1}, ValueError, "bias_power=-0.1 is out of range"),
        ({"lag": math.inf}, ValueError, "lag=inf is out of range"),
        ({"multiplier": "1"}, TypeError, "multiplier='1' is not a number"),
        ({"lag": 0, "multiplier": 0}, ValueError, "lag=0.0 and multiplier=0.0 are both 0; give one of them"),
    ],
)
def test_what_bema_cannot_be_is_refused(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bema(**settings)


# Readouts of one's own ------------------------------------------------------------------------------------------------


class Mine:
    """A readout that returns what it is given."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def shares(self, name: str, method: tb.Method, step: int, lr: float) -> Any:
        return self.found

    def __repr__(self) -> str:
        return "Mine()"


def test_any_three_numbers_with_the_sum_1_are_shares() -> None:
    for found in ((0, -0.5, 1.5), [0.25, 0.25, 0.5], Shares(1e6, -1e6, 1.0), (0.1, 0.2, 0.7)):
        assert shares_of(check(Mine(found)), "any", EMA, 3, 0.1) == tuple(map(float, found))


@pytest.mark.parametrize("found", [None, 1.0, (0.5, 0.5), (0, 0, 1, 0), (None, 0, 1), "abc"], ids=repr)
def test_what_are_not_three_numbers_is_refused(found: Any) -> None:
    with pytest.raises(TypeError, match=r"Mine\(\).shares\('any', …\) returned .*; return Shares\(w0, w1, w2\)"):
        shares_of(Mine(found), "any", EMA, 3, 0.1)


@pytest.mark.parametrize("found", [(0, 0.5, 0.4), (0, 0, 0), (math.nan, 0, 1), (math.inf, -math.inf, 1)], ids=repr)
def test_shares_whose_sum_is_not_1_are_refused(found: Any) -> None:
    with pytest.raises(ValueError, match=r"Mine\(\).shares\('any', …\) returned .*need the sum 1"):
        shares_of(Mine(found), "any", EMA, 3, 0.1)


@pytest.mark.parametrize(
    ("readout", "message"),
    [
        (blend, r"readout=blend was not called; give the readout that it makes, as blend\(...\)"),
        (0.65, r"readout=0.65 has no shares\(name, method, step, lr\); give a readout of torchbelay.readouts"),
        ("blend", r"readout='blend' has no shares"),
        (lambda name: 0.5, r"has no shares"),
        (EMA, r"has no shares"),
    ],
    ids=["uncalled", "a number", "a text", "a function", "a method"],
)
def test_what_is_not_a_readout_is_refused_with_the_cure(readout: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        check(readout)


def test_a_readout_is_told_as_a_method_is() -> None:
    from torchbelay.physics.identity import describe

    told = [describe(each) for each in (blend(0.65), blend({"a.*": 1}), centre(), bema(), bema(lag=20))]
    assert told == ["blend(share=0.65)", "blend(share={'a.*': 1.0})", "centre()", "bema()", "bema(lag=20.0)"]
