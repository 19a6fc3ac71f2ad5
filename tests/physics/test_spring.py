"""Spring: its constructors, the arguments it refuses, and properties of every valid setting."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from functools import cached_property
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from torchbelay.physics.spring import Force, Regime, Spring
from torchbelay.physics.warnings import UnstableSpringWarning

Array = NDArray[np.float64]
Setting = dict[str, Any]
INF = math.inf
FORCES = get_args(Force)


def quiet(**setting: Any) -> Spring:
    """Return a spring without a warning, stable or not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnstableSpringWarning)
        return Spring(**setting)


# Every valid setting -----------------------------------------------------------------------------------------------


@st.composite
def valid_settings(draw: st.DrawFn) -> Setting:
    """Draw springs of every kind: infinite masses, any damping, magnitudes from 1e-12 to 1e12."""
    k = 10 ** draw(st.floats(-12, 6))
    dt = draw(st.sampled_from([1.0, 1e-3, 0.3, 1e3]))
    setting: Setting = {"k": k, "dt": dt, "force": draw(st.sampled_from(FORCES))}
    for i in "12":
        mass = max(10 ** draw(st.floats(-6, 12)), k * dt * dt / 2 * draw(st.floats(1.001, 3)))
        setting["m" + i] = m = draw(st.sampled_from([INF, mass, mass, mass]))
        if m == INF:
            setting["c" + i] = draw(st.sampled_from([None, INF]))
        else:
            delta = draw(st.sampled_from([None, 0.0, 1e-12, 1.0, 50.0]) | st.floats(0, 1.2))
            setting["c" + i] = None if delta is None else 2 * m / dt * delta
    if draw(st.booleans()) and not quiet(**setting).has_velocity:
        setting["follow"] = "after"
    return setting


PROPERTIES = [
    name
    for name, value in vars(Spring).items()
    if isinstance(value, property | cached_property) and not name.startswith("_")
]


def flat(value: Any) -> Iterator[float]:
    """Yield the numbers in a property's value."""
    yield from (x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, float))


@settings(max_examples=600, deadline=None, derandomize=True)
@given(valid_settings())
def test_no_property_of_a_valid_spring_is_nan_or_out_of_its_range(setting: Setting) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        s = Spring(**setting)
    assert [w.category for w in said] == [UnstableSpringWarning] * (not s.is_stable)
    for name in PROPERTIES:
        assert not any(map(math.isnan, flat(getattr(s, name)))), name
    assert s.regime in get_args(Regime)
    assert (s.regime == "unstable") == (not s.is_stable)
    assert 0 < s.alpha <= 1
    assert 0 < s.beta <= 1
    assert s.half_life >= 0
    assert s.effective_lr_scale >= 0 or not s.is_stable
    assert s.max_stable_lr(1.0) >= 0
    assert "nan" not in s.explain()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(valid_settings())
def test_a_stable_spring_has_a_finite_memory_and_some_stable_lr(setting: Setting) -> None:
    s = quiet(**setting)
    assume(s.is_stable)
    assert s.half_life < INF
    assert 0 < s.max_stable_lr(1.0) < INF


@pytest.mark.parametrize(
    ("regime", "setting"),
    [
        ("velocity-free", {}),
        ("overdamped", {"c1": 18.0, "c2": 36.0}),
        ("overdamped", {"c1": 18.0}),
        ("critical", {"c1": 20 * (math.sqrt(0.15) - 0.0375), "c2": 40 * (math.sqrt(0.15) - 0.0375)}),
        ("underdamped", {"c1": 5.0, "c2": 10.0}),
        ("underdamped", {"c1": 5.0}),
        ("unstable", {"c1": 0.5, "c2": 1.0}),
        ("unstable", {"c1": 50.0}),
    ],
)
def test_regime(regime: str, setting: Setting) -> None:
    assert quiet(k=1.0, m1=10.0, m2=20.0, **setting).regime == regime


# Constructors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999, 0.9999])
def test_ema_moves_by_exactly_one_minus_decay(decay: float) -> None:
    s = Spring.ema(decay)
    assert (s.coupling().a, s.coupling().b, s.coupling().p, s.coupling().q) == (0.0, 1 - decay, 1.0, 1 - decay)
    assert s == Spring.ema(decay=decay)


@pytest.mark.parametrize("half_life", [0.1, 1.0, 500.0, 1e12])
def test_ema_forgets_half_in_its_half_life(half_life: float) -> None:
    assert Spring.ema(half_life=half_life).half_life == pytest.approx(half_life, rel=1e-13)


def test_follow_decides_whether_the_average_sees_the_step() -> None:
    before, after = (Spring(k=1.0, m1=10.0, m2=20.0, follow=f).coupling() for f in ("before", "after"))
    assert (before.a, before.b, before.p, before.q) == (0.05, 0.025, 0.95, 0.0)
    assert (after.a, after.b, after.p, after.q) == (0.05, 0.025, 0.95, 0.025)


