"""How fast couplings converge: on quadratics by eigenvalues and algebra, on smooth functions by Lyapunov functions."""

import itertools
import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import sympy as sp
from scipy.optimize import linprog

from helpers.quadratic import Array, radius, step_matrix
from torchbelay import Coupling, Spring, methods
from torchbelay.physics.convergence import is_certified, polynomial

RANDOM = np.random.default_rng(10)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test has the same random numbers, in whatever order they run."""
    RANDOM.bit_generator.state = np.random.default_rng(10).bit_generator.state


def centred(theta: float, c: float, follow: str = "after") -> Coupling:
    return methods.centred(theta, c, follow=follow).coupling(1, 0.1)  # type: ignore[arg-type]


def random_centred(low: float, high: float) -> Coupling:
    return centred(RANDOM.uniform(low, high), RANDOM.uniform(0.02, 0.98), ("before", "after")[RANDOM.integers(2)])


# Theorem 1: an attractive spring never accelerates -------------------------------------------------------------------

a, b, p, q, x, lam = sp.symbols("a b p q x lambda")


def characteristic() -> sp.Expr:
    """The polynomial of a step at ηh = x."""
    matrix = sp.Matrix([[1 - a - p * x, a], [b - q * x, 1 - b]])
    return (lam * sp.eye(2) - matrix).det()


def in_lambda(coefficients: tuple[float, ...]) -> Array:
    """The coefficients in λ of a polynomial in ζ = λ − 1."""
    return np.poly1d(coefficients)(np.poly1d([1.0, -1.0])).coeffs  # type: ignore[no-any-return]


def test_the_polynomial_of_the_module_is_that_of_the_step() -> None:
    for beta in (0.0, 0.7):
        coupling = random_centred(-0.9, 2.0)
        matrix = step_matrix(coupling, 0.3, beta)
        found = in_lambda(polynomial(coupling, 0.3, beta))
        assert found == pytest.approx(np.poly(matrix if beta else matrix[:2, :2]), abs=1e-12)
    c, drift = a + b, b * p + a * q
    assert sp.expand(characteristic() - ((lam - 1) * (lam - 1 + c) + x * (p * lam - p + drift))) == 0


def test_at_1_minus_the_effective_rate_the_polynomial_is_minus_theta_times_a_square() -> None:
    """f(1 − r·x) = −θ(r − q)·r·x²: negative for θ > 0 and r > q, so that a root is on each side."""
    r, theta = (b * p + a * q) / (a + b), a / b
    value = characteristic().subs(lam, 1 - r * x)
    assert sp.cancel(sp.together(value + theta * (r - q) * r * x**2)) == 0
    th, c = sp.symbols("theta c")
    for numbers, share in (({p: 1 + th * (1 - c), q: c}, 1 - c), ({p: 1 + th, q: 0}, 1)):  # after, before
        at = {a: th * c / (1 + th), b: c / (1 + th)} | numbers
        assert sp.cancel(sp.together(characteristic().subs(at).subs(lam, 1 - x) + th * share * x**2)) == 0


def test_no_attractive_spring_is_faster_or_more_stable_than_sgd_at_equal_effective_rate() -> None:
    for _ in range(500):
        coupling = random_centred(0.0, 5.0)
        push = RANDOM.uniform(0.001, 3.0)
        assert radius(step_matrix(coupling, push)[:2, :2]) >= abs(1 - push) - 1e-12
        assert coupling.max_stable_lr(1.0) <= 2 + 1e-12
    for _ in range(300):  # BELAY, at its own effective rate
        k, m1, m2 = RANDOM.uniform((0.01, 0.6, 0.6), (1, 30, 30))
        spring = Spring(k=k, m1=m1, m2=m2)
        if spring.kappa1 + spring.kappa2 <= 1:
            push = RANDOM.uniform(0.001, 3.0)
            effective = push * spring.effective_lr_scale
            assert radius(step_matrix(spring.coupling(), push)[:2, :2]) >= abs(1 - effective) - 1e-12


def test_over_a_range_of_curvatures_none_beats_the_best_of_sgd_and_a_repulsive_one_does() -> None:
    low, high = 1.0, 100.0
    best = (high - low) / (high + low)
    for _ in range(2000):
        lr = RANDOM.uniform(0.1, 1.5) * 2 / (low + high)
        assert random_centred(0.0, 3.0).convergence_rate((low, high), lr) >= best - 1e-12
    root = math.sqrt(high / low)
    polyak = (root - 1) / (root + 1)
    c, lr = 1 - polyak**2, 4 / (math.sqrt(high) + math.sqrt(low)) ** 2  # heavy ball's momentum 1 − c and rate c·η
    assert centred(-1 + 1e-8, c).convergence_rate((low, high), lr / c) == pytest.approx(polyak, abs=4e-4)
    assert polyak < best


def test_at_theta_minus_1_the_average_is_heavy_ball() -> None:
    """w2'' − w2' = (1−c)(w2' − w2) + c·u': momentum 1 − c at the rate c·η, for every loss."""
    z, w2, u1, u2, c = sp.symbols("z w2 u1 u2 c")
    z1, w21 = z + u1, w2 + c * (z + u1 - w2)
    w22 = w21 + c * (z1 + u2 - w21)
    assert sp.expand((w22 - w21) - (1 - c) * (w21 - w2) - c * u2) == 0  # gradients are taken at w1 = w2


