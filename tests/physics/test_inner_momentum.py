"""The stable range of a spring around an optimizer with momentum, against eigenvalues of the step itself."""

import math

import numpy as np
import pytest
import sympy as sp

from torchbelay import Coupling, Spring, methods
from torchbelay.physics import theta_floor
from torchbelay.physics.inner_momentum import is_below_floor, stable_range

RANDOM = np.random.default_rng(14)


def radius(x: float, coupling: Coupling, beta: float, nesterov: bool) -> float:
    """The spectral radius of one step of (w1, w2, m) at ηh = x, written down from the definition."""
    moment = np.array([1 - beta, 0.0, beta])  # m' = β·m + (1 − β)·w1
    update = -x * (beta * moment + np.array([1 - beta, 0.0, 0.0]) if nesterov else moment)
    w1 = np.array([1 - coupling.a, coupling.a, 0.0]) + coupling.p * update
    w2 = np.array([coupling.b, 1 - coupling.b, 0.0]) + coupling.q * update
    return float(max(abs(np.linalg.eigvals(np.array([w1, w2, moment])))))


def check_limit(limit: float, coupling: Coupling, beta: float, nesterov: bool = False) -> None:
    """The step is stable everywhere below the limit, and not right above it."""
    for share in (1e-3, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999):
        assert radius(share * min(limit, 1e6), coupling, beta, nesterov) < 1
    if limit < math.inf:
        assert radius(1.001 * limit, coupling, beta, nesterov) > 1


def centred(theta: float, c: float, follow: str = "after") -> Coupling:
    return methods.centred(theta, c, follow=follow).coupling(1, 0.1)  # type: ignore[arg-type]


CASES = [
    (RANDOM.uniform(-0.97, 1.5), RANDOM.uniform(0.02, 0.98), RANDOM.uniform(0, 0.98), ("before", "after")[i % 2])
    for i in range(200)
]


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_range_is_that_of_the_eigenvalues(nesterov: bool) -> None:
    for theta, c, beta, follow in CASES:
        coupling = centred(theta, c, follow)
        check_limit(stable_range(coupling, beta, nesterov=nesterov), coupling, beta, nesterov)


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_range_of_any_four_numbers_is_that_of_the_eigenvalues(nesterov: bool) -> None:
    seen = 0
    while seen < 100:
        a, b, p, q = RANDOM.uniform((-1, 0.01, 0.1, 0), (1, 1.5, 2, 1))
        if 0.01 < a + b <= 1 and b * p + a * q > 0.01:
            coupling, beta = Coupling(a, b, p, q), RANDOM.uniform(0, 0.98)
            check_limit(stable_range(coupling, beta, nesterov=nesterov), coupling, beta, nesterov)
            seen += 1


def first_term(theta: float, c: float, beta: float, follow: str) -> float:
    """Where a root leaves through −1."""
    below = 2 * (1 + theta) - c * (1 + 2 * theta) if follow == "after" else 2 * (1 + theta) - c
    return (1 + beta) / (1 - beta) * 2 * (2 - c) / below if below > 0 else math.inf


def turning_term(theta: float, c: float, beta: float, follow: str) -> float:
    """Where a complex pair leaves, below the floor."""
    g = 1 - beta * (1 - c)
    excess = (1 - c) * (-theta * g - (1 - beta)) if follow == "after" else c - (1 + theta) * g
    return c * g / excess


@pytest.mark.parametrize("follow", ["before", "after"])
def test_above_the_floor_the_range_is_the_first_term_and_below_it_the_lesser_of_two(follow: str) -> None:
    for _, c, beta, _ in CASES:
        floor = theta_floor(beta, c, follow)  # type: ignore[arg-type]
        for share in (0.1, 0.5, 0.99):
            coupling = centred(share * floor, c, follow)
            assert stable_range(coupling, beta) == pytest.approx(first_term(share * floor, c, beta, follow), rel=1e-9)
            assert not is_below_floor(coupling, beta)
        low = max(-0.995, 1.05 * floor)
        if low < 1.04 * floor:
            coupling, turning = centred(low, c, follow), turning_term(low, c, beta, follow)
            expected = min(first_term(low, c, beta, follow), turning)
            assert stable_range(coupling, beta) == pytest.approx(expected, rel=1e-6)
            assert is_below_floor(coupling, beta) is (turning < first_term(low, c, beta, follow))
            check_limit(expected, coupling, beta)


