"""Modes: roots of small polynomials against numpy, and crossings of steps with known limits."""

import math
from collections.abc import Sequence
from itertools import permutations

import numpy as np
import pytest

from torchbelay.physics.modes import Modes, horner, roots


def distance(found: Sequence[complex], expected: Sequence[complex]) -> float:
    """Return the distance of two sets of roots under the best pairing."""
    assert len(found) == len(expected)
    pairings = (zip(found, order, strict=True) for order in permutations(expected))
    return min(max((abs(x - y) for x, y in pairs), default=0.0) for pairs in pairings)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_roots_of_random_polynomials(degree: int) -> None:
    for coefficients in np.random.default_rng(degree).standard_normal((500, degree + 1)):
        expected = np.roots(coefficients)
        # Two of 500 random roots come close to each other, or far out: 1e-8 of the largest.
        assert distance(roots(coefficients.tolist()), expected) < 1e-8 * max(1, np.abs(expected).max())


@pytest.mark.parametrize("spread", [1.0, 1e-1, 1e-2])
def test_roots_that_crowd_together(spread: float) -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        x, y, size = rng.standard_normal(3) * (spread, spread, 1)
        true = np.array([1 + x + 1j * y, 1 + x - 1j * y, 1 + spread * size, 1 + spread])
        coefficients = np.real(np.poly(true))
        others = (np.abs(true[:, None] - true) + np.eye(4)).prod(-1)
        # One rounding of each coefficient moves a root by this much: no method can be more accurate.
        allowed = 2.2e-16 * np.polyval(np.abs(coefficients), np.abs(true)) / others
        assert distance(roots(coefficients.tolist()), true) < allowed.max()


@pytest.mark.parametrize("multiplicity", [2, 3, 4])
@pytest.mark.parametrize("at", [1.0, -0.3, 1e-5])
def test_multiple_roots_are_found_to_the_root_of_the_precision(multiplicity: int, at: float) -> None:
    found = roots(np.poly([at] * multiplicity).tolist())
    assert len(found) == multiplicity
    assert max(abs(z - at) for z in found) < 10 * abs(at) * 2.2e-16 ** (1 / multiplicity)


@pytest.mark.parametrize("sizes", [(1.0, 1e-6), (1e-3, 1e-9, 1e-15), (2.0, 1e-4, 1e-8, 1e-12)])
def test_roots_of_very_different_size_keep_their_digits(sizes: tuple[float, ...]) -> None:
    found = sorted(roots(np.poly([-s for s in sizes]).tolist()), key=abs, reverse=True)
    assert [-z.real for z in found] == pytest.approx(sizes, rel=1e-13)
    assert all(z.imag == 0 for z in found)


@pytest.mark.parametrize(
    ("coefficients", "expected"),
    [
        ([], []),
        ([3.0], []),
        ([0.0, 0.0], []),
        ([2.0, -1.0], [0.5]),
        ([0.0, 2.0, -1.0], [0.5]),  # a root at infinity does not count
        ([1.0, 0.0, 0.0], [0.0, 0.0]),
        ([1.0, -1.0, 0.0], [0.0, 1.0]),
        ([1.0, 0.0, 1.0], [1j, -1j]),
    ],
)
def test_roots_of_degenerate_polynomials(coefficients: list[float], expected: list[complex]) -> None:
    assert distance(roots(coefficients), expected) < 1e-15


def test_real_roots_are_exactly_real() -> None:
    for true in np.random.default_rng(6).uniform(-1, 1, (200, 3)):
        if min(abs(a - b) for a, b in permutations(true, 2)) > 0.05:
            assert [z.imag for z in roots(np.poly(true).tolist())] == [0.0] * 3


def test_horner_is_polyval() -> None:
    rng = np.random.default_rng(7)
    for degree in range(5):
        coefficients, z = rng.standard_normal(degree + 1), complex(*rng.standard_normal(2))
        assert horner(coefficients.tolist(), z) == pytest.approx(np.polyval(coefficients, z), rel=1e-13)


# Steps whose limit is known: p0 + ηh·p1 in ζ = λ − 1 ---------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.999])
def test_heavy_ball_leaves_the_circle_through_minus_one(momentum: float) -> None:
    # λ² − (1 + μ − x)λ + μ = ζ² + (1 − μ + x)ζ + x
    modes = Modes(p0=(1.0, 1 - momentum, 0.0), p1=(1.0, 1.0))
    assert modes.first_crossing() == pytest.approx(2 * (1 + momentum), rel=1e-13)
    assert modes.drift() == pytest.approx(1 / (1 - momentum), rel=1e-15)
    assert distance(modes.free(), [momentum - 1]) < 1e-15


@pytest.mark.parametrize("friction", [1e-9, 1e-3, 0.5])
def test_a_pair_leaves_the_circle_where_its_product_is_one(friction: float) -> None:
    # λ² − (2 − f)λ + 1 − f + x = ζ² + fζ + x: a complex pair of modulus² 1 − f + x
    modes = Modes(p0=(1.0, friction, 0.0), p1=(1.0,))
    assert modes.first_crossing() == pytest.approx(friction, rel=1e-13)
    assert modes.comes_to_rest(friction * (1 - 1e-9))
    assert not modes.comes_to_rest(friction * (1 + 1e-9))


def test_a_step_without_push_never_crosses() -> None:
    assert Modes(p0=(1.0, 0.5), p1=(0.0,), anchored=True).first_crossing() == math.inf


@pytest.mark.parametrize(
    ("p0", "rests"),
    [
        ((1.0, 0.5), True),  # λ = 0.5
        ((1.0, 2.0), False),  # λ = −1, on the circle
        ((1.0, 1.999999), True),
        ((1.0, 0.0), False),  # λ = 1
        ((1.0, -1e-9), False),
        ((1.0, 1e-30), True),
        ((1.0, 0.0, 1.0), False),  # λ = 1 ± i
        ((1.0, 1.0, 1.0), False),  # a pair on the circle
        ((1.0, 1.0, 0.999), True),
    ],
)
def test_comes_to_rest_only_inside_the_circle(p0: tuple[float, ...], rests: bool) -> None:
    assert Modes(p0=p0, p1=(1.0,), anchored=True).comes_to_rest() == rests
    assert Modes(p0=(*p0, 0.0), p1=(1.0,)).comes_to_rest() == rests  # translation aside


def test_comes_to_rest_agrees_with_the_roots() -> None:
    rng = np.random.default_rng(8)
    answers = set()
    for coefficients in rng.uniform(-1, 1, (1000, 4)):
        p0 = np.real(np.poly(np.roots([1, *coefficients]) - 1))  # random roots λ, as ζ
        largest = np.abs(1 + np.roots(p0)).max()
        rests = Modes(p0=tuple(p0.tolist()), p1=(1.0,), anchored=True).comes_to_rest()
        assert rests == (largest < 1)
        answers.add(rests)
    assert answers == {True, False}


def test_an_anchored_average_lets_nothing_drift() -> None:
    assert Modes(p0=(1.0, 0.5), p1=(1.0,), anchored=True).drift() == 0
    assert Modes(p0=(1.0, 0.0, 0.0), p1=(1.0, 1.0)).drift() == math.inf  # no brake at all
