"""`methods.ema`: decays that are scheduled, warm up or are 0 or 1, their formula for devices, and what is refused."""

import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.ids import without_address
from torchbelay.physics.coupling import Coupling
from torchbelay.physics.identity import describe
from torchbelay.physics.methods import ema
from torchbelay.physics.schedules import cosine, linear

STEPS = (1, 2, 3, 9, 10, 11, 100, 10**4, 10**6)


def decay(method: ema, t: int) -> float:
    c = method.coupling(t, 0.1)
    assert (c.a, c.p, c.q) == (0, 1, c.b if method.follow == "after" else 0)
    return 1 - c.b


def half(t: int) -> float:
    return 0.5


# Schedules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("follow", ["after", "before"])
@pytest.mark.parametrize("t", STEPS)
def test_a_scheduled_decay_is_that_of_the_step(t: int, follow: Any) -> None:
    schedule = cosine(0.9, 0.999, 50)
    assert decay(ema(schedule, follow=follow), t) == pytest.approx(schedule(t), rel=1e-15)
    assert decay(ema(lambda t: 1 / (1 + t), follow=follow), t) == pytest.approx(1 / (1 + t), rel=1e-9)


@pytest.mark.parametrize(
    ("method", "varies", "horizon"),
    [
        (ema(0.9), "never", 0),
        (ema(0.0), "never", 0),
        (ema(1.0), "never", 0),
        (ema(half_life=5), "never", 0),
        (ema(half), "step", 0),
        (ema(linear(0, 1, 30)), "step", 30),
        (ema(0.9, warmup="ratio"), "step", 0),
        (ema(0.9, rampup_ratio=0.05), "step", 0),
    ],
    ids=without_address,
)
def test_what_varies_and_until_when(method: ema, varies: str, horizon: int) -> None:
    assert (method.varies, method.horizon) == (varies, horizon)


def test_a_function_out_of_range_is_refused_at_its_step() -> None:
    method = ema(lambda t: t / 10)
    assert decay(method, 10) == 1.0
    with pytest.raises(ValueError, match=r"^decay=<function .*> at step 11: decay=1\.1 is out of range"):
        method.coupling(11, 0.1)


# The ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", STEPS)
def test_decay_0_copies_and_decay_1_stands_still(t: int) -> None:
    assert ema(0).coupling(t, 0.1) == ema(0.0).coupling(t, 0.1) == Coupling(0.0, 1.0, 1.0, 1.0)
    assert ema(1).coupling(t, 0.1) == Coupling(0.0, 0.0, 1.0, 0.0)
    assert ema(1.0, warmup="ratio").coupling(t, 0.1).b == 9 / (10 + t)
    assert ema(0.0, warmup="inverse-power").coupling(t, 0.1).b == 1.0


# Warm-ups ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", STEPS)
def test_the_decay_is_the_smallest_of_all_but_not_below_the_least(t: int) -> None:
    method = ema(0.99, warmup="inverse-power", power=0.7, inv_gamma=3.0, min_decay=0.5, rampup_ratio=0.1)
    ramp = 0.0 if t == 1 else 0.5 ** (1 / (0.1 * (t - 1)))
    assert decay(method, t) == pytest.approx(max(0.5, min(0.99, 1 - (1 + t / 3) ** -0.7, ramp)), rel=1e-12)
    fading = ema(linear(0.0, 0.9, 10), min_decay=0.5)
    assert decay(fading, t) == pytest.approx(max(0.5, linear(0.0, 0.9, 10)(t)), rel=1e-14)


@pytest.mark.parametrize("ratio", [1e-3, 0.05, 1.0, 7.0])
@pytest.mark.parametrize("t", STEPS)
def test_the_half_life_is_at_most_a_share_of_the_steps_so_far(t: int, ratio: float) -> None:
    found = decay(ema(half_life=500.0, rampup_ratio=ratio), t)
    if t == 1:
        assert found == 0.0  # no step so far
    else:
        assert found == pytest.approx(0.5 ** (1 / min(500.0, ratio * (t - 1))), rel=1e-12, abs=1e-15)


@given(
    power=st.floats(0.01, 5.0),
    inv_gamma=st.floats(1e-3, 1e6),
    given_decay=st.floats(0, 1),
    t=st.integers(1, 10**7),
)
def test_the_law_is_the_coupling(power: float, inv_gamma: float, given_decay: float, t: int) -> None:
    if given_decay > 0 and 1 - given_decay == 1:
        given_decay = 0.0
    for method in (
        ema(given_decay, warmup="inverse-power", power=power, inv_gamma=inv_gamma),
        ema(given_decay, warmup="ratio"),
    ):
        law = method.law
        assert law is not None
        assert (law.kind, law.every) == ("power", 1)
        rate = max(law.floor, law.scale * (t + law.shift) ** -law.exponent)
        assert rate == pytest.approx(method.coupling(t, 0.1).b, rel=1e-12)


