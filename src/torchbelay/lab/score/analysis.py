"""Results of the score models from their records: losses per seed, best rates, ranges that work, FIDs.

Everything here is computed from records alone, by the rules of ../claims/protocol.md. A seed's learning rate is chosen
by the training loss of the other seeds and judged by the test loss of the seed itself. Two things are judged on seeds
that took part in them: which rates are eligible, and a choice that lost seeds would leave to fewer than two others.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from statistics import median, variance

from torchbelay.lab.arms import BELAY, EMA, EQUAL, MATCHED
from torchbelay.lab.part import Record
from torchbelay.lab.statistics import WORKS, Range, working_range

from .comparison import Comparison, compare, geometric_mean

ARMS = (EMA, EQUAL, MATCHED, BELAY)  # "no averaging" needs no run: it is w1 of an EMA's run
HEAVIER = (f"{BELAY} m1 2e4", f"{BELAY} m1 2e5")  # the appendix's masses; BELAY itself has 2e3
PAPER_LR = 0.05  # on MNIST

# A network that predicts zero has a loss of about 1, the mean square of the target over pixels, for NCSNv2 and for EDM.
# A run with more than half of that counts as lost. EDM networks that collapse stay at about 0.86, and NCSNv2 networks
# that recover in part at 0.58 to 0.8. Networks that work end below about 0.22: any bar in between gives the same.
FAILED = 0.5

FID_MARGIN = 1.1  # two FIDs within this factor count as equal: seeds alone differ by a few per cent
# The relative standard deviation of a FID over sets of samples of one network, if no record has several sets. EDM's
# authors see differences of about 2% among three sets, which is a standard deviation of about 1%.
FID_NOISE = 0.01

Losses = dict[int, float | None]  # by seed; None: lost


def select(records: Iterable[Record], kind: str, **fields: object) -> list[Record]:
    """Return the records of a kind whose fields have these values.

    >>> select([{"kind": "run", "seed": 0}, {"kind": "run", "seed": 1}, {"kind": "fid", "seed": 1}], "run", seed=1)
    [{'kind': 'run', 'seed': 1}]
    """
    return [r for r in records if r["kind"] == kind and all(r.get(key) == value for key, value in fields.items())]


def is_lost(loss: float | None) -> bool:
    """Whether a loss is above half of that of predicting zero, or not finite."""
    return loss is None or loss > FAILED


def median_loss(losses: Iterable[float | None]) -> float | None:
    """Return the median; a loss that is not finite counts as infinite. None if the median itself is not finite.

    >>> median_loss([0.06, None, 0.07]), median_loss([0.06, None]), median_loss([])
    (0.07, None, None)
    """
    known = [math.inf if loss is None else loss for loss in losses]
    found = median(known) if known else math.inf
    return found if math.isfinite(found) else None


def worst_loss(losses: Iterable[float | None]) -> float | None:
    """Return the largest loss; None if any of them is lost.

    >>> worst_loss([0.06, 0.08]), worst_loss([0.06, None])
    (0.08, None)
    """
    found = max((math.inf if loss is None else loss for loss in losses), default=math.inf)
    return None if is_lost(found) else found


# A study --------------------------------------------------------------------------------------------------------------


class StudyResults:
    """The runs of a study, of all arms or of some, by arm, nominal learning rate and seed; any run may be missing."""

    def __init__(self, records: Iterable[Record], name: str, arms: Collection[str] | None = None) -> None:
        self.name = name
        self.runs = [run for run in select(records, "run", study=name) if arms is None or run["arm"] in arms]
        present = dict.fromkeys(run["arm"] for run in self.runs)
        self.arms = [arm for arm in ARMS if arm in present] + [arm for arm in present if arm not in ARMS]
        self.lrs = sorted({float(run["lr"]) for run in self.runs})
        self.seeds = sorted({int(run["seed"]) for run in self.runs})

    def __bool__(self) -> bool:
        return bool(self.runs)

    @cached_property
    def _at(self) -> dict[tuple[str, float], dict[int, Record]]:
        """The runs by arm and rate, then by seed. Two of one place would hide each other, and are refused."""
        found: dict[tuple[str, float], dict[int, Record]] = {}
        for run in self.runs:
            if run["seed"] in (seeds := found.setdefault((run["arm"], run["lr"]), {})):
                where = f"arm {run['arm']}, rate {run['lr']:g}, seed {run['seed']}"
                raise ValueError(f"two runs of {self.name} have {where}; take the runs of one setting")
            seeds[run["seed"]] = run
        return found

    @property
    def ema(self) -> str:
        """The EMA that BELAY is compared with: the paper's if it was run, else the one of equal memory."""
        return EMA if EMA in self.arms or EQUAL not in self.arms else EQUAL

    def runs_at(self, arm: str, lr: float) -> Mapping[int, Record]:
        """Return the runs of an arm at a rate, by seed."""
        return self._at.get((arm, lr), {})

    def rates(self, arm: str) -> list[float]:
        """Return the nominal learning rates at which an arm was run."""
        return [lr for lr in self.lrs if self.runs_at(arm, lr)]

    def effective_rate(self, arm: str, lr: float) -> float:
        """Return the learning rate at which the centre of mass moves."""
        return float(next(iter(self.runs_at(arm, lr).values()))["effective_lr"])

    def losses(self, arm: str, lr: float, weights: str = "w2", images: str = "test") -> Losses:
        """Return the final loss of every seed, as measured; None if it is not finite."""
        return {seed: run["final"].get(weights, {}).get(images) for seed, run in sorted(self.runs_at(arm, lr).items())}

    def valid_losses(self, arm: str, lr: float, weights: str = "w2") -> Losses:
        """Return the test loss of every seed; None if the run was lost."""
        found = self.losses(arm, lr, weights)
        return {seed: None if is_lost(loss) else loss for seed, loss in found.items()}

    def compare(self, one: str, other: str, lr: float, weights: str = "w2") -> Comparison:
        """Compare two arms at the same nominal rate."""
        return compare(self.valid_losses(one, lr, weights), self.valid_losses(other, lr, weights))

    def eligible_rates(self, arm: str) -> list[float]:
        """Return the rates at which an arm keeps more than half of its seeds; if there is none, those with most kept.

        So one lost seed does not exclude a rate, and one lucky seed does not make a rate.
        """
        share = {lr: 1 - self.lost_count(arm, lr) / len(self.runs_at(arm, lr)) for lr in self.rates(arm)}
        most = max(share.values(), default=0.0)
        return [lr for lr, kept in share.items() if kept > 0.5 or (most <= 0.5 and kept == most)]

    def best_rate(self, arm: str, without: int | None = None, among: Collection[float] | None = None) -> float | None:
        """Return the eligible rate with the lowest mean training loss over the seeds but `without`.

        Means are over the seeds that are kept at every eligible rate, so that a lost seed moves no mean; if there is no
        such seed, over those that are kept at each rate. If lost seeds leave fewer than two others to choose by, all
        seeds choose, because one seed's choice is chance. `among` restricts the rates.
        """
        rates = [lr for lr in self.eligible_rates(arm) if without is None or without in self.runs_at(arm, lr)]
        rates = [lr for lr in rates if among is None or lr in among]
        kept = {lr: self._kept_losses(arm, lr, without) for lr in rates}
        shared = set.intersection(*(set(losses) for losses in kept.values())) if kept else set()
        others = set().union(*(self.runs_at(arm, lr) for lr in rates)) - {without}
        if without is not None and len(shared) < 2 <= len(others):
            return self.best_rate(arm, among=among)

        def mean(lr: float) -> float:
            used = [loss for seed, loss in kept[lr].items() if seed in shared or not shared]
            return geometric_mean(used) or math.inf

        return min(rates, key=mean, default=None)

    def _kept_losses(self, arm: str, lr: float, without: int | None) -> dict[int, float]:
        """Return the training loss of the seeds but `without` that are not lost; of `without` if it is the only one."""
        found = self.losses(arm, lr, images="train")
        kept = {seed: loss for seed, loss in found.items() if loss is not None and not is_lost(loss)}
        others = {seed: loss for seed, loss in kept.items() if seed != without}
        return others if set(found) - {without} else kept

    def mean_loss(self, arm: str, lr: float) -> float:
        """Return the mean training loss over all seeds; infinite if a run was lost."""
        found = [*self.losses(arm, lr, images="train").values()]
        return math.inf if any(map(is_lost, found)) else geometric_mean(found) or math.inf

    def safe_rates(self, arm: str) -> list[float]:
        """Return the rates at which an arm loses no seed."""
        return [lr for lr in self.rates(arm) if not self.lost_count(arm, lr)]

    def safe_rate(self, arm: str) -> float | None:
        """Return the best rate among those that lose no seed: for plans of longer runs, never for a verdict."""
        return min(self.rates(arm), key=lambda lr: self.mean_loss(arm, lr), default=None)

    def at_best(self, arm: str, among: Collection[float] | None = None) -> Losses:
        """Return the test loss of every seed at the rate that the other seeds choose for it, of all rates or some."""
        found: Losses = {}
        for seed in self.seeds:
            lr = self.best_rate(arm, without=seed, among=among)
            if lr is not None:
                found[seed] = self.valid_losses(arm, lr)[seed]
        return found

    def by_seed(self, arm: str, weights: str = "w2") -> dict[int, dict[float, float | None]]:
        """Return the test loss by seed and learning rate."""
        found: dict[int, dict[float, float | None]] = {}
        for lr in self.rates(arm):
            for seed, loss in self.losses(arm, lr, weights).items():
                found.setdefault(seed, {})[lr] = loss
        return found

    def loss_curve(
        self, arm: str, lr: float, weights: str = "w2", images: str = "test"
    ) -> tuple[list[int], list[list[float | None]]]:
        """Return the steps at which the loss was measured, and for each step the losses of all seeds."""
        runs = [run for _, run in sorted(self.runs_at(arm, lr).items())]
        points = range(min((len(run["curve"]) for run in runs), default=0))
        losses = [[run["curve"][i].get(weights, {}).get(images) for run in runs] for i in points]
        return [int(runs[0]["curve"][i]["step"]) for i in points], losses

    def working_rates(self, arm: str, limit: float) -> Range | None:
        """Return the range of nominal rates at which every seed's loss is within a limit; a lost run is beyond any."""
        rates = self.rates(arm)
        ends = [worst_loss(self.losses(arm, lr).values()) for lr in rates]
        return working_range(rates, ends, limit) if rates else None

    def best_median(self, arms: Sequence[str]) -> float | None:
        """Return the lowest median loss of some arms over all rates."""
        middles = [median_loss(self.valid_losses(arm, lr).values()) for arm in arms for lr in self.rates(arm)]
        return min((each for each in middles if each is not None), default=None)

    def working_ranges(self, arms: Sequence[str]) -> dict[str, tuple[Range | None, Range | None]]:
        """Return where each arm is within a factor of the best median of all these arms, and of its own best."""
        found = {}
        for arm in arms:
            limits = (self.best_median(arms), self.best_median([arm]))
            ranges = [None if limit is None else self.working_rates(arm, WORKS * limit) for limit in limits]
            found[arm] = (ranges[0], ranges[1])
        return found

    def lost_count(self, arm: str, lr: float) -> int:
        """Count the seeds whose average is lost."""
        return sum(map(is_lost, self.losses(arm, lr).values()))

    def loss_gap(self) -> tuple[float | None, float | None]:
        """Return the largest test loss below the bar and the smallest above it, over averages and weights."""
        every = [
            loss
            for run in self.runs
            for weights in ("w1", "w2")
            if (loss := run["final"].get(weights, {}).get("test")) is not None
        ]
        below, above = [x for x in every if not is_lost(x)], [x for x in every if is_lost(x)]
        return max(below, default=None), min(above, default=None)