# Theorem 4: quadratics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_the_rate_on_quadratics_is_the_largest_eigenvalue_over_all_curvatures(beta: float) -> None:
    for _ in range(120):
        coupling = random_centred(-0.97, 2.0)
        low = RANDOM.uniform(0.001, 1)
        high = low * RANDOM.uniform(1, 60)
        lr = RANDOM.uniform(0.05, 1.2) * min(10.0, coupling.max_stable_lr(high, momentum=beta))
        between = [radius(step_matrix(coupling, lr * h, beta)) for h in np.geomspace(low, high, 60)]
        found = coupling.convergence_rate((low, high), lr, momentum=beta)
        assert found == pytest.approx(max(between), rel=1e-6)
        assert max(between) == pytest.approx(max(between[0], between[-1]), rel=1e-9)  # the worst is at an end


def test_for_a_double_root_the_rate_is_that_of_the_long_run() -> None:
    """The error after n steps is within a factor of n of rateⁿ."""
    coupling = centred(-0.25, 0.1)
    rate = coupling.convergence_rate((1.0, 1.0), 0.5)
    state = np.array([1.0, 1.0, 0.0])
    for _ in range(400):
        state = step_matrix(coupling, 0.5) @ state
    assert math.log(abs(state[1])) / 400 == pytest.approx(math.log(rate), rel=0.02)


# Theorem 5: smooth functions, attractive springs ---------------------------------------------------------------------


def test_for_an_attractive_spring_the_step_is_a_symmetric_matrix() -> None:
    """In s1 = z/√r, s2 = e·√(θ/(r−q)) with e = z − w2: s' = diag(1, 1−c)·s − ηg·v and w1 = v·s."""
    z, e, g, r, theta, c, eta = sp.symbols("z e g r theta c eta", positive=True)
    rest = sp.Symbol("rest", positive=True)  # r − q
    z_new, e_new = z - eta * r * g, (1 - c) * e - eta * rest * g
    s, new = (sp.Matrix([i / sp.sqrt(r), j * sp.sqrt(theta / rest)]) for i, j in ((z, e), (z_new, e_new)))
    v = sp.Matrix([sp.sqrt(r), sp.sqrt(theta * rest)])
    expected = sp.diag(1, 1 - c) * s - eta * g * v
    assert all(sp.simplify(term) == 0 for term in new - expected)
    assert sp.simplify(v.dot(s) - (z + theta * e)) == 0


def test_the_centre_and_the_difference_move_as_the_proof_says() -> None:
    w1, w2, u = sp.symbols("w1 w2 u")
    r, c = (b * p + a * q) / (a + b), a + b
    z, z_new = ((b * i + a * j) / c for i, j in ((w1, w2), (w1 + a * (w2 - w1) + p * u, w2 + b * (w1 - w2) + q * u)))
    w2_new = w2 + b * (w1 - w2) + q * u
    assert sp.cancel(sp.together(z_new - z - r * u)) == 0
    assert sp.cancel(sp.together((z_new - w2_new) - (1 - c) * (z - w2) - (r - q) * u)) == 0
    assert sp.cancel(sp.together(w1 - z - a / b * (z - w2))) == 0


