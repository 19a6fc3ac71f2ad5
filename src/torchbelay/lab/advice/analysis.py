"""What the records say about advice: regret against the best of the grid, and whether its warnings were right."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from torchbelay.lab.part import Record
from torchbelay.lab.records import select

Key = tuple[float, float, float]  # θ, averaging rate and learning rate


@dataclass(frozen=True)
class Outcome:
    """Advice from one run, followed: losses over that of the grid's best setting with the same seed."""

    seed: int
    lr: float  # of the run
    run: float
    regret: float
    warned: bool  # by the fit, of a run that is far from a quadratic; or with the advice from curvatures
    share: float | None = None  # of noise in the weights of the run

    @property
    def ratio(self) -> float:
        """The loss of the advice over that of the run."""
        return self.regret / self.run if self.run < math.inf else 0.0

    @property
    def worse(self) -> bool:
        """Whether the advice made the run worse."""
        return self.ratio > 1


@dataclass(frozen=True)
class Outcomes:
    """All records of one problem."""

    about: Record
    settings: Sequence[Record]
    advices: Sequence[Record]  # of the first round
    later: Sequence[Record]  # of all other rounds
    refusals: Sequence[Record]  # of the first round

    @classmethod
    def of(cls, records: Sequence[Record], problem: str, *, probed: bool = False) -> "Outcomes":
        """Return those of a problem: of advice from the losses of runs, or from measured curvatures."""
        (about,) = select(records, "protocol", problem=problem)
        kinds = ("setting", "probe", "probe refusal") if probed else ("setting", "advice", "refusal")
        settings, advices, refusals = (select(records, kind, problem=problem) for kind in kinds)
        first, later = ([each for each in advices if (each.get("round", 1) == 1) is which] for which in (True, False))
        return cls(about, settings, first, later, [each for each in refusals if each.get("round", 1) == 1])

    @cached_property
    def best(self) -> Key:
        """The setting of the grid with the lowest mean loss over seeds."""
        return min(self._losses, key=lambda key: fmean(self._losses[key].values()))

    @property
    def tuned(self) -> float:
        """The mean loss of the EMA that gives advice, at the best of its learning rates, over that of the best."""
        means = {key: fmean(losses.values()) for key, losses in self._losses.items()}
        ema = 1 - self.about["decay"]
        return (
            min(mean for (theta, rate, _), mean in means.items() if theta == 0 and abs(rate - ema) < 1e-9)
            / means[self.best]
        )

    @cached_property
    def _losses(self) -> dict[Key, dict[int, float]]:
        found: dict[Key, dict[int, float]] = {}
        for each in self.settings:
            key = each["theta"], each["rate"], each["lr"]
            found.setdefault(key, {})[each["seed"]] = _finite(each["loss"])
        return found

    @cached_property
    def all(self) -> list[Outcome]:
        """Every advice of the first round."""
        return [self._outcome(each, "loss") for each in self.advices]

    @cached_property
    def ends(self) -> list[Outcome]:
        """The best runs of the searches that began with these, by the losses that were reported, in the same order."""
        last = {(each["seed"], each["lr"]): each for each in (*self.advices, *self.later)}
        return [self._outcome(last[each["seed"], each["lr"]], "best") for each in self.advices]

    def _outcome(self, advice: Record, loss: str) -> Outcome:
        best = self._losses[self.best][advice["seed"]]
        run, end = _finite(advice["run"]) / best, _finite(advice[loss]) / best
        return Outcome(advice["seed"], advice["lr"], run, end, advice["warned"], advice.get("share"))

    @property
    def took(self) -> list[int]:
        """How many runs more each of the searches took, in the order of `ends`; θ ≠ 0 takes an EMA besides."""
        found = [(each["seed"], each["lr"], each["theta"]) for each in (*self.advices, *self.later)]
        return [
            sum(1 + (theta != 0) for seed, lr, theta in found if (seed, lr) == (end.seed, end.lr)) for end in self.ends
        ]

    @property
    def lrs(self) -> list[float]:
        """The learning rates of the runs that gave advice."""
        return sorted({each.lr for each in self.all})

    def at(self, lr: float) -> list[Outcome]:
        """Return the outcomes of runs at a learning rate."""
        return [each for each in self.all if each.lr == lr]

    def ends_at(self, lr: float) -> list[Outcome]:
        """Return what the searches found that began at a learning rate."""
        return [each for each in self.ends if each.lr == lr]


def problems(records: Sequence[Record]) -> list[str]:
    """Return the problems of the records, in their order."""
    return [each["problem"] for each in select(records, "protocol")]


def count_worse(outcomes: Sequence[Outcome]) -> str:
    """Return how many advices made their run worse, in words.

    >>> count_worse([Outcome(0, 0.1, 1.0, 1.2, False), Outcome(0, 0.2, 1.0, 0.9, True)])
    '1 of 2'
    """
    return f"{sum(each.worse for each in outcomes)} of {len(outcomes)}"


def spread(values: Sequence[float]) -> str:
    """Return the least and the largest of some ratios.

    >>> spread([1.234, 0.98]), spread([1.0])
    ('0.98 to 1.23', '1.00')
    """
    low, high = (f"{end:.2f}" for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _finite(loss: float | None) -> float:
    return math.inf if loss is None else loss
