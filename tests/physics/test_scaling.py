"""`method.scaled(kappa)`: the average for a batch κ times as large, for the methods that have one."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbelay.physics import methods
from torchbelay.physics.coupling import Coupling, closed
from torchbelay.physics.methods import centred, ema, primal_averaging
from torchbelay.physics.scaling import Unscaled
from torchbelay.physics.schedules import linear
from torchbelay.physics.spring import Spring

RELAXING: dict[str, Any] = {
    "ema": ema(0.9),
    "ema, lagged": ema(0.9, follow="before"),
    "ema, half-life": ema(half_life=20.0),
    "ema, samples": ema(half_life_samples=5000.0, batch_size=64),
    "ema, a copy": ema(0.0),
    "ema, standing still": ema(1.0),
    "spring": Spring(k=1.0, m1=10.0, m2=20.0),
    "spring, after": Spring(k=1.0, m1=10.0, m2=20.0, follow="after"),
    "spring, light": Spring(k=1.0, m1=1.5, m2=1.5),
    "spring, dt": Spring(k=1.0, m1=10.0, m2=20.0, dt=0.5),
    "spring, EMA": Spring.ema(decay=0.95),
    "tether": Spring(k=1.0, m1=10.0, m2=math.inf, allow_unstable=True),
    "centred": centred(0.5, 0.1),
    "centred, repulsive": centred(-0.9, 0.1),
    "centred, before": centred(-0.5, 0.1, "before"),
    "primal averaging": primal_averaging(0.9, 0.7),
    "primal averaging, no memory": primal_averaging(0.0, 0.7),
}
relaxing = pytest.mark.parametrize("method", RELAXING.values(), ids=RELAXING)
KAPPAS = st.floats(0.25, 4.0)  # further away, 1 − c itself has lost its digits


def free(method: Any, steps: int, w1: float = 3.0, w2: float = -2.0) -> tuple[float, float]:
    """Where weights and average are after steps without an update."""
    for t in range(1, steps + 1):
        c = method.coupling(t, 0.1)
        w1, w2 = w1 + c.a * (w2 - w1), w2 + c.b * (w1 - w2)
    return w1, w2


def numbers(method: Any) -> list[float]:
    c = method.coupling(1, 0.1)
    return [c.a, c.b, c.p, c.q]


@relaxing
@pytest.mark.parametrize("kappa", [1, 2, 3, 16])
def test_one_larger_step_is_kappa_steps_without_an_update(method: Any, kappa: int) -> None:
    assert free(method.scaled(kappa), 1) == pytest.approx(free(method, kappa), rel=1e-12)


@relaxing
def test_scaled_by_1_is_the_method_itself(method: Any) -> None:
    assert numbers(method.scaled(1)) == pytest.approx(numbers(method), rel=1e-12, abs=1e-15)


@relaxing
@given(one=KAPPAS, other=KAPPAS)
def test_scaled_twice_is_scaled_by_the_product(method: Any, one: float, other: float) -> None:
    twice, once = method.scaled(one).scaled(other), method.scaled(one * other)
    assert numbers(twice) == pytest.approx(numbers(once), rel=1e-9, abs=1e-14)


@relaxing
@given(kappa=KAPPAS)
def test_the_rate_compounds_and_theta_stays(method: Any, kappa: float) -> None:
    old, new = method.coupling(1, 0.1), method.scaled(kappa).coupling(1, 0.1)
    left = 1 - old.rate
    assert 1 - new.rate == pytest.approx(left**kappa if left else 0.0, rel=1e-9, abs=1e-14)
    if math.isfinite(old.theta) and old.b:
        assert new.theta == pytest.approx(old.theta, rel=1e-9, abs=1e-12)
    assert method.scaled(kappa).follow == method.follow if hasattr(method, "follow") else True


def test_the_relation_of_update_and_pull_stays_that_of_the_method() -> None:
    """p and q follow from a, b and the kind of the method, as they did before."""
    spring = Spring(k=1.0, m1=10.0, m2=20.0, follow="after").scaled(3)
    assert spring.coupling().relaxes
    assert numbers(centred(-0.5, 0.1).scaled(3)) == numbers(centred(-0.5, closed(0.1, 3)))
    c = primal_averaging(0.9, 0.7).scaled(3).coupling(1, 0.1)
    assert (c.p, c.q) == pytest.approx((1 - 0.7 * 0.9**3, 1 - 0.9**3), rel=1e-14)


def test_what_the_scaled_methods_are() -> None:
    assert ema(0.9).scaled(2) == ema(0.9**2)
    assert ema(half_life=20.0).scaled(4) == ema(half_life=5.0)
    assert ema(half_life_samples=6400.0, batch_size=64).scaled(2) == ema(half_life=50.0)
    assert ema(0.0).scaled(3) == ema(0.0)
    assert ema(1.0).scaled(3) == ema(1.0)
    assert ema(0.5).scaled(1e6) == ema(0.0)  # keeps nothing
    assert centred(0.5, 0.75, "before").scaled(0.5) == centred(0.5, 0.5, "before")
    assert Spring(k=1.0, m1=10.0, m2=20.0, dt=0.5, follow="after").scaled(2).theta == 2.0


def test_an_ema_of_edm_is_the_same_in_images_at_any_batch() -> None:
    small = ema(half_life_samples=500_000.0, batch_size=64, rampup_ratio=0.05, min_decay=0.25)
    large = small.scaled(4)
    assert (large.rampup_ratio, large.min_decay) == (0.05, 0.25**4)
    assert large.half_life == 500_000 / 256
    same = ema(half_life_samples=500_000.0, batch_size=256, rampup_ratio=0.05, min_decay=0.25**4)
    assert [large.coupling(t, 0.1) for t in (1, 2, 50, 10**6)] == [same.coupling(t, 0.1) for t in (1, 2, 50, 10**6)]


@pytest.mark.parametrize(
    "method",
    [methods.swa(), methods.swa(every=5), methods.power_ema(sigma_rel=0.1), methods.schedule_free(0.9)],
    ids=repr,
)
def test_what_depends_on_shares_of_the_run_alone_keeps_its_numbers(method: Any) -> None:
    assert method.scaled(8) is method
    with pytest.raises(ValueError, match=r"^kappa=0 is out of range; it needs kappa > 0, finite"):
        method.scaled(0)


UNDEFINED: dict[Any, str] = {
    methods.lookahead(): "choose k anew",
    methods.diloco(): "choose `every` anew",
    methods.switch_ema(0.9, every=10): "choose `every` anew",
    methods.hard_sync(10): "choose `every` anew",
    methods.easgd(0.1): "applies the whole update beside the pull",
    methods.heavy_ball(0.9): "not an average",
    methods.nesterov(0.9): "not an average",
    methods.ema_nesterov(0.5, 0.9): "extrapolates by β once per step",
    Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0): "velocities move at every step; leave c1 and c2 out",
}


@pytest.mark.parametrize(("method", "why"), UNDEFINED.items(), ids=map(repr, UNDEFINED))
@pytest.mark.parametrize("kappa", [1, 2.5])
def test_the_others_refuse_and_say_why(method: Any, why: str, kappa: float) -> None:
    with pytest.raises(TypeError, match=rf"\.scaled\({kappa}\) is not defined: .*{why}"):
        method.scaled(kappa)


def test_every_method_of_the_library_answers() -> None:
    for name in {*methods.__all__} - {"Method", "belay"}:
        kind = getattr(methods, name)
        assert callable(kind.scaled)
        assert not issubclass(kind, Unscaled) or kind.unscaled


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (ema(0.9, warmup="ratio"), r"its warmup='ratio' counts steps"),
        (ema(linear(0.5, 0.9, 10)), r"its schedule of the decay counts steps\. .* decays become d\^κ"),
        (centred(linear(0.5, 0.9, 10), 0.1), r"its schedules count steps\. Make them anew"),
        (centred(0.5, linear(0.5, 0.9, 10)), r"its schedules count steps\. Make them anew"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("kappa", [1, 2])
def test_warm_ups_and_schedules_are_refused_with_the_cure(method: Any, message: str, kappa: float) -> None:
    with pytest.raises(ValueError, match=rf"\.scaled\({kappa}\) is not defined: {message}"):
        method.scaled(kappa)


@relaxing
@pytest.mark.parametrize("kappa", [0, -1.0, math.nan, math.inf])
def test_a_kappa_out_of_range_is_refused(method: Any, kappa: float) -> None:
    with pytest.raises(ValueError, match=r"^kappa=\S+ is out of range; it needs kappa > 0, finite"):
        method.scaled(kappa)


@pytest.mark.parametrize("method", [Spring.ema(decay=0.5), centred(-0.5, 0.5)], ids=repr)
def test_a_scale_that_keeps_nothing_is_refused(method: Any) -> None:
    with pytest.raises(ValueError, match=r"\.scaled\(80\) keeps nothing .* rounds to 0; use a smaller kappa"):
        method.scaled(80)


def test_a_spring_that_overshoots_has_whole_scales_only() -> None:
    bouncing = Spring(k=1.0, m1=0.6, m2=0.6)  # closes 5/3 of the distance
    assert free(bouncing.scaled(2), 1) == pytest.approx(free(bouncing, 2), rel=1e-12)
    assert free(bouncing.scaled(3.0), 1) == pytest.approx(free(bouncing, 3), rel=1e-12)
    with pytest.raises(ValueError, match=r"closes 1\.667 of the distance per step, .* give a whole kappa"):
        bouncing.scaled(1.5)


@given(rate=st.floats(0, 1), steps=st.floats(1e-3, 1e3))
def test_closed_is_one_minus_a_power(rate: float, steps: float) -> None:
    assert closed(rate, steps) == pytest.approx(1 - (1 - rate) ** steps, rel=1e-9, abs=1e-12)


def test_closed_is_what_compound_does() -> None:
    c = Coupling(0.1, 0.3, 0.9, 0.3)
    assert c.compound(7).rate == pytest.approx(closed(0.4, 7), rel=1e-14)
    assert Coupling(0.0, 0.0, 1.0, 0.0).compound(3) == Coupling(0.0, 0.0, 1.0, 0.0)
    assert Coupling(0.0, 1.0, 1.0, 1.0).compound(3) == Coupling(0.0, 1.0, 1.0, 1.0)
