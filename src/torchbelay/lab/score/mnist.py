"""Table 1: NCSNv2 on MNIST, over learning rates and with the controls that the paper lacks.

The paper trains at one rate, 5e-2. Here BELAY, the EMA with its memory and the matched EMA are trained over a range of
rates, all on the same batches and noise, and then for longer at the best rates and at the paper's. Table 1's own EMA is
in the parts figure4 and readings.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torchbelay.lab.arms import BELAY, EMA, MATCHED, PLAIN, in_words
from torchbelay.lab.part import Plate, Record, Settings, Tick
from torchbelay.lab.report import style
from torchbelay.lab.report.words import listed

from . import effects as ways
from . import run as study_run
from .analysis import ARMS, HEAVIER, PAPER_LR, StudyResults, compare_fids, rate_difference
from .captions import (
    LEFT_OUT,
    PAIRED,
    describe_lost_runs,
    describe_networks,
    difference_notes,
    settings_note,
    time_note,
)
from .comparison import Comparison, compare
from .figures import (
    arm_colour,
    arm_marker,
    draw_curve,
    draw_median,
    draw_ratio,
    set_loss_axis,
    set_ratio_axis,
    set_ticks,
)
from .masses import masses_plate
from .tables import describe_sampling, paper_row, results_row, results_table, samples_plate, speed_plate

NAME = "mnist"
TITLE = "MNIST: BELAY and EMA on a score model"

PAPER = {BELAY: ("0.042", "0.040", "15.2"), EMA: ("0.056", "0.061", "18.1")}  # train, test, FID: Table 1 at rate 5e-2
STUDIES = {"rates": "short runs", "table1": "long runs"}
NOMINAL, EFFECTIVE = "nominal learning rate", "effective learning rate"


def plan(settings: Settings) -> tuple[int, str]:
    """Return the units of work, and one line that says what would be run."""
    return study_run.plan(NAME, settings)


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Train and measure; if that is impossible here, return the records that come with the package."""
    return study_run.run(NAME, settings, tick)


def draw(records: Sequence[Record]) -> list[Plate]:
    """Return the plates; a study without records has none."""
    with style.house():
        found = [_rates(records), ways.effects_plate(records, NAME, STUDIES), _pairs(records), _table(records)]
        found += [samples_plate(records, NAME, "Samples"), masses_plate(records, NAME, "rates")]
        return [plate for plate in [*found, speed_plate(records, NAME)] if plate is not None]


# Loss against learning rate -------------------------------------------------------------------------------------------


def _rates(records: Sequence[Record]) -> Plate | None:
    study = StudyResults(records, "rates", ARMS)
    if not study:
        return None
    fig = style.figure(9.0, 4.6)
    axes: Any = fig.subplots(1, 2, sharey=True)
    rows = [arm for each in study.arms for arm in ((PLAIN, each) if each == study.ema else (each,))]
    everything = [loss for arm in study.arms for lr in study.lrs for loss in _all_losses(study, arm, lr)]
    for ax, effective in zip(axes, (False, True), strict=True):
        axis = set_loss_axis(ax, everything, rows, (float(test) for _, test, _ in PAPER.values()))
        for arm in study.arms:
            rates = study.rates(arm)
            x = [study.effective_rate(arm, lr) for lr in rates] if effective else rates
            own, average = ([[*study.losses(arm, lr, w).values()] for lr in rates] for w in ("w1", "w2"))
            if arm == study.ema:
                look: dict[str, Any] = {"linewidth": 1.0, "marker": "s", "markersize": 3, "label": PLAIN}
                draw_curve(ax, x, own, style.PLAIN_COLOUR, axis, PLAIN, **look)
            else:
                draw_median(ax, x, own, arm_colour(arm), linewidth=0.9, linestyle=":")
            draw_curve(
                ax, x, average, arm_colour(arm), axis, arm, linewidth=2, marker=arm_marker(arm), markersize=5, label=arm
            )
        ax.set(xscale="log", xlabel=EFFECTIVE if effective else NOMINAL)
        set_ticks(ax.xaxis, study.lrs)
        ax.tick_params(axis="x", labelsize=8)
    for name, (_, test, _) in PAPER.items():
        at = (PAPER_LR, float(test))
        axes[0].plot(*at, "*", color=arm_colour(name), markersize=11, markeredgecolor="white", zorder=5)
        axes[0].annotate(
            f"paper, {name}", at, xytext=(-7, -1), textcoords="offset points", fontsize=8, ha="right", va="center"
        )
    axes[0].set_ylabel("test loss, mean over pixels")
    axes[1].legend(fontsize=8, loc="lower right", labelspacing=0.3)
    best = [f"{lr:g} ({arm})" for arm in study.arms if (lr := study.best_rate(arm)) is not None]
    caption = (
        "Test loss against the nominal learning rate (left) and the effective one (right); stars are the paper's "
        f"values at {PAPER_LR:g}. The lowest training loss is at {', '.join(best)}."
    )
    notes = (
        "Bold: the average w2; thin: the weights w1 (grey: those of EMA, which is no averaging; dotted: those of the "
        "other arms). Lines are the median over the seeds, bands go from the best to the worst seed. A cross in the "
        "strip: at least half of the seeds are lost. The effective rate is that at which the centre of mass moves.",
        describe_lost_runs(study),
        describe_networks(study),
        *(
            difference_notes(records, study.name) if StudyResults(records, "table1", ARMS) else ()
        ),  # or Table 1 has them
        *settings_note(records, study.name),
        *time_note(study),
    )
    return Plate("mnist-rates", "Loss against learning rate", caption, fig, notes)