def test_for_belay_the_lyapunov_function_is_the_moment_of_inertia() -> None:
    m1, m2, w1, w2 = sp.symbols("m1 m2 w1 w2", positive=True)
    z = (m1 * w1 + m2 * w2) / (m1 + m2)
    inertia = (m1 * w1**2 + m2 * w2**2) / (m1 + m2)
    assert sp.cancel(sp.together(z**2 + m2 / m1 * (z - w2) ** 2 - inertia)) == 0  # q = 0: both weights are 1/r


class Smooth:
    """A random function with curvatures between two numbers: a quadratic and ridges ½h·x² that bend."""

    def __init__(self, low: float, high: float, size: int = 3) -> None:
        turn = np.linalg.qr(RANDOM.standard_normal((size, size)))[0]
        self.base = turn @ np.diag(RANDOM.choice([0.0, 0.0, 0.3, 1.0], size)) @ turn.T
        self.ridges = np.linalg.qr(RANDOM.standard_normal((size, size)))[0]
        room = 1 - np.linalg.eigvalsh(self.base).max() if self.base.any() else 1.0
        self.heights = RANDOM.uniform(0, 1, size) * room
        self.scales = 10 ** RANDOM.uniform(-1, 1, size)
        self.shifts = RANDOM.standard_normal(size)  # a kink away from the minimum, at which the slope is 0
        self.low, self.high = low, high

    def gradient(self, w: Array) -> Array:
        """Return the gradient; its minimum is the origin, and its curvature is low at least and high at most."""
        along = self.ridges.T @ w
        bend = (np.tanh(self.scales * along - self.shifts) + np.tanh(self.shifts)) / self.scales  # slopes in (0, 1)
        own = self.base @ w + self.ridges @ (self.heights * bend)
        return self.low * w + (self.high - self.low) * own


def run(coupling: Coupling, gradient: Callable[[Array], Array], lr: float, steps: int, start: Array) -> list[Array]:
    """Return (w1, w2) of every step."""
    w1, w2 = start.copy(), start + RANDOM.standard_normal(start.shape)
    seen = [np.stack([w1, w2])]
    for _ in range(steps):
        u = -lr * gradient(w1)
        w1, w2 = w1 + coupling.a * (w2 - w1) + coupling.p * u, w2 + coupling.b * (w1 - w2) + coupling.q * u
        seen.append(np.stack([w1, w2]))
    return seen


def lyapunov(coupling: Coupling, w: Array) -> float:
    """V = ‖z‖²/r + θ‖z − w2‖²/(r − q)."""
    z = (coupling.b * w[0] + coupling.a * w[1]) / coupling.rate
    r = coupling.effective_lr_scale
    return float((z**2).sum() / r + coupling.theta * ((z - w[1]) ** 2).sum() / (r - coupling.q))


def test_on_random_functions_the_moment_of_inertia_shrinks_by_the_rate_of_quadratics() -> None:
    closest = 0.0
    for _ in range(150):
        low, high = 1.0, RANDOM.uniform(1.5, 50)
        if RANDOM.integers(2):
            k, m1, m2 = RANDOM.uniform((0.01, 1, 1), (1, 30, 30))
            coupling = Spring(k=k, m1=m1, m2=m2).coupling()
        else:
            coupling = random_centred(0.01, 2.0)
        lr = RANDOM.uniform(0.1, 0.95) * coupling.max_stable_lr(high)
        bound = coupling.convergence_bound((low, high), lr)
        assert bound == coupling.convergence_rate((low, high), lr) < 1
        values = [lyapunov(coupling, w) for w in run(coupling, Smooth(low, high).gradient, lr, 40, 10 * np.ones(3))]
        ratios = [new / old for old, new in itertools.pairwise(values) if old > 1e-200]
        assert max(ratios) <= bound**2 * (1 + 1e-9)
        closest = max(closest, max(ratios) / bound**2)
    assert closest > 0.99  # the bound is reached


