"""The appendix's table on CIFAR-10: a small EDM score model, trained for minutes instead of days.

BELAY's masses are scaled to the length of the run by the paper's rule for k. The controls are EMA, the matched EMA and
θ = −0.5, which did well on MNIST: Generalized Primal Averaging, as every θ < 0.
"""

from collections.abc import Sequence
from typing import Any

from torchbelay.lab.arms import BELAY, EMA, MATCHED, in_words
from torchbelay.lab.part import Plate, Record, Settings, Tick
from torchbelay.lab.report import style
from torchbelay.lab.statistics import MARGIN

from . import run as study_run
from .analysis import ARMS, FID_MARGIN, StudyResults, compare_fids, fid_noise, fids, median_loss
from .captions import (
    LEFT_OUT,
    PAIRED,
    describe_lost_runs,
    describe_networks,
    difference_notes,
    settings_note,
    sign_note,
    time_note,
)
from .comparison import Comparison
from .effects import effects_plate, fid_effect, loss_effect, sentence
from .figures import arm_colour, draw_ratio, draw_training, set_ratio_axis
from .tables import (
    describe_sampling,
    fid_check_notes,
    paper_row,
    results_row,
    results_table,
    samples_plate,
    speed_plate,
)

NAME = "cifar10"
TITLE = "CIFAR-10: BELAY and EMA on EDM"

PAPER = {BELAY: ("0.176", "0.170", "1.99"), EMA: ("0.175", "0.168", "1.98")}  # train, test, FID
PAPER_WEIGHTS = 55.7e6  # of EDM's network for CIFAR-10


