"""What the records of the score models say: losses over seeds, paired comparisons, best rates, ranges that work.

Everything here is computed from run records alone. A rate is chosen by the loss on training images of the other seeds,
and judged by the test loss of the seed itself, so that no choice is judged on what made it.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from torchbelay.lab.arms import BELAY, EMA, MATCHED
from torchbelay.lab.part import Record
from torchbelay.lab.statistics import CONFIDENCE, MARGIN, WORKS, Range, Ratio, fisher, ratio, t_quantile, working_range

ARMS = (EMA, MATCHED, BELAY)  # no averaging has no run of its own: it is w1 of EMA's
HEAVIER = ("BELAY m1 2e4", "BELAY m1 2e5")  # the appendix's masses; BELAY itself has 2e3
PAPER_LR = 0.05  # on MNIST

# A network that predicts nothing has a loss of about 1, with NCSNv2 as with EDM: the mean square, over pixels, of what
# it should have said. One with more than half of that counts as lost. EDM networks that collapse stay at 0.86 or so,
# not at 1, and NCSNv2 ones that half recover at 0.58 to 0.8, whereas those that work end below about 0.22: any bar
# between the two says the same.
FAILED = 0.5

CHANCE = 1 - CONFIDENCE  # the largest p of what counts as shown; three seeds lost against none have just this
FID_MARGIN = 1.1  # two FIDs within this factor are as good as equal: seeds alone differ by a few per cent
MANY = 100  # seeds: nobody will ever train more

Losses = dict[int, float | None]  # of each seed; None: lost


def of(records: Iterable[Record], kind: str, **fields: object) -> list[Record]:
    """The records of a kind whose fields have these values.

    >>> of([{"kind": "run", "seed": 0}, {"kind": "run", "seed": 1}, {"kind": "fid", "seed": 1}], "run", seed=1)
    [{'kind': 'run', 'seed': 1}]
    """
    return [r for r in records if r["kind"] == kind and all(r.get(key) == value for key, value in fields.items())]


def mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of those that are known.

    >>> mean([1.0, None, 4.0])
    2.0
    """
    logs = [math.log(value) for value in values if value is not None]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def is_lost(loss: float | None) -> bool:
    """Whether a network has more than half of the loss of one that predicts nothing, or none that is finite."""
    return loss is None or loss > FAILED


def middle(losses: Iterable[float | None]) -> float | None:
    """The median, in which a loss that is not finite is beyond any other; None if it is itself not finite.

    >>> middle([0.06, None, 0.07]), middle([0.06, None]), middle([])
    (0.07, None, None)
    """
    known = [math.inf if loss is None else loss for loss in losses]
    found = median(known) if known else math.inf
    return found if math.isfinite(found) else None


def worst(losses: Iterable[float | None]) -> float | None:
    """The largest; None if one of them is lost.

    >>> worst([0.06, 0.08]), worst([0.06, None])
    (0.08, None)
    """
    found = max((math.inf if loss is None else loss for loss in losses), default=math.inf)
    return None if is_lost(found) else found


def near_one(ratio: float) -> str:
    """Three digits, and near 1 three behind the point: on which side it lies is what matters there.

    >>> near_one(1.0036), near_one(0.794), near_one(12.3)
    ('1.004', '0.794', '12.3')
    """
    return f"{ratio:.3f}" if 0.9 < ratio < 1.1 else f"{ratio:.3g}"


