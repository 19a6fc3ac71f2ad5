"""Coupling: its properties against the same map, iterated or diagonalised by numpy."""

import math
import re
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, astuple
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from torchbelay.physics import methods
from torchbelay.physics.coupling import Coupling
from torchbelay.physics.spring import Spring

Array = NDArray[np.float64]
INF = math.inf


def step_matrices(numbers: Array, push: Array | float = 0.0) -> Array:
    """Return the matrix of the map on (w1, w2) under u = −push·w1, for rows of (a, b, p, q)."""
    a, b, p, q = numbers.T
    return np.stack([np.stack([1 - a - p * push, a + 0 * a], -1), np.stack([b - q * push, 1 - b], -1)], -2)


def radius(matrix: Array) -> Array:
    """Return the spectral radii."""
    return np.abs(np.linalg.eigvals(matrix)).max(-1)


def apply(c: Coupling, w1: float, w2: float, u: float) -> tuple[float, float]:
    """Return (w1, w2) after the map."""
    return w1 + c.a * (w2 - w1) + c.p * u, w2 + c.b * (w1 - w2) + c.q * u


def random_couplings(count: int, seed: int) -> Iterator[Coupling]:
    """Yield attractive and repulsive couplings with any force, unstable ones and ones that go uphill included."""
    rng = np.random.default_rng(seed)
    yield from (Coupling(*map(float, row)) for row in rng.uniform((-1, 0, -0.5, -0.5), (1, 1.5, 2, 1.5), (count, 4)))


def numbers(couplings: list[Coupling]) -> Array:
    """Return rows of (a, b, p, q)."""
    return np.array([astuple(c) for c in couplings])


# The free motion and its centre of mass --------------------------------------------------------------------------


def test_eigenvalues_are_those_of_the_free_map() -> None:
    couplings = list(random_couplings(2000, seed=1))
    expected = np.sort(np.linalg.eigvals(step_matrices(numbers(couplings))).real, -1)
    found = np.sort([c.eigenvalues for c in couplings], -1)
    assert np.allclose(found, expected, rtol=0, atol=1e-7)  # if a + b ≈ 0, both are 1: the root of the precision


def test_the_centre_of_mass_moves_by_the_effective_rate_and_gradients_are_taken_theta_beyond_it() -> None:
    rng = np.random.default_rng(2)
    for c in random_couplings(300, seed=3):
        if abs(c.rate) < 0.05 or abs(c.b) < 0.05:
            continue
        w1, w2 = rng.standard_normal(2)
        z = (c.b * w1 + c.a * w2) / (c.a + c.b)
        x2 = w2
        for u in rng.standard_normal(8):
            w1, w2 = apply(c, w1, w2, u)
            z, x2 = z + c.effective_lr_scale * u, x2 + c.rate * (z - x2) + c.q * u
            # Rounding grows with the free motion, by up to 1.55 per step, and with 1/rate.
            assert (w1, w2) == pytest.approx((z + c.theta * (z - x2), x2), rel=1e-11, abs=1e-11)


def test_belays_own_numbers_are_its_masses() -> None:
    c = Spring(k=1.0, m1=10.0, m2=20.0).coupling()
    assert c.theta == pytest.approx(2.0, rel=1e-15)
    assert c.rate == pytest.approx(0.075, rel=1e-15)
    assert c.effective_lr_scale == pytest.approx(0.95 / 3, rel=1e-15)


@pytest.mark.parametrize(
    ("c", "theta", "scale"),
    [
        (Coupling(0.0, 0.0, 1.0, 0.0), 0.0, 1.0),  # no coupling
        (Coupling(0.1, 0.0, 0.9, 0.0), INF, 0.0),  # a tether
        (Coupling(-0.1, 0.0, 0.9, 0.0), -INF, 0.0),
        (Coupling(-0.5, 0.5, 1.0, 0.0), -1.0, INF),  # no distance closes: a constant force accelerates without end
        (Coupling(-0.5, 0.5, 0.0, 1.0), -1.0, -INF),
    ],
)
def test_theta_and_effective_rate_if_the_quotient_does_not_exist(c: Coupling, theta: float, scale: float) -> None:
    assert (c.theta, c.effective_lr_scale) == (theta, scale)


# The stable range ------------------------------------------------------------------------------------------------