def test_with_noise_the_moment_of_inertia_stays_below_its_bound() -> None:
    """E V' ≤ ρ²·V + η²σ²(r + θ(r−q)): on quadratics the stationary V, which is exact, stays below."""
    for _ in range(100):
        coupling, h = random_centred(0.01, 2.0), RANDOM.uniform(0.2, 3)
        lr = RANDOM.uniform(0.05, 0.95) * coupling.max_stable_lr(h)
        rate, r = coupling.convergence_rate((h, h), lr), coupling.effective_lr_scale
        bound = lr**2 * (r + coupling.theta * (r - coupling.q)) / (1 - rate**2)
        state = np.zeros((2, 2))
        m, noise = step_matrix(coupling, lr * h)[:2, :2], lr * np.array([coupling.p, coupling.q])
        state = np.linalg.solve(np.eye(4) - np.kron(m, m), np.outer(noise, noise).ravel()).reshape(2, 2)
        z, e = np.array([coupling.b, coupling.a]) / coupling.rate, np.array([coupling.b, -coupling.b]) / coupling.rate
        value = z @ state @ z / r + coupling.theta * (e @ state @ e) / (r - coupling.q)
        assert value <= bound * (1 + 1e-9)


# Theorem 6: smooth functions, every coupling -------------------------------------------------------------------------


def certificate(coupling: Coupling, low: float, high: float, beta: float, rho: float) -> Array:
    """Return P of V = sᵀPs, s = (w1, w2, m), from a factor of the circle criterion (Kalman, Yakubovich, Popov).

    On |λ| = ρ, Re χ_L·conj χ_μ = |κ|² with a polynomial κ. Then P is the sum of the squares of an output of the step
    at the least curvature, which makes κ; the inequality of V is the square that is left.
    """
    n = 3 if beta else 2
    m = step_matrix(coupling, low, beta)[:n, :n]
    away = step_matrix(coupling, low + 1.0, beta)[:n, :n] - m  # what one unit of curvature more adds: −B·Cᵀ
    gain = away[:, 0]  # the state moves by gain·v for v = (x − ημ)·w1
    chi_low, chi_high = (in_lambda(polynomial(coupling, push, beta)) for push in (low, high))
    scale = rho ** -np.arange(n + 1)  # λ = ρ·ζ, so that the circle is |ζ| = 1
    f, g = chi_low * scale, chi_high * scale
    product = (np.convolve(f, g[::-1]) + np.convolve(g, f[::-1])) / 2  # of ζⁿ·Re f·conj g, symmetric
    inside = np.sort_complex(np.roots(product))
    inside = inside[np.argsort(np.abs(inside))][:n]
    kappa = np.real(np.poly(inside))
    kappa *= math.sqrt(max(product[n], 0.0) / (kappa @ kappa)) if kappa @ kappa else 0.0
    kappa = kappa / scale  # back to λ
    # an output k·s + d·v of the step has κ/χ_μ as its response: match the coefficients
    columns, power = [], np.eye(n)
    for i in range(n):  # adj(λ − m)·gain = Σ λ^(n−1−i)·columns[i]
        columns.append(power @ gain)
        power = m @ power + chi_low[i + 1] * np.eye(n)
    d = kappa[0]
    k = np.linalg.lstsq(np.array(columns), kappa[1:] - d * chi_low[1:], rcond=None)[0]
    lhs = np.eye(n * n) * rho**2 - np.kron(m.T, m.T)
    return np.linalg.solve(lhs, np.outer(k, k).ravel()).reshape(n, n)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_if_the_circle_criterion_holds_a_quadratic_function_shrinks_on_random_functions(beta: float) -> None:
    proved = 0
    for _ in range(100):
        coupling = random_centred(-0.9, 0.5)
        low, high = 1.0, RANDOM.uniform(1.2, 20)
        lr = 10 ** RANDOM.uniform(-2, 0) * min(2 / high, coupling.max_stable_lr(high, momentum=beta))
        bound = coupling.convergence_bound((low, high), lr, momentum=beta)
        assert bound >= coupling.convergence_rate((low, high), lr, momentum=beta) - 1e-9
        if bound == math.inf:
            continue
        rho = min(1.0, bound * (1 + 1e-3))  # a little room, so that P is positive
        shape = certificate(coupling, lr * low, lr * high, beta, rho)
        eigenvalues = np.linalg.eigvalsh(shape)
        assert eigenvalues[0] > -1e-9 * eigenvalues[-1]
        n = len(shape)
        state = np.zeros((n, 3))
        state[:2] = RANDOM.standard_normal((2, 3)) * 10
        smooth = Smooth(low, high)
        value = np.einsum("id,ij,jd->", state, shape, state)
        for _ in range(40):
            mean = (1 - beta) * lr * smooth.gradient(state[0]) + (beta * state[2] if beta else 0.0)
            w1 = state[0] + coupling.a * (state[1] - state[0]) - coupling.p * mean
            w2 = state[1] + coupling.b * (state[0] - state[1]) - coupling.q * mean
            state = np.stack([w1, w2, mean][:n])
            new = np.einsum("id,ij,jd->", state, shape, state)
            assert new <= rho**2 * value * (1 + 1e-6) + 1e-12 * eigenvalues[-1] * (state**2).sum()
            value = new
            if np.abs(state).max() < 1e-3:  # the function's own rounding, at the minimum, is 1e-16
                break
        proved += 1
    assert proved > 30


