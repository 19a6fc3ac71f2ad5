"""Paired comparisons of two arms, seed by seed: ratios with their interval, and how many seeds each loses."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torchbelay.lab.statistics import CONFIDENCE, MARGIN, Ratio, mcnemar, ratio, t_quantile

CHANCE = 1 - CONFIDENCE  # the largest p that counts as evidence; it takes five seeds lost against none
MANY = 100  # seeds: more will never be trained
MOST_DECIMALS = 4  # of a ratio, to show on which side of 1 it lies


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the values that are not None; None if all are.

    >>> geometric_mean([1.0, None, 4.0])
    2.0
    """
    logs = [math.log(value) for value in values if value is not None]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def format_ratio(ratio: float) -> str:
    """Return a ratio with three digits, near 1 with three decimals, and with four if three would make it 1.000.

    So the text shows on which side of 1 the ratio lies.

    >>> format_ratio(1.0036), format_ratio(0.99987), format_ratio(0.794), format_ratio(1.1), format_ratio(12.3)
    ('1.004', '0.9999', '0.794', '1.10', '12.3')
    """
    return f"{ratio:.{_count_decimals(ratio)}f}"


def format_interval(mean: float, low: float, high: float) -> str:
    """Return a ratio and its interval with the same number of decimals, which shows on which side of 1 each lies.

    >>> format_interval(1.101, 1.089, 1.112), format_interval(1.17, 1.0011, 1.38), format_interval(12.34, 0.512, 98.7)
    ('1.10 (1.09 to 1.11)', '1.170 (1.001 to 1.380)', '12.3 (0.5 to 98.7)')
    """
    values = (mean, low, high)
    decimals = _count_decimals(mean)
    while decimals < MOST_DECIMALS and any(round(value, decimals) == 1 for value in values):
        decimals += 1
    mean_text, low_text, high_text = (f"{value:.{decimals}f}" for value in values)
    return f"{mean_text} ({low_text} to {high_text})"


def _count_decimals(ratio: float) -> int:
    """Return how many decimals a ratio is given with."""
    if 0.9 < ratio < 1.1:
        return MOST_DECIMALS if f"{ratio:.3f}" == "1.000" else 3
    if not 0 < ratio < math.inf:
        return 3
    return max(0, 2 - math.floor(math.log10(ratio)))


