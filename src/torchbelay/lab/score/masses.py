"""The appendix's figure of BELAY's mass m1: train and test loss over iterations, with EMA as the limit m1 → ∞."""

from collections.abc import Sequence
from typing import Any

from torchbelay.lab.arms import BELAY, EMA, EQUAL
from torchbelay.lab.part import Plate, Record
from torchbelay.lab.report import style
from torchbelay.lab.report.words import listed

from .analysis import HEAVIER, StudyResults
from .captions import describe_networks
from .figures import draw_training
from .studies import MNIST_EMA

ARMS = (EMA, BELAY, *HEAVIER)


def masses_plate(records: Sequence[Record], part: str, name: str) -> Plate | None:
    """Return the figure for a study that has the appendix's masses; None if no such run is there.

    If the paper's EMA was not run, the EMA with BELAY's memory takes its place.
    """
    arms = ARMS if EMA in StudyResults(records, name).arms else (EQUAL, *ARMS[1:])
    study = StudyResults(records, name, arms)
    lrs = [lr for lr in study.lrs if any(study.runs_at(arm, lr) for arm in HEAVIER)]
    drawn = [lr for lr in lrs if any(study.lost_count(arm, lr) < len(study.runs_at(arm, lr)) for arm in study.arms)]
    if not lrs:
        return None
    shown = drawn or lrs[:1]
    fig = style.figure(9.0, 0.6 + 3.4 * len(shown))
    axes: Any = fig.subplots(len(shown), 2, squeeze=False, sharex=True)
    for row, lr in zip(axes, shown, strict=True):
        for ax, images in zip(row, ("train", "test"), strict=True):
            draw_training(ax, study, lr, images=images)
            ax.set(title=f"{images} loss, learning rate {lr:g}")
        row[0].set_ylabel("loss, mean over pixels")
    for ax in axes[-1]:
        ax.set_xlabel("iteration")
    axes[0, 0].legend(fontsize=8)
    ratios = {
        (arm, lr): study.compare(arm, study.ema, lr).describe(arm, study.ema)
        for lr in drawn
        for arm in study.arms
        if arm != study.ema and study.compare(arm, study.ema, lr).seeds
    }
    every = "; ".join(f"at {lr:g} {arm} ÷ {study.ema} {text}" for (arm, lr), text in ratios.items())
    all_lost = listed([f"{lr:g}" for lr in lrs if lr not in drawn])
    heaviest = [f"At {lr:g} {arm} ÷ {study.ema} is {ratios[arm, lr]}" for arm, lr in ratios if arm == HEAVIER[-1]]
    shows = "Train and test loss over iterations for masses m1 of BELAY: the heavier the model, the less it is pulled"
    if study.ema == EMA:
        caption = f"{shows}, and EMA is the limit.{f' {heaviest[0]}.' if heaviest else ''}"
    else:  # it averages over fewer steps than the limit does
        caption = (
            f"{shows}. The limit, an EMA of decay {MNIST_EMA.decay:g}, was not run here: {study.ema} stands beside."
        )
    notes = (
        "BELAY without a number has the paper's m1 of 2e3. Bold: the median of the average w2 over the seeds, which "
        "are the thin lines; dotted: the median of the weights w1.",
        *([f"Test loss of w2 at the end: {every}."] if every else []),
        *([f"At {all_lost} every run of every arm is lost."] if all_lost else []),
        describe_networks(study),
    )
    return Plate(f"{part}-m1", "Appendix: BELAY's mass m1", caption, fig, notes)