def test_the_circle_criterion_proves_no_less_than_the_symmetric_matrix() -> None:
    """For attractive springs both apply, and they agree."""
    for _ in range(150):
        coupling, high = random_centred(0.01, 2.0), RANDOM.uniform(1.5, 50)
        lr = RANDOM.uniform(0.1, 0.95) * coupling.max_stable_lr(high)
        rate = coupling.convergence_rate((1.0, high), lr)
        low, top = (polynomial(coupling, lr * h) for h in (1.0, high))
        assert is_certified(low, top, rate * (1 + 1e-7))
        assert not is_certified(low, top, rate * (1 - 1e-3))


def test_the_least_value_on_the_circle_is_found() -> None:
    angles = np.linspace(0, np.pi, 2001)
    for _ in range(200):
        coupling, beta = random_centred(-0.9, 1.0), RANDOM.choice([0.0, 0.6])
        low, high = (polynomial(coupling, push, beta) for push in RANDOM.uniform(0.01, 2, 2))
        rho = RANDOM.uniform(0.8, 1)
        if radius(np.polynomial.polynomial.polycompanion(in_lambda(low)[::-1])) > rho:
            assert not is_certified(low, high, rho)
            continue
        at = rho * np.exp(1j * angles) - 1
        least = (np.polyval(low, at) * np.polyval(high, at).conj()).real.min()
        if abs(least) > 1e-5:
            assert is_certified(low, high, rho) == (least > 0)


# Slow modes: c and x of 1e-3 to 1e-9, as in training -------------------------------------------------------------


def exact_polynomial(coupling: Coupling, push: float, beta: float) -> list[mpmath.mpf]:
    """χ in λ with 50 digits: (λ − β)(λ − 1)(λ − 1 + c) + (1 − β)·x·λ·(p·λ − p + c·r)."""
    a, b, p, q, push, beta = map(mpmath.mpf, (coupling.a, coupling.b, coupling.p, coupling.q, push, beta))
    c, drift, x = a + b, b * p + a * q, (1 - beta) * push
    return [1, c - 2 - beta + p * x, 1 - c + beta * (2 - c) + (drift - p) * x, -beta * (1 - c)]


def exact_least(low: list[mpmath.mpf], high: list[mpmath.mpf], rho: mpmath.mpf) -> mpmath.mpf:
    """The least Re χ_L·conj χ_μ·λ³ on |λ| = ρ over angles from 1e-10 to π, evenly spaced on a log scale."""
    angles = [mpmath.pi * mpmath.mpf(10) ** (-i / mpmath.mpf(40)) for i in range(400)]
    points = [rho, *(rho * mpmath.expj(angle) for angle in angles)]
    return min((mpmath.polyval(low, z) * mpmath.conj(mpmath.polyval(high, z))).real for z in points)


