"""Derive results from the ring's runs: choices of a setting, paired comparisons, and working ranges.

Everything here is computed from run records alone. Tuning is cross-fit: half of the seeds choose by their validation
loss, and the other half reports its test loss, so no choice is judged on the runs that made it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self

from torchbelay.lab.arms import BELAY, EMA, MATCHED, PLAIN, REPULSIVE
from torchbelay.lab.part import Record
from torchbelay.lab.records import rounded
from torchbelay.lab.statistics import WORKS, Range, ratio, working_range

DIGITS = 5  # of a number in a record
MIXTURE = "the mixture itself"
TUNED = ", tuned"  # marks a contestant that chooses among all settings of its arm

Key = tuple[str, str]  # an arm and its setting

# Pairs that are compared, each contestant at the rate (and setting) that it chose. Both have the same number of trials,
# except for comparisons with no averaging and with the repulsive spring, which have fewer settings.
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


@dataclass(frozen=True)
class Choice:
    """The setting and learning rate that half of the seeds chose for the other half."""

    contestant: str
    arm: str
    setting: str
    lr: float
    effective_lr: float
    trials: int
    validation: float | None  # geometric mean over the seeds that chose
    test: list[float | None]  # test losses of the seeds that report
    chosen_on: list[int]
    reported_on: list[int]

    def record(self) -> Record:
        """Return the choice as a record."""
        return {"kind": "choice", **vars(self)}

    @classmethod
    def from_record(cls, record: Record) -> Self:
        """Return the choice of a record."""
        return cls(**{key: value for key, value in record.items() if key != "kind"})


class RunTable:
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
        """Return the settings of an arm, in the order of the runs; the first is used without tuning."""
        return [setting for name, setting in self._runs if name == arm]

    def runs(self, key: Key, lr: float) -> Mapping[int, Record]:
        """Return the runs of all seeds, by seed."""
        return self._runs[key][lr]

    def tests(self, key: Key, lr: float) -> list[float | None]:
        """Return the test loss of every seed."""
        return [self.runs(key, lr)[seed]["test"] for seed in self.seeds]

    def scale(self, key: Key) -> float:
        """Return the effective learning rate per nominal one."""
        run = self.runs(key, self.lrs[0])[self.seeds[0]]
        return float(run["effective_lr"] / run["lr"])


def derive_records(runs: Sequence[Record]) -> list[Record]:
    """Return all records that follow from the runs."""
    table = RunTable(runs)
    choices = [choice for name in _contestants(table) for choice in choose(table, name)]
    return [choice.record() for choice in choices] + [
        *compare_choices(choices),
        *compare_rates(table),
        *find_ranges(table),
        *compare_ranges(table),
    ]


def split_seeds(seeds: Sequence[int]) -> tuple[list[int], list[int]]:
    """Split the seeds into two halves, which choose for one another."""
    middle = len(seeds) // 2
    return list(seeds[:middle]), list(seeds[middle:])


def _contestants(table: RunTable) -> list[str]:
    names = dict.fromkeys(name for contest in CONTESTS for name in contest)
    return [name for name in names if table.settings(name.removesuffix(TUNED))]


def choose(table: RunTable, contestant: str) -> Iterator[Choice]:
    """Choose the best setting and learning rate on each half of the seeds, for the other half to report."""
    arm = contestant.removesuffix(TUNED)
    settings = table.settings(arm) if contestant.endswith(TUNED) else table.settings(arm)[:1]
    first, second = split_seeds(table.seeds)
    trials = [((arm, setting), lr) for setting in settings for lr in table.lrs]
    for chosen_on, reported_on in ((second, first), (first, second)):

        def loss(trial: tuple[Key, float], on: Sequence[int] = chosen_on) -> float:
            runs = table.runs(*trial)
            return _mean_log(runs[seed]["validation"] for seed in on)

        key, lr = best = min(trials, key=loss)
        runs = table.runs(key, lr)
        yield Choice(
            contestant,
            *key,
            lr,
            runs[table.seeds[0]]["effective_lr"],
            len(trials),
            rounded(math.exp(loss(best)), DIGITS),
            [runs[seed]["test"] for seed in reported_on],
            chosen_on,
            reported_on,
        )


def _mean_log(losses: Iterable[float | None]) -> float:
    """Return the logarithm of the geometric mean; infinite if any run was lost."""
    known = [math.inf if loss is None else math.log(loss) for loss in losses]
    return sum(known) / len(known)


def compare_choices(choices: Sequence[Choice]) -> Iterator[Record]:
    """Compare the test losses of two contestants, each at its choice, seed by seed."""
    results: dict[str, dict[int, float | None]] = {}
    trials: dict[str, int] = {}
    for choice in choices:
        results.setdefault(choice.contestant, {}).update(zip(choice.reported_on, choice.test, strict=True))
        trials[choice.contestant] = choice.trials
    for one, other in CONTESTS:
        if one in results and other in results:
            seeds = sorted(results[one])
            pair = [[results[name][seed] for seed in seeds] for name in (one, other)]
            yield _pair_record("chosen", one, other, *pair) | {"trials": [trials[one], trials[other]]}


def _rivals(table: RunTable) -> list[tuple[Key, Key]]:
    """Return what is compared at equal learning rates: each with the control that differs from it in one thing."""
    emas, springs = table.settings(EMA), table.settings(BELAY)
    found = [((BELAY, spring), (MATCHED, spring)) for spring in springs]
    found += [((BELAY, spring), (EMA, ema)) for spring, ema in zip(springs, emas, strict=True)]
    found += [((EMA, ema), (PLAIN, table.settings(PLAIN)[0])) for ema in emas]
    found += [((REPULSIVE, setting), (EMA, emas[1])) for setting in table.settings(REPULSIVE)]  # it has the same memory
    return found


def compare_rates(table: RunTable) -> Iterator[Record]:
    """Compare the test losses of two arms at every nominal learning rate, seed by seed."""
    for one, other in _rivals(table):
        for lr in table.lrs:
            pair = _pair_record("rate", one[0], other[0], table.tests(one, lr), table.tests(other, lr))
            yield pair | {"one_setting": one[1], "other_setting": other[1], "lr": lr}


def find_ranges(table: RunTable) -> Iterator[Record]:
    """Find the rates at which each median curve is within a factor of its own best, and of the best of all."""
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
                "effective_scale": rounded(scale, DIGITS),
                **_ends(found, scale),
            }


def _ends(found: Range | None, scale: float) -> Record:
    if found is None:
        names = ("low", "high", "low_effective", "high_effective", "width", "open_low", "open_high")
        return dict.fromkeys(names)
    return {
        "low": rounded(found.low, DIGITS),
        "high": rounded(found.high, DIGITS),
        "low_effective": rounded(found.low * scale, DIGITS),
        "high_effective": rounded(found.high * scale, DIGITS),
        "width": rounded(found.width, DIGITS),
        "open_low": found.open_low,
        "open_high": found.open_high,
    }


def compare_ranges(table: RunTable) -> Iterator[Record]:
    """Compare the working range of each seed: its width, and its upper end.

    A rate works relative to the method's own best loss ("width", "high", "high_effective"), which favours a method
    whose best is poor, or relative to the better of the two ("width_shared"), which leaves out a method that never
    works.
    """
    for one, other in _rivals(table):
        keys, scales = (one, other), (table.scale(one), table.scale(other))
        own = [_seed_ranges(table, key, [key]) for key in keys]
        shared = [_seed_ranges(table, key, keys) for key in keys]
        compared: dict[str, list[list[float | None]]] = {
            "width": [[None if r is None else r.width for r in each] for each in own],
            "width_shared": [[None if r is None else r.width for r in each] for each in shared],
            "high": [[None if r is None else r.high for r in each] for each in own],
            "high_effective": [
                [None if r is None else r.high * scale for r in each] for each, scale in zip(own, scales, strict=True)
            ],
        }
        for scope, pair in compared.items():
            yield _pair_record(scope, one[0], other[0], *pair) | {"one_setting": one[1], "other_setting": other[1]}


def _seed_ranges(table: RunTable, key: Key, against: Sequence[Key]) -> list[Range | None]:
    """Return, per seed, the range in which the loss is within a factor of the best loss of any of `against`."""
    found = []
    for i, losses in enumerate(_losses_by_seed(table, key)):
        best = _best(loss for each in against for loss in _losses_by_seed(table, each)[i])
        found.append(None if best is None else working_range(table.lrs, losses, WORKS * best))
    return found


def _losses_by_seed(table: RunTable, key: Key) -> list[tuple[float | None, ...]]:
    return list(zip(*(table.tests(key, lr) for lr in table.lrs), strict=True))


def _best(losses: Iterable[float | None]) -> float | None:
    return min((loss for loss in losses if loss is not None), default=None)


def _median(losses: Sequence[float | None]) -> float | None:
    return rounded(median(math.inf if loss is None else loss for loss in losses), DIGITS)


def _pair_record(
    scope: str, one: str, other: str, ones: Sequence[float | None], others: Sequence[float | None]
) -> Record:
    """Return the record of a comparison, the ratio one ÷ other; all None if fewer than two pairs are left."""
    found = ratio(ones, others)
    ratios = [None if a is None or b is None else rounded(a / b, DIGITS) for a, b in zip(ones, others, strict=True)]
    about: Record = {"kind": "pair", "scope": scope, "one": one, "other": other, "ratios": ratios}
    if found is None:
        left = len(ratios) - ratios.count(None)
        return about | dict.fromkeys(("ratio", "low", "high", "p_equal", "margin")) | {"pairs": left, "reading": "lost"}
    return about | {
        "pairs": found.pairs,
        "ratio": rounded(found.mean, DIGITS),
        "low": rounded(found.low, DIGITS),
        "high": rounded(found.high, DIGITS),
        "p_equal": rounded(found.p_equal, DIGITS),
        "margin": found.margin,
        "reading": found.reading,
    }
