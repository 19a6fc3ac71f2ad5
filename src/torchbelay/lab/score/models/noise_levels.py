"""Which noise to train on and how to walk down through it: the rules of Song and Ermon (2020), sections 3 and 4.

Numbers only. For MNIST (784 pixels, the largest distance between two images 16.9) they give 95 levels from 17 to 0.01
and a step size of 1.1e-5 for five steps a level.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

OVERLAP = 0.5  # of the shells on which neighbouring levels live (technique 2)
_PHI = NormalDist().cdf


@dataclass(frozen=True)
class Levels:
    """A geometric sequence of noise levels and the Langevin steps between them."""

    first: float  # σ_1, the largest
    last: float  # σ_L
    count: int  # L
    steps: int  # T, Langevin steps a level
    epsilon: float  # ε, the step size at the last level

    @property
    def ratio(self) -> float:
        """γ = σ_i/σ_(i+1)."""
        return float((self.first / self.last) ** (1 / (self.count - 1)))

    @property
    def sigmas(self) -> list[float]:
        """All of them, the largest first."""
        return [self.first * self.ratio**-i for i in range(self.count)]


def levels(pixels: int, largest_distance: float, *, last: float = 0.01, steps: int = 5) -> Levels:
    """The rules: σ_1 as large as images are apart (technique 1), neighbours overlap (2), the step size fits them (4).

    >>> mnist = levels(784, 17.0)
    >>> mnist.count, round(mnist.ratio, 4), f"{mnist.epsilon:.1e}"
    (95, 1.0823, '1.1e-05')
    """
    ratio = _solve(lambda g: overlap(g, pixels) - OVERLAP, 1.0, 2.0)
    count = 1 + round(math.log(largest_distance / last) / math.log(ratio))
    exact = (largest_distance / last) ** (1 / (count - 1))
    return Levels(largest_distance, last, count, steps, step_size(exact, last, steps))


def overlap(ratio: float, pixels: int) -> float:
    """How much of the shell of a level lies in the next one's, if that is `ratio` times as large (proposition 2)."""
    shift = math.sqrt(2 * pixels) * (ratio - 1)
    return _PHI(shift + 3 * ratio) - _PHI(shift - 3 * ratio)


def step_size(ratio: float, last: float, steps: int) -> float:
    """The ε at which T steps take the noise of a level to that of the next one, and no further (proposition 3).

    Of the two solutions, the one below the step at which a walk forgets where it was. Where T steps are too few to
    reach the next level, the ε that comes closest.
    """

    def excess(share: float) -> float:  # share = ε/σ²; the variance after T steps over the one that is wanted, less 1
        keep = (1 - share) ** (2 * steps)
        settled = 2 * share / (1 - (1 - share) ** 2)  # the variance that the walk tends to
        return keep * (ratio**2 - settled) + settled - 1

    grid = [10 ** (-6 + i / 1000) for i in range(6000)]
    for low, high in pairwise(grid):
        if excess(low) > 0 >= excess(high):
            return last**2 * _solve(excess, high, low)
    return last**2 * min(grid, key=lambda share: abs(excess(share)))


def _solve(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function is 0, by bisection; it is of one sign at `low` and of the other at `high`."""
    sign = function(low) > 0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (function(middle) > 0) == sign else (low, middle)
    return (low + high) / 2
