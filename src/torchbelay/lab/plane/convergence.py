"""Summarize many starts by a few numbers: the share that converged, the share that diverged, and the time it took."""

from typing import Any

from torch import Tensor

from torchbelay.lab.records import rounded

from .race import Outcome
from .trajectories import DIGITS


def share(flags: Tensor) -> float:
    """Return the share of rows whose flag is set."""
    return rounded(float(flags.double().mean()), DIGITS) or 0.0


def summarize(outcome: Outcome, lane: int, which: int) -> dict[str, Any]:
    """Return the results of a lane over its starts, judged by w1 (which = 0) or w2 (which = 1)."""
    arrived = outcome.arrived[which][lane]
    median = int(arrived.median())  # the lower middle of an even number; runs that never arrive count as the slowest
    arrivals = arrived[arrived <= outcome.steps]
    return {
        "judged": f"w{which + 1}",
        "starts": arrived.numel(),
        "steps": outcome.steps,
        "converged": share(outcome.converged(which)[lane]),
        "diverged": share(outcome.lost[lane]),
        "median_arrival": median if median <= outcome.steps else None,
        "median_of_arrived": int(arrivals.median()) if arrivals.numel() else None,
    }
