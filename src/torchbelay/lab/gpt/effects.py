"""BELAY against EMA on the language model, in the three ways of `score.effects`.

`centred` gives every θ the same effective rate, so the EMA of the same nominal rate is the matched EMA too: the first
two ways have the same runs. The rates of the third are chosen on the seeds and the text for tuning, as for every arm.
"""

from torchbelay.lab.arms import EQUAL
from torchbelay.lab.part import Plate, Record
from torchbelay.lab.report.words import listed
from torchbelay.lab.score.comparison import Comparison, compare, format_ratio, geometric_mean
from torchbelay.lab.score.effects import (
    RATIOS,
    TITLE,
    WAYS,
    Effect,
    describe_left_out,
    effects_table,
    spans,
    without_lost,
)

from .analysis import MARGIN, Losses, Runs
from .arms import BELAY, CONSTANT

STUDY = "gpt"
QUANTITY = "test loss"
FAR = 2.0  # a loss is far above the best one if it is this many times as large


def effect(runs: Runs) -> Effect | None:
    """Return BELAY's effect on the loss of the average; None if one of the two arms was not tuned and judged."""
    if not (runs.tuned(BELAY.name) and runs.tuned(CONSTANT.name)):
        return None
    lrs = sorted({r["lr"] for r in runs.judging if r["arm"] == BELAY.name})
    every = {lr: each for lr in lrs if (each := _compare(runs, lr, lr)).seeds}
    shared = without_lost(every)
    left_out = [lr for lr in every if lr not in shared]
    best = _compare(runs, runs.best_lr(BELAY.name), runs.best_lr(CONSTANT.name))
    found = Effect(STUDY, QUANTITY, EQUAL, shared, shared, best, (left_out, left_out))
    return found if found else None


def _compare(runs: Runs, one: float, other: float) -> Comparison:
    """Compare BELAY and EMA at a rate each, over the seeds for judging that have all their runs."""
    return compare(_whole(runs, runs.losses(BELAY.name, one)), _whole(runs, runs.losses(CONSTANT.name, other)), MARGIN)


def _whole(runs: Runs, losses: Losses) -> Losses:
    return {seed: losses[seed] for seed in runs.whole_seeds() if seed in losses}


def explain_largest(runs: Runs) -> str:
    """Return where the largest ratio is, if both losses there are far above those at the best rates; else nothing."""
    found = effect(runs)
    shared = {} if found is None else {lr: each.point for lr, each in found.nominal.items() if each.point is not None}
    if found is None or len(shared) < 2:
        return ""
    *others, lr = sorted(shared, key=shared.__getitem__)
    for arm in (BELAY.name, CONSTANT.name):
        here, best = (geometric_mean(runs.losses(arm, rate).values()) for rate in (lr, runs.best_lr(arm)))
        if here is None or best is None or here <= FAR * best:
            return ""
    return (
        f"On the GPT the largest ratio is {found.nominal[lr].size} at {lr:g}, where both losses are more than {FAR:g} "
        f"times those at the best rates. At other rates it is at most {format_ratio(shared[others[-1]])}."
    )


def effects_plate(runs: Runs, about: Record) -> Plate | None:
    """Return the table of effects; None without runs of BELAY."""
    found = effect(runs)
    if found is None:
        return None
    caption = (
        f"BELAY's loss over EMA's: at {WAYS[0]}, at {WAYS[1]} and at {WAYS[2]}. On {found.seeds} seeds it is "
        f"{listed(spans([found]))}."
    )
    best = f"{runs.best_lr(BELAY.name):g} (BELAY) and {runs.best_lr(CONSTANT.name):g} (EMA)"
    notes = (
        f"{RATIOS}. BELAY has θ = {BELAY.theta:+g}; both average at rate {about['rate']:g}.",
        "Every θ has the same effective rate here, so the EMA at the same nominal rate is the matched EMA too, and the "
        "first two ways have the same runs.",
        describe_left_out([found], {STUDY: name(about)}),
        *filter(None, [explain_largest(runs)]),
        f"The best rates, {best}, were chosen on the seeds and the text for tuning; all ratios are of other seeds and "
        "other text.",
    )
    return Plate("gpt-effects", TITLE, caption, effects_table([found], {STUDY: name(about)}), notes)


def name(about: Record) -> str:
    """Return what the study is called, with the length of its runs."""
    return f"byte-level GPT, {about['steps']:,} steps"