def test_max_stable_lr_is_the_first_crossing_for_any_coupling() -> None:
    couplings = list(random_couplings(6000, seed=4))
    rows, limit = numbers(couplings), np.array([c.max_stable_lr(1.0) for c in couplings])
    finite = (limit > 0) & (limit < INF)
    assert (rows[finite, 0] < 0).sum() > 500  # repulsive ones are among them
    cut, rest = limit[finite], rows[finite]
    assert (radius(step_matrices(rest, cut * (1 - 1e-6))) < 1).all()
    assert (radius(step_matrices(rest, cut * (1 + 1e-6))) > 1).all()
    for share in np.linspace(0.01, 0.99, 40):
        assert (radius(step_matrices(rest, cut * share)) < 1).all()
    never = rows[limit == 0]
    assert len(never) > 500
    for push in np.geomspace(1e-9, 1e-6, 4):  # the smallest gradient is too much
        assert (radius(step_matrices(never, push)) > 1).all()
    assert not np.isinf(limit).any()  # p = q = 0 alone has no limit


@pytest.mark.parametrize(
    ("c", "limit"),
    [
        (Coupling(0.0, 0.0, 1.0, 0.0), 2.0),  # no coupling: plain SGD
        (Coupling(0.0, 0.3, 1.0, 0.3), 2.0),  # EMA
        (Coupling(0.0, 0.3, 1.0, 0.0), 2.0),  # EMA, lagged
        (Coupling(0.2, 0.0, 0.8, 0.0), 2.25),  # a tether: 1 − a − p·x > −1
        (Coupling(-0.9, 1.0, 1.0, 0.0), 3.8),  # heavy ball: 2(1 + μ)
        (Coupling(-0.9, 1.0, 1.9, 1.0), 2 * 1.9 / 2.8),  # Nesterov: 2(1 + μ)/(1 + 2μ)
        (Coupling(1.1, 1.0, 1.0, 0.0), 0.0),  # jumps further than the distance
        (Coupling(-0.6, 0.5, 1.0, 0.0), 0.0),  # repels more than it follows
        (Coupling(0.1, 0.2, -1.0, 0.0), 0.0),  # goes uphill
        (Coupling(0.1, 0.2, 0.0, 0.0), INF),  # never moves by a gradient
    ],
)
def test_max_stable_lr_of_known_methods(c: Coupling, limit: float) -> None:
    assert c.max_stable_lr(1.0) == pytest.approx(limit, rel=1e-14, abs=0)
    assert c.max_stable_lr(202.0) == pytest.approx(limit / 202, rel=1e-14, abs=0)


@pytest.mark.parametrize("curvature", [0.0, -1.0, INF, math.nan])
def test_max_stable_lr_refuses_an_invalid_curvature(curvature: float) -> None:
    with pytest.raises(ValueError, match=rf"^curvature={curvature!r} .* needs curvature > 0, finite"):
        Coupling(0.0, 0.3, 1.0, 0.3).max_stable_lr(curvature)


@pytest.mark.parametrize("follow", ["before", "after"])
def test_stable_range_of_the_whole_centred_family(follow: str) -> None:
    rng = np.random.default_rng(5)
    theta, rate = rng.uniform(-0.99, 3, 3000), np.exp(rng.uniform(math.log(1e-4), math.log(0.99), 3000))
    if follow == "before":
        theta, rate = theta[1 + theta > rate], rate[1 + theta > rate]  # the formula's own condition
        limit = 2 * (2 - rate) / (2 * (1 + theta) - rate)
    else:
        limit = 2 * (2 - rate) / (2 * (1 + theta) - rate * (1 + 2 * theta))
    couplings = [methods.centred(float(t), float(c), follow).coupling(1, 0.1) for t, c in zip(theta, rate, strict=True)]
    assert np.allclose([c.effective_lr_scale for c in couplings], 1, rtol=1e-12, atol=0)
    # 1 + θ near 0 multiplies the rounding of θ by up to 100, a denominator near 0 by some more.
    assert np.allclose([c.max_stable_lr(1.0) for c in couplings], limit, rtol=1e-11, atol=0)
    rows = numbers(couplings)
    assert (radius(step_matrices(rows, limit * (1 - 1e-6))) < 1).all()
    assert (radius(step_matrices(rows, limit * (1 + 1e-6))) > 1).all()


# Several steps in one --------------------------------------------------------------------------------------------


