"""Differences between runs that share their seeds, and the range of learning rates over which a method works.

Losses are compared by their ratios: everything is computed on logarithms and given back as ratios.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

CONFIDENCE = 0.95
MARGIN = 1.05  # two losses whose ratio lies between 1/MARGIN and MARGIN are as good as equal
WORKS = 1.5  # a learning rate works whose loss is at most so many times the best one


def t_share(t: float, df: int) -> float:
    """The share of Student's distribution with `df` degrees of freedom that lies below t.

    A finite sum for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4).

    >>> round(t_share(2.262157, 9), 6)
    0.975
    """
    angle = math.atan(t / math.sqrt(df))
    odd, square = df % 2, math.cos(angle) ** 2
    total, term = 0.0, math.cos(angle) ** odd
    for power in range(odd, df - 1, 2):
        total += term
        term *= square * (power + 1) / (power + 2)
    total *= math.sin(angle)
    share = (1 + (2 / math.pi * (angle + total) if odd else total)) / 2
    return min(1.0, max(0.0, share))  # rounding must not leave the range


@cache
def t_quantile(share: float, df: int) -> float:
    """The t below which that share of Student's distribution lies, by bisection.

    >>> round(t_quantile(0.975, 9), 6)
    2.262157
    """
    low, high = -1.0, 1.0
    while t_share(low, df) > share:
        low *= 2
    while t_share(high, df) < share:
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if t_share(middle, df) < share else (low, middle)
    return high


@dataclass(frozen=True)
class Ratio:
    """How many times larger the one is than the other, in the (geometric) mean over pairs, with its interval."""

    pairs: int
    mean: float
    low: float  # of the 95% interval
    high: float
    p_equal: float  # of the test that the ratio lies outside the margin (two one-sided t-tests)
    margin: float

    @property
    def equal(self) -> bool:
        """Whether the two are as good as equal: the ratio is shown to lie within the margin."""
        return self.p_equal < 1 - CONFIDENCE

    @property
    def reading(self) -> str:
        """In a word: "equal", "lower", "higher" or "open"; what is shown to lie within the margin is equal."""
        if self.equal:
            return "equal"
        return "lower" if self.high < 1 else "higher" if self.low > 1 else "open"


def ratio(ones: Sequence[float | None], others: Sequence[float | None], margin: float = MARGIN) -> Ratio | None:
    """Compare paired positive numbers; a pair with a missing one is left out, and two pairs are the least.

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
    return Ratio(
        n, math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), _outside(mean, error, n - 1, margin), margin
    )


def _outside(mean: float, error: float, df: int, margin: float) -> float:
    """The larger p of the two one-sided tests, that the mean is beyond the one and beyond the other bound."""
    nearest = math.log(margin) - abs(mean)  # the bound that the mean is closer to decides
    if error == 0:
        return 0.0 if nearest > 0 else 1.0
    return t_share(-nearest / error, df)


def fisher(fewer: tuple[int, int], more: tuple[int, int]) -> float:
    """Fisher's exact one-sided p: that chance alone gives the second so many, or more; each is (how many, of how many).

    >>> fisher((0, 5), (4, 5)) == 5 / 210  # of the ways to choose 4 of 10, those that choose from the second 5 alone
    True
    """
    (a, n), (b, m) = fewer, more
    ways = sum(math.comb(m, k) * math.comb(n, a + b - k) for k in range(b, min(m, a + b) + 1))
    return ways / math.comb(n + m, a + b)


@dataclass(frozen=True)
class Range:
    """The learning rates between which a method works."""

    low: float
    high: float
    open_low: bool  # works at the smallest rate that was tried: the range may reach further down
    open_high: bool

    @property
    def width(self) -> float:
        """How many times the smallest rate the largest one is."""
        return self.high / self.low


def working_range(lrs: Sequence[float], losses: Sequence[float | None], limit: float) -> Range | None:
    """The range around the best learning rate in which the loss stays within `limit`; None if it nowhere does.

    Between two rates the logarithm of the loss is taken to be linear in that of the rate; beside a run that was lost
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
    """Where the loss first exceeds the limit, and whether it never does; the first one is within."""
    for i in range(1, len(lrs)):
        if losses[i] > limit:
            if losses[i] == math.inf:
                return lrs[i - 1], False
            share = math.log(limit / losses[i - 1]) / math.log(losses[i] / losses[i - 1])
            return lrs[i - 1] * (lrs[i] / lrs[i - 1]) ** share, False
    return lrs[-1], True
