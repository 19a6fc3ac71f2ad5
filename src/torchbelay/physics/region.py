"""The settings that a search for advice may take: all, or those about which runs say something.

A quadratic that fits the losses of a run asks for a higher learning rate nearly always, because its average removes
what the rate adds to the noise. A network bears less. In one run its noise tells how much: what noise adds to the loss
of the weights at the end, over what the run had to gain. Several runs tell more: then it is a line search over the
learning rate, and the quadratic says the rest. `lab.advice` tries both on networks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

NEAR = 2.0  # the factor of one step away from a run, in both rates
QUIET, LOUD = 0.03, 0.06  # below the first share of noise the learning rate may rise, above the second it falls
SAME = 1.1  # learning rates within this factor are not told apart

_WINDOW = NEAR * SAME**2  # a run within this factor is a neighbour, also of a best run that has moved by SAME
_HUGE = 1e100  # a loss over the best one, of runs that were lost
Tried = tuple[float, float]  # the learning rate of a run, and the loss of its average at the end; inf if it was lost
LINE_SEARCH = ("up", "down", "between")  # the cases of several runs
Case = Literal["any", "near", "low", "right", "high", "up", "down", "between"]


@dataclass(frozen=True)
class Region:
    """Learning rates and averaging rates among which a search stays, and why these; by default all.

    >>> Region.near(0.1)
    Region(lrs=(0.05, 0.2), rates=(0.0, 1.0), case='near')
    >>> Region.of_run(0.1, share=0.04)
    Region(lrs=(0.05, 0.1), rates=(0.0, 1.0), case='right')
    >>> Region.of_runs([(0.1, 0.7), (0.2, 0.9)], share=0.04)  # twice the rate was worse: half of it is next
    Region(lrs=(0.0454..., 0.05), rates=(0.0, 1.0), case='down')
    """

    lrs: tuple[float, float] | None = None
    rates: tuple[float, float] = (0.0, 1.0)
    case: Case = "any"

    @classmethod
    def near(cls, lr: float) -> "Region":
        """Return the learning rates near one that is known."""
        return cls((lr / NEAR, lr * NEAR), case="near")

    @classmethod
    def of_run(cls, lr: float, *, share: float | None) -> "Region":
        """Return the learning rates near that of a run, which depend on its share of noise, if it is known."""
        if share is None:
            return cls.near(lr)
        if share <= QUIET:
            return cls((lr / NEAR, lr * NEAR), case="low")
        return cls((lr / NEAR, lr), case="right") if share <= LOUD else cls((lr / NEAR**2, lr / NEAR), case="high")

    @classmethod
    def of_runs(cls, runs: Sequence[Tried], *, share: float | None) -> "Region":
        """Return the learning rates that come next after several runs, `share` being that of the best of them.

        If runs near twice and half the best learning rate are no better, these are the rates around the vertex of the
        parabola through the three, over logarithms. Else they are near twice or half the best rate: where nothing was
        tried, and if that is so on both sides, as the noise says.
        """
        best, loss = min(runs, key=lambda run: run[1])
        below = max((run for run in runs if best / _WINDOW <= run[0] < best / SAME), default=None)
        # A rate above the best one is a neighbour, however near, if its run was lost.
        above = min((r for r in runs if best * (SAME if r[1] < math.inf else 1) < r[0] <= best * _WINDOW), default=None)
        if below and above:
            vertex = _vertex(below, (best, loss), above)
            high = vertex * SAME if above[1] < math.inf else min(vertex * SAME, above[0] / SAME)
            return cls((min(vertex / SAME, high / SAME), high), case="between")
        if below or (above is None and (share is None or share <= LOUD)):
            return cls((best * math.sqrt(NEAR), best * NEAR), case="up")
        return cls((best / (NEAR * SAME), best / NEAR), case="down")

    def averaging_near(self, rate: float, ran: int, steps: int) -> "Region":
        """Return the part with averaging rates near that of a run of `ran` steps, for a run of `steps`.

        The average may reach back over the same number of steps, or over the same part of the run.
        """
        scale = ran / steps
        low, high = min(1.0, scale) * rate / NEAR, max(1.0, scale) * rate * NEAR
        return Region(self.lrs, (max(low, self.rates[0]), min(high, self.rates[1])), self.case)

    def __contains__(self, setting: tuple[float, float]) -> bool:
        """Whether an averaging rate and a learning rate are in the region."""
        rate, lr = setting
        return self.rates[0] < rate < self.rates[1] and (self.lrs is None or self.lrs[0] <= lr <= self.lrs[1])

    @property
    def highest_theta(self) -> float:
        """The largest θ that is tried: 0 if averaging rates are bounded, because θ > 0 makes averages longer."""
        return math.inf if self.rates == (0.0, 1.0) else 0.0

    def is_end(self, rate: float) -> bool:
        """Whether an averaging rate is at an end of those that are bounded."""
        low, high = self.rates
        return self.rates != (0.0, 1.0) and (rate < 1.05 * low or (rate > high / 1.05 and high < 1))


def _vertex(below: Tried, best: Tried, above: Tried) -> float:
    """Return the learning rate at the vertex of the parabola through three runs, of which the middle one is the best.

    >>> round(_vertex((0.05, 2.0), (0.1, 1.0), (0.2, 2.0)), 6)
    0.1
    """
    left, right = math.log(best[0] / below[0]), math.log(above[0] / best[0])
    rise_left, rise_right = (math.log(min(each[1] / best[1], _HUGE)) for each in (below, above))
    curvature = rise_left * right + rise_right * left
    if curvature <= 0:  # all three are equal
        return best[0]
    shift = (rise_left * right**2 - rise_right * left**2) / (2 * curvature)
    return best[0] * math.exp(min(max(shift, -left / 2), right / 2))
