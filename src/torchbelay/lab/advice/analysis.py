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
    warned: bool  # by the fit, of a noisy run or one far from a quadratic; or with the advice from curvatures

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
    advices: Sequence[Record]
    refusals: Sequence[Record]

    @classmethod
    def of(cls, records: Sequence[Record], problem: str, *, probed: bool = False) -> "Outcomes":
        """Return those of a problem: of advice from the losses of runs, or from measured curvatures."""
        (about,) = select(records, "protocol", problem=problem)
        kinds = ("setting", "probe", "probe refusal") if probed else ("setting", "advice", "refusal")
        parts = (select(records, kind, problem=problem) for kind in kinds)
        return cls(about, *parts)

    @cached_property
    def best(self) -> Key:
        """The setting of the grid with the lowest mean loss over seeds."""
        return min(self._losses, key=lambda key: fmean(self._losses[key].values()))

    @cached_property
    def _losses(self) -> dict[Key, dict[int, float]]:
        found: dict[Key, dict[int, float]] = {}
        for each in self.settings:
            key = each["theta"], each["rate"], each["lr"]
            found.setdefault(key, {})[each["seed"]] = _finite(each["loss"])
        return found

    @cached_property
    def all(self) -> list[Outcome]:
        """Every advice that was followed."""
        best = self._losses[self.best]
        return [
            Outcome(
                each["seed"],
                each["lr"],
                _finite(each["run"]) / best[each["seed"]],
                _finite(each["loss"]) / best[each["seed"]],
                each["warned"],
            )
            for each in self.advices
        ]

    @property
    def lrs(self) -> list[float]:
        """The learning rates of the runs that gave advice."""
        return sorted({each.lr for each in self.all})

    def at(self, lr: float) -> list[Outcome]:
        """Return the outcomes of runs at a learning rate."""
        return [each for each in self.all if each.lr == lr]

    @property
    def best_run_lr(self) -> float:
        """The learning rate at which the runs that gave advice are best themselves."""
        return min(self.lrs, key=lambda lr: fmean(each.run for each in self.at(lr)))

    @property
    def low(self) -> list[Outcome]:
        """The outcomes of runs whose learning rate is at most half of their best one."""
        return [each for each in self.all if each.lr <= self.best_run_lr / 2]

    @property
    def high(self) -> list[Outcome]:
        """The outcomes of runs at their best learning rate, or above it."""
        return [each for each in self.all if each.lr >= self.best_run_lr]


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
