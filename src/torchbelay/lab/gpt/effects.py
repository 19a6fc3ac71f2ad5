"""BELAY against EMA on the language model, in the three ways of `score.effects`.

`centred` gives every θ the same effective rate, so the EMA of the same nominal rate is the matched EMA too: the first
two ways have the same runs. The rates of the third are chosen on the seeds and the text for tuning, as for every arm.
"""

from torchbelay.lab.arms import EQUAL
from torchbelay.lab.part import Plate, Record
from torchbelay.lab.report.words import listed
from torchbelay.lab.score.comparison import Comparison, compare
from torchbelay.lab.score.effects import RATIOS, TITLE, WAYS, Effect, effects_table, spans

from .analysis import MARGIN, Losses, Runs
from .arms import BELAY, CONSTANT

STUDY = "gpt"
QUANTITY = "test loss"


def effect(runs: Runs) -> Effect | None:
    """Return BELAY's effect on the loss of the average; None if one of the two arms was not tuned and judged."""
    if not (runs.tuned(BELAY.name) and runs.tuned(CONSTANT.name)):
        return None
    lrs = sorted({r["lr"] for r in runs.judging if r["arm"] == BELAY.name})
    shared = {lr: each for lr in lrs if (each := _compare(runs, lr, lr)).seeds}
    best = _compare(runs, runs.best_lr(BELAY.name), runs.best_lr(CONSTANT.name))
    found = Effect(STUDY, QUANTITY, EQUAL, shared, shared, best, ((), ()))
    return found if found else None


def _compare(runs: Runs, one: float, other: float) -> Comparison:
    """Compare BELAY and EMA at a rate each, over the seeds for judging that have all their runs."""
    return compare(_whole(runs, runs.losses(BELAY.name, one)), _whole(runs, runs.losses(CONSTANT.name, other)), MARGIN)


def _whole(runs: Runs, losses: Losses) -> Losses:
    return {seed: losses[seed] for seed in runs.whole_seeds() if seed in losses}


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
        "first two ways have the same runs. BELAY was judged at its own best rate alone.",
        f"The best rates, {best}, were chosen on the seeds and the text for tuning; all ratios are of other seeds and "
        "other text.",
    )
    return Plate("gpt-effects", TITLE, caption, effects_table([found], {STUDY: name(about)}), notes)


def name(about: Record) -> str:
    """Return what the study is called, with the length of its runs."""
    return f"byte-level GPT, {about['steps']:,} steps"
