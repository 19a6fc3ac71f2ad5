"""The noise that stays: the formula by sympy, by Lyapunov's equation in numpy, and by simulation."""

import math

import numpy as np
import pytest
import sympy as sp

from helpers.quadratic import covariance, kick, step_matrix
from torchbelay import Coupling, methods
from torchbelay.physics.variance import Variances

RANDOM = np.random.default_rng(19)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test has the same random numbers, in whatever order they run."""
    RANDOM.bit_generator.state = np.random.default_rng(19).bit_generator.state


def random_couplings(count: int) -> list[Coupling]:
    """Attractive and repulsive couplings that close a distance and go downhill."""
    found: list[Coupling] = []
    while len(found) < count:
        a, b, p, q = RANDOM.uniform((-1, 0.01, 0.1, 0), (1, 1.5, 2, 1))
        if 0.01 < a + b < 1.9 and b * p + a * q > 0.01:
            found.append(Coupling(a, b, p, q))
    return found


def centred(theta: float, c: float, follow: str = "after") -> Coupling:
    return methods.centred(theta, c, follow=follow).coupling(1, 0.1)  # type: ignore[arg-type]


# The formula ---------------------------------------------------------------------------------------------------------

a, b, p, q, x = sp.symbols("a b p q x")
STEP = sp.Matrix([[1 - a - p * x, a], [b - q * x, 1 - b]])
KICK = sp.Matrix([p, q])
T, D, CR = STEP.trace(), STEP.det(), b * p + a * q


def test_the_formula_solves_the_equation_of_the_second_moments() -> None:
    """Σ = M·Σ·Mᵀ + N has one solution; that the formula's diagonal is its diagonal is checked by elimination."""
    s11, s12, s22 = sp.symbols("s11 s12 s22")
    moments = sp.Matrix([[s11, s12], [s12, s22]])
    rest = STEP * moments * STEP.T + KICK * KICK.T - moments
    (found,) = sp.linsolve([rest[0, 0], rest[0, 1], rest[1, 1]], [s11, s12, s22])
    for expected, b0, b1 in ((found[0], p, a * q - (1 - b) * p), (found[2], q, b * p - (1 - a) * q)):
        formula = ((1 + D) * (b0**2 + b1**2) + 2 * T * b0 * b1) / ((1 - D) * (CR * x) * (1 + D + T))
        assert sp.cancel(formula - expected) == 0
        assert sp.expand(b0 + b1 - CR) == 0


def test_the_formula_of_the_centred_family() -> None:
    theta, c = sp.symbols("theta c")
    n = 2 - c - (1 - c) * (1 + theta) * x
    short = c / x * n / ((2 - n) * (2 * n - c * x))
    at = {a: theta * c / (1 + theta), b: c / (1 + theta), p: 1 + theta * (1 - c), q: c}
    b1 = b * p - (1 - a) * q
    formula = ((1 + D) * (q**2 + b1**2) + 2 * T * q * b1) / ((1 - D) * (CR * x) * (1 + D + T))
    assert sp.cancel(sp.together((formula - short).subs(at))) == 0
    # to leading order in small c and x, at c = ε·c and x = ε·x
    small = sp.Symbol("epsilon", positive=True)
    leading = sp.limit(sp.cancel((short * x).subs({c: small * c, x: small * x}, simultaneous=True)), small, 0)
    b_rate = c / (1 + theta)
    assert sp.cancel(leading - b_rate / (2 * (b_rate + x))) == 0


def test_the_code_has_the_formula() -> None:
    for coupling in random_couplings(300):
        push = RANDOM.uniform(0.01, 0.98) * min(20.0, coupling.max_stable_lr(1.0))
        found = coupling.stationary_variance(curvature=2.0, lr=push / 2, noise=3.0)
        expected = covariance(coupling, push) * (1.5 * push) ** 2
        assert found == pytest.approx((expected[0, 0], expected[1, 1]), rel=1e-7)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9, 0.99])
def test_with_momentum_it_solves_lyapunovs_equation(beta: float) -> None:
    for coupling in random_couplings(60):
        push = RANDOM.uniform(0.01, 0.98) * min(20.0, coupling.max_stable_lr(1.0, momentum=beta))
        found = coupling.stationary_variance(curvature=0.5, lr=2 * push, noise=0.25, momentum=beta)
        expected = covariance(coupling, push, beta) * (0.5 * push) ** 2
        assert found == pytest.approx((expected[0, 0], expected[1, 1]), rel=1e-6)


def exact_covariance(coupling: Coupling, push: float, beta: float) -> sp.Matrix:
    """Return Σ = M·Σ·Mᵀ + N for ησ = 1 by rational numbers, as nine equations."""
    a, b, p, q = (sp.Rational(number) for number in (coupling.a, coupling.b, coupling.p, coupling.q))
    x, kept = sp.Rational(push), sp.Rational(beta)
    mean = sp.Matrix([[(1 - kept) * x, 0, kept]])
    m = sp.Matrix([[1 - a, a, 0], [b, 1 - b, 0], [0, 0, 0]]) - sp.Matrix([p, q, -1]) * mean
    noise = (1 - kept) * sp.Matrix([-p, -q, 1])
    equations = sp.eye(9) - sp.Matrix(sp.kronecker_product(m, m))
    return equations.LUsolve(sp.Matrix(sp.kronecker_product(noise, noise))).reshape(3, 3)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999])