@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize(
    ("theta", "c", "low", "high"),
    [
        (-0.64, 1.6e-5, 3e-7, 2e-3),  # not proved; with 16 digits in λ it seems so
        (-0.1, 6e-4, 1.5e-6, 0.015),
        (-0.45, 2.5e-5, 5.7e-5, 0.012),
        (-0.13, 3.9e-5, 2.6e-5, 0.01),
        (-0.67, 7e-4, 3.6e-4, 2.5e-3),
        (-0.3, 1e-8, 1e-8, 4e-8),
        (0.5, 1e-6, 1e-6, 1e-5),
        (0.0, 1e-9, 1e-12, 1e-12),
    ],
)
def test_slow_modes_have_the_rate_and_the_bound_of_exact_numbers(
    theta: float, c: float, low: float, high: float, beta: float
) -> None:
    coupling = centred(theta, c)
    with mpmath.workdps(50):
        ends = [exact_polynomial(coupling, push, beta) for push in (low, high)]
        rate = max(abs(root) for end in ends for root in mpmath.polyroots(end, maxsteps=200, extraprec=200))
        found = coupling.convergence_rate((low, high), 1.0, beta)
        assert abs(found - rate) < 1e-4 * (1 - rate)
        bound = coupling.convergence_bound((low, high), 1.0, beta)
        if bound == math.inf:
            assert exact_least(*ends, mpmath.mpf(1)) < 0
            return
        assert exact_least(*ends, 1 - 0.999 * (1 - mpmath.mpf(bound))) >= 0
        faster = 1 - 1.01 * (1 - mpmath.mpf(bound))
        assert rate > faster or exact_least(*ends, faster) < 0


def test_far_beyond_the_stable_range_nothing_converges() -> None:
    """A root that is much larger than the others must not be taken for infinite and left out."""
    for push in (1e3, 1e14, 1e20, 1e150, 1e300):
        for beta in (0.0, 0.9):
            assert centred(0.0, 0.05).convergence_rate((push, push), 1.0, beta) > 0.09 * push
            assert centred(0.0, 0.05).convergence_bound((push, push), 1.0, beta) == math.inf
    assert centred(0.0, 0.05).convergence_rate((1e300, 1e300), 1e300) == math.inf


def test_a_spring_that_repels_much_is_not_proved_although_it_converges_on_quadratics() -> None:
    heavy = centred(-0.95, 0.05)
    assert heavy.convergence_rate((1.0, 100.0), 0.005) < 1
    assert heavy.convergence_bound((1.0, 100.0), 0.005) == math.inf
    unstable = centred(1.0, 0.1)
    assert unstable.convergence_bound((1.0, 10.0), 0.3) == math.inf
    assert unstable.convergence_rate((1.0, 10.0), 0.3) > 1


class Bent:
    """A convex function of one variable: one curvature between two ends, another outside, and smooth bends."""

    def __init__(self, inside: float, outside: float, ends: tuple[float, float], sharp: float) -> None:
        self.inside, self.outside, self.ends, self.sharp = inside, outside, ends, sharp  # a bend is about as long

    def gradient(self, w: float) -> float:
        """Return the gradient, which is 0 at the origin."""
        return self.outside * w + (self.inside - self.outside) * (self._within(w) - self._within(0.0))

    def curvature(self, w: float) -> float:
        """Return the second derivative."""
        low, high = ((1 + math.tanh((w - end) / self.sharp / 2)) / 2 for end in self.ends)
        return self.outside + (self.inside - self.outside) * (low - high)

    def _within(self, w: float) -> float:
        """Return the length of what lies between the ends and below w."""
        low, high = (self.sharp * np.logaddexp(0.0, (w - end) / self.sharp) for end in self.ends)
        return float(low - high)

    def after(self, step: Coupling, lr: float, start: tuple[float, float], steps: int) -> list[tuple[float, float]]:
        """Return the last six (w1, w2) of a run."""
        (w1, w2), seen = start, []
        for left in range(steps, 0, -1):
            u = -lr * self.gradient(w1)
            w1, w2 = w1 + step.a * (w2 - w1) + step.p * u, w2 + step.b * (w1 - w2) + step.q * u
            if left <= 6:
                seen.append((w1, w2))
        return seen