# Comparisons ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """What the one has, over what the other has, seed by seed.

    A pair in which a run was lost has no ratio: what was lost is counted, and the counts are compared by themselves.
    """

    seeds: int  # that both have
    point: float | None  # the ratio, in the geometric mean over the seeds that neither lost
    ratio: Ratio | None  # the same with its interval, if there are two such seeds
    only_one_lost: int
    only_other_lost: int
    both_lost: int

    @property
    def unpaired(self) -> int:
        """How many seeds have no ratio, as one of the two was lost, or both."""
        return self.both_lost + self.only_one_lost + self.only_other_lost

    @property
    def judged(self) -> bool:
        """Whether there are seeds enough to say anything: two."""
        return self.seeds >= 2

    @property
    def p_loses_fewer(self) -> float:
        """Fisher's exact one-sided p that the one loses fewer seeds than the other."""
        one, other = self.only_one_lost + self.both_lost, self.only_other_lost + self.both_lost
        return fisher((one, self.seeds), (other, self.seeds))

    @property
    def p_loses_more(self) -> float:
        """The same that it loses more."""
        one, other = self.only_one_lost + self.both_lost, self.only_other_lost + self.both_lost
        return fisher((other, self.seeds), (one, self.seeds))

    @property
    def below(self) -> bool:
        """Whether the whole interval of the ratio lies below 1."""
        return self.ratio is not None and self.ratio.high < 1

    @property
    def above(self) -> bool:
        """Whether it lies above 1."""
        return self.ratio is not None and self.ratio.low > 1

    @property
    def lower(self) -> bool:
        """Whether the one is shown to be the better one: by its ratio, or by the seeds that only the other loses."""
        return (self.below or self.p_loses_fewer <= CHANCE) and not self.above and not self.only_one_lost

    @property
    def higher(self) -> bool:
        """Whether the one is shown to be the worse one, by the same."""
        return (self.above or self.p_loses_more <= CHANCE) and not self.below and not self.only_other_lost

    @property
    def equal(self) -> bool:
        """Whether the two are shown to be as good as equal."""
        return not self.only_one_lost and not self.only_other_lost and self.ratio is not None and self.ratio.equal

    @property
    def reading(self) -> str:
        """In a word; what is shown to lie within the margin is equal."""
        if not self.judged:
            return "open"
        if self.both_lost == self.seeds:
            return "lost"
        return "equal" if self.equal else "lower" if self.lower else "higher" if self.higher else "open"

    @property
    def size(self) -> str:
        """The ratio and its interval; empty if every pair has a run that was lost."""
        if self.ratio is not None:
            return f"{near_one(self.ratio.mean)} ({near_one(self.ratio.low)} to {near_one(self.ratio.high)})"
        return "" if self.point is None else f"{near_one(self.point)} (one seed)"

    def what_was_lost(self, one: str, other: str) -> str:
        """Which of the two lost how many seeds, and how likely chance alone does that; empty if neither did."""
        lost = ((self.both_lost, "both"), (self.only_one_lost, one), (self.only_other_lost, other))
        words = [f"{name} lost in {count} of {self.seeds} seeds" for count, name in lost if count]
        if abs(self.only_one_lost - self.only_other_lost) > 1:  # one alone is no evidence
            words.append(f"p = {min(self.p_loses_fewer, self.p_loses_more):.2g}")
        return ", ".join(words)

    def said(self, one: str, other: str) -> str:
        """The ratio, its interval, and which of the two lost how many seeds: those are not in the ratio."""
        return ", ".join(filter(None, (self.size, self.what_was_lost(one, other)))) or "not run"

    @property
    def seeds_to_be_equal(self) -> int | None:
        """How many seeds would show that the two are equal, if all went on as it did; None if none would."""
        if self.ratio is None or self.only_one_lost or self.only_other_lost:
            return None
        n, nearest = self.ratio.pairs, math.log(self.ratio.margin) - abs(math.log(self.ratio.mean))
        spread = math.log(self.ratio.high / self.ratio.mean) / t_quantile((1 + CONFIDENCE) / 2, n - 1) * math.sqrt(n)
        enough = (n for n in range(2, MANY + 1) if t_quantile(CONFIDENCE, n - 1) * spread / math.sqrt(n) < nearest)
        return next(enough, None)


def compare(ones: Mapping[int, float | None], others: Mapping[int, float | None], margin: float = MARGIN) -> Comparison:
    """Compare two arms over the seeds that both have.

    >>> compare({0: 0.9, 1: 0.8, 2: 0.85}, {0: 1.0, 1: 0.9, 2: 0.95}).said("BELAY", "EMA")
    '0.895 (0.881 to 0.908)'
    >>> compare({0: 0.9, 1: 0.8, 2: 0.8}, {0: None, 1: None, 2: None}).said("BELAY", "EMA")
    'EMA lost in 3 of 3 seeds, p = 0.05'
    """
    seeds = sorted({*ones} & {*others})
    pairs = [(ones[seed], others[seed]) for seed in seeds]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return Comparison(
        len(seeds),
        mean(a / b for a, b in known),
        ratio([a for a, _ in known], [b for _, b in known], margin),
        sum(a is None and b is not None for a, b in pairs),
        sum(a is not None and b is None for a, b in pairs),
        sum(a is None and b is None for a, b in pairs),
    )