@pytest.mark.parametrize("follow", ["before", "after"])
def test_the_floor_binds_below_a_multiple_of_it_that_depends_on_the_averaging_rate_alone(follow: str) -> None:
    for theta, c, beta, _ in CASES:
        binding = theta_floor(beta, c, follow) * (2 - c) ** 2 / (4 * (1 - c))  # type: ignore[arg-type]
        for each in (theta, 0.999 * binding, 1.001 * binding):
            if -0.999 < each < 0:
                assert is_below_floor(centred(each, c, follow), beta) is (each < binding)


def test_at_that_multiple_of_the_floor_both_limits_are_equal() -> None:
    c, beta = sp.symbols("c beta")
    g = 1 - beta * (1 - c)
    for share, below, excess in (
        (1, lambda t: 2 * (1 + t) - c * (1 + 2 * t), lambda t: (1 - c) * (-t * g - (1 - beta))),  # after
        (1 - c, lambda t: 2 * (1 + t) - c, lambda t: c - (1 + t) * g),  # before
    ):
        theta = -share * (1 - beta) / g * (2 - c) ** 2 / (4 * (1 - c))
        first = (1 + beta) / (1 - beta) * 2 * (2 - c) / below(theta)
        assert sp.cancel(sp.together(1 / first - excess(theta) / (c * g))) == 0


def test_right_below_the_floor_the_range_is_still_that_of_a_root_at_minus_1() -> None:
    coupling = centred(-0.9, 0.8)
    assert theta_floor(0.5, 0.8) == pytest.approx(-0.556, abs=5e-4)
    assert not is_below_floor(coupling, 0.5)
    assert stable_range(coupling, 0.5) == pytest.approx(8.57, abs=5e-3)
    assert stable_range(coupling, 0.5) == pytest.approx(first_term(-0.9, 0.8, 0.5, "after"))
    assert first_term(-0.9, 0.8, 0.5, "after") < turning_term(-0.9, 0.8, 0.5, "after") < math.inf


def test_the_numbers_that_are_quoted() -> None:
    assert theta_floor(0.9, 0.05) == pytest.approx(-0.1 / 0.145)
    assert type(theta_floor(np.float32(0.5), np.float32(0.5))) is float  # type: ignore[arg-type]
    assert theta_floor(1 - 2**-53, 2**-53) == pytest.approx(-0.5)
    assert theta_floor(0.9, 0.0895) == pytest.approx(-0.554, abs=5e-4)
    assert stable_range(centred(-0.9, 0.05), 0.9) == pytest.approx(0.25, abs=1e-3)
    assert stable_range(centred(0.0, 0.05), 0.9) == pytest.approx(38.0)
    assert stable_range(centred(-0.5, 0.0895), 0.9) == pytest.approx(72.6, abs=0.05)


