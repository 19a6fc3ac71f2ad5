"""The least value of a function of a few numbers, by the simplex of Nelder and Mead (1965).

A search along axes stops in a valley that is diagonal, as that of an averaging rate and a learning rate is; a simplex
turns with it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

Point = tuple[float, ...]


class Found(NamedTuple):
    """The least value that was found, and where."""

    value: float
    at: Point


def minimise(
    value: Callable[[Point], float], start: Point, *, size: float = 0.5, end: float = 0.02, most: int = 150
) -> Found:
    """Return the least value near a start. Infinite values are walls.

    The simplex begins with edges of `size` along the axes, and ends when it is smaller than `end` or after about
    `most` values.

    >>> found = minimise(lambda at: (at[0] - 1) ** 2 + 100 * (at[0] - at[1]) ** 2, (0.0, 3.0), end=1e-4)
    >>> [round(x, 2) for x in found.at]
    [1.0, 1.0]
    """
    corners = [start, *(_moved(start, axis, size) for axis in range(len(start)))]
    points = sorted((Found(value(at), at) for at in corners), key=_by_value)
    taken = len(points)
    while taken < most and _extent(points) > end:
        *others, worst = points
        best, second = others[0], others[-1]
        centre = [sum(xs) / len(xs) for xs in zip(*(each.at for each in others), strict=True)]
        new = _beyond(value, centre, worst, 1.0)
        taken += 1
        if new.value < best.value:
            new = min(new, _beyond(value, centre, worst, 2.0), key=_by_value)
            taken += 1
        elif new.value >= second.value:
            new = min(new, _beyond(value, centre, worst, 0.5 if new.value < worst.value else -0.5), key=_by_value)
            taken += 1
        if new.value < worst.value:
            points = [*others, new]
        else:  # draw all points towards the best one
            nearer = (tuple((x + y) / 2 for x, y in zip(each.at, best.at, strict=True)) for each in points[1:])
            points = [best, *(Found(value(at), at) for at in nearer)]
            taken += len(start)
        points.sort(key=_by_value)
    return points[0]


def _beyond(value: Callable[[Point], float], centre: Sequence[float], worst: Found, factor: float) -> Found:
    """Return the point that lies `factor` times as far beyond the centre as the worst one lies before it."""
    at = tuple(c + factor * (c - w) for c, w in zip(centre, worst.at, strict=True))
    return Found(value(at), at)


def _moved(start: Point, axis: int, size: float) -> Point:
    return (*start[:axis], start[axis] + size, *start[axis + 1 :])


def _extent(points: list[Found]) -> float:
    """Return the largest distance from the best point along an axis."""
    return max(abs(x - y) for each in points[1:] for x, y in zip(each.at, points[0].at, strict=True))


def _by_value(found: Found) -> float:
    return found.value