@pytest.mark.parametrize(
    "method",
    [
        ema(0.9),
        ema(half),
        ema(linear(0, 1, 9), warmup="ratio"),
        ema(0.9, warmup="ratio", min_decay=0.1),
        ema(0.9, warmup="ratio", rampup_ratio=0.1),
        ema(0.9, rampup_ratio=0.1),
        ema(0.9, warmup="ratio", follow="before"),
        ema(0.9, warmup="inverse-power", inv_gamma=1e300, power=3.0),  # γ³ is no float
        ema(0.9, warmup="inverse-power", inv_gamma=1e-300, power=3.0),
    ],
    ids=without_address,
)
def test_without_a_formula_there_is_no_law(method: ema) -> None:
    assert method.law is None
    assert all(0 <= method.coupling(t, 0.1).b <= 1 for t in STEPS)


# What it is ----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_says_new_fields_only_if_they_are_used() -> None:
    old = "ema(decay=0.9, half_life=None, half_life_samples=None, batch_size=None, warmup='inverse-power', "
    old += "power=0.6666666666666666, follow='after'"
    assert describe(ema(0.9, warmup="inverse-power", inv_gamma=1, min_decay=0)) == old + ")"
    more = ema(0.9, warmup="inverse-power", inv_gamma=2, min_decay=0.5, rampup_ratio=0.05)
    assert describe(more) == old + ", inv_gamma=2.0, min_decay=0.5, rampup_ratio=0.05)"
    assert "decay=cosine(start=0.9, end=1.0, steps=20), half_life=None" in describe(ema(cosine(0.9, 1, 20)))
    with pytest.raises(ValueError, match=r"ema\.decay=<function half at .* a schedule is a small dataclass"):
        describe(ema(half))


def test_a_pickle_without_the_new_fields_has_their_defaults() -> None:
    old = ema(0.9, warmup="inverse-power")
    for name in ("inv_gamma", "min_decay", "rampup_ratio"):
        del old.__dict__[name]
    again = pickle.loads(pickle.dumps(old))
    assert again == ema(0.9, warmup="inverse-power")
    assert again.coupling(3, 0.1) == ema(0.9, warmup="inverse-power").coupling(3, 0.1)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"decay": 1.1}, ValueError, r"^decay=1\.1 is out of range; it needs decay ≥ 0 and decay ≤ 1$"),
        ({"decay": -0.1}, ValueError, r"^decay=-0\.1 is out of range; it needs decay ≥ 0"),
        ({"decay": cosine}, TypeError, "^decay=cosine was not called"),
        ({"decay": cosine(0.9, 1.1, 9)}, ValueError, r"^decay=cosine.* at step 9: decay=1\.1 is out of range"),
        ({"decay": half, "half_life": 3.0}, ValueError, "^give exactly one of decay, half_life, half_life_samples"),
        ({"decay": None, "half_life": half}, TypeError, "^half_life=<function half .*> is not a number; give a float"),
        ({"inv_gamma": 2.0}, ValueError, r"^inv_gamma=2\.0 belongs to warmup='inverse-power', and warmup=None; leave"),
        ({"inv_gamma": 2.0, "warmup": "ratio"}, ValueError, r"^inv_gamma=2\.0 belongs to .*, and warmup='ratio'"),
        ({"inv_gamma": 0.0, "warmup": "inverse-power"}, ValueError, r"^inv_gamma=0\.0 .* needs inv_gamma > 0, finite"),
        ({"rampup_ratio": 0.0}, ValueError, r"^rampup_ratio=0\.0 .* needs rampup_ratio > 0, finite"),
        ({"rampup_ratio": math.nan}, ValueError, r"^rampup_ratio=nan .* needs rampup_ratio > 0, finite"),
        ({"min_decay": 0.5}, ValueError, r"^min_decay=0\.5 is the least decay of a warm-up or a schedule, .* leave it"),
        ({"min_decay": 0.95, "warmup": "ratio"}, ValueError, r"^min_decay=0\.95 is above the decay 0\.9 .*; lower it"),
        ({"min_decay": 1.5, "warmup": "ratio"}, ValueError, r"^min_decay=1\.5 .* min_decay ≥ 0 and min_decay ≤ 1"),
        (
            {"decay": None, "half_life": 1.0, "min_decay": 0.6, "warmup": "ratio"},
            ValueError,
            r"^min_decay=0\.6 is above the decay 0\.5 that half_life=1\.0 ends at",
        ),
    ],
    ids=without_address,
)
def test_refused(bad: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ema(**({"decay": 0.9} | bad))