@pytest.mark.parametrize("follow", ["before", "after"])
def test_matched_ema_has_the_same_rate_and_no_pull(follow: Any) -> None:
    s = Spring(k=1.0, m1=10.0, m2=20.0, follow=follow)
    ema = s.matched_ema()
    assert (ema.coupling().a, ema.coupling().p, ema.follow) == (0, 1, follow)
    assert ema.coupling().b == pytest.approx(0.075, rel=1e-15)
    assert ema.decay == pytest.approx(s.decay, rel=1e-15)


def test_matched_ema_of_a_spring_with_velocities_forgets_as_fast() -> None:
    s = Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=12.0)
    assert s.matched_ema().decay == pytest.approx(s.decay, rel=1e-15)


def test_one_and_one_point_zero_make_the_same_spring() -> None:
    whole, real = Spring(1, 10, 20, c1=5, c2=10, dt=1), Spring(1.0, 10.0, 20.0, c1=5.0, c2=10.0, dt=1.0)
    assert (whole, hash(whole), repr(whole)) == (real, hash(real), repr(real))
    assert Spring(np.float32(1), np.float64(10), 20) == Spring(1.0, 10.0, 20.0)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    valid_settings() | st.floats(1e-9, 1 - 1e-9).map(lambda d: {"k": 2 * d, "m1": INF, "m2": 1.0, "follow": "after"})
)
def test_repr_evaluates_to_an_equal_spring(setting: Setting) -> None:
    for more in ({}, {"force": "printed"}, {"allow_unstable": True}):
        s = quiet(**setting | more)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnstableSpringWarning)
            assert eval(repr(s), {"Spring": Spring, "inf": INF}) == s


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999, 0.9999])
def test_repr_of_an_ema_is_its_decay(decay: float) -> None:
    assert repr(Spring.ema(decay)) == f"Spring.ema(decay={decay})"


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Spring(1.0, 10.0, 20.0).k = 2.0  # type: ignore[misc]


def test_the_coupling_is_the_same_at_every_step_and_learning_rate() -> None:
    s = Spring(1.0, 10.0, 20.0)
    assert s.varies == "never"
    assert s.coupling(1, 0.1) == s.coupling(10**6, 3.0) == s.coupling()


# Refused arguments -------------------------------------------------------------------------------------------------