@dataclass(frozen=True)
class Comparison:
    """The ratio of one arm's values to another's, seed by seed.

    A pair with a lost run has no ratio: lost runs are counted, and the counts are compared by themselves.
    """

    seeds: int  # that both arms have
    point: float | None  # the geometric mean of the ratios over the seeds that neither arm lost
    ratio: Ratio | None  # the same with its interval, if there are at least two such seeds
    only_one_lost: int
    only_other_lost: int
    both_lost: int

    @property
    def unpaired(self) -> int:
        """The number of seeds without a ratio, because one run or both were lost."""
        return self.both_lost + self.only_one_lost + self.only_other_lost

    @property
    def judged(self) -> bool:
        """Whether there are enough seeds for a comparison: two."""
        return self.seeds >= 2

    @property
    def p_loses_fewer(self) -> float:
        """McNemar's exact one-sided p for "the first arm loses fewer seeds"; both arms share their seeds."""
        return mcnemar(self.only_one_lost, self.only_other_lost)

    @property
    def p_loses_more(self) -> float:
        """McNemar's exact one-sided p for "the first arm loses more seeds"."""
        return mcnemar(self.only_other_lost, self.only_one_lost)

    @property
    def below(self) -> bool:
        """Whether the whole interval of the ratio lies below 1."""
        return self.ratio is not None and self.ratio.high < 1

    @property
    def above(self) -> bool:
        """Whether the whole interval of the ratio lies above 1."""
        return self.ratio is not None and self.ratio.low > 1

    @property
    def lower(self) -> bool:
        """Whether the first arm is shown to be better: by the ratio, or by the seeds that only the other arm loses."""
        return (self.below or self.p_loses_fewer <= CHANCE) and not self.above and not self.only_one_lost

    @property
    def higher(self) -> bool:
        """Whether the first arm is shown to be worse: by the ratio, or by the seeds that only it loses."""
        return (self.above or self.p_loses_more <= CHANCE) and not self.below and not self.only_other_lost

    @property
    def equal(self) -> bool:
        """Whether the two arms are shown to be equal within the margin."""
        return not self.only_one_lost and not self.only_other_lost and self.ratio is not None and self.ratio.equal

    @property
    def reading(self) -> str:
        """The outcome in one word: open, lost, equal, lower or higher. Equality within the margin comes first."""
        if not self.judged:
            return "open"
        if self.both_lost == self.seeds:
            return "lost"
        return "equal" if self.equal else "lower" if self.lower else "higher" if self.higher else "open"

    @property
    def better(self) -> bool | None:
        """Whether the first arm is shown to be better; False if it is shown to be worse or equal, else None."""
        return {"lower": True, "higher": False, "equal": False}.get(self.reading)

    @property
    def alike(self) -> bool | None:
        """Whether the two arms are shown to be equal; False if a difference is shown, else None."""
        return {"equal": True, "lower": False, "higher": False}.get(self.reading)

    @property
    def size(self) -> str:
        """The ratio and its interval as text; empty if every pair has a lost run."""
        if self.ratio is not None:
            return format_interval(self.ratio.mean, self.ratio.low, self.ratio.high)
        return "" if self.point is None else f"{format_ratio(self.point)} (one seed)"

    def describe_lost(self, one: str, other: str) -> str:
        """Return how many seeds each arm lost, with the p of the difference; empty if none was lost."""
        lost = ((self.both_lost, "both"), (self.only_one_lost, one), (self.only_other_lost, other))
        words = [f"{name} lost in {count} of {self.seeds} seeds" for count, name in lost if count]
        if abs(self.only_one_lost - self.only_other_lost) > 1:  # a difference of one seed is no evidence
            words.append(f"p = {min(self.p_loses_fewer, self.p_loses_more):.2g}")
        return ", ".join(words)

    def describe(self, one: str, other: str) -> str:
        """Return the ratio, its interval, and the lost seeds, which are not part of the ratio."""
        return ", ".join(filter(None, (self.size, self.describe_lost(one, other)))) or "not run"

    @property
    def seeds_to_be_equal(self) -> int | None:
        """The number of seeds that would show equality at the same mean and spread; None if no number would."""
        if self.ratio is None or self.only_one_lost or self.only_other_lost:
            return None
        n, nearest = self.ratio.pairs, math.log(self.ratio.margin) - abs(math.log(self.ratio.mean))
        spread = math.log(self.ratio.high / self.ratio.mean) / t_quantile((1 + CONFIDENCE) / 2, n - 1) * math.sqrt(n)
        enough = (n for n in range(2, MANY + 1) if t_quantile(CONFIDENCE, n - 1) * spread / math.sqrt(n) < nearest)
        return next(enough, None)


def compare(
    ones: Mapping[int, float | None],
    others: Mapping[int, float | None],
    margin: float = MARGIN,
    noise: float = 0.0,
) -> Comparison:
    """Compare two arms over the seeds that both have; `noise` is that of `statistics.ratio`.

    >>> compare({0: 0.9, 1: 0.8, 2: 0.85}, {0: 1.0, 1: 0.9, 2: 0.95}).describe("BELAY", "EMA")
    '0.895 (0.881 to 0.908)'
    >>> compare({0: 0.9, 1: 0.8, 2: 0.8}, {0: None, 1: None, 2: None}).describe("BELAY", "EMA")
    'EMA lost in 3 of 3 seeds, p = 0.12'
    """
    seeds = sorted({*ones} & {*others})
    pairs = [(ones[seed], others[seed]) for seed in seeds]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return Comparison(
        len(seeds),
        geometric_mean(a / b for a, b in known),
        ratio([a for a, _ in known], [b for _, b in known], margin, noise),
        sum(a is None and b is not None for a, b in pairs),
        sum(a is not None and b is None for a, b in pairs),
        sum(a is None and b is None for a, b in pairs),
    )
