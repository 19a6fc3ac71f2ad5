"""The noise levels of NCSNv2 and the Langevin step size, by the rules of Song and Ermon (2020), sections 3 and 4.

This module has numbers only. For MNIST (784 pixels, the largest distance between two images is 16.9) the rules give 95
levels from 17 to 0.01 and a step size of 1.1e-5 for five steps per level.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

OVERLAP = 0.5  # of the shells of neighbouring levels (technique 2)
_PHI = NormalDist().cdf


@dataclass(frozen=True)
class Levels:
    """A geometric sequence of noise levels and the Langevin steps between them."""

    first: float  # σ_1, the largest
    last: float  # σ_L
    count: int  # L
    steps: int  # T, Langevin steps per level
    epsilon: float  # ε, the step size at the last level

    @property
    def ratio(self) -> float:
        """γ = σ_i/σ_(i+1)."""
        return float((self.first / self.last) ** (1 / (self.count - 1)))

    @property
    def sigmas(self) -> list[float]:
        """All levels, the largest first."""
        return [self.first * self.ratio**-i for i in range(self.count)]


def levels(pixels: int, largest_distance: float, *, last: float = 0.01, steps: int = 5) -> Levels:
    """Return the levels: σ_1 is the largest distance of images (technique 1), neighbours overlap (2), ε fits them (4).

    >>> mnist = levels(784, 17.0)
    >>> mnist.count, round(mnist.ratio, 4), f"{mnist.epsilon:.1e}"
    (95, 1.0823, '1.1e-05')
    """
    ratio = _solve(lambda g: overlap(g, pixels) - OVERLAP, 1.0, 2.0)
    count = 1 + round(math.log(largest_distance / last) / math.log(ratio))
    exact = (largest_distance / last) ** (1 / (count - 1))
    return Levels(largest_distance, last, count, steps, step_size(exact, last, steps))


def overlap(ratio: float, pixels: int) -> float:
    """Return the share of a level's shell that lies in that of a level `ratio` times as large (proposition 2)."""
    shift = math.sqrt(2 * pixels) * (ratio - 1)
    return _PHI(shift + 3 * ratio) - _PHI(shift - 3 * ratio)


def step_size(ratio: float, last: float, steps: int) -> float:
    """Return the ε at which T steps reduce the noise of a level exactly to that of the next one (proposition 3).

    Of the two solutions this is the smaller one, below the step size at which a chain forgets its previous sample. If T
    steps are too few to reach the next level, it is the ε that comes closest.
    """

    def excess(share: float) -> float:  # share = ε/σ²; returns (variance after T steps)/(wanted variance) − 1
        keep = (1 - share) ** (2 * steps)
        settled = 2 * share / (1 - (1 - share) ** 2)  # the variance in the limit of many steps
        return keep * (ratio**2 - settled) + settled - 1

    grid = [10 ** (-6 + i / 1000) for i in range(6000)]
    for low, high in pairwise(grid):
        if excess(low) > 0 >= excess(high):
            return last**2 * _solve(excess, high, low)
    return last**2 * min(grid, key=lambda share: abs(excess(share)))


def _solve(function: Callable[[float], float], low: float, high: float) -> float:
    """Return a zero of a function by bisection; its signs at `low` and `high` must differ."""
    sign = function(low) > 0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (function(middle) > 0) == sign else (low, middle)
    return (low + high) / 2
