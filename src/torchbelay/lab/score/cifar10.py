"""The appendix's table on CIFAR-10: a small EDM score model, trained for minutes instead of days.

BELAY's masses are scaled to the length of the run, as the paper's own rule for k has it. Beside EMA and BELAY stands
the EMA that is matched to BELAY, and what looked promising elsewhere.
"""

from collections.abc import Sequence
from typing import Any

from torchbelay.lab.arms import BELAY, EMA, MATCHED
from torchbelay.lab.part import Plate, Record, Settings, Tick
from torchbelay.lab.report import style
from torchbelay.lab.statistics import MARGIN

from . import run as studied
from .analysis import FID_MARGIN, Comparison, Study, compare, fids, middle
from .figures import LEFT_OUT, PAIRED, about, colour, differs, lost, over_training, pair, ratio_axis, settings, times
from .tables import fid_checks, printed, result, results, samples, sampling, speed

NAME = "cifar10"
TITLE = "CIFAR-10: BELAY and EMA on EDM"

PAPER = {BELAY: ("0.176", "0.170", "1.99"), EMA: ("0.175", "0.168", "1.98")}  # train, test, FID
PAPER_WEIGHTS = 55.7e6  # of EDM's network for CIFAR-10


def plan(settings: Settings) -> tuple[int, str]:
    """How much work there is, and what it is."""
    return studied.plan(NAME, settings)


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Train and measure, or, where that cannot be done, the records that come with the package."""
    return studied.run(NAME, settings, tick)


def draw(records: Sequence[Record]) -> list[Plate]:
    """What there are records of."""
    study = Study(records, NAME)
    with style.house():
        found = [_curves(records, study), _pairs(records, study), _table(records, study)] if study else []
        found += [samples(records, NAME, "Samples"), speed(records, NAME)]
        return [plate for plate in found if plate is not None]


# Loss over images -----------------------------------------------------------------------------------------------------


def _curves(records: Sequence[Record], study: Study) -> Plate:
    fig = style.figure(9.0, 0.6 + 3.4 * len(study.lrs))
    axes: Any = fig.subplots(len(study.lrs), 2, squeeze=False, sharex=True)
    for (ax, beside), lr in zip(axes, study.lrs, strict=True):
        over_training(ax, study, lr, x_for_a_step=study.runs[0]["batch"] / 1e3)
        for arm in study.arms:
            if arm != EMA and study.at(EMA, lr):
                _beside(beside, study, arm, lr)
        ax.set(ylabel="test loss", title=f"learning rate {lr:g}")
        ax.legend(fontsize=8)
        beside.axhspan(1 / MARGIN, MARGIN, color="#e9e9e9", zorder=0)
        beside.axhline(1, color=colour(EMA), linewidth=1.6)
        beside.set(title="the average, over EMA's at the same time", ylabel="ratio of test losses")
    for ax in axes[-1]:
        ax.set(xlabel="training images, thousands", xlim=(0, None))
    caption = (
        "Left: the test loss as training goes on: the median over the seeds of the average w2 (bold, over the hairs of "
        "the seeds) and of the weights w1 (dotted). Right: the average's loss over that of EMA at the same time, seed "
        f"by seed: median, and band from the best to the worst; grey: within {MARGIN - 1:.0%}. {lost(study)}"
    )
    notes = (about(study), *settings(records, NAME))
    return Plate("cifar10-curves", "Loss over training", caption, fig, notes)


def _beside(ax: Any, study: Study, arm: str, lr: float) -> None:
    """The ratio to EMA as training goes on, over the seeds that both have."""
    ones, others = study.at(arm, lr), study.at(EMA, lr)
    found: dict[float, list[float]] = {}
    for seed in {*ones} & {*others}:
        for one, other in zip(ones[seed]["curve"], others[seed]["curve"], strict=False):  # the shorter one decides
            if one["w2"]["test"] is not None and other["w2"]["test"] is not None:
                images = one["step"] * ones[seed]["batch"] / 1e3
                found.setdefault(images, []).append(one["w2"]["test"] / other["w2"]["test"])
    x = sorted(found)
    ax.fill_between(
        x, [min(found[i]) for i in x], [max(found[i]) for i in x], color=colour(arm), alpha=0.13, linewidth=0
    )
    ax.plot(x, [middle(found[i]) for i in x], color=colour(arm), linewidth=1.9)


# Paired differences ---------------------------------------------------------------------------------------------------


def _pairs(records: Sequence[Record], study: Study) -> Plate | None:
    keys = [(BELAY, EMA), (BELAY, MATCHED), (MATCHED, EMA)]
    keys += [(arm, EMA) for arm in study.arms if arm not in (EMA, MATCHED, BELAY)]
    rows = [(key, lr) for lr in study.lrs for key in keys if all(study.at(arm, lr) for arm in key)]
    if not rows:
        return None
    losses = {(key, lr): study.compare(*key, lr) for key, lr in rows}
    drawn = {
        (key, lr): compare(fids(records, study, key[0], lr), fids(records, study, key[1], lr), FID_MARGIN)
        for key, lr in rows
    }
    fig = style.figure(9.0, 3.9)
    axes: Any = fig.subplots(1, 2, squeeze=False)
    names = [
        f"{a}\n÷ {b}".replace("matched ", "matched\n") + (f"\n{lr:g}" if len(study.lrs) > 1 else "")
        for (a, b), lr in rows
    ]
    for ax, found, title in zip(axes[0], (losses, drawn), ("test loss of w2", "FID of w2"), strict=True):
        margin = MARGIN if found is losses else FID_MARGIN
        ratio_axis(ax, list(found.values()), margin)
        for x, (key, lr) in enumerate(rows):
            if found is losses:
                pair(ax, x, key, study.kept(key[0], lr), study.kept(key[1], lr))
            else:
                pair(ax, x, key, fids(records, study, key[0], lr), fids(records, study, key[1], lr))
        ax.set_xticks(range(len(rows)), names, fontsize=8)
        ax.set(title=title, xlim=(-0.6, len(rows) - 0.4))
        if not any(each.seeds for each in found.values()):
            ax.annotate("not run", (0.5, 0.5), xycoords="axes fraction", ha="center", va="center", color="#555555")
    axes[0, 0].set_ylabel("ratio")
    ratios = f"Test loss: {_told(losses)}." + (f" Ratios of FID: {said}." if (said := _told(drawn)) else "")
    caption = f"{ratios} {sampling(records, NAME)}"
    notes = (
        *_other_sign(losses, drawn),
        f"{PAIRED} (of FID {FID_MARGIN - 1:.0%}); a hollow mark is one seed.",
        *([LEFT_OUT] if any(found.unpaired for found in losses.values()) else ()),
    )
    return Plate("cifar10-pairs", "BELAY against its controls, seed by seed", caption, fig, notes)


Pairs = dict[tuple[tuple[str, str], float], Comparison]


def _told(pairs: Pairs) -> str:
    """The ratios of what was run."""
    known = [(one, other, found) for ((one, other), _), found in pairs.items() if found.seeds]
    return "; ".join(f"{one} ÷ {other} {found.said(one, other)}" for one, other, found in known)


def _other_sign(losses: Pairs, drawn: Pairs) -> tuple[str, ...]:
    """What became of each θ that was tried, as notes."""
    return tuple(
        f"The sign of the spring: at {lr:g} {one} has {found.size} times EMA's test loss"
        + (f" and {fid} times its FID." if (fid := drawn[(one, other), lr].size) else "; its FID has not been run.")
        for ((one, other), lr), found in losses.items()
        if one.startswith("θ") and found.size
    )


# The table ------------------------------------------------------------------------------------------------------------


def _table(records: Sequence[Record], study: Study) -> Plate:
    rows = [printed(arm, *PAPER[arm]) for arm in (BELAY, EMA)]
    rows += [result(records, study, arm, lr) for arm in study.arms for lr in study.rates(arm)]
    larger = PAPER_WEIGHTS / max(run["parameters"] for run in study.runs)
    caption = (
        "Mean ± standard deviation over the seeds that are not lost. w2 is the average, w1 are the weights. "
        f"{sampling(records, NAME)} The paper's are of a network {larger:.2g} times as large, trained for days: only "
        "the differences between arms can be compared with its own."
    )
    notes = (about(study), *differs(records, NAME), *times(study), *fid_checks(records))
    title = "The appendix's table: losses and FID beside the paper's"
    return Plate("cifar10-table", title, caption, results(rows), notes)
