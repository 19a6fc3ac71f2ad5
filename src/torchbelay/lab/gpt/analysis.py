"""What the runs say: each arm's best rate, the range of rates that it bears, and the hypotheses.

An arm's best rate is chosen on the seeds and the text for tuning; everything else is told of other seeds and of other
text. A lost run counts as worse than every other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats  # type: ignore[import-untyped]

from torchbelay.lab.part import Record
from torchbelay.lab.records import select
from torchbelay.lab.statistics import Ratio, ratio, working_range

from .arms import BELAY, CONSTANT, HALF, QUARTER

NEAR = 1.02  # a rate is within an arm's range if its loss is at most this many times the arm's best
MARGIN = 1.01  # the largest ratio of losses that counts as "not worse"
LEVEL = 0.05


class Runs:
    """The runs of the study, by arm, rate, seed and kind of weights."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.tuning, self.judging = (select(records, "run", split=split) for split in ("tune", "judge"))
        self.all = self.tuning + self.judging
        self.arms = list(dict.fromkeys(r["arm"] for r in self.all))
        self.lrs = sorted({r["lr"] for r in self.all})

    def best_lr(self, arm: str, weights: str = "w2") -> float:
        """Return the rate with the lowest mean loss over the seeds for tuning; a lost seed makes a rate the worst."""

        def score(lr: float) -> tuple[int, float]:
            losses = [r["losses"].get(weights) for r in self.tuning if r["arm"] == arm and r["lr"] == lr]
            known = [loss for loss in losses if loss is not None]
            return len(losses) - len(known), math.fsum(known) / len(known) if known else math.inf

        best: float = min((lr for lr in self.lrs if any(r["lr"] == lr for r in self._tuned(arm))), key=score)
        return best

    def _tuned(self, arm: str) -> list[Record]:
        return [r for r in self.tuning if r["arm"] == arm]

    def losses(self, arm: str, lr: float, weights: str = "w2") -> dict[int, float | None]:
        """Return the loss of each seed for judging."""
        return {r["seed"]: r["losses"].get(weights) for r in self.judging if r["arm"] == arm and r["lr"] == lr}

    def width(self, arm: str, seed: int) -> float | None:
        """Return how wide the range of rates is that are near the arm's best, as the logarithm of its ends' ratio.

        Between two rates the logarithm of the loss is taken to be linear in that of the rate, and none is taken to work
        beyond those tried. None if every run is lost.
        """
        curve = {lr: self.losses(arm, lr).get(seed) for lr in self.lrs}
        known = {lr: loss for lr, loss in curve.items() if loss is not None}
        if not known:
            return None
        return range_width(list(curve), list(curve.values()), NEAR * min(known.values()))


def range_width(lrs: Sequence[float], losses: Sequence[float | None], limit: float) -> float:
    """Return the logarithm of the ratio of the rates between which losses are at most `limit`, around the best one.

    >>> round(range_width([1.0, math.e, math.e**2], [2.0, 1.0, None], limit=2.0), 6)
    1.0
    """
    found = working_range(lrs, losses, limit)
    return math.log(found.width) if found else 0.0


@dataclass(frozen=True)
class Hypothesis:
    """A hypothesis with its p value: how likely the data are if it is wrong."""

    id: str
    claim: str
    p: float
    numbers: str
    holds: bool = False  # by Holm's rule over all hypotheses


def hypotheses(runs: Runs) -> list[Hypothesis]:
    """Return H2 for two θ, H3 and H5, judged together."""
    found = [_wider(runs, QUARTER.name), _wider(runs, HALF.name), _not_worse(runs), _not_better(runs)]
    return holm(found)


def holm(found: Sequence[Hypothesis], level: float = LEVEL) -> list[Hypothesis]:
    """Return the hypotheses, each with whether it holds: the i-th smallest p of n is at most level/(n − i + 1).

    >>> [h.holds for h in holm([Hypothesis("A", "", 0.02, ""), Hypothesis("B", "", 0.04, "")])]
    [True, True]
    >>> [h.holds for h in holm([Hypothesis("A", "", 0.03, ""), Hypothesis("B", "", 0.04, "")])]
    [False, False]
    """
    holds: set[str] = set()
    for i, each in enumerate(sorted(found, key=lambda h: h.p)):
        if each.p > level / (len(found) - i):
            break
        holds.add(each.id)
    return [Hypothesis(h.id, h.claim, h.p, h.numbers, h.id in holds) for h in found]


