"""Compare runs that share their seeds, and find the range of learning rates over which a method works.

Losses are compared by their ratios: everything is computed on logarithms and returned as ratios. The distributions
are scipy's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from scipy import stats  # type: ignore[import-untyped]

CONFIDENCE = 0.95
MARGIN = 1.05  # two losses whose ratio lies between 1/MARGIN and MARGIN count as equal
WORKS = 1.5  # a learning rate works if its loss is at most this many times the best loss


@cache  # scipy is slow on single numbers, and the same few are wanted again and again
def t_quantile(share: float, df: int) -> float:
    """Return the t below which a share of Student's distribution with `df` degrees of freedom lies.

    >>> round(t_quantile(0.975, 9), 6)
    2.262157
    """
    return float(stats.t.ppf(share, df))


@dataclass(frozen=True)
class Ratio:
    """The ratio of two methods' numbers: its geometric mean over pairs of runs, and its interval."""

    pairs: int
    mean: float
    low: float  # lower end of the 95% interval
    high: float
    p_equal: float  # p of equivalence: two one-sided t-tests that the ratio lies outside the margin
    margin: float

    @property
    def equal(self) -> bool:
        """Whether the two count as equal: the ratio is shown to lie within the margin."""
        return self.p_equal < 1 - CONFIDENCE

    @property
    def reading(self) -> str:
        """The result in one word: "equal" if shown to lie within the margin, else "lower", "higher" or "open"."""
        if self.equal:
            return "equal"
        return "lower" if self.high < 1 else "higher" if self.low > 1 else "open"


def ratio(ones: Sequence[float | None], others: Sequence[float | None], margin: float = MARGIN) -> Ratio | None:
    """Compare paired positive numbers. Pairs with a missing number are left out; None if fewer than two are left.

    >>> found = ratio([1.0, 2.2, 3.0], [1.0, 2.0, 3.1])
    >>> round(found.mean, 3), round(found.low, 2), round(found.high, 2), found.reading
    (1.021, 0.87, 1.2, 'open')
    """
    logs = [math.log(a / b) for a, b in zip(ones, others, strict=True) if a is not None and b is not None]
    n = len(logs)
    if n < 2:
        return None
    mean = math.fsum(logs) / n
    error = math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / (n - 1) / n)
    reach = t_quantile((1 + CONFIDENCE) / 2, n - 1) * error
    p_equal = _equivalence_p(mean, error, n - 1, margin)
    return Ratio(n, math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), p_equal, margin)


def _equivalence_p(mean: float, error: float, df: int, margin: float) -> float:
    """Return the larger p of two one-sided t-tests, each that the mean lies beyond one end of the margin."""
    nearest = math.log(margin) - abs(mean)  # the end that the mean is closer to has the larger p
    if error == 0:
        return 0.0 if nearest > 0 else 1.0
    return float(stats.t.cdf(-nearest / error, df))


def fisher(fewer: tuple[int, int], more: tuple[int, int]) -> float:
    """Return Fisher's exact one-sided p: how likely chance alone gives the second group its count or a larger one.

    Each group is (count, size).

    >>> round(fisher((0, 5), (4, 5)) * 210, 9)  # of the 210 ways to choose 4 of 10, 5 choose from the second group only
    5.0
    """
    (a, n), (b, m) = fewer, more
    return float(stats.hypergeom.sf(b - 1, n + m, m, a + b))


def fit_power(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the power of x that y goes as, by least squares on the logarithms; 0 if some y is 0.

    >>> round(fit_power([1.0, 10.0, 100.0], [3.0, 0.03, 0.0003]), 9)
    -2.0
    """
    if min(y) <= 0:
        return 0.0
    return float(stats.linregress([math.log(value) for value in x], [math.log(value) for value in y]).slope)


@dataclass(frozen=True)
class Range:
    """The learning rates between which a method works."""

    low: float
    high: float
    open_low: bool  # whether the smallest rate that was tried works: the range may reach further down
    open_high: bool

    @property
    def width(self) -> float:
        """The largest rate over the smallest."""
        return self.high / self.low


def working_range(lrs: Sequence[float], losses: Sequence[float | None], limit: float) -> Range | None:
    """Return the range around the best learning rate in which the loss stays within `limit`; None if it never does.

    Between two rates, the logarithm of the loss is taken to be linear in the logarithm of the rate. Beside a lost run
    the range ends at the rate that works.

    >>> working_range([0.01, 0.1, 1.0], [4.0, 1.0, None], limit=2.0)
    Range(low=0.0316..., high=0.1, open_low=False, open_high=False)
    """
    known = [math.inf if loss is None else loss for loss in losses]
    best = min(range(len(known)), key=known.__getitem__)
    if known[best] > limit:
        return None
    low, open_low = _edge(lrs[best::-1], known[best::-1], limit)
    high, open_high = _edge(lrs[best:], known[best:], limit)
    return Range(low, high, open_low, open_high)


def _edge(lrs: Sequence[float], losses: Sequence[float], limit: float) -> tuple[float, bool]:
    """Return the rate at which the loss first exceeds the limit, and whether it never does; the first loss does not."""
    for i in range(1, len(lrs)):
        if losses[i] > limit:
            if losses[i] == math.inf:
                return lrs[i - 1], False
            share = math.log(limit / losses[i - 1]) / math.log(losses[i] / losses[i - 1])
            return lrs[i - 1] * (lrs[i] / lrs[i - 1]) ** share, False
    return lrs[-1], True