@pytest.mark.parametrize(
    ("theta", "c"), [(-0.9999, 0.75), (-0.999, 0.2), (-0.5, 1e-9), (-0.5, 0.5), (0.0, 1e-4), (2.0, 0.1), (1e5, 1e-12)]
)
def test_every_setting_keeps_its_digits(theta: float, c: float, beta: float) -> None:
    """At slow, strong and almost unstable settings an elimination in floats has negative variances."""
    coupling = centred(theta, c)
    limit = coupling.max_stable_lr(1.0, momentum=beta)
    for share in (1e-9, 1e-5, 0.3, 0.999):
        push = share * limit
        expected = exact_covariance(coupling, push, beta)
        found = coupling.stationary_variance(1.0, push, noise=1 / push, momentum=beta)
        assert found == pytest.approx((float(expected[0, 0]), float(expected[1, 1])), rel=1e-8)


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_the_scale_of_curvature_and_noise_does_not_matter(beta: float) -> None:
    coupling = centred(-0.5, 0.01)
    w1, w2 = coupling.stationary_variance(1.0, 0.1, momentum=beta)
    for h, noise in ((1e250, 1.0), (1e-250, 1.0), (1e200, 1e300), (1e-100, 1e-150), (1.0, 1e-100)):
        found = coupling.stationary_variance(h, 0.1 / h, noise, momentum=beta)
        factor = (noise / h) * (noise / h)
        assert found == pytest.approx((w1 * factor, w2 * factor), rel=1e-9)
    assert coupling.stationary_variance(1.0, 0.1, noise=1e300, momentum=beta) == (math.inf, math.inf)
    assert coupling.stationary_variance(1.0, 1e300, momentum=beta) == (math.inf, math.inf)
    with pytest.raises(ValueError, match=r"^curvature=1e-200 times lr=1e-200 is too small"):
        coupling.stationary_variance(1e-200, 1e-200, momentum=beta)


def test_a_little_momentum_changes_little() -> None:
    for coupling in random_couplings(30):
        push = 0.5 * min(1.0, coupling.max_stable_lr(1.0))
        without = coupling.stationary_variance(1.0, push)
        assert coupling.stationary_variance(1.0, push, momentum=1e-9) == pytest.approx(without, rel=1e-5)


def test_slow_modes_keep_their_digits() -> None:
    """x and c of a millionth: the exact value by rational numbers."""
    numbers = [sp.Rational(n) for n in (-0.5e-6, 1e-6, 1.0, 1e-6)]
    push = sp.Rational(1e-6)
    at = dict(zip((a, b, p, q), numbers, strict=True)) | {x: push}
    b1 = b * p - (1 - a) * q
    formula = ((1 + D) * (q**2 + b1**2) + 2 * T * q * b1) / ((1 - D) * (CR * x) * (1 + D + T))
    exact = float(formula.subs(at)) * float(push) ** 2
    coupling = Coupling(*map(float, numbers))
    assert coupling.stationary_variance(1.0, float(push)).w2 == pytest.approx(exact, rel=1e-9)
    with_momentum = coupling.stationary_variance(1.0, float(push), momentum=0.9).w2
    assert with_momentum == pytest.approx(exact, rel=1e-4)  # slow against the momentum: the same noise


# Simulation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("coupling", "beta"),
    [
        (centred(-0.5, 0.1), 0.0),
        (centred(1.0, 0.1, "before"), 0.0),
        (centred(-0.4, 0.2), 0.8),
        (centred(0.0, 0.1), 0.9),
    ],
    ids=str,
)
def test_a_simulation_has_this_noise(coupling: Coupling, beta: float) -> None:
    m, noise, push = step_matrix(coupling, 0.3, beta), kick(coupling, beta), 0.3
    state = np.zeros((3, 20_000))
    for _ in range(250):
        state = m @ state + np.outer(noise, RANDOM.standard_normal(state.shape[1]))
    found = coupling.stationary_variance(1.0, push, noise=1 / push, momentum=beta)
    assert (state[0].var(), state[1].var()) == pytest.approx(found, rel=0.05)  # 1% is one standard error


# What is said of it --------------------------------------------------------------------------------------------------


def test_at_equal_c_a_repulsive_spring_is_noisier_and_at_equal_b_it_is_not() -> None:
    for c, push in ((0.001, 0.01), (0.01, 0.01), (0.02, 0.1)):
        noise = [centred(theta, c).stationary_variance(1.0, push).w2 for theta in (-0.8, -0.5, 0.0, 1.0)]
        assert noise == sorted(noise, reverse=True)
        # b = c/(1+θ) the same: to leading order in c and x
        equal = [centred(theta, c * (1 + theta)).stationary_variance(1.0, push).w2 for theta in (-0.8, -0.5, 0.0, 1.0)]
        assert equal == pytest.approx([equal[2]] * 4, rel=2 * push)


