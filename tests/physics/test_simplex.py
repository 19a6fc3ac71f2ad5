"""The simplex finds minima of functions that are known, along a diagonal valley and beside a wall too."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbelay.physics.simplex import Point, minimise


@given(
    start=st.tuples(st.floats(-3, 3), st.floats(-3, 3)),
    angle=st.floats(0, math.pi),
    ratio=st.floats(1, 1e3),
)
def test_it_finds_the_minimum_of_a_valley_in_any_direction(start: Point, angle: float, ratio: float) -> None:
    def valley(at: Point) -> float:
        x, y = at[0] - 1, at[1] + 2
        along, across = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
        return along**2 + ratio * across**2

    found = minimise(valley, minimise(valley, start, end=1e-5, most=500).at, end=1e-5, most=500)
    assert found.value == valley(found.at)
    assert found.value < 1e-6


@pytest.mark.parametrize("size", [1, 2, 3])
def test_infinite_values_are_walls(size: int) -> None:
    """The minimum lies on the edge of what is finite."""
    found = minimise(lambda at: sum(at) if min(at) >= 0 else math.inf, (1.0,) * size, end=1e-3, most=400)
    assert min(found.at) >= 0
    assert found.value < 0.05


def test_where_everything_is_infinite_it_ends_at_the_start() -> None:
    assert minimise(lambda at: math.inf, (1.0, 2.0)).value == math.inf


def test_it_takes_about_as_many_values_as_it_may() -> None:
    seen: list[Point] = []

    def value(at: Point) -> float:
        seen.append(at)
        return math.sin(50 * at[0]) + at[1] ** 2 + at[2] ** 2

    minimise(value, (0.0, 3.0, 3.0), end=1e-12, most=60)
    assert 60 <= len(seen) <= 65
    assert all(len(at) == 3 for at in seen)