@pytest.mark.parametrize("sharp", [0.01, 0.001])
def test_a_bent_function_has_the_curvatures_that_it_names(sharp: float) -> None:
    bent = Bent(inside=10.0, outside=1.0, ends=(-0.4768, 0.2237), sharp=sharp)
    points = np.linspace(-2, 2, 20_001)
    slopes = np.diff([bent.gradient(w) for w in points]) / np.diff(points)
    assert (slopes.min(), slopes.max()) == (pytest.approx(1.0, rel=1e-6), pytest.approx(10.0, rel=1e-6))
    assert slopes == pytest.approx([bent.curvature(w) for w in (points[1:] + points[:-1]) / 2], abs=0.03)
    assert bent.gradient(0.0) == 0


def test_strong_repulsion_can_cycle_for_ever_on_a_convex_function() -> None:
    """No bound exists there, although errors shrink on every quadratic with such curvatures."""
    bent, step = Bent(inside=1.0, outside=25.0, ends=(1.0, 2.0), sharp=0.01), centred(-0.99, 5 / 9)
    assert step.convergence_rate((1.0, 25.0), 0.2) == pytest.approx(0.871, abs=5e-4)
    assert step.convergence_bound((1.0, 25.0), 0.2) == math.inf
    seen = [w2 for _, w2 in bent.after(step, 0.2, (1.0, 1.0), 10_000)]
    assert seen[-3:] == pytest.approx(seen[-6:-3], abs=1e-6)  # every third step is the same
    assert sorted(seen[-3:]) == pytest.approx([-1.698, 0.617, 2.041], abs=1e-3)


def test_a_repulsion_of_0_9_can_cycle_for_ever_on_a_convex_function() -> None:
    """The learning rate is just below the limit of quadratics; the cycle attracts what begins near it."""
    bent, step = Bent(inside=10.0, outside=1.0, ends=(-0.4768, 0.2237), sharp=0.001), centred(-0.9, 0.4)
    lr = 0.6123
    assert lr < step.max_stable_lr(10.0) == pytest.approx(0.6154, abs=5e-5)
    assert step.convergence_rate((1.0, 10.0), lr) == pytest.approx(0.979, abs=5e-4)
    assert step.convergence_bound((1.0, 10.0), lr) == math.inf
    for start, steps in (((0.5176, 0.3996), 100_000), ((0.52, 0.40), 1_000), ((0.5, 0.38), 1_000)):
        seen = bent.after(step, lr, start, steps)
        assert np.array(seen[-3:]) == pytest.approx(np.array(seen[-6:-3]), abs=1e-12)  # every third step is the same
        assert sorted(w1 for w1, _ in seen[-3:]) == pytest.approx([-0.48231, 0.22932, 0.51759], abs=5e-6)
    around = np.eye(2)  # what three steps make of a small distance from the cycle
    for w1, _ in seen[-3:]:
        around = step_matrix(step, lr * bent.curvature(w1))[:2, :2] @ around
    assert radius(around) == pytest.approx(0.42, abs=0.005)
    (w1, w2), *_ = bent.after(step, lr, (0.6, 0.4), 2_000)  # from elsewhere, a run does come to the minimum
    assert abs(w1) + abs(w2) < 1e-12


def test_with_before_the_weights_move_as_with_after_at_theta_over_1_minus_c() -> None:
    """So a cycle at −0.9 and c = 0.4 is one at −0.54 too. A start differs in w2 by the same share."""
    for _ in range(20):
        c, gradient = RANDOM.uniform(0.05, 0.9), Smooth(1.0, RANDOM.uniform(2, 20)).gradient
        theta = RANDOM.uniform(-0.95, 1.5) * (1 - c)
        centre, apart = RANDOM.standard_normal((2, 3))
        seen = []
        for step, e in ((centred(theta, c, "before"), apart), (centred(theta / (1 - c), c), (1 - c) * apart)):
            w1, w2 = centre + step.theta * e, centre - e
            for _ in range(20):
                u = -0.05 * gradient(w1)
                w1, w2 = w1 + step.a * (w2 - w1) + step.p * u, w2 + step.b * (w1 - w2) + step.q * u
            seen.append(w1)
        assert seen[0] == pytest.approx(seen[1], rel=1e-9, abs=1e-12)
    bent, step = Bent(inside=10.0, outside=1.0, ends=(-0.4768, 0.2237), sharp=0.001), centred(-0.54, 0.4, "before")
    assert step.convergence_rate((1.0, 10.0), 0.6123) == pytest.approx(0.979, abs=5e-4)
    seen = [w1 for w1, _ in bent.after(step, 0.6123, (0.5176, -0.3866), 10_000)]
    assert sorted(seen[-3:]) == pytest.approx([-0.48231, 0.22932, 0.51759], abs=5e-6)


