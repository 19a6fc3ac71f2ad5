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


def ratio(
    ones: Sequence[float | None], others: Sequence[float | None], margin: float = MARGIN, noise: float = 0.0
) -> Ratio | None:
    """Compare paired positive numbers. Pairs with a missing number are left out; None if fewer than two are left.

    `noise` is the relative standard deviation of a number that all pairs share, as that of FIDs from the same random
    numbers: the spread over the pairs does not show it, so it is added to the standard error of both numbers.

    >>> found = ratio([1.0, 2.2, 3.0], [1.0, 2.0, 3.1])
    >>> round(found.mean, 3), round(found.low, 2), round(found.high, 2), found.reading
    (1.021, 0.87, 1.2, 'open')
    """
    logs = [math.log(a / b) for a, b in zip(ones, others, strict=True) if a is not None and b is not None]
    n = len(logs)
    if n < 2:
        return None
    mean = math.fsum(logs) / n
    error = math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / (n - 1) / n + 2 * noise**2)
    reach = t_quantile((1 + CONFIDENCE) / 2, n - 1) * error
    p_equal = _equivalence_p(mean, error, n - 1, margin)
    return Ratio(n, math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), p_equal, margin)


def _equivalence_p(mean: float, error: float, df: int, margin: float) -> float:
    """Return the larger p of two one-sided t-tests, each that the mean lies beyond one end of the margin."""
    nearest = math.log(margin) - abs(mean)  # the end that the mean is closer to has the larger p
    if error == 0:
        return 0.0 if nearest > 0 else 1.0
    return float(stats.t.cdf(-nearest / error, df))


def mcnemar(only_one: int, only_other: int) -> float:
    """Return McNemar's exact one-sided p for pairs: how likely a fair coin gives `only_other` as often, or more.

    The counts are of the pairs in which only the first, and only the other, lost its run. Pairs that agree say nothing
    about the difference. Fisher's test would be for runs that share no seed.

    >>> mcnemar(0, 4), mcnemar(0, 5), mcnemar(1, 1)
    (0.0625, 0.03125, 0.75)
    """
    return float(stats.binom.sf(only_other - 1, only_one + only_other, 0.5))


def one_sided(gains: Sequence[float]) -> float:
    """Return p of gains with a mean of at most 0: by Student's t; by signs if one of them is infinite.

    An infinite gain is that of a lost run, which is worse than any other by an unknown amount: only its rank is known.

    >>> round(one_sided([1.0, 2.0, 3.0]), 4), one_sided([math.inf, 1.0, 1.0]), one_sided([1.0, -math.inf])
    (0.0371, 0.125, 0.75)
    """
    n = len(gains)
    if n < 2:
        return 1.0
    if not all(math.isfinite(gain) for gain in gains):
        return float(stats.binomtest(sum(gain > 0 for gain in gains), n, alternative="greater").pvalue)
    mean = math.fsum(gains) / n
    error = math.sqrt(math.fsum((gain - mean) ** 2 for gain in gains) / (n - 1) / n)
    if error == 0:
        return 0.0 if mean > 0 else 1.0
    return float(stats.t.sf(mean / error, n - 1))


def holm(ps: Sequence[float], level: float, tests: int | None = None) -> list[bool]:
    """Return which of several tests are passed: the i-th smallest p of n is at most level/(n − i + 1), and all before.

    `tests` is n if some tests have no p yet; their p counts as 1.

    >>> holm([0.02, 0.04], 0.05), holm([0.03, 0.04], 0.05), holm([0.02, 0.04], 0.05, tests=3)
    ([True, True], [False, False], [False, False])
    """
    n, passed = len(ps) if tests is None else tests, [False] * len(ps)
    for i, k in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        if ps[k] > level / (n - i):
            break
        passed[k] = True
    return passed


def share_interval(count: int, size: int) -> tuple[float, float]:
    """Return the 95% interval of a share, by Wilson's formula.

    >>> low, high = share_interval(271, 300)
    >>> round(low, 3), round(high, 3)
    (0.865, 0.932)
    """
    z = float(stats.norm.ppf((1 + CONFIDENCE) / 2))
    share, weight = count / size, z * z / size
    middle = (share + weight / 2) / (1 + weight)
    reach = z / (1 + weight) * math.sqrt(share * (1 - share) / size + weight / (4 * size))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def difference_interval(one: tuple[int, int], other: tuple[int, int]) -> tuple[float, float]:
    """Return the 95% interval of the difference of two shares, one − other, by Newcombe's formula.

    Each share is (count, size). If the two are paired and rise together, the interval is too wide, never too narrow.

    >>> low, high = difference_interval((300, 300), (180, 300))
    >>> round(low, 3), round(high, 3)
    (0.345, 0.456)
    """
    (p, (low, high)), (q, (floor, top)) = ((count / size, share_interval(count, size)) for count, size in (one, other))
    difference = p - q
    return (
        difference - math.hypot(p - low, top - q),
        difference + math.hypot(high - p, q - floor),
    )


def exceeds(interval: tuple[float, float], bar: float) -> bool | None:
    """Whether a value is shown to be at least a bar (True) or below it (False); None if the bar is in the interval.

    >>> exceeds((0.97, 0.99), 0.9), exceeds((0.6, 0.7), 0.9), exceeds((0.865, 0.932), 0.9)
    (True, False, None)
    """
    low, high = interval
    return True if low >= bar else False if high < bar else None


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