def relaxations(count: int, seed: int) -> Iterator[Coupling]:
    """Yield couplings that only add u and close a part of the distance; every other one follows the step."""
    rng = np.random.default_rng(seed)
    for i, (a, b) in enumerate(rng.uniform((-0.3, 0.0), (0.9, 1.0), (count, 2))):
        yield Coupling(float(a), float(b), float(1 - a), float(b) * (i % 2))


@pytest.mark.parametrize("n", [1, 2, 3, 10, 1000])
def test_compound_is_the_nth_power_of_the_free_map(n: int) -> None:
    for c in relaxations(40, seed=6):
        powered = np.linalg.matrix_power(step_matrices(numbers([c]))[0], n)
        total = c.compound(n)
        assert np.allclose(step_matrices(numbers([total]))[0], powered, rtol=1e-11, atol=1e-11)  # n roundings of each
        assert total.p == pytest.approx(1 - total.a, abs=1e-14)
        assert total.q == (total.b if c.q else 0)
        left = 1 - (1 - c.rate) ** n
        assert (total.a, total.b) == pytest.approx((c.a * left / c.rate, c.b * left / c.rate), rel=1e-9, abs=1e-12)


def test_then_is_the_product_of_two_free_maps_and_follows_as_the_later_one() -> None:
    first, later = list(relaxations(200, seed=7)), list(relaxations(201, seed=8))[1:]
    for pair in (zip(first, later, strict=True), zip(first, first[::-1], strict=True)):
        for c, d in pair:
            total = c.then(d)
            product = step_matrices(numbers([d]))[0] @ step_matrices(numbers([c]))[0]
            assert np.allclose(step_matrices(numbers([total]))[0], product, rtol=0, atol=1e-14)
            assert (total.p, total.q) == (1 - total.a, total.b if d.q else 0)


@pytest.mark.parametrize("c", [Coupling(0.0, 0.25, 1.0, 0.25), Coupling(0.0, 0.25, 1.0, 0.0)], ids=str)
def test_a_rest_after_or_before_a_coupling_changes_nothing_of_it(c: Coupling) -> None:
    rest = Coupling(0.0, 0.0, 1.0, 0.0)
    assert c.then(rest) == rest.then(c) == c
    assert rest.then(rest) == rest


@pytest.mark.parametrize(
    "c", [Coupling(-0.9, 1.0, 1.0, 0.0), Coupling(0.1, 0.1, 1.0, 0.0), Coupling(0.1, 0.2, 0.9, 0.1)], ids=str
)
def test_a_coupling_that_does_more_than_relax_cannot_be_compounded(c: Coupling) -> None:
    assert not c.relaxes
    ema = Coupling(0.0, 0.1, 1.0, 0.1)
    assert ema.relaxes
    for attempt in (lambda: c.compound(2), lambda: c.then(ema), lambda: ema.then(c)):
        with pytest.raises(ValueError, match=rf"a={c.a}, b={c.b}.* needs p = 1 − a and q = 0 or q = b"):
            attempt()


@pytest.mark.parametrize(("n", "error"), [(0, ValueError), (-3, ValueError), (1.5, TypeError), (True, TypeError)])
def test_compound_refuses_an_invalid_count(n: int, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"^n={n} .*(n ≥ 1|at least 1)"):
        Coupling(0.0, 0.1, 1.0, 0.1).compound(n)


# Without a copy of w1 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 1e-3, 1e-6, 1e-9])
def test_without_a_copy_the_stepped_weights_and_the_average_give_the_same_map(size: float) -> None:
    for pull, follow in np.random.default_rng(10).uniform(-0.95, 0.95, (500, 2)) * size:
        c = Coupling(pull, follow, 1 - pull, follow)
        assert not c.needs_copy
        for w1, w2, u in np.random.default_rng(9).standard_normal((5, 3)):
            stepped = w1 + u
            together = stepped + c.a * (w2 - stepped), w2 + c.q * (stepped - w2)
            assert together == pytest.approx(apply(c, w1, w2, u), rel=0, abs=1e-13)


