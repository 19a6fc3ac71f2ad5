"""The sentences that captions and notes of the score models share. All numbers come from records."""

import math
from collections.abc import Collection, Iterable, Sequence

from torchbelay.lab.hypotheses import GPA
from torchbelay.lab.part import Record
from torchbelay.lab.report.words import listed
from torchbelay.lab.statistics import CONFIDENCE, MARGIN, Range

from .analysis import FAILED, StudyResults, is_lost, select

PAIRED = (
    f"Ratios are taken seed by seed (dots); shown are their geometric mean and its {CONFIDENCE:.0%} t-interval. "
    f"Below 1 the arm named first is better. Grey: within {MARGIN - 1:.0%}"
)
LEFT_OUT = "A pair with a lost run has no ratio; a number beside a point says how many pairs have one."
MODELS = {"ncsnv2": "NCSNv2", "edm": "EDM"}
_ELSEWHERE = ("kind", "study", "differs", "dataset", "model", "steps", "batch")  # fields that other notes show


def describe_networks(study: StudyResults) -> str:
    """Return the networks of a study and the length of training, as a sentence."""

    def values(key: str) -> str:
        return listed([f"{value:,}" for value in sorted({run[key] for run in study.runs})])

    models = listed([MODELS.get(name, name) for name in sorted({str(run["model"]) for run in study.runs})])
    count = len(study.seeds)
    seeds = f"{count} seeds, each with the same start, batches and noise for every arm" if count > 1 else "one seed"
    return (
        f"{models} with {values('parameters')} weights, {values('steps')} steps of Adam on batches of "
        f"{values('batch')}; {seeds}; losses at the end, on fixed images and noise."
    )


def describe_lost_runs(study: StudyResults) -> str:
    """Return how many runs are lost and what "lost" means, as a sentence."""
    count = sum(is_lost(run["final"].get("w2", {}).get("test")) for run in study.runs)
    if not count:
        return "No run is lost."
    below, above = study.loss_gap()
    ends = [f"runs that work end below {_round_up(below)}"] if below is not None else []
    ends += [f"collapsed runs end above {_round_down(above)}"] if above is not None else []
    between = f"; {listed(ends)}" if ends else ""
    return (
        f"{count} of {len(study.runs)} runs are lost: their test loss is above {FAILED:g}, half of that of predicting "
        f"zero, or not finite{between}."
    )


def _round_up(value: float) -> str:
    """Return a value with two decimals, never below it.

    >>> _round_up(0.1864), _round_down(0.6239)
    ('0.19', '0.62')
    """
    return f"{math.ceil(value * 100 - 1e-9) / 100:g}"


def _round_down(value: float) -> str:
    """Return a value with two decimals, never above it."""
    return f"{math.floor(value * 100 + 1e-9) / 100:g}"


def format_range(found: Range | None) -> str:
    """Return the width and the ends of a range of rates; ≥ if it may extend beyond the rates that were tried."""
    if found is None:
        return "none"
    sign = "≥" if found.open_low or found.open_high else ""
    return f"{sign}{found.width:.3g}× ({found.low:.2g} to {found.high:.2g})"


def settings_note(records: Sequence[Record], study: str) -> tuple[str, ...]:
    """Return the numbers of a study's protocols as a note; nothing if there is no protocol.

    If a number differs between the protocols of the study, all its values are listed.
    """
    values: dict[str, dict[str, None]] = {}  # the texts of each key, in the order of the records
    for record in select(records, "protocol", study=study):
        for key, value in record.items():
            if key not in _ELSEWHERE and isinstance(value, int | float | str):
                values.setdefault(key, {})[_format_setting(value)] = None
    texts = [f"{key.replace('_', ' ')} {listed([*found])}" for key, found in values.items()]
    return (f"Settings: {', '.join(texts)}.",) if texts else ()


def _format_setting(value: float | str) -> str:
    """Return a number with four digits and a typographic minus, or a text as it is.

    >>> _format_setting(-1.2), _format_setting(1.1142945e-05), _format_setting("pixel_mean")
    ('−1.2', '1.114e-05', 'pixel_mean')
    """
    return value if isinstance(value, str) else f"{'−' * (value < 0)}{abs(value):.4g}"


def difference_notes(records: Sequence[Record], study: str) -> tuple[str, ...]:
    """Return how a study differs from the paper's setting and what was special in its runs, each sentence once.

    `time_note` covers a shared GPU.
    """
    protocols = select(records, "protocol", study=study)
    notes = [note for field in ("differs", "remarks") for r in protocols for note in r.get(field, ())]
    return tuple(dict.fromkeys(note for note in notes if "shared_gpu" not in note))


def sign_note(arms: Iterable[str]) -> tuple[str, ...]:
    """Return what a repelling spring is called, as a note; nothing if no arm has one.

    >>> sign_note(["EMA", "θ −0.5"])
    ('θ < 0 is Generalized Primal Averaging, and schedule-free its case c = 1/t.',)
    >>> sign_note(["EMA", "θ +0.25"])
    ()
    """
    return (GPA,) if any(arm.startswith("θ −") for arm in arms) else ()


def time_note(study: StudyResults) -> tuple[str, ...]:
    """Return how long a run took, as a note. Runs that shared the GPU are listed apart; stopped runs are left out."""
    groups: dict[tuple[bool, int], set[float]] = {}
    for run in study.runs:
        if "wall_s" in run and run.get("steps_taken", run["steps"]) == run["steps"]:
            groups.setdefault((bool(run.get("shared_gpu")), run["side_by_side"]), set()).add(float(run["wall_s"]))
    texts = [
        f"{_span(seconds)} with {count} side by side"
        + (", while other work used the GPU too: not to be compared" if shared else "")
        for (shared, count), seconds in sorted(groups.items())
    ]
    rule = "its share, by steps, of the time of its group"
    return (f"Time per run ({rule}): {'; '.join(texts)}.",) if texts else ()


def _span(seconds: Collection[float]) -> str:
    """Return the least and the largest of some times.

    >>> _span([12.04, 5.6]), _span([11.5])
    ('5.6 to 12 s', '11.5 s')
    """
    low, high = f"{min(seconds):.3g}", f"{max(seconds):.3g}"
    return f"{low} s" if low == high else f"{low} to {high} s"