def has_cycle(step: Coupling, lr: float, low: float, high: float, length: int) -> bool:
    """Whether a function of one variable with curvatures in [low, high] exists on which a run has such a cycle.

    Given the order of the cycle's w1 and of the minimum, at 0, the gradients must rise from each to the next by low to
    high times their distance: a linear program in w1, w2 and the gradients. The length of the whole is set to 1.
    """
    return any(_has_cycle_in(order, step, lr, low, high, length) for order in orders(length))


def orders(length: int) -> list[tuple[int, ...]]:
    """Return the orders of points 0 … length − 1 and the minimum (`length`), up to the cycle's start and to a sign."""
    found = set()
    for order in itertools.permutations(range(length + 1)):
        turned = ([(i + k) % length if i < length else i for i in order] for k in range(length))
        found.add(min(tuple(each[::way]) for each in turned for way in (1, -1)))
    return sorted(found)


def _has_cycle_in(order: tuple[int, ...], step: Coupling, lr: float, low: float, high: float, length: int) -> bool:
    unit, zero = np.eye(3 * length), np.zeros((1, 3 * length))
    w1, w2, slope = (np.concatenate([part, zero]) for part in np.split(unit, 3))  # the last row is the minimum
    equal = []
    for now in range(length):
        then, u = (now + 1) % length, -lr * slope[now]
        equal.append(w1[now] + step.a * (w2[now] - w1[now]) + step.p * u - w1[then])
        equal.append(w2[now] + step.b * (w1[now] - w2[now]) + step.q * u - w2[then])
    below = []  # what must not be above 0
    for near, far in itertools.pairwise(order):
        apart, rise = w1[far] - w1[near], slope[far] - slope[near]
        below += [-apart, rise - high * apart, low * apart - rise]
    equal.append(w1[order[-1]] - w1[order[0]])
    limits = {"A_ub": below, "b_ub": np.zeros(len(below)), "A_eq": equal, "b_eq": [*np.zeros(len(equal) - 1), 1.0]}
    return bool(linprog(zero[0], **limits, bounds=(None, None)).success)


@pytest.mark.thorough
def test_linear_programs_find_cycles_of_a_strong_repulsion_and_none_of_a_weaker_one() -> None:
    """A coarse grid of what docs/theory.md says was searched."""
    assert len(orders(3)) == 4
    assert has_cycle(centred(-0.9, 0.4), 0.6123, 1.0, 10.0, 3)

    def cycles(theta: float, length: int) -> list[float]:
        steps = [centred(theta, float(c)) for c in np.linspace(0.1, 0.9, 17)]
        settings = [(step, share * step.max_stable_lr(1.0)) for step in steps for share in (0.95, 0.98, 0.999)]
        return [step.rate for step, lr in settings if has_cycle(step, lr, 1e-3, 1.0, length)]

    assert len(cycles(-0.9, 3)) > 5
    assert len(cycles(-0.875, 3)) > 0
    assert [cycles(theta, 3) for theta in (-0.87, -0.8, -0.7, -0.5)] == [[]] * 4
    assert [cycles(theta, 4) for theta in (-0.87, -0.75)] == [[]] * 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"curvatures": (2.0, 1.0)}, r"^curvatures=\(2.0, 1.0\) are in the wrong order; give the least first"),
        ({"curvatures": (0.0, 1.0)}, "^curvatures=0.0 .* needs curvatures > 0"),
        ({"curvatures": (1.0,)}, r"^curvatures=\(1.0,\) are not two"),
        ({"curvatures": 1.0}, "^curvatures=1.0 are not two; give the least and the largest"),
        ({"lr": 0.0}, "^lr=0.0 "),
        ({"momentum": 1.5}, "^momentum=1.5 "),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["convergence_rate", "convergence_bound"])
def test_refused(name: str, bad: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(centred(0.0, 0.1), name)(**{"curvatures": (1.0, 2.0), "lr": 0.1} | bad)