# A study --------------------------------------------------------------------------------------------------------------


class Study:
    """The runs of a study, all or those of some arms, by arm, nominal learning rate and seed; any may be missing."""

    def __init__(self, records: Iterable[Record], name: str, arms: Collection[str] | None = None) -> None:
        self.name = name
        self.runs = [run for run in of(records, "run", study=name) if arms is None or run["arm"] in arms]
        self._at: dict[tuple[str, float], dict[int, Record]] = {}
        for run in self.runs:
            self._at.setdefault((run["arm"], run["lr"]), {})[run["seed"]] = run
        there = dict.fromkeys(run["arm"] for run in self.runs)
        self.arms = [arm for arm in ARMS if arm in there] + [arm for arm in there if arm not in ARMS]
        self.lrs = sorted({float(run["lr"]) for run in self.runs})
        self.seeds = sorted({int(run["seed"]) for run in self.runs})

    def __bool__(self) -> bool:
        return bool(self.runs)

    def at(self, arm: str, lr: float) -> Mapping[int, Record]:
        """The runs of all seeds; none, if there are none."""
        return self._at.get((arm, lr), {})

    def rates(self, arm: str) -> list[float]:
        """The nominal learning rates at which an arm was run."""
        return [lr for lr in self.lrs if self.at(arm, lr)]

    def effective(self, arm: str, lr: float) -> float:
        """The learning rate at which the centre of mass moves."""
        return float(next(iter(self.at(arm, lr).values()))["effective_lr"])

    def losses(self, arm: str, lr: float, weights: str = "w2", images: str = "test") -> Losses:
        """The last loss of every seed, as it was measured; None where it is not finite."""
        return {seed: run["final"].get(weights, {}).get(images) for seed, run in sorted(self.at(arm, lr).items())}

    def kept(self, arm: str, lr: float, weights: str = "w2") -> Losses:
        """The test loss of every seed; None where the run was lost."""
        found = self.losses(arm, lr, weights)
        return {seed: None if is_lost(loss) else loss for seed, loss in found.items()}

    def compare(self, one: str, other: str, lr: float, weights: str = "w2") -> Comparison:
        """Two arms at the same nominal rate."""
        return compare(self.kept(one, lr, weights), self.kept(other, lr, weights))

    def mean_loss(self, arm: str, lr: float, without: int | None = None) -> float:
        """On training images, over all seeds but one (unless it is the only one); infinite if a run was lost."""
        found = self.losses(arm, lr, images="train")
        chosen = [loss for seed, loss in found.items() if seed != without] or list(found.values())
        return math.inf if any(map(is_lost, chosen)) else mean(chosen) or math.inf

    def best_rate(self, arm: str, without: int | None = None) -> float | None:
        """The rate with the lowest loss on training images, over all seeds but one."""
        rates = [lr for lr in self.rates(arm) if without is None or without in self.at(arm, lr)]
        return min(rates, key=lambda lr: self.mean_loss(arm, lr, without), default=None)

    def at_best(self, arm: str) -> Losses:
        """The test loss of every seed at the rate that the other seeds choose for it."""
        found: Losses = {}
        for seed in self.seeds:
            lr = self.best_rate(arm, without=seed)
            if lr is not None:
                found[seed] = self.kept(arm, lr)[seed]
        return found

    def by_seed(self, arm: str, weights: str = "w2") -> dict[int, dict[float, float | None]]:
        """The test loss at each learning rate, for each seed."""
        found: dict[int, dict[float, float | None]] = {}
        for lr in self.rates(arm):
            for seed, loss in self.losses(arm, lr, weights).items():
                found.setdefault(seed, {})[lr] = loss
        return found

    def along(self, arm: str, lr: float, weights: str = "w2") -> tuple[list[int], list[list[float | None]]]:
        """At which steps the test loss was measured on the way, and which it was, of each seed."""
        runs = [run for _, run in sorted(self.at(arm, lr).items())]
        points = range(min((len(run["curve"]) for run in runs), default=0))
        losses = [[run["curve"][i].get(weights, {}).get("test") for run in runs] for i in points]
        return [int(runs[0]["curve"][i]["step"]) for i in points], losses

    def working(self, arm: str, limit: float) -> Range | None:
        """The nominal rates at which every seed's loss stays within a limit; a lost run is beyond any."""
        rates = self.rates(arm)
        ends = [worst(self.losses(arm, lr).values()) for lr in rates]
        return working_range(rates, ends, limit) if rates else None

    def lowest(self, arms: Sequence[str]) -> float | None:
        """The best median loss that any of some arms reaches at any rate."""
        middles = [middle(self.kept(arm, lr).values()) for arm in arms for lr in self.rates(arm)]
        return min((each for each in middles if each is not None), default=None)

    def widths(self, arms: Sequence[str]) -> dict[str, tuple[Range | None, Range | None]]:
        """Where each arm is within a factor of the best of all these arms, and of its own best."""
        found = {}
        for arm in arms:
            limits = (self.lowest(arms), self.lowest([arm]))
            ranges = [None if limit is None else self.working(arm, WORKS * limit) for limit in limits]
            found[arm] = (ranges[0], ranges[1])
        return found

    def lost(self, arm: str, lr: float) -> int:
        """How many seeds' averages are lost."""
        return sum(map(is_lost, self.losses(arm, lr).values()))

    def gap(self) -> tuple[float | None, float | None]:
        """The largest test loss that is not lost and the least that is, of averages and weights: the bar is between."""
        every = [
            loss
            for run in self.runs
            for weights in ("w1", "w2")
            if (loss := run["final"].get(weights, {}).get("test")) is not None
        ]
        kept, gone = [x for x in every if not is_lost(x)], [x for x in every if is_lost(x)]
        return max(kept, default=None), min(gone, default=None)


