"""Figure 4: loss and FID over training iterations, of BELAY and of EMA; and the appendix's masses from the same runs.

The EMA is Table 1's, with decay .999. Its controls, the equal-memory EMA and the matched EMA, are trained beside it.
"""

from collections.abc import Sequence
from typing import Any

from matplotlib.lines import Line2D

from torchbelay.lab.arms import BELAY, EMA
from torchbelay.lab.part import Plate, Record, Settings, Tick
from torchbelay.lab.report import style

from . import run as study_run
from . import studies
from .analysis import ARMS, HEAVIER, PAPER_LR, StudyResults, median_loss, select
from .captions import describe_lost_runs, describe_networks, difference_notes, settings_note, time_note
from .effects import effects_plate, fid_effect, loss_effect, sentence
from .figures import arm_colour, draw_average, draw_training, set_ticks, spaced
from .masses import masses_plate
from .mnist import PAPER
from .tables import describe_sampling, paper_row, results_row, results_table, samples_plate

NAME = "figure4"
TITLE = "Figure 4: loss and FID over iterations"
_NAMES = {EMA: "EMA, decay .999"}  # there are other EMAs in the part
DURING = "fid during training"  # the kind of a FID before the end


def plan(settings: Settings) -> tuple[int, str]:
    """Return the units of work, and one line that says what would be run."""
    return study_run.plan(NAME, settings)


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Train and measure; if that is impossible here, return the records that come with the package."""
    return study_run.run(NAME, settings, tick)


def draw(records: Sequence[Record]) -> list[Plate]:
    """Return the plates; without records there is none."""
    study = StudyResults(records, NAME, (*ARMS, *HEAVIER))
    if not study:
        return []
    with style.house():
        found = [_iterations(records), _table(records, study), effects_plate(records, NAME, {NAME: "runs"})]
        found += [masses_plate(records, NAME, NAME), samples_plate(records, NAME, "Samples")]
        return [plate for plate in found if plate is not None]


def fid_curve(records: Sequence[Record], arm: str, lr: float, weights: str = "w2") -> dict[int, list[float | None]]:
    """Return the FIDs of all seeds by step, the end included; a seed has the FIDs of all its steps or none."""
    found: dict[int, list[float | None]] = {}
    for kind in (DURING, "fid"):
        for r in select(records, kind, study=NAME, arm=arm, lr=lr, weights=weights):
            found.setdefault(int(r["step"]), []).append(r["fid"])
    return dict(sorted(found.items()))


def _iterations(records: Sequence[Record]) -> Plate:
    """Draw the paper's Figure 4: loss above, FID below."""
    study = StudyResults(records, NAME, (EMA, BELAY))
    fig = style.figure(7.5, 6.2)
    axes: Any = fig.subplots(2, len(study.lrs), squeeze=False, sharex=True)
    for (above, below), lr in zip(axes.T, study.lrs, strict=True):
        draw_training(above, study, lr)
        for arm in study.arms:
            _draw_fids(below, records, arm, lr)
        above.set_ylim(0.85 * above.get_ylim()[0])  # off the axis, where the curves end
        above.set(ylabel="test loss, mean over pixels", title=f"learning rate {lr:g}")
        _draw_end(above, study, lr)
        below.set(ylabel="FID", xlabel="iteration", yscale="log")
        set_ticks(below.yaxis, spaced(*below.get_ylim()))
        above.legend(handles=_handles(study.arms), fontsize=8, loc="upper right")
    whole = StudyResults(records, NAME)
    found = [loss_effect(whole), fid_effect(records, whole)] if BELAY in whole.arms else []
    caption = f"Test loss (above) and FID (below) over iterations, of BELAY and of Table 1's EMA.{sentence(found)}"
    notes = (
        "Bold: the average w2, the median over the seeds, which are the thin lines; dotted: the weights w1. A cross is "
        "the FID of the weights w1 at the end.",
        describe_sampling(records, NAME),
        "Every seed has random numbers of its own for its samples, the same for both arms.",
        describe_lost_runs(study),
        describe_networks(study),
        *_unfinished(records, study),
        *difference_notes(records, NAME),
        *settings_note(records, NAME),
        *time_note(study),
    )
    return Plate("figure4-iterations", "Figure 4: loss and FID over iterations", caption, fig, notes)


