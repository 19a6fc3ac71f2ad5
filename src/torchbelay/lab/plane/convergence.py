"""From many starts to a few numbers: the share that converged, that diverged, and how long it took."""

from typing import Any

from torch import Tensor

from .race import Outcome
from .trajectories import number


def share(of: Tensor) -> float:
    """The share of rows for which something is so."""
    return number(float(of.double().mean())) or 0.0


def summary(outcome: Outcome, lane: int, which: int) -> dict[str, Any]:
    """What became of a lane's starts, judged by w1 (which = 0) or w2 (1)."""
    arrived = outcome.arrived[which][lane]
    median = int(arrived.median())  # of an even number the lower middle; runs that never arrive count as the slowest
    those = arrived[arrived <= outcome.steps]
    return {
        "judged": f"w{which + 1}",
        "starts": arrived.numel(),
        "steps": outcome.steps,
        "converged": share(outcome.converged(which)[lane]),
        "diverged": share(outcome.lost[lane]),
        "median_arrival": median if median <= outcome.steps else None,
        "median_of_arrived": int(those.median()) if those.numel() else None,
    }
