"""What fitted runs say together: which was the best, what quadratic stands for it, and what may come next."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .coupling import watch
from .inner_momentum import stable_range
from .quadratics import Quadratic
from .region import SAME, Region
from .run_fit import LONG, RunFit
from .search import AROUND


@dataclass(frozen=True)
class Evidence:
    """Fitted runs that differ in their rates alone, and the learning rates at which others were lost."""

    fits: tuple[RunFit, ...]  # the one that ended best first
    lost: tuple[float, ...] = ()

    @classmethod
    def of(cls, runs: Sequence[Any], lost: tuple[float, ...] = ()) -> "Evidence":
        """Check that the runs can be compared."""
        if not all(isinstance(each, RunFit) for each in runs):
            raise TypeError("curvatures has fitted runs and other things; give fitted runs alone, or numbers alone")
        if len({each.beta1 for each in runs}) > 1:
            raise ValueError("the runs were fitted with several beta1; give runs with one")
        if len({each.rate is None for each in runs}) > 1:
            raise ValueError(
                "some runs have losses of an average, and others have not, so their ends cannot be compared; give all "
                "runs with w2 and a decay, or all without"
            )
        lengths = [each.steps for each in runs]
        if max(lengths) > SAME * min(lengths):
            raise ValueError(
                f"the runs have {min(lengths):,} to {max(lengths):,} steps, so their losses cannot be compared; give "
                "runs of one length, and of runs that were lost the learning rate alone, as lost (--lost)"
            )
        return cls(tuple(sorted(runs, key=lambda fit: fit.end)), lost)

    @property
    def best(self) -> RunFit:
        """The run that ended best."""
        return self.fits[0]

    @property
    def count(self) -> int:
        """The number of runs, lost ones included."""
        return len(self.fits) + len(self.lost)

    @property
    def caveats(self) -> list[str]:
        """What is doubtful about the runs."""
        if self.count == 1:
            return list(self.best.caveats)
        unsafe = (
            f"A run at {lr:.3g} was lost, and the best one is at {self.best.lr:.3g}: such rates are not safe. "
            "Try several seeds."
            for lr in self.lost
            if lr <= self.best.lr * SAME
        )
        return [f"Run at {fit.lr:.3g}: {caveat}" for fit in self.fits for caveat in fit.caveats] + [*unsafe]

    def region(self, steps: int) -> Region:
        """Return the settings that come next, for a run of `steps` steps."""
        best = self.best
        if self.count == 1:
            region = Region.of_run(best.lr, share=best.share)
        else:
            tried = [(each.lr, each.end) for each in self.fits] + [(lr, math.inf) for lr in self.lost]
            region = Region.of_runs(tried, share=best.share)
        if best.rate is None or best.rate * best.steps < LONG:  # a rate that is no guide
            return region
        return region.averaging_near(best.rate, best.steps, steps)

    def problem(self, region: Region) -> Quadratic:
        """Return the quadratic of the best run, with curvatures that let the advice be judged.

        The run did not diverge at its own learning rate. If there are others, the line search decides how far to go,
        and networks often bear rates at which the quadratic of a run at a lower one diverges.
        """
        assert region.lrs is not None
        highest = self.best.lr if self.count == 1 else max(region.lrs[1], self.best.lr)
        return self.best.problem.bounded(0.98 * self._range / (highest * AROUND))

    def beyond(self, region: Region) -> list[str]:
        """Return a warning if the line search goes beyond what the quadratic of the best run bears."""
        limit = self._range / self.best.problem.largest
        if self.count == 1 or region.lrs is None or region.lrs[1] <= limit:
            return []
        return [
            f"The quadratic that fits the best run diverges above a learning rate of {limit:.3g}. Networks often bear "
            "more, so the advice takes its largest curvatures as smaller."
        ]

    @property
    def _range(self) -> float:
        """The largest stable learning rate times curvature; an EMA does not change it."""
        return stable_range(watch(1.0), self.best.beta1)
