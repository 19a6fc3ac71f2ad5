"""The part `warmup`: does θ < 0 still bear a rate at which EMA is lost, if the learning rate is warmed up?

EDM on MNIST, θ = 0 (EMA) and θ = −0.5 (Generalized Primal Averaging), with a cold start and with warm-up. H1 of
`claims/study.md` says that warm-up removes EMA's losses.
"""

from collections.abc import Iterable, Sequence

from torchbelay.lab.hypotheses import Hypothesis, hypotheses_plate, judge
from torchbelay.lab.part import Plate, Record, Settings, Table, Tick
from torchbelay.lab.statistics import mcnemar

from . import run as study_run
from .analysis import Losses, StudyResults, select
from .studies import LOSING_RATE, coupled

NAME = "warmup"
TITLE = "The sign of the spring on MNIST, with warm-up"

LEAST = 5  # seeds: with fewer, losses against none show nothing
ZERO, NEGATIVE = (coupled(theta).name for theta in (0.0, -0.5))


def plan(settings: Settings) -> tuple[int, str]:
    """Return the units of work, and one line that says what would be run."""
    return study_run.plan(NAME, settings)


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Train and measure; if that is impossible here, return the records that come with the package."""
    return study_run.run(NAME, settings, tick)


def draw(records: Sequence[Record]) -> list[Plate]:
    """Return the tables; none without runs."""
    if not select(records, "run", study=NAME):
        return []
    title = "Does warm-up remove EMA's losses?"
    return [_table(records), hypotheses_plate("warmup-hypotheses", title, judge(hypotheses(records)))]


def by_warm_up(records: Iterable[Record]) -> dict[int, StudyResults]:
    """Return the runs of each length of warm-up, the cold start first."""
    found: dict[int, list[Record]] = {}
    for r in select(records, "run", study=NAME):
        found.setdefault(r["warm_up"], []).append(r)
    return {steps: StudyResults(runs, NAME) for steps, runs in sorted(found.items())}


def hypotheses(records: Iterable[Record]) -> list[Hypothesis]:
    """Return H1, not yet judged."""
    groups = by_warm_up(records)
    claim = f"warm-up removes EMA's losses at {LOSING_RATE:g}"
    if len(groups) < 2:
        return [Hypothesis("H1", claim, "no seeds", least=LEAST)]
    cold, warm = (groups[steps].valid_losses(ZERO, LOSING_RATE) for steps in (min(groups), max(groups)))
    seeds = sorted({*cold} & {*warm})
    left = sum(warm[seed] is None for seed in seeds)
    removed = sum(cold[seed] is None and warm[seed] is not None for seed in seeds)
    return [
        Hypothesis(
            "H1",
            claim,
            _counts(groups),
            len(seeds),
            mcnemar(left, removed),
            mcnemar(removed, left),
            least=LEAST,
            whole=not left,
            absent=not left and not removed,
        )
    ]


def _counts(groups: dict[int, StudyResults]) -> str:
    """Return how many seeds EMA and θ = −0.5 lose, cold and warmed up, in words."""
    words = []
    for arm, name in ((ZERO, "EMA"), (NEGATIVE, "θ = −0.5")):
        counts = [_lost(each.valid_losses(arm, LOSING_RATE)) for each in groups.values()]
        words.append(f"{name} loses {counts[0]} cold and {counts[-1]} warmed up")
    return "; ".join(words)


def _lost(losses: Losses) -> str:
    return f"{sum(loss is None for loss in losses.values())} of {len(losses)}"


def _table(records: Sequence[Record]) -> Plate:
    groups = by_warm_up(records)
    rows = []
    for steps, study in groups.items():
        for lr in study.lrs:
            start = f"{steps} steps of warm-up" if steps else "cold"
            cells = [_cell(study.valid_losses(arm, lr)) for arm in (ZERO, NEGATIVE)]
            found = study.compare(NEGATIVE, ZERO, lr)
            rows.append((f"{start}, {lr:g}", f"{found.seeds}", *cells, found.describe("θ = −0.5", "EMA")))
    columns = ("", "seeds", "EMA", "θ = −0.5", "θ = −0.5 ÷ EMA")
    caption = (
        f"Test loss of the average, the mean over the seeds that are not lost. {_counts(groups)}, at {LOSING_RATE:g}."
    )
    run = select(records, "run", study=NAME)[0]
    notes = (
        f"EDM on MNIST, {run['steps']:,} steps of Adam on batches of {run['batch']}, averaging rate "
        f"{run['rate']:g}. θ = −0.5 is Generalized Primal Averaging. Rules, seeds and rates are in `claims/study.md`.",
    )
    return Plate("warmup-table", "Cold and warmed up", caption, Table(columns, tuple(rows)), notes)


def _cell(losses: Losses) -> str:
    known = [loss for loss in losses.values() if loss is not None]
    mean = f"{sum(known) / len(known):.4f}" if known else ""
    lost = f"{_lost(losses)} lost" if len(known) < len(losses) else ""
    return ", ".join(filter(None, (mean, lost))) or "not run"
