"""Theorem 3: critical damping is an exact double root, and the least noise at its speed."""

import math

import numpy as np
import pytest
import sympy as sp

from helpers.quadratic import step_matrix
from torchbelay import methods
from torchbelay.physics import critical

RANDOM = np.random.default_rng(3)
CASES = [(x, min(0.99, x) * share) for x, share in RANDOM.uniform((0.001, 0.01), (1.9, 1.0), (60, 2)).tolist()]


def noise(theta: float, c: float, x: float) -> float:
    return methods.centred(theta, c).coupling(1, 0.1).stationary_variance(1.0, x).w2


def test_it_is_a_double_root_by_algebra() -> None:
    mu, x, lam = sp.symbols("mu x lambda")
    c = mu**2 / x
    theta = (1 - (1 - mu) ** 2 / (1 - c)) / x - 1
    p = 1 + theta * (1 - c)
    polynomial = (lam - 1) * (lam - 1 + c) + x * (p * lam - p + c)
    assert sp.cancel(sp.together(polynomial - (lam - 1 + mu) ** 2)) == 0
    # θ is never above 0: (1−c)(1−x) − (1−μ)² = −(x − μ)²/x
    assert sp.cancel((1 - c) * (1 - x) - (1 - mu) ** 2 + (x - mu) ** 2 / x) == 0


def test_both_modes_shrink_by_1_minus_the_rate() -> None:
    for x, mu in CASES:
        method = critical(curvature=2.0, lr=x / 2, rate=mu)
        modes = np.linalg.eigvals(step_matrix(method.coupling(1, 0.1), x)[:2, :2])
        assert np.abs(modes - (1 - mu)).max() < 1e-6  # a double root has half of the digits
        assert -1 < method.theta <= 1e-12
        if x < 0.01:
            assert method.theta == pytest.approx(-((1 - mu / x) ** 2), abs=2 * x)


def test_faster_than_x_it_is_momentum() -> None:
    method = critical(curvature=1.0, lr=0.1, rate=0.15)
    assert methods.centred(method.theta, method.rate).coupling(1, 0.1).convergence_rate((1.0, 1.0), 0.1) < 0.9
    assert method.theta < 0


@pytest.mark.parametrize(("x", "mu"), [(0.01, 0.001), (0.01, 0.005), (0.05, 0.01), (0.002, 0.002)])
def test_no_other_setting_of_this_speed_has_less_noise(x: float, mu: float) -> None:
    """Over a fine grid and random settings; the theorem is of leading order in x."""
    method = critical(curvature=1.0, lr=x, rate=mu)
    least = noise(method.theta, method.rate, x)
    seen = 0
    for theta in np.linspace(-0.99, 2.0, 150):
        for c in np.geomspace(mu / 30, 0.9, 100):
            coupling = methods.centred(float(theta), float(c)).coupling(1, 0.1)
            if coupling.convergence_rate((1.0, 1.0), x) <= 1 - mu + 1e-12:
                seen += 1
                assert coupling.stationary_variance(1.0, x).w2 >= least * (1 - 3 * x)
    assert seen > 100
    ema = noise(0.0, mu, x)
    assert ema / least == pytest.approx(2 * x / (x + mu), rel=3 * x)
    assert 1 <= 2 * x / (x + mu) <= 2


def test_at_a_large_x_the_gain_over_an_ema_is_another() -> None:
    """The formula of leading order would be 1.33 and, out of the range from 1 to 2, 1.67."""
    gains = []
    for x, mu in ((1.0, 0.5), (1.5, 0.3)):
        method = critical(curvature=1.0, lr=x, rate=mu)
        gains.append(noise(0.0, mu, x) / noise(method.theta, method.rate, x))
    assert gains == pytest.approx([1.8, 2.80], abs=5e-3)


def test_the_proof_of_leading_order() -> None:
    """Var(w2) = s²·R/(2x²), R = r1·r2/(r1+r2) of the two rates; R ≥ μ/2 if both are at least μ."""
    x, c, theta = sp.symbols("x c theta", positive=True)
    r1, r2 = sp.symbols("r1 r2")
    # slow modes: λ = 1 − r with r² − (c + (1+θ)x)·r + c·x = 0, and Var(w2) = s²·b/(2x(b + x)) with b = c/(1+θ)
    total, both = c + (1 + theta) * x, c * x
    b = c / (1 + theta)
    assert sp.cancel(b / (2 * x * (b + x)) - (both / total) / (2 * x**2)) == 0
    # two real rates: R − μ/2 in terms of what they have above μ
    mu, u, v = sp.symbols("mu u v", nonnegative=True)
    real = (r1 * r2 / (r1 + r2) - mu / 2).subs({r1: mu + u, r2: mu + v})
    assert sp.expand(sp.fraction(sp.together(real))[0] - (mu * (u + v) + 2 * u * v)) == 0
    # a complex pair m ± iw with m ≥ μ: R = (m² + w²)/(2m) ≥ m/2
    m, w = sp.symbols("m w", positive=True)
    pair = (r1 * r2 / (r1 + r2)).subs({r1: m + sp.I * w, r2: m - sp.I * w})
    assert sp.cancel(sp.expand(pair) - (m / 2 + w**2 / (2 * m))) == 0


def test_leading_order_alone_is_too_slow_at_a_large_x() -> None:
    x, mu = 0.5, 0.1
    exact = critical(1.0, x, mu)
    rough = methods.centred(-((1 - mu / x) ** 2), mu * mu / x).coupling(1, 0.1).convergence_rate((1.0, 1.0), x)
    assert exact.coupling(1, 0.1).convergence_rate((1.0, 1.0), x) == pytest.approx(1 - mu, abs=1e-7)
    assert (1 - rough) / mu == pytest.approx(0.78, abs=0.01)  # 22% too slow


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"rate": 0.0}, "^rate=0.0 .* needs rate > 0 and rate < 1"),
        ({"rate": 0.19}, r"^rate=0.19 is too fast for curvature·lr = 0.1: .* use a rate below 0.1818"),
        ({"curvature": math.inf}, "^curvature=inf "),
        ({"lr": 0.0}, "^lr=0.0 "),
        ({"rate": 1e-20}, "^rate=1e-20 is too slow for curvature·lr = 0.1: .* use a rate above 6e-10"),
        ({"rate": 4e-10}, r"^rate=4e-10 is too slow .*: 1 \+ θ would be below 1e-8; .* or a lower learning rate"),
        ({"curvature": 1e200, "lr": 1e200}, r"^curvature=1e\+200 times lr=1e\+200 is not a positive float"),
        ({"rate": 0.2 / 1.1 * (1 - 1e-9)}, r"^rate=0.18181818\d* is too fast .* use a rate below 0.1818"),
        ({"rate": 0.95, "lr": 0.9}, r"^rate=0.95 is too fast .* use a rate below 0.9474, or a higher learning rate"),
    ],
    ids=str,
)
def test_refused(bad: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        critical(**{"curvature": 1.0, "lr": 0.1, "rate": 0.02} | bad)


@pytest.mark.parametrize("lr", [1e-9, 1e-3, 0.1, 0.9])
def test_the_rate_that_the_refusal_of_a_slow_one_names_is_accepted(lr: float) -> None:
    assert critical(1.0, lr, 6.001e-9 * lr).theta > -1 + 1e-8