def _wider(runs: Runs, arm: str) -> Hypothesis:
    seeds = sorted({r["seed"] for r in runs.judging if r["arm"] == arm})
    widths = [(runs.width(arm, seed) or 0.0, runs.width(CONSTANT.name, seed) or 0.0) for seed in seeds]
    gains = [one - other for one, other in widths]
    factors = [math.exp(math.fsum(each) / len(each)) if each else math.nan for each in zip(*widths, strict=True)]
    shown = " and ".join(f"a factor of {factor:.3g}" for factor in factors) or "no seeds"
    return Hypothesis(
        f"H2 {arm}",
        f"the rates within {NEAR - 1:.0%} of the best span more with {arm} than with EMA",
        one_sided(gains),
        f"{shown}, on average",
    )


def _not_worse(runs: Runs) -> Hypothesis:
    one, other = ((arm, runs.best_lr(arm)) for arm in (HALF.name, CONSTANT.name))
    found = ratio_of(runs, one, other)
    return Hypothesis(
        "H3",
        f"at its best rate {HALF.name} has at most {MARGIN:g} times EMA's loss at EMA's best rate",
        _p_below(runs, one, other, math.log(MARGIN)),
        format_ratio(found),
    )


def _not_better(runs: Runs) -> Hypothesis:
    lr = runs.best_lr(BELAY.name)
    one, other = (CONSTANT.name, lr), (BELAY.name, lr)
    return Hypothesis(
        "H5",
        f"at BELAY's best rate its matched EMA has at most {MARGIN:g} times BELAY's loss",
        _p_below(runs, one, other, math.log(MARGIN)),
        format_ratio(ratio_of(runs, one, other)),
    )


Lane = tuple[str, float]  # an arm and a rate


def ratio_of(runs: Runs, one: Lane, other: Lane) -> Ratio | None:
    """Compare two arms, each at its rate, over the seeds for judging that neither lost."""
    ones, others = runs.losses(*one), runs.losses(*other)
    shared = sorted(ones.keys() & others.keys())
    return ratio([ones[seed] for seed in shared], [others[seed] for seed in shared], MARGIN)


def format_ratio(found: Ratio | None) -> str:
    """Return a ratio with its interval."""
    return "too few seeds" if found is None else f"{found.mean:.4g} ({found.low:.4g} to {found.high:.4g})"


def _p_below(runs: Runs, one: Lane, other: Lane, log_limit: float) -> float:
    """Return p of the logarithm of the losses' ratio being at least `log_limit`; with a lost run, by signs alone."""
    ones, others = runs.losses(*one), runs.losses(*other)
    gaps = []
    for seed in sorted(ones.keys() & others.keys()):
        a, b = (math.inf if loss is None else math.log(loss) for loss in (ones[seed], others[seed]))
        gaps.append(0.0 if a == b == math.inf else log_limit - (a - b))
    return one_sided(gaps)


def one_sided(gains: Sequence[float]) -> float:
    """Return p of gains with a mean of at most 0: by Student's t; by signs if one of them is infinite.

    >>> round(one_sided([1.0, 2.0, 3.0]), 4), one_sided([math.inf, 1.0, 1.0]), one_sided([1.0, -math.inf])
    (0.0371, 0.125, 0.75)
    """
    if len(gains) < 2:
        return 1.0
    if not all(math.isfinite(gain) for gain in gains):
        return float(stats.binomtest(sum(gain > 0 for gain in gains), len(gains), alternative="greater").pvalue)
    n = len(gains)
    mean = math.fsum(gains) / n
    error = math.sqrt(math.fsum((gain - mean) ** 2 for gain in gains) / (n - 1) / n)
    if error == 0:
        return 0.0 if mean > 0 else 1.0
    return float(stats.t.sf(mean / error, n - 1))
