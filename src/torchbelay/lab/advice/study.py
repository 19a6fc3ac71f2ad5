"""What advice from a run, or from curvatures, is worth on networks: its loss beside the run's and a grid's best."""

from collections.abc import Sequence

from torchbelay.lab.part import Plate, Record, Settings, Tick
from torchbelay.lab.threads import one_thread

from . import figures, mnist, ring
from .trial import Protocol, describe, measure

NAME, TITLE = "advice", "What advice from a run is worth on networks"

FULL = Protocol()
QUICK = Protocol(lrs=(0.0025, 0.01, 0.04), seeds=1, steps=100)


def _protocol(settings: Settings) -> Protocol:
    return QUICK if settings.quick else FULL


def plan(settings: Settings) -> tuple[int, str]:
    """Return the units of work, and one line that says what would run."""
    how = _protocol(settings)
    more, images = mnist.plan(settings, how)
    return how.units + more, (
        f"advice from runs of the ring's networks at {len(how.lrs)} learning rates beside a grid of {len(how.grid)} "
        f"settings, {how.seeds} seeds, {how.steps:,} steps; {images}"
    )


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Train the grid, ask for advice, and follow it: on the ring, then on MNIST."""
    how = _protocol(settings)
    with one_thread():
        return [
            describe(ring.NAME, how, weights=ring.SHAPE.numbers, batch=ring.BATCH),
            *measure(ring.NAME, how, ring.trainer(settings, how.steps), tick),
            *mnist.run(settings, how, tick),
        ]


def draw(records: Sequence[Record]) -> list[Plate]:
    """Draw the figure and the tables, from the records alone."""
    return figures.draw_plates(records)
