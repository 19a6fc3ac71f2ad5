"""What the runs say: each arm's best rate, the range of rates that it bears, and the hypotheses.

An arm's best rate is chosen on the seeds and the text for tuning; everything else is told of other seeds and of other
text. A lost run counts as worse than every other. Only seeds for judging that have all their runs count.
"""

import math
from collections.abc import Mapping, Sequence

from torchbelay.lab.hypotheses import Hypothesis, judge
from torchbelay.lab.part import Record
from torchbelay.lab.records import select
from torchbelay.lab.statistics import Ratio, one_sided, ratio, working_range

from .arms import BELAY, CONSTANT, HALF, QUARTER

NEAR = 1.02  # a rate is within an arm's range if its loss is at most this many times the arm's best
MARGIN = 1.01  # the largest ratio of losses that counts as "not worse"
CURVES = (CONSTANT, QUARTER, HALF)  # the arms whose ranges of rates are compared; judged at every rate from the first

Losses = dict[int, float | None]  # by seed; None: lost


class Runs:
    """The runs of the study, by arm, rate, seed and kind of weights."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.tuning, self.judging = (select(records, "run", split=split) for split in ("tune", "judge"))
        self.all = self.tuning + self.judging
        self.traced = self._whole_traces(select(records, "curvature"))
        self.arms = list(dict.fromkeys(r["arm"] for r in self.all))
        self.lrs = sorted({r["lr"] for r in self.all})

    def _whole_traces(self, found: list[Record]) -> list[Record]:
        """Return the runs in which the curvature was measured; none if they lack a setting that other runs have.

        Older records have one measurement per run, at its end. New ones take their place if none of them is missing, as
        `claims/study.md` says.
        """
        ends = {(r["arm"], r["lr"]) for r in self.tuning if "sharpness" in r}
        return found if ends <= {(r["arm"], r["lr"]) for r in found} else []

    def tuned(self, arm: str) -> bool:
        """Whether the arm has runs for tuning."""
        return any(r["arm"] == arm for r in self.tuning)

    def best_lr(self, arm: str, weights: str = "w2") -> float:
        """Return the rate with the lowest mean loss over the seeds for tuning, among the rates with the most seeds.

        A rate that loses a seed comes after all that lose none.
        """
        losses: dict[float, list[float | None]] = {}
        for r in self.tuning:
            if r["arm"] == arm:
                losses.setdefault(r["lr"], []).append(r["losses"].get(weights))
        most = max(map(len, losses.values()))

        def score(lr: float) -> tuple[int, float]:
            known = [loss for loss in losses[lr] if loss is not None]
            return most - len(known), math.fsum(known) / len(known) if known else math.inf

        return min((lr for lr in sorted(losses) if len(losses[lr]) == most), key=score)

    def losses(self, arm: str, lr: float, weights: str = "w2") -> Losses:
        """Return the loss of each seed for judging."""
        return {r["seed"]: r["losses"].get(weights) for r in self.judging if r["arm"] == arm and r["lr"] == lr}

    def is_judged_everywhere(self, arm: str) -> bool:
        """Whether every rate has runs of the arm for judging."""
        return {r["lr"] for r in self.judging if r["arm"] == arm} == set(self.lrs)

    def whole_seeds(self) -> list[int]:
        """Return the seeds for judging at which every curve has all its rates."""
        seeds = {r["seed"] for r in self.judging}
        known = {(r["arm"], r["lr"], r["seed"]) for r in self.judging}
        lrs = sorted({r["lr"] for r in self.tuning})
        return sorted(seed for seed in seeds if all((arm.name, lr, seed) in known for arm in CURVES for lr in lrs))

    def width(self, arm: str, seed: int) -> float:
        """Return how wide the range of rates is that are near the arm's best, as the logarithm of its ends' ratio.

        Between two rates the logarithm of the loss is taken to be linear in that of the rate, and none is taken to work
        beyond those tried. 0 if every run is lost.
        """
        losses = [self.losses(arm, lr)[seed] for lr in self.lrs]
        known = [loss for loss in losses if loss is not None]
        return range_width(self.lrs, losses, NEAR * min(known)) if known else 0.0


def range_width(lrs: Sequence[float], losses: Sequence[float | None], limit: float) -> float:
    """Return the logarithm of the ratio of the rates between which losses are at most `limit`, around the best one.

    >>> round(range_width([1.0, math.e, math.e**2], [2.0, 1.0, None], limit=2.0), 6)
    1.0
    """
    found = working_range(lrs, losses, limit)
    return math.log(found.width) if found else 0.0


def hypotheses(runs: Runs) -> list[Hypothesis]:
    """Return H2 for two θ, H3 and H5, not yet judged."""
    return [_wider(runs, QUARTER.name), _wider(runs, HALF.name), _not_worse(runs), _not_better(runs)]


def judged(runs: Runs) -> list[Hypothesis]:
    """Return the hypotheses with their answers; those of the other parts of the study count with p = 1."""
    return judge(hypotheses(runs))


def _wider(runs: Runs, arm: str) -> Hypothesis:
    seeds = runs.whole_seeds()
    widths = [(runs.width(arm, seed), runs.width(CONSTANT.name, seed)) for seed in seeds]
    gains = [one - other for one, other in widths]
    factors = [math.exp(math.fsum(each) / len(each)) for each in zip(*widths, strict=True)]
    shown = " and ".join(f"{factor:.3g} with {name}" for factor, name in zip(factors, (arm, "EMA"), strict=False))
    compared = width_ratio(runs, arm)
    quotient = f"; ratio {compared.mean:.3f} ({compared.low:.3f} to {compared.high:.3f})" if compared else ""
    return Hypothesis(
        f"H2 {arm}",
        f"the rates within {NEAR - 1:.0%} of the best span more with {arm} than with EMA",
        f"a factor of {shown}, on average{quotient}" if seeds else "no seeds",
        len(seeds),
        one_sided(gains),
        one_sided([-gain for gain in gains]),
    )


def width_ratio(runs: Runs, arm: str) -> Ratio | None:
    """Compare how many times its lowest rate the highest near the best is, for an arm and for EMA, seed by seed."""
    ones, others = ([math.exp(runs.width(each, seed)) for seed in runs.whole_seeds()] for each in (arm, CONSTANT.name))
    return ratio(ones, others)


Lane = tuple[str, float]  # an arm and a rate


def _not_worse(runs: Runs) -> Hypothesis:
    claim = f"at its best rate {HALF.name} has at most {MARGIN:g} times EMA's loss at EMA's best rate"
    if not runs.tuned(HALF.name) or not runs.tuned(CONSTANT.name):
        return Hypothesis("H3", claim, "no seeds")
    one, other = ((arm, runs.best_lr(arm)) for arm in (HALF.name, CONSTANT.name))
    return _within_margin("H3", claim, runs, one, other)


def _not_better(runs: Runs) -> Hypothesis:
    claim = f"at BELAY's best rate its matched EMA has at most {MARGIN:g} times BELAY's loss"
    if not runs.tuned(BELAY.name):
        return Hypothesis("H5", claim, "no seeds")
    lr = runs.best_lr(BELAY.name)
    return _within_margin("H5", claim, runs, (CONSTANT.name, lr), (BELAY.name, lr))


def _within_margin(name: str, claim: str, runs: Runs, one: Lane, other: Lane) -> Hypothesis:
    """Test that the first lane's loss is at most MARGIN times that of the other."""
    seeds, ones, others = _shared(runs, one, other)
    gaps = []
    for a, b in zip(ones, others, strict=True):
        first, second = (math.inf if loss is None else math.log(loss) for loss in (a, b))
        gaps.append(0.0 if first == second == math.inf else math.log(MARGIN) - (first - second))
    return Hypothesis(
        name,
        claim,
        format_ratio(ratio_of(runs, one, other)),
        len(seeds),
        one_sided(gaps),
        one_sided([-gap for gap in gaps]),
    )


def _shared(runs: Runs, one: Lane, other: Lane) -> tuple[list[int], list[float | None], list[float | None]]:
    """Return the whole seeds that both lanes have, and the losses of each lane at them."""
    ones, others = runs.losses(*one), runs.losses(*other)
    seeds = [seed for seed in runs.whole_seeds() if seed in ones and seed in others]
    return seeds, _at(ones, seeds), _at(others, seeds)


def _at(losses: Mapping[int, float | None], seeds: Sequence[int]) -> list[float | None]:
    return [losses[seed] for seed in seeds]


def ratio_of(runs: Runs, one: Lane, other: Lane) -> Ratio | None:
    """Compare two arms, each at its rate, over the seeds for judging that neither lost."""
    _, ones, others = _shared(runs, one, other)
    return ratio(ones, others, MARGIN)


def format_ratio(found: Ratio | None) -> str:
    """Return a ratio with its interval."""
    return "too few seeds" if found is None else f"{found.mean:.4f} ({found.low:.4f} to {found.high:.4f})"