@pytest.mark.parametrize("c", [0.01, 0.3, 1.0])
def test_without_momentum_the_whole_range_of_theta_is_above_the_floor(c: float) -> None:
    assert theta_floor(0.0, c) == -1.0
    assert theta_floor(0.0, c, "before") == pytest.approx(-(1 - c))
    assert stable_range(centred(-0.9, 0.3), 0.0) == pytest.approx(centred(-0.9, 0.3).max_stable_lr(1.0))
    assert not is_below_floor(centred(-0.99, min(c, 0.99)), 0.0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"beta": 1.0, "c": 0.1}, "^beta=1.0 .* needs beta ≥ 0 and beta < 1"),
        ({"beta": -0.1, "c": 0.1}, "^beta=-0.1 "),
        ({"beta": 0.9, "c": 0.0}, "^c=0.0 .* needs c > 0"),
        ({"beta": 0.9, "c": 1.1}, "^c=1.1 .* needs c > 0 and c ≤ 1"),
        ({"beta": 0.9, "c": 0.1, "follow": "never"}, "^follow='never' is unknown"),
    ],
    ids=str,
)
def test_refused(bad: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        theta_floor(**bad)  # type: ignore[arg-type]


def test_the_largest_stable_rate_with_momentum_is_the_range_over_the_curvature() -> None:
    for theta, c, beta, follow in CASES:
        coupling = centred(theta, c, follow)
        assert coupling.max_stable_lr(4.0, momentum=beta) == pytest.approx(stable_range(coupling, beta) / 4, rel=1e-14)
    spring = Spring(k=1.0, m1=10.0, m2=20.0)
    assert spring.max_stable_lr(2.0, momentum=0.9) == pytest.approx(stable_range(spring.coupling(), 0.9) / 2, rel=1e-14)


def test_what_diverges_by_itself_or_goes_uphill_has_no_range() -> None:
    for coupling in (Coupling(1.1, 1.0, 1.0, 0.0), Coupling(-0.6, 0.5, 1.0, 0.0), Coupling(0.1, 0.2, -1.0, 0.0)):
        assert coupling.max_stable_lr(1.0, momentum=0.9) == 0
        assert radius(1e-6, coupling, 0.9, False) > 1


def test_at_the_rate_0_the_pair_is_on_the_circle_and_only_some_come_back() -> None:
    """a = −b: nothing closes the distance without a gradient."""
    for coupling, beta in ((Coupling(-0.5, 0.5, 1.0, 0.0), 0.0), (Coupling(-0.05, 0.05, 1.0, 0.0), 0.9)):
        check_limit(coupling.max_stable_lr(1.0, momentum=beta), coupling, beta)
    lost = Coupling(-0.5, 0.5, 1.0, 0.0)
    assert lost.max_stable_lr(1.0, momentum=0.9) == 0
    assert radius(1e-3, lost, 0.9, False) > 1


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("damping", [(5.0, 10.0), (19.0, 30.0), (20.0, 10.0)])
def test_a_spring_with_velocities_has_the_range_of_its_eigenvalues(beta: float, damping: tuple[float, float]) -> None:
    spring = Spring(k=1.0, m1=10.0, m2=20.0, c1=damping[0], c2=damping[1])

    def largest(x: float) -> float:
        w1, w2, v1, v2, m = np.eye(5)
        mean = beta * m + (1 - beta) * w1
        c, u, rows = spring.coupling(), -x * mean, [mean]
        for own, other, v, pull, force, inertia in (
            (w1, w2, v1, c.a, c.p, spring.inertia1),
            (w2, w1, v2, c.b, c.q, spring.inertia2),
        ):
            rows.append(own + pull * (other - own) + force * u + (inertia.carry * v if inertia else 0))
            kept = inertia.stay * v + inertia.pull * (other - own) + inertia.push * u if inertia else 0 * v
            rows.append(kept)
        mean, w1, v1, w2, v2 = rows
        return float(max(abs(np.linalg.eigvals(np.array([w1, w2, v1, v2, mean])))))

    limit = spring.max_stable_lr(2.0, momentum=beta) * 2
    assert all(largest(share * limit) < 1 for share in (0.01, 0.1, 0.3, 0.6, 0.9, 0.999))
    assert largest(1.001 * limit) > 1


@pytest.mark.parametrize("momentum", [1.0, -0.1, math.nan])
def test_a_momentum_out_of_range_is_refused(momentum: float) -> None:
    for each in (centred(0.0, 0.1), Spring(k=1.0, m1=10.0, m2=20.0), Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0)):
        with pytest.raises(ValueError, match=rf"^momentum={momentum!r} .* needs momentum ≥ 0 and momentum < 1"):
            each.max_stable_lr(1.0, momentum=momentum)