def fids(records: Iterable[Record], study: StudyResults, arm: str, lr: float, weights: str = "w2") -> Losses:
    """Return the FID by seed, averaged over its sets of samples; None if the run was lost.

    A collapsed network may still make images, but their FID is not a result, and neither is its loss.
    """
    found: dict[int, list[float | None]] = {}
    for record in select(records, "fid", study=study.name, arm=arm, lr=lr, weights=weights):
        found.setdefault(record["seed"], []).append(record["fid"])
    lost = {seed for seed, loss in study.valid_losses(arm, lr, weights).items() if loss is None}
    return {seed: None if seed in lost else geometric_mean(values) for seed, values in sorted(found.items())}


def compare_fids(
    records: Sequence[Record], study: StudyResults, one: str, other: str, lr: float | None = None
) -> Comparison:
    """Compare the FIDs of two arms at a rate, or else each at its best rate; FID's own noise is in the interval."""
    ones, others = (
        fid_at_best(records, study, arm) if lr is None else fids(records, study, arm, lr) for arm in (one, other)
    )
    return compare(ones, others, FID_MARGIN, fid_noise(records, study))


def fid_noise(records: Iterable[Record], study: StudyResults) -> float:
    """Return the relative standard deviation that a FID has from its samples alone, and that all seeds share.

    Networks with several sets of samples tell it; else it is FID_NOISE. If every seed has random numbers of its own for
    its samples, the spread over the seeds contains it already, and it is 0 here.
    """
    found = [r for r in select(records, "fid", study=study.name, weights="w2") if r["fid"]]
    seeds = {(r["seed"], r.get("sample_seed", 0)) for r in found}
    if len({seed for seed, _ in seeds}) == len(seeds) == len({sample for _, sample in seeds}) > 1:
        return 0.0

    def network(r: Record) -> tuple[str, float, int]:
        return r["arm"], r["lr"], r["seed"]

    sets = [[math.log(r["fid"]) for r in some] for _, some in groupby(sorted(found, key=network), network)]
    within = [(variance(logs), len(logs) - 1) for logs in sets if len(logs) > 1]
    if not within:
        return FID_NOISE if found else 0.0
    pooled = sum(value * freedom for value, freedom in within) / sum(freedom for _, freedom in within)
    return math.sqrt(pooled / min(len(logs) for logs in sets))


def rate_of_fids(records: Sequence[Record], study: StudyResults, arm: str) -> float | None:
    """Return the best rate of an arm among those at which it has FIDs, by the training loss of all seeds."""
    return study.best_rate(arm, among=[lr for lr in study.rates(arm) if fids(records, study, arm, lr)])


def fid_at_best(records: Sequence[Record], study: StudyResults, arm: str) -> Losses:
    """Return the FIDs of an arm at its best rate that has any."""
    lr = rate_of_fids(records, study, arm)
    return {} if lr is None else fids(records, study, arm, lr)


def rate_difference(records: Sequence[Record], study: StudyResults, arms: Sequence[str]) -> str:
    """Return a clause with the rates of some arms' FIDs if the rates differ; else an empty text.

    An arm that lost every seed with images has no FID to compare, and is left out.
    """
    rates = {
        arm: lr
        for arm in arms
        if (lr := rate_of_fids(records, study, arm)) is not None
        and geometric_mean(fids(records, study, arm, lr).values())
    }
    if len({*rates.values()}) < 2:
        return ""
    places = ", ".join(f"{arm} at {lr:g}" for arm, lr in rates.items())
    return f"{places}, so that rates are compared as much as averages"
