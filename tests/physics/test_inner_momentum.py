"""The stable range of a spring around an optimizer with momentum, against eigenvalues of the step itself."""

import math

import numpy as np
import pytest

from torchbelay import Coupling, methods
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
def test_above_the_floor_the_range_is_the_first_term_and_below_it_collapses(follow: str) -> None:
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


def test_the_numbers_that_are_quoted() -> None:
    assert theta_floor(0.9, 0.05) == pytest.approx(-0.1 / 0.145)
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
        ({"beta": 0.9, "c": 1.1}, "^c=1.1 "),
        ({"beta": 0.9, "c": 0.1, "follow": "never"}, "^follow='never' is unknown"),
    ],
    ids=str,
)
def test_refused(bad: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        theta_floor(**bad)  # type: ignore[arg-type]
