"""From the ring's runs to what may be said of them: choices, paired differences, and ranges that work.

Everything here is computed from run records alone. Tuning is cross-fit: what half of the seeds choose by their
validation loss, the other half reports by its test loss, so that no choice is judged on the runs that made it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self

from torchbelay.lab.arms import BELAY, EMA, MATCHED, PLAIN, REPULSIVE
from torchbelay.lab.part import Record
from torchbelay.lab.statistics import WORKS, Range, ratio, working_range

MIXTURE = "the mixture itself"
TUNED = ", tuned"  # a contestant that may choose among all settings of its arm

Key = tuple[str, str]  # an arm and its setting

# What is compared at the rate (and setting) that each chose; as many trials for the one as for the other, but for the
# repulsive spring, which has fewer.
CONTESTS = (
    (EMA, PLAIN),
    (BELAY, PLAIN),
    (BELAY, EMA),
    (BELAY, MATCHED),
    (EMA + TUNED, PLAIN),
    (MATCHED + TUNED, EMA + TUNED),
    (BELAY + TUNED, EMA + TUNED),
    (BELAY + TUNED, MATCHED + TUNED),
    (REPULSIVE, EMA + TUNED),
)


def short(number: float) -> float | None:
    """As a record has it: five digits are enough, and what is not a number is missing."""
    return float(f"{number:.5g}") if math.isfinite(number) else None


@dataclass(frozen=True)
class Choice:
    """What half of the seeds chose for the other half."""

    contestant: str
    arm: str
    setting: str
    lr: float
    effective_lr: float
    trials: int
    validation: float | None  # geometric mean over the seeds that chose
    test: list[float | None]  # of the seeds that report
    chosen_on: list[int]
    reported_on: list[int]

    def record(self) -> Record:
        """As plain JSON."""
        return {"kind": "choice", **vars(self)}

    @classmethod
    def of(cls, record: Record) -> Self:
        """Back from a record."""
        return cls(**{key: value for key, value in record.items() if key != "kind"})


class Table:
    """Runs by arm and setting, learning rate, and seed."""

    def __init__(self, runs: Iterable[Record]) -> None:
        self._runs: dict[Key, dict[float, dict[int, Record]]] = {}
        for run in runs:
            by_lr = self._runs.setdefault((run["arm"], run["setting"]), {})
            by_lr.setdefault(run["lr"], {})[run["seed"]] = run
        some = next(iter(self._runs.values()))
        self.lrs = sorted(some)
        self.seeds = sorted(some[self.lrs[0]])

    @property
    def keys(self) -> list[Key]:
        """All arms and settings, in the order of the runs."""
        return list(self._runs)

    def settings(self, arm: str) -> list[str]:
        """Of an arm, in the order of the runs: the first one is the one without tuning."""
        return [setting for name, setting in self._runs if name == arm]

    def at(self, key: Key, lr: float) -> Mapping[int, Record]:
        """The runs of all seeds."""
        return self._runs[key][lr]

    def tests(self, key: Key, lr: float) -> list[float | None]:
        """The test loss of every seed."""
        return [self.at(key, lr)[seed]["test"] for seed in self.seeds]

    def scale(self, key: Key) -> float:
        """Effective learning rate per nominal one."""
        run = self.at(key, self.lrs[0])[self.seeds[0]]
        return float(run["effective_lr"] / run["lr"])


def records(runs: Sequence[Record]) -> list[Record]:
    """Everything that follows from the runs."""
    table = Table(runs)
    choices = [choice for name in _contestants(table) for choice in choose(table, name)]
    return [choice.record() for choice in choices] + [
        *contests(choices),
        *at_each_rate(table),
        *ranges(table),
        *range_pairs(table),
    ]


def halves(seeds: Sequence[int]) -> tuple[list[int], list[int]]:
    """The seeds that choose for one another."""
    middle = len(seeds) // 2
    return list(seeds[:middle]), list(seeds[middle:])


def _contestants(table: Table) -> list[str]:
    named = dict.fromkeys(name for contest in CONTESTS for name in contest)
    return [name for name in named if table.settings(name.removesuffix(TUNED))]


def choose(table: Table, contestant: str) -> Iterator[Choice]:
    """Cross-fit: the best setting and learning rate on each half of the seeds, for the other half to report."""
    arm = contestant.removesuffix(TUNED)
    settings = table.settings(arm) if contestant.endswith(TUNED) else table.settings(arm)[:1]
    first, second = halves(table.seeds)
    trials = [((arm, setting), lr) for setting in settings for lr in table.lrs]
    for chosen_on, reported_on in ((second, first), (first, second)):

        def loss(trial: tuple[Key, float], on: Sequence[int] = chosen_on) -> float:
            runs = table.at(*trial)
            return _mean_log(runs[seed]["validation"] for seed in on)

        key, lr = best = min(trials, key=loss)
        runs = table.at(key, lr)
        yield Choice(
            contestant,
            *key,
            lr,
            runs[table.seeds[0]]["effective_lr"],
            len(trials),
            short(math.exp(loss(best))),
            [runs[seed]["test"] for seed in reported_on],
            chosen_on,
            reported_on,
        )


def _mean_log(losses: Iterable[float | None]) -> float:
    """The logarithm of the geometric mean; infinite as soon as one run was lost."""
    known = [math.inf if loss is None else math.log(loss) for loss in losses]
    return sum(known) / len(known)


def contests(choices: Sequence[Choice]) -> Iterator[Record]:
    """The test losses of two contestants, each at what it chose, seed by seed."""
    results: dict[str, dict[int, float | None]] = {}
    trials: dict[str, int] = {}
    for choice in choices:
        results.setdefault(choice.contestant, {}).update(zip(choice.reported_on, choice.test, strict=True))
        trials[choice.contestant] = choice.trials
    for one, other in CONTESTS:
        if one in results and other in results:
            seeds = sorted(results[one])
            pair = [[results[name][seed] for seed in seeds] for name in (one, other)]
            yield _pair("chosen", one, other, *pair) | {"trials": [trials[one], trials[other]]}


def _rivals(table: Table) -> list[tuple[Key, Key]]:
    """What is compared at equal learning rates: each with the control that differs from it in one thing."""
    emas, springs = table.settings(EMA), table.settings(BELAY)
    found = [((BELAY, spring), (MATCHED, spring)) for spring in springs]
    found += [((BELAY, spring), (EMA, ema)) for spring, ema in zip(springs, emas, strict=True)]
    found += [((EMA, ema), (PLAIN, table.settings(PLAIN)[0])) for ema in emas]
    found += [((REPULSIVE, setting), (EMA, emas[1])) for setting in table.settings(REPULSIVE)]  # of the same memory
    return found


def at_each_rate(table: Table) -> Iterator[Record]:
    """The test losses of two arms at every nominal learning rate, seed by seed."""
    for one, other in _rivals(table):
        for lr in table.lrs:
            pair = _pair("rate", one[0], other[0], table.tests(one, lr), table.tests(other, lr))
            yield pair | {"one_setting": one[1], "other_setting": other[1], "lr": lr}


def ranges(table: Table) -> Iterator[Record]:
    """Where each curve (the median over seeds) is within a factor of its own best, and of the best of all."""
    medians = {key: [_median(table.tests(key, lr)) for lr in table.lrs] for key in table.keys}
    bests = {key: _best(values) for key, values in medians.items()}
    best_of_all = _best(bests.values())
    for key, values in medians.items():
        scale, best = table.scale(key), bests[key]
        for against, limit in (("own", best), ("best", best_of_all)):
            found = None if limit is None else working_range(table.lrs, values, WORKS * limit)
            yield {
                "kind": "width",
                "arm": key[0],
                "setting": key[1],
                "against": against,
                "factor": WORKS,
                "best": best,
                "best_lr": None if best is None else table.lrs[values.index(best)],
                "effective_scale": short(scale),
                **_ends(found, scale),
            }


def _ends(found: Range | None, scale: float) -> Record:
    if found is None:
        names = ("low", "high", "low_effective", "high_effective", "width", "open_low", "open_high")
        return dict.fromkeys(names)
    return {
        "low": short(found.low),
        "high": short(found.high),
        "low_effective": short(found.low * scale),
        "high_effective": short(found.high * scale),
        "width": short(found.width),
        "open_low": found.open_low,
        "open_high": found.open_high,
    }


def range_pairs(table: Table) -> Iterator[Record]:
    """Each seed's own range of rates that work, compared: how wide it is, and how far up it reaches.

    Against its own best loss ("width", "high", "high_effective"), which favours a method whose best is poor; and
    against the better one of the two ("width_shared"), where what never works is missing.
    """
    for one, other in _rivals(table):
        keys, scales = (one, other), (table.scale(one), table.scale(other))
        own = [_ranges_of_seeds(table, key, [key]) for key in keys]
        shared = [_ranges_of_seeds(table, key, keys) for key in keys]
        compared: dict[str, list[list[float | None]]] = {
            "width": [[None if r is None else r.width for r in each] for each in own],
            "width_shared": [[None if r is None else r.width for r in each] for each in shared],
            "high": [[None if r is None else r.high for r in each] for each in own],
            "high_effective": [
                [None if r is None else r.high * scale for r in each] for each, scale in zip(own, scales, strict=True)
            ],
        }
        for scope, pair in compared.items():
            yield _pair(scope, one[0], other[0], *pair) | {"one_setting": one[1], "other_setting": other[1]}


def _ranges_of_seeds(table: Table, key: Key, against: Sequence[Key]) -> list[Range | None]:
    """Of every seed, the rates at which the loss is within a factor of the best that any of `against` reaches."""
    found = []
    for i, losses in enumerate(_by_seed(table, key)):
        best = _best(loss for each in against for loss in _by_seed(table, each)[i])
        found.append(None if best is None else working_range(table.lrs, losses, WORKS * best))
    return found


def _by_seed(table: Table, key: Key) -> list[tuple[float | None, ...]]:
    return list(zip(*(table.tests(key, lr) for lr in table.lrs), strict=True))


def _best(losses: Iterable[float | None]) -> float | None:
    return min((loss for loss in losses if loss is not None), default=None)


def _median(losses: Sequence[float | None]) -> float | None:
    return short(median(math.inf if loss is None else loss for loss in losses))


def _pair(scope: str, one: str, other: str, ones: Sequence[float | None], others: Sequence[float | None]) -> Record:
    """How many times the other's the one's numbers are; None throughout where fewer than two pairs are left."""
    found = ratio(ones, others)
    seen = [None if a is None or b is None else short(a / b) for a, b in zip(ones, others, strict=True)]
    about: Record = {"kind": "pair", "scope": scope, "one": one, "other": other, "ratios": seen}
    if found is None:
        left = len(seen) - seen.count(None)
        return about | dict.fromkeys(("ratio", "low", "high", "p_equal", "margin")) | {"pairs": left, "reading": "lost"}
    return about | {
        "pairs": found.pairs,
        "ratio": short(found.mean),
        "low": short(found.low),
        "high": short(found.high),
        "p_equal": short(found.p_equal),
        "margin": found.margin,
        "reading": found.reading,
    }
