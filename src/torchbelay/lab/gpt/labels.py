"""The names and colours of the arms in figures, and losses as text."""

from collections.abc import Sequence

from torchbelay.lab.part import MISSING
from torchbelay.lab.score.figures import theta_colour

from .arms import CONSTANT, Arm

NAMES = {CONSTANT.name: "θ = 0 (EMA)", "θ = +0.25": "θ = +0.25 (BELAY)"}
_OTHERS = {"cosine": "#CC79A7", "schedule-free": "#009E73", "Lookahead": "#E69F00"}


def colour(arm: Arm) -> str:
    """Return the colour of an arm: that of its θ, or its own."""
    return _OTHERS[arm.name] if arm.theta is None else theta_colour(arm.theta)


def title(arm: str) -> str:
    """Return the name of an arm as figures have it."""
    return NAMES.get(arm, arm)


def mean(losses: Sequence[float | None]) -> str:
    """Return the mean of the losses that are known, as text."""
    known = [loss for loss in losses if loss is not None]
    return f"{sum(known) / len(known):.4f}" if known else MISSING