def _handles(arms: Sequence[str]) -> list[Line2D]:
    """Return the marks of both charts, for the legend."""
    dashed: Any = (0, (5, 2))
    return [
        *(
            Line2D([], [], color=arm_colour(arm), linewidth=2, linestyle=dashed if arm == EMA else "-", label=name)
            for arm, name in ((arm, _NAMES.get(arm, arm)) for arm in arms)
        ),
        Line2D([], [], color="#777777", linewidth=2, label="bold: median of the average w2"),
        Line2D([], [], color="#777777", linewidth=0.7, label="thin: the average of one seed"),
        Line2D([], [], color="#777777", linewidth=0.9, linestyle=":", label="median of the weights w1"),
        Line2D([], [], color="#777777", linestyle="", marker="x", label="FID of the weights w1"),
    ]


def _draw_end(ax: Any, study: StudyResults, lr: float) -> None:
    """Draw the medians of the average over the last fifth of the run once more, on an axis of their own."""
    inset = ax.inset_axes((0.36, 0.42, 0.3, 0.5))
    for arm in study.arms:
        steps, losses = study.loss_curve(arm, lr, "w2", "test")
        shown = [(x, median_loss(row)) for x, row in zip(steps, losses, strict=True) if x >= 0.8 * max(steps)]
        line = (0, (5, 2)) if arm == EMA else "-"
        inset.plot(*zip(*shown, strict=True), color=arm_colour(arm), linewidth=1.6, linestyle=line)
    inset.set_title("the average, at the end", fontsize=8)
    inset.tick_params(labelsize=7)
    inset.locator_params(nbins=4)


def _unfinished(records: Sequence[Record], study: StudyResults) -> tuple[str, ...]:
    """Return how many seeds have losses and how many have FIDs, as a note, if the part was stopped before its end."""
    if all(about.get("complete") is not False for about in select(records, "origin")):
        return ()
    planned = len(list(studies.figure4()))
    sampled = {line["seed"] for line in select(records, "fid", study=NAME)}
    return (f"The part is not complete: losses of {len(study.seeds)} of {planned} seeds, FIDs of {len(sampled)}.",)


def _draw_fids(ax: Any, records: Sequence[Record], arm: str, lr: float) -> None:
    """Draw the FID of an arm over iterations: the average as a line, the weights at the end as a cross."""
    curve, own = fid_curve(records, arm, lr), fid_curve(records, arm, lr, "w1")
    draw_average(ax, list(curve), list(curve.values()), arm, marker="o", markersize=3)
    for step, fids in own.items():
        if (middle := median_loss(fids)) is not None:
            ax.plot(step, middle, "x", color=arm_colour(arm), markersize=6)


def _table(records: Sequence[Record], study: StudyResults) -> Plate:
    """Return Table 1 with the paper's own EMA."""
    rows = [paper_row(f"{arm} at {PAPER_LR:g}", *PAPER[arm]) for arm in (BELAY, EMA)]
    rows += [results_row(records, study, arm, lr) for arm in study.arms for lr in study.rates(arm)]
    caption = (
        "Losses and FID at the end, beside Table 1's. The paper's learning rate is another, so that only the "
        "differences between arms can be compared."
    )
    notes = (
        "Cells: mean ± standard deviation over the seeds that are not lost. w2 is the average, w1 are the weights. ÷ "
        "EMA's: the ratio at the same rate, seed by seed.",
        describe_sampling(records, NAME),
    )
    return Plate("figure4-table", "Table 1 with its own EMA, decay .999", caption, results_table(rows, EMA), notes)