def _all_losses(study: StudyResults, arm: str, lr: float) -> list[float | None]:
    """Return the final test losses of the average and of the weights."""
    return [*study.losses(arm, lr).values(), *study.losses(arm, lr, "w1").values()]


# Paired differences ---------------------------------------------------------------------------------------------------


def _pairs(records: Sequence[Record]) -> Plate | None:
    study = StudyResults(records, "rates", ARMS)
    pairs = ((BELAY, study.ema), (BELAY, MATCHED), (MATCHED, study.ema))
    present = [(one, other) for one, other in pairs if one in study.arms and other in study.arms]
    if not present:
        return None
    losses = {arm: study.at_best(arm) for arm in study.arms}
    best = {key: compare(losses[key[0]], losses[key[1]]) for key in present}
    along = {key: [study.compare(*key, lr) for lr in study.lrs] for key in present if key[0] == BELAY}
    fig = style.figure(9.0, 4.1)
    axes: Any = fig.subplots(1, len(along) + 1, width_ratios=[*[1.0] * len(along), 0.8], squeeze=False)
    for ax, (one, other) in zip(axes[0], along, strict=False):  # the last panel is that of the best rates
        set_ratio_axis(ax, [each for row in along.values() for each in row])
        way = ways.EFFECTIVE if other == MATCHED else ways.NOMINAL
        ax.set(xlim=(study.lrs[0] / 1.6, study.lrs[-1] * 1.6), xscale="log", xlabel=NOMINAL)
        ax.set_title(f"{way}:\n{one} ÷ {other}")
        for lr in study.lrs:
            draw_ratio(ax, lr, (one, other), study.valid_losses(one, lr), study.valid_losses(other, lr))
        set_ticks(ax.xaxis, study.lrs)
        ax.tick_params(axis="x", labelsize=7)
    last = axes[0, -1]
    set_ratio_axis(last, [*best.values()])
    for x, key in enumerate(best):
        draw_ratio(last, x, key, losses[key[0]], losses[key[1]])
    names = [f"{a}\n÷ {b}".replace("matched ", "matched\n").replace("-memory", "-\nmemory") for a, b in best]
    last.set_xticks(range(len(best)), names, fontsize=8)
    last.set(title=ways.BEST, xlim=(-0.6, len(best) - 0.4))
    axes[0, 0].set_ylabel("ratio of test losses")
    at_paper = {key: row[study.lrs.index(PAPER_LR)] for key, row in along.items() if PAPER_LR in study.lrs}
    effect = ways.loss_effect(study)
    rivals = listed([f"{in_words(each)}'s" for each in (study.ema, MATCHED, study.ema)])
    found = f" BELAY's is {listed(ways.spans([effect]))} times {rivals}." if effect else ""
    caption = (
        f"Ratios of test losses, from left to right at {ways.NOMINAL}, at {ways.EFFECTIVE} (the matched EMA) and at "
        f"{ways.BEST}.{found}"
    )
    notes = (
        f"At the paper's rate, {PAPER_LR:g}: {_ratio_texts(at_paper) or 'not run'}. At the best rates: "
        f"{_ratio_texts(best)}.",
        f"{ways.CHOICE} The matched EMA has BELAY's effective rate and averaging rate: any difference from it is due "
        "to BELAY's feedback.",
        f"{PAIRED}. {LEFT_OUT} Test losses of the average w2.",
    )
    return Plate("mnist-pairs", "BELAY against its controls, seed by seed", caption, fig, notes)