def test_at_equal_c_noise_grows_with_repulsion_in_the_lower_half_of_the_stable_range_and_not_in_all_of_the_upper() -> (
    None
):
    def grows(theta: float, c: float, share: float) -> bool:
        x = share * centred(theta, c).max_stable_lr(1.0)
        more, less = centred(theta - 1e-4, c), centred(theta, c)
        return more.stationary_variance(1.0, x).w2 > less.stationary_variance(1.0, x).w2

    for theta in (-0.99, -0.9, -0.5, 0.0, 2.0):
        for c in (0.001, 0.05, 0.3, 0.7, 0.99):
            assert all(grows(theta, c, share) for share in (0.01, 0.3, 0.499))
    assert [grows(0.0, c, 0.6) for c in (0.01, 0.5, 0.9)] == [True, True, False]
    assert [grows(-0.9, c, 0.8) for c in (0.01, 0.05, 0.5)] == [True, False, False]


def test_below_x_1_a_repulsive_spring_is_noisier_than_ema_and_above_it_need_not_be() -> None:
    """Also not in the lower half of its own stable range."""

    def ratio(theta: float, c: float, x: float) -> float:
        return centred(theta, c).stationary_variance(1.0, x).w2 / centred(0.0, c).stationary_variance(1.0, x).w2

    for theta in (-0.95, -0.5, -0.1):
        for c in (0.01, 0.3, 0.66, 0.95):
            assert min(ratio(theta, c, x) for x in (0.01, 0.3, 0.999)) > 1
    assert centred(-0.9, 0.66).max_stable_lr(1.0) > 2 * 1.65
    assert ratio(-0.9, 0.66, 1.65) < 0.9


def test_at_x_equal_to_c_a_repulsive_spring_is_both_slower_and_noisier_than_ema() -> None:
    """What is false: that θ < 0 dominates EMA at equal bandwidth."""
    c, theta = 0.05, -0.5
    ours, ema = centred(theta, c), centred(0.0, c)
    assert ours.stationary_variance(1.0, c).w2 / ema.stationary_variance(1.0, c).w2 == pytest.approx(1.32, abs=0.01)
    assert 2 / (2 + theta) == pytest.approx(1.32, abs=0.02)
    slowest = 1 - ours.convergence_rate((1.0, 1.0), c)
    assert slowest == pytest.approx(0.752 * c, rel=0.01)
    assert slowest == pytest.approx(c * (1 + theta / 2), rel=0.01)


def test_the_setting_of_cifar10() -> None:
    ours, ema = (centred(theta, 0.0895) for theta in (-0.5, 0.0))
    ratio = ours.stationary_variance(1.0, 1.0, momentum=0.9).w2 / ema.stationary_variance(1.0, 1.0, momentum=0.9).w2
    assert ratio == pytest.approx(4.3, abs=0.05)
    rates = [each.convergence_rate((1.0, 1.0), 1.0, momentum=0.9) for each in (ours, ema)]
    assert rates == pytest.approx([0.984, 0.949], abs=5e-4)


# Ends ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_an_unstable_rate_has_no_variance(beta: float) -> None:
    ema = centred(0.0, 0.1)
    limit = ema.max_stable_lr(1.0, momentum=beta)
    assert ema.stationary_variance(1.0, limit, momentum=beta) == Variances(math.inf, math.inf)
    assert ema.stationary_variance(1.0, 0.999 * limit, momentum=beta).w2 < math.inf
    assert ema.stationary_variance(1.0, 0.1, noise=0.0, momentum=beta) == (0.0, 0.0)


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize(
    ("coupling", "share"),
    [
        (Coupling(0.0, 0.0, 1.0, 0.0), 0.0),  # no coupling: the average stands still
        (Coupling(0.0, 0.0, 1.0, 0.25), 0.0625),  # it adds up a quarter of every update
        (Coupling(0.3, 0.0, 0.7, 0.0), 0.0),  # a tether
    ],
)
def test_averages_without_a_motion_of_their_own(coupling: Coupling, share: float, beta: float) -> None:
    m, noise = step_matrix(coupling, 0.2, beta), kick(coupling, beta)
    moments = np.zeros((3, 3))
    for _ in range(300):  # the state of w2 begins at 0, and all else comes to rest
        moments = m @ moments @ m.T + np.outer(noise, noise)
    w1, w2 = coupling.stationary_variance(1.0, 0.2, noise=5.0, momentum=beta)
    assert w1 == pytest.approx(moments[0, 0], rel=1e-9)
    assert w2 == pytest.approx(share * w1, rel=1e-9)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"curvature": 0.0}, "^curvature=0.0 .* needs curvature > 0"),
        ({"lr": -1.0}, "^lr=-1.0 "),
        ({"noise": -1.0}, "^noise=-1.0 .* needs noise ≥ 0"),
        ({"momentum": 1.0}, "^momentum=1.0 .* needs momentum ≥ 0 and momentum < 1"),
    ],
    ids=str,
)
def test_refused(bad: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        centred(0.0, 0.1).stationary_variance(**{"curvature": 1.0, "lr": 0.1} | bad)