def fids(records: Iterable[Record], study: Study, arm: str, lr: float, weights: str = "w2") -> Losses:
    """The FID of every seed's network, over all sets of samples that were drawn with it; None where the run was lost.

    A network that collapsed may still make images: what they are like is no more a result than its loss.
    """
    found: dict[int, list[float | None]] = {}
    for record in of(records, "fid", study=study.name, arm=arm, lr=lr, weights=weights):
        found.setdefault(record["seed"], []).append(record["fid"])
    lost = {seed for seed, loss in study.kept(arm, lr, weights).items() if loss is None}
    return {seed: None if seed in lost else mean(values) for seed, values in sorted(found.items())}


def rate_of_fids(records: Sequence[Record], study: Study, arm: str) -> float | None:
    """The best rate of an arm among those at which it has FIDs.

    A rate at which it loses every seed is not its best one, unless it does so everywhere: FIDs known only there say
    nothing of the best.
    """
    works = [lr for lr in study.rates(arm) if study.lost(arm, lr) < len(study.at(arm, lr))] or study.rates(arm)
    drawn = [lr for lr in works if fids(records, study, arm, lr)]
    return min(drawn, key=lambda lr: study.mean_loss(arm, lr), default=None)


def fid_at_best(records: Sequence[Record], study: Study, arm: str) -> Losses:
    """The FIDs of an arm at that rate."""
    lr = rate_of_fids(records, study, arm)
    return {} if lr is None else fids(records, study, arm, lr)


def confounded(records: Sequence[Record], study: Study, arms: Sequence[str]) -> str:
    """At which rates the FIDs of some arms are, if these differ, as a clause; empty if they are the same.

    An arm that lost every seed of which images were made has no FID that could be compared.
    """
    rates = {
        arm: lr
        for arm in arms
        if (lr := rate_of_fids(records, study, arm)) is not None and mean(fids(records, study, arm, lr).values())
    }
    if len({*rates.values()}) < 2:
        return ""
    where = ", ".join(f"{arm} at {lr:g}" for arm, lr in rates.items())
    return f"{where}, so that rates are compared as much as averages"