def _ratio_texts(pairs: Mapping[tuple[str, str], Comparison]) -> str:
    """Return the ratio of each pair and what was lost, as a list."""
    return "; ".join(_ratio_text(*key, found) for key, found in pairs.items())


def _ratio_text(one: str, other: str, found: Comparison) -> str:
    """Return the ratio of two arms and what they lost."""
    return f"{one} ÷ {other}{':' if found.point is None else ''} {found.describe(one, other)}"


# Table 1 --------------------------------------------------------------------------------------------------------------


def _table(records: Sequence[Record]) -> Plate | None:
    study = StudyResults(records, "table1", (*ARMS, *HEAVIER)) or StudyResults(records, "rates", ARMS)
    if not study:
        return None
    long = study.name == "table1"
    rows = [paper_row(f"{arm} at {PAPER_LR:g}", *PAPER[arm]) for arm in (BELAY, EMA)]
    for arm in study.arms:
        wanted = dict.fromkeys(study.rates(arm) if long else (study.best_rate(arm), PAPER_LR))
        rows += [results_row(records, study, arm, lr) for lr in wanted if lr is not None and study.runs_at(arm, lr)]
    fid_ratios = _fid_ratios(records, study)
    cells = (
        "Cells: mean ± standard deviation over the seeds that are not lost. w2 is the average, w1 are the weights; the "
        f"paper does not say which of them it measured. ÷ {study.ema}'s: the ratio at the same rate, seed by seed."
    )
    if long:
        title = f"Table 1: losses and FID beside the paper's, with {in_words(study.ema)}"
        fids = ways.fid_effect(records, study)
        order = f"at {ways.NOMINAL}, at {ways.EFFECTIVE} (the matched EMA) and at {ways.BEST}"
        ratios = f"BELAY's FID over the {fids.rival}'s {order}: {'; '.join(fids.cells)}."
        sampling = describe_sampling(records, study.name)
        result = ways.sentence([ways.loss_effect(study), fids]) if fids else f" {sampling}"
        caption = f"Long runs, at the short runs' best rates that lose no seed and at the paper's.{result}"
        notes: tuple[str, ...] = (cells, *_tuned_note(study))
        notes += (ratios, sampling) if fids else ()
        notes += (*_fid_note(records, study, fid_ratios), "FIDs of MNIST can be compared only within one study.")
    else:
        title = "Table 1: losses beside the paper's; the long runs with FID are still to come"
        caption = (
            "The long runs with FID have not been run yet. Until then the rows are the short runs, at each arm's best "
            "rate and at the paper's."
        )
        notes = (cells,)
    notes += (describe_networks(study), *difference_notes(records, study.name), *(time_note(study) if long else ()))
    return Plate("mnist-table1", title, caption, results_table(rows, study.ema), notes)


def _tuned_note(study: StudyResults) -> tuple[str, ...]:
    """Return a note on a heavier BELAY among the long runs."""
    tuned = [arm for arm in study.arms if arm in HEAVIER]
    return (f"{listed(tuned)} is BELAY with rate and mass tuned on the short runs.",) if tuned else ()


def _fid_ratios(records: Sequence[Record], study: StudyResults) -> dict[tuple[str, str], str]:
    """Return BELAY's FID over those of its rivals, and the tuned BELAY's over that of the study's EMA, as text."""
    pairs = [(BELAY, study.ema), (BELAY, MATCHED), *((arm, study.ema) for arm in study.arms if arm in HEAVIER)]
    every = {(a, b): compare_fids(records, study, a, b) for a, b in pairs if a in study.arms and b in study.arms}
    return {
        key: f"{_ratio_text(*key, found)}{_count_text(found.seeds, study)}"
        for key, found in every.items()
        if found.seeds
    }


def _fid_note(records: Sequence[Record], study: StudyResults, ratios: Mapping[tuple[str, str], str]) -> tuple[str, ...]:
    """Return all ratios of FID, and the rates at which the FIDs were measured, as a note."""
    why = rate_difference(records, study, study.arms)
    texts = "; ".join(ratios.values())
    every = f"FID of w2, each at its own best rate, seed by seed: {texts}.{f' {why}.' if why else ''}"
    return (every,) if ratios else ()


def _count_text(seeds: int, study: StudyResults) -> str:
    """Return how many seeds have images, if fewer than were trained."""
    return f", {seeds} of {len(study.seeds)} seeds drawn" if seeds < len(study.seeds) else ""