NAN = math.nan
GOOD = {"k": 1.0, "m1": 10.0, "m2": 20.0}


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"k": 0.0}, ValueError, r"^k=0\.0 .* needs k > 0, finite"),
        ({"k": -1.0}, ValueError, r"^k=-1\.0 .* needs k > 0, finite"),
        ({"k": INF}, ValueError, r"^k=inf .* needs k > 0, finite"),
        ({"k": NAN}, ValueError, r"^k=nan .* needs k > 0, finite"),
        ({"k": "1"}, TypeError, r"^k='1' is not a number; give a float"),
        ({"k": True}, TypeError, r"^k=True is not a number; give a float"),
        ({"k": None}, TypeError, r"^k=None is not a number; give a float"),
        ({"m1": 0.0}, ValueError, r"^m1=0\.0 .* needs m1 > 0, or inf"),
        ({"m1": -3}, ValueError, r"^m1=-3 .* needs m1 > 0, or inf"),
        ({"m1": NAN}, ValueError, r"^m1=nan .* needs m1 > 0, or inf"),
        ({"m1": None}, TypeError, r"^m1=None is not a number; give a float"),
        ({"m2": -INF}, ValueError, r"^m2=-inf .* needs m2 > 0, or inf"),
        ({"m2": NAN}, ValueError, r"^m2=nan .* needs m2 > 0, or inf"),
        ({"m2": "inf"}, TypeError, r"^m2='inf' is not a number; give a float"),
        ({"c1": -0.1}, ValueError, r"^c1=-0\.1 .* needs c1 ≥ 0, finite"),
        ({"c1": NAN}, ValueError, r"^c1=nan .* needs c1 ≥ 0, finite"),
        ({"c1": INF}, ValueError, r"^c1=inf .* needs c1 ≥ 0, finite"),
        ({"c2": -0.1}, ValueError, r"^c2=-0\.1 .* needs c2 ≥ 0, finite"),
        ({"c2": NAN}, ValueError, r"^c2=nan .* needs c2 ≥ 0, finite"),
        ({"c2": "1"}, TypeError, r"^c2='1' is not a number; give a float"),
        ({"dt": 0}, ValueError, r"^dt=0 .* needs dt > 0, finite"),
        ({"dt": NAN}, ValueError, r"^dt=nan .* needs dt > 0, finite"),
        ({"dt": INF}, ValueError, r"^dt=inf .* needs dt > 0, finite"),
        ({"follow": "later"}, ValueError, r"^follow='later' is unknown; choose one of 'before', 'after'"),
        ({"force": "strong"}, ValueError, r"^force='strong' is unknown; choose one of 'derived', 'printed'"),
        ({"m1": 0.5}, ValueError, r"κ1 .* = 1 with k=1\.0, m1=0\.5, dt=1\.0 .* use m1 > 0\.5 or k < 1"),
        ({"m2": 0.25}, ValueError, r"κ2 .* = 2 with k=1\.0, m2=0\.25, dt=1\.0 .* use m2 > 0\.5 or k < 0\.5"),
        ({"dt": 10}, ValueError, r"κ1 .* = 5 with k=1\.0, m1=10\.0, dt=10\.0 .* use m1 > 50 or k < 0\.2"),
        ({"dt": 1e200}, ValueError, r"κ1 .* = inf with .*dt=1e\+200 "),
        ({"m1": INF, "c1": 1.0}, ValueError, r"^c1=1\.0 with m1=inf: .* leave c1 out"),
        ({"m1": INF, "c1": NAN}, ValueError, r"^c1=nan with m1=inf: .* leave c1 out"),
        ({"m2": INF, "c2": 0.0}, ValueError, r"^c2=0\.0 with m2=inf: .* leave c2 out"),
        (
            {"c1": 5.0, "follow": "after"},
            ValueError,
            r"^follow='after' with damping .* use follow='before', or leave c1",
        ),
        (
            {"c2": 5.0, "follow": "after"},
            ValueError,
            r"^follow='after' with damping .* use follow='before', or leave c1",
        ),
    ],
    ids=str,
)
def test_refused(bad: Setting, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Spring(**GOOD | bad)


def test_an_explicit_default_damping_keeps_no_velocity() -> None:
    s = Spring(k=1.0, m1=10.0, m2=20.0, c1=20.0, c2=40.0, follow="after")
    assert not s.has_velocity
    assert Spring(k=1.0, m1=INF, m2=20.0, c1=INF) == Spring(k=1.0, m1=INF, m2=20.0)


@pytest.mark.parametrize("curvature", [0.0, -1.0, INF, NAN])
@pytest.mark.parametrize("damping", [{}, {"c1": 5.0}])
def test_max_stable_lr_refuses_an_invalid_curvature(curvature: float, damping: Setting) -> None:
    with pytest.raises(ValueError, match=rf"^curvature={curvature!r} .* needs curvature > 0, finite"):
        Spring(**GOOD, **damping).max_stable_lr(curvature)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({}, ValueError, r"exactly one of decay, half_life; got none"),
        (
            {"decay": 0.9, "half_life": 5.0},
            ValueError,
            r"exactly one of decay, half_life; got decay=0\.9, half_life=5\.0",
        ),
        ({"decay": 0.0}, ValueError, r"^decay=0\.0 .* needs decay > 0 and decay < 1"),
        ({"decay": 1.0}, ValueError, r"^decay=1\.0 .* needs decay > 0 and decay < 1"),
        ({"decay": NAN}, ValueError, r"^decay=nan .* needs decay > 0 and decay < 1"),
        ({"decay": "0.9"}, TypeError, r"^decay='0\.9' is not a number"),
        ({"decay": 1e-17}, ValueError, r"^decay=1e-17 makes an average that keeps nothing .* use a larger decay"),
        ({"decay": 1 - 1e-17}, ValueError, r"^decay=1\.0 .* needs decay > 0 and decay < 1"),
        ({"half_life": 0}, ValueError, r"^half_life=0 .* needs half_life > 0, finite"),
        ({"half_life": INF}, ValueError, r"^half_life=inf .* needs half_life > 0, finite"),
        ({"half_life": NAN}, ValueError, r"^half_life=nan .* needs half_life > 0, finite"),
        (
            {"half_life": 1e-3},
            ValueError,
            r"^half_life=0\.001 makes an average that keeps nothing .* use a larger half_life",
        ),
    ],
    ids=str,
)
def test_ema_refuses(bad: Setting, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Spring.ema(**bad)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"m1": 10.0, "m2": INF}, r"holds its average still: .* give m2 a finite value"),
        ({"m1": 0.9, "m2": 0.9}, r"closes 1\.111 of the distance per step; .* lower k"),
    ],
)
def test_matched_ema_refuses(setting: Setting, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spring(k=1.0, **setting).matched_ema()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"c1": 0.5, "c2": 1.0},
            r"δ .* = 0\.025 and ω² = 0\.15 need ω² < 4δ and δ < 1; set the damping between 0\.0375 and",
        ),
        ({"c1": 30.0, "c2": 60.0}, r"δ .* = 1\.5 and ω² = 0\.15 need .* leave c1 and c2 out"),
        (
            {"c1": 0.0, "c2": 0.1},
            r"grows by 1\.0\d+ per step; change the damping \(c1=0\.0, c2=0\.1\), lower k=1\.0",
        ),
        ({"m1": INF, "m2": INF}, r"both masses are infinite.*; give one of them a finite mass"),
    ],
    ids=str,
)
def test_an_unstable_spring_warns_at_the_line_that_makes_it(setting: Setting, message: str) -> None:
    with pytest.warns(UnstableSpringWarning, match=message) as said:
        Spring(**GOOD | setting)
    assert [w.filename for w in said] == [__file__]


def test_a_stable_spring_does_not_warn() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Spring(**GOOD)
        Spring(**GOOD, c1=5.0, c2=10.0)
        Spring(**GOOD, c1=5.0)
        Spring.ema(0.999)
        Spring(k=1e-12, m1=1e12, m2=1e12)
    assert said == []
