"""The paper's rate of 5e-2 on MNIST, under every reading of what the paper does not print.

With a cold start and Adam's usual eps nothing trains at this rate, whatever the average: that says nothing about BELAY
against EMA. Here the learning rate may grow over the first steps, and Adam's eps may be as large as in NCSNv2's
settings for large images. Whatever trains decides.
"""

from collections.abc import Iterable, Sequence

from torchbelay.lab.arms import BELAY
from torchbelay.lab.part import Plate, Record, Settings, Table, Tick
from torchbelay.lab.report import style
from torchbelay.lab.report.words import listed

from . import run as study_run
from .analysis import PAPER_LR, StudyResults, select
from .captions import describe_lost_runs, describe_networks, difference_notes, settings_note, time_note
from .comparison import Comparison
from .tables import mean_cell

NAME = "readings"
TITLE = "MNIST at the paper's learning rate: what trains"

Reading = tuple[int, int, float]  # the network's features, the steps of warm-up, and Adam's eps


def plan(settings: Settings) -> tuple[int, str]:
    """Return the units of work, and one line that says what would be run."""
    return study_run.plan(NAME, settings)


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Train and measure; if that is impossible here, return the records that come with the package."""
    return study_run.run(NAME, settings, tick)


def draw(records: Sequence[Record]) -> list[Plate]:
    """Return the table of readings; none without records."""
    with style.house():
        return [] if (plate := _table(records)) is None else [plate]


def readings(records: Iterable[Record]) -> dict[str, StudyResults]:
    """Return the runs of each reading that was run, by what the reading is, in words."""
    return {reading_text(*reading): study for reading, study in _by_reading(records).items()}


def _by_reading(records: Iterable[Record]) -> dict[Reading, StudyResults]:
    found: dict[Reading, list[Record]] = {}
    for r in select(records, "run", study=NAME):
        found.setdefault((r["features"], r["warm_up"], r["eps"]), []).append(r)
    return {reading: StudyResults(runs, NAME) for reading, runs in sorted(found.items())}


def reading_text(features: int, warm_up: int, eps: float) -> str:
    """Return a reading in words.

    >>> reading_text(64, 500, 0.001), reading_text(32, 0, 1e-08)
    ("500 steps of warm-up, Adam's eps 0.001, 64 features", "cold start, Adam's eps 1e-08, 32 features")
    """
    start = f"{warm_up} steps of warm-up" if warm_up else "cold start"
    return f"{start}, Adam's eps {eps:g}, {features} features"


def training_text(works: Sequence[Reading], count: int) -> str:
    """Return which readings train, of `count`, as a sentence; their number, if more than two phrases were needed.

    >>> training_text([(32, 500, 0.001), (32, 500, 0.01), (64, 500, 0.001), (64, 500, 0.01)], 12)
    "Training works with 500 steps of warm-up, Adam's eps 0.001 and 0.01, 32 and 64 features."
    >>> training_text([], 12), training_text([(32, 0, 0.01), (32, 500, 0.001), (64, 500, 0.01)], 12)
    ('No reading trains.', 'Training works in 3 of 12 readings.')
    """
    epsilons: dict[tuple[int, int], list[float]] = {}  # by steps of warm-up and features
    for features, warm_up, eps in works:
        epsilons.setdefault((warm_up, features), []).append(eps)
    sizes: dict[tuple[int, tuple[float, ...]], list[int]] = {}  # features, by steps of warm-up and values of eps
    for (warm_up, features), values in epsilons.items():
        sizes.setdefault((warm_up, tuple(values)), []).append(features)
    if not works:
        return "No reading trains."
    if len(sizes) > 2:
        return f"Training works in {len(works)} of {count} readings."
    phrases = [
        f"{_start_text(warm_up)}, Adam's eps {listed([f'{eps:g}' for eps in values])}, {listed([*map(str, features)])} "
        "features"
        for (warm_up, values), features in sizes.items()
    ]
    return f"Training works with {'; and with '.join(phrases)}."


def _start_text(warm_up: int) -> str:
    return f"{warm_up} steps of warm-up" if warm_up else "a cold start"


def _table(records: Sequence[Record]) -> Plate | None:
    found = _by_reading(records)
    if not found:
        return None
    rows = tuple((reading_text(*reading), *_cells(study)) for reading, study in found.items())
    result = training_text([each for each, study in found.items() if _compare(study).reading != "lost"], len(found))
    every = StudyResults(records, NAME)
    caption = f"Test loss of the average at learning rate {PAPER_LR:g}, for each reading of the paper. {result}"
    notes = (
        "Cells: mean ± standard deviation over the seeds that are not lost. BELAY ÷ EMA: the ratio seed by seed.",
        describe_lost_runs(every),
        describe_networks(every),
        *difference_notes(records, NAME),
        *settings_note(records, NAME),
        *time_note(every),
    )
    columns = ("", "EMA", "BELAY", "BELAY ÷ EMA")
    return Plate("readings-table", "What trains at the paper's rate", caption, Table(columns, rows), notes)


def _compare(study: StudyResults) -> Comparison:
    return study.compare(BELAY, study.ema, PAPER_LR)


def _cells(study: StudyResults) -> tuple[str, str, str]:
    """Return the losses of EMA and BELAY, and their ratio."""
    ema, belay = (mean_cell(study.valid_losses(arm, PAPER_LR).values(), "#.3g") for arm in (study.ema, BELAY))
    return ema, belay, _compare(study).describe(BELAY, study.ema)