@pytest.mark.parametrize(
    "c",
    [
        Coupling(0.0, 1e-9, 1.0, 1e-9),  # EMA
        Spring(k=2e-3, m1=2.0, m2=1.0, follow="after").coupling(),
        methods.lookahead(k=5, alpha=0.75).coupling(5, 0.1),
        methods.lookahead(k=5, alpha=0.75).coupling(4, 0.1),
        methods.switch_ema(decay=0.75, every=5).coupling(5, 0.1),
        methods.switch_ema(decay=0.75, every=5).coupling(4, 0.1),
        methods.swa().coupling(1, 0.1),
        methods.nesterov(0.5).coupling(1, 0.1),
    ],
    ids=str,
)
def test_couplings_that_need_no_copy(c: Coupling) -> None:
    assert not c.needs_copy


@pytest.mark.parametrize(
    "method",
    [
        methods.ema(0.9, follow="before"),
        methods.heavy_ball(0.9),
        methods.primal_averaging(0.9, 0.5),
        methods.schedule_free(0.9),
        methods.easgd(0.1),
        methods.easgd(1e-9),
        methods.centred(1.0, 0.1, "before"),
        methods.centred(1.0, 0.1, "after"),
    ],
    ids=str,
)
def test_methods_that_need_the_copy(method: methods.Method) -> None:
    assert method.coupling(3, 0.1).needs_copy


def test_algorithm_1_always_needs_the_copy() -> None:
    for kappa1, kappa2 in 10 ** np.random.default_rng(12).uniform(-9, -0.01, (3000, 2)):
        assert Coupling(float(kappa1), float(kappa2), float(1 - kappa1), 0.0).needs_copy


def test_an_average_that_only_partly_becomes_the_stepped_point_needs_the_copy() -> None:
    assert Coupling(0.0, 0.5, 1.0, 1.0).needs_copy  # w2' = w1* + (w2 − w1)/2


# The object ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("c", "pulls"),
    [
        (Coupling(0.0, 0.1, 1.0, 0.1), False),
        (Coupling(1e-9, 0.1, 1 - 1e-9, 0.0), True),
        (Coupling(-0.9, 1.0, 1.0, 0.0), True),
        (Coupling(0.0, 0.1, 0.5, 0.0), True),
    ],
)
def test_pulls_if_the_weights_move_by_more_or_less_than_the_update(c: Coupling, pulls: bool) -> None:
    assert c.pulls == pulls


@pytest.mark.parametrize("name", ["a", "b", "p", "q"])
@pytest.mark.parametrize("value", [math.nan, INF, -INF])
def test_refuses_numbers_that_are_not_finite(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{name}={value!r} of a Coupling is not finite; check the numbers"):
        Coupling(**{"a": 0.1, "b": 0.1, "p": 1.0, "q": 0.0} | {name: value})


@pytest.mark.parametrize("value", ["0.1", None, [0.1]], ids=str)
def test_refuses_what_is_not_a_number(value: object) -> None:
    with pytest.raises(TypeError, match=rf"^b={re.escape(repr(value))} of a Coupling is not a number; give a float$"):
        Coupling(0.0, value, 1.0, 0.0)  # type: ignore[arg-type]


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Coupling(0.0, 0.1, 1.0, 0.1).a = 0.5  # type: ignore[misc]


def test_numbers_of_other_kinds_become_plain_floats() -> None:
    """A tensor could be changed by its owner, and a decimal cannot be multiplied by a float."""
    held = torch.tensor(0.25, dtype=torch.float64)
    made = Coupling(held, np.float32(0.5), Decimal("0.75"), Fraction(1, 4))  # type: ignore[arg-type]
    held.fill_(0.5)
    assert made == Coupling(0.25, 0.5, 0.75, 0.25)
    assert {type(x) for x in (made.a, made.b, made.p, made.q)} == {float}
    assert made.max_stable_lr(2.0) > 0


@pytest.mark.parametrize(
    "value",
    [
        True,
        np.bool_(True),
        np.array(True),
        torch.tensor(True),
        np.complex128(1j),
        np.array(1 + 0j),
        torch.tensor(1 + 0j),
        torch.tensor(1j),
        np.str_("0.1"),
        np.array("0.1"),
        np.timedelta64(1),
        torch.tensor([1.0, 2.0]),
    ],
    ids=repr,
)
def test_what_is_not_one_real_number_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=r"^a=.* of a Coupling is not a number; give a float$"):
        Coupling(value, 0.1, 0.9, 0.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^a=inf of a Coupling is not finite"):
        Coupling(10**400, 0.1, 0.9, 0.0)