def plan(settings: Settings) -> tuple[int, str]:
    """Return the units of work, and one line that says what would be run."""
    return study_run.plan(NAME, settings)


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Train and measure; if that is impossible here, return the records that come with the package."""
    return study_run.run(NAME, settings, tick)


def draw(records: Sequence[Record]) -> list[Plate]:
    """Return the plates; a study without records has none."""
    study = StudyResults(records, NAME)
    with style.house():
        found = [_curves(records, study), _pairs(records, study), _table(records, study)] if study else []
        found += [effects_plate(records, NAME, {NAME: "short runs"})]
        found += [samples_plate(records, NAME, "Samples"), speed_plate(records, NAME)]
        return [plate for plate in found if plate is not None]


# Loss over images -----------------------------------------------------------------------------------------------------


def _curves(records: Sequence[Record], study: StudyResults) -> Plate:
    fig = style.figure(9.0, 0.6 + 3.4 * len(study.lrs))
    axes: Any = fig.subplots(len(study.lrs), 2, squeeze=False, sharex=True)
    for (ax, beside), lr in zip(axes, study.lrs, strict=True):
        draw_training(ax, study, lr, x_per_step=study.runs[0]["batch"] / 1e3)
        for arm in study.arms:
            if arm != study.ema and study.runs_at(study.ema, lr):
                _draw_ratio_to_ema(beside, study, arm, lr)
        ax.set(ylabel="test loss", title=f"learning rate {lr:g}")
        ax.legend(fontsize=8)
        beside.axhspan(1 / MARGIN, MARGIN, color="#e9e9e9", zorder=0)
        beside.axhline(1, color=arm_colour(study.ema), linewidth=1.6)
        beside.set(title=f"the average ÷ {in_words(study.ema)}'s", ylabel="ratio of test losses")
    for ax in axes[-1]:
        ax.set(xlabel="training images, thousands", xlim=(0, None))
    end = sentence([loss_effect(study)]) if BELAY in study.arms else ""
    caption = (
        "Test loss during training (left; the average w2 bold, the weights w1 dotted), and the average's loss "
        f"over {in_words(study.ema)}'s at the same time (right).{end}"
    )
    notes = (
        "Left: medians over the seeds; thin lines are the seeds. Right: ratios seed by seed; the line is their median, "
        f"the band goes from the best to the worst seed. Grey: within {MARGIN - 1:.0%}.",
        describe_lost_runs(study),
        describe_networks(study),
        *sign_note(study.arms),
        *settings_note(records, NAME),
    )
    return Plate("cifar10-curves", "Loss over training", caption, fig, notes)


def _draw_ratio_to_ema(ax: Any, study: StudyResults, arm: str, lr: float) -> None:
    """Draw the ratio to EMA during training, over the seeds that both have."""
    ones, others = study.runs_at(arm, lr), study.runs_at(study.ema, lr)
    found: dict[float, list[float]] = {}
    for seed in {*ones} & {*others}:
        for one, other in zip(
            ones[seed]["curve"], others[seed]["curve"], strict=False
        ):  # up to the end of the shorter curve
            if one["w2"]["test"] is not None and other["w2"]["test"] is not None:
                images = one["step"] * ones[seed]["batch"] / 1e3
                found.setdefault(images, []).append(one["w2"]["test"] / other["w2"]["test"])
    x = sorted(found)
    ax.fill_between(
        x, [min(found[i]) for i in x], [max(found[i]) for i in x], color=arm_colour(arm), alpha=0.13, linewidth=0
    )
    ax.plot(x, [median_loss(found[i]) for i in x], color=arm_colour(arm), linewidth=1.9)


# Paired differences ---------------------------------------------------------------------------------------------------


def _pairs(records: Sequence[Record], study: StudyResults) -> Plate | None:
    keys = [(BELAY, study.ema), (BELAY, MATCHED), (MATCHED, study.ema)]
    keys += [(arm, study.ema) for arm in study.arms if arm not in ARMS]
    rows = [(key, lr) for lr in study.lrs for key in keys if all(study.runs_at(arm, lr) for arm in key)]
    if not rows:
        return None
    losses = {(key, lr): study.compare(*key, lr) for key, lr in rows}
    drawn = {(key, lr): compare_fids(records, study, *key, lr) for key, lr in rows}
    fig = style.figure(9.0, 3.9)
    axes: Any = fig.subplots(1, 2, squeeze=False)
    names = [
        f"{a}\n÷ {b}".replace("matched ", "matched\n").replace("-memory", "-\nmemory")
        + (f"\n{lr:g}" if len(study.lrs) > 1 else "")
        for (a, b), lr in rows
    ]
    for ax, found, title in zip(axes[0], (losses, drawn), ("test loss of w2", "FID of w2"), strict=True):
        margin = MARGIN if found is losses else FID_MARGIN
        set_ratio_axis(ax, list(found.values()), margin)
        for x, (key, lr) in enumerate(rows):
            if found is losses:
                draw_ratio(ax, x, key, study.valid_losses(key[0], lr), study.valid_losses(key[1], lr))
            else:
                ones, others = (fids(records, study, arm, lr) for arm in key)
                draw_ratio(ax, x, key, ones, others, fid_noise(records, study))
        ax.set_xticks(range(len(rows)), names, fontsize=8)
        ax.set(title=title, xlim=(-0.6, len(rows) - 0.4))
        if not any(each.seeds for each in found.values()):
            ax.annotate("not run", (0.5, 0.5), xycoords="axes fraction", ha="center", va="center", color="#555555")
    axes[0, 0].set_ylabel("ratio")
    ways = sentence([loss_effect(study), fid_effect(records, study)]) if BELAY in study.arms else ""
    caption = (
        f"Ratios of test loss (left) and of FID (right) between arms: below 1 the arm named first is better.{ways}"
    )
    notes = (
        f"Ratios of test loss: {_ratio_texts(losses)}.",
        *([f"Ratios of FID: {texts}."] if (texts := _ratio_texts(drawn)) else []),
        describe_sampling(records, NAME),
        *_sign_notes(losses, drawn),
        f"{PAIRED} (for FID {FID_MARGIN - 1:.0%}). A hollow mark is one seed.",
        *([LEFT_OUT] if any(found.unpaired for found in losses.values()) else ()),
    )
    return Plate("cifar10-pairs", "BELAY against its controls, seed by seed", caption, fig, notes)


Pairs = dict[tuple[tuple[str, str], float], Comparison]


def _ratio_texts(pairs: Pairs) -> str:
    """Return the ratios of all pairs that were run, as a list."""
    known = [(one, other, found) for ((one, other), _), found in pairs.items() if found.seeds]
    return "; ".join(f"{one} ÷ {other} {found.describe(one, other)}" for one, other, found in known)


def _sign_notes(losses: Pairs, drawn: Pairs) -> tuple[str, ...]:
    """Return a note per θ: its test loss and FID over those of the study's EMA."""
    return tuple(
        f"The sign of the spring: at {lr:g} {one} (Generalized Primal Averaging) has {found.size} times "
        f"{in_words(other)}'s test loss"
        + (f" and {fid} times its FID." if (fid := drawn[(one, other), lr].size) else "; its FID has not been run.")
        for ((one, other), lr), found in losses.items()
        if one.startswith("θ") and found.size
    )


# The table ------------------------------------------------------------------------------------------------------------


def _table(records: Sequence[Record], study: StudyResults) -> Plate:
    rows = [paper_row(arm, *PAPER[arm]) for arm in (BELAY, EMA)]
    rows += [results_row(records, study, arm, lr) for arm in study.arms for lr in study.rates(arm)]
    larger = PAPER_WEIGHTS / max(run["parameters"] for run in study.runs)
    caption = (
        "Losses and FID beside the paper's: mean ± standard deviation over the seeds that are not lost. The paper's "
        f"network is {larger:.2g} times as large and was trained for days: compare only the differences between arms."
    )
    notes = (
        f"w2 is the average, w1 are the weights; ÷ {study.ema}'s: the ratio, seed by seed. "
        f"{describe_sampling(records, NAME)}",
        describe_networks(study),
        *sign_note(study.arms),
        *difference_notes(records, NAME),
        *time_note(study),
        *fid_check_notes(records),
    )
    title = "The appendix's table: losses and FID beside the paper's"
    return Plate("cifar10-table", title, caption, results_table(rows, study.ema), notes)
