"""The figures and tables of the language model."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from torchbelay.lab.answer import Answer
from torchbelay.lab.hypotheses import GPA, hypotheses_plate
from torchbelay.lab.part import Plate, Record, Table
from torchbelay.lab.records import select
from torchbelay.lab.report import style
from torchbelay.lab.report.words import listed
from torchbelay.lab.statistics import CONFIDENCE, ratio

from . import curvature
from .analysis import NEAR, Runs, format_ratio, judged, ratio_of
from .arms import ARMS, CONSTANT, COSINE, QUARTER, WATCHING, Arm
from .effects import effects_plate
from .labels import colour, mean, title

CHOSEN = "Rate chosen on the text for tuning"
DOTTED = " Dotted: the first seed for tuning of arms that are not judged at every rate."


def draw(records: Sequence[Record]) -> list[Plate]:
    """Return the plates."""
    (about,) = select(records, "protocol")
    runs = Runs(records)
    found = (
        _curves(runs, about),
        curvature.during_plate(runs, about),
        curvature.floor_plate(runs, about),
        _arms(runs, about),
        effects_plate(runs, about),
        _hypotheses(runs),
    )
    return [plate for plate in found if plate is not None]


def _curves(runs: Runs, about: Record) -> Plate:
    fig = style.figure(9.0, 4.2)
    left, right = fig.subplots(1, 2)
    known = [r["losses"]["w2"] for r in runs.judging if r["losses"]["w2"] is not None]
    sparse = [name for name in runs.arms if not runs.is_judged_everywhere(name)]
    for name in runs.arms:
        _draw_curve(left, runs, ARMS[name])
        if name in sparse:
            _draw_tuning(left, runs, ARMS[name])
    left.set(ylabel="loss of the average, nats per byte")
    if known:
        left.set_ylim(0.99 * min(known), 1.2 * min(known))
        left.legend(fontsize=7)
    left.set_title("Test loss, on text that no rate was chosen on")
    curvature.draw_ends(right, runs, about)
    right.set_title("Curvature at the end, times the rate")
    for ax in (left, right):
        ax.set(xscale="log", xlabel="learning rate")
        ax.minorticks_off()
        ax.set_xticks(runs.lrs, [f"{lr:g}" for lr in runs.lrs])
    excess, above = curvature.limit_words(runs, about)
    notes = (
        f"Left: a line joins the means over seeds; bars are {CONFIDENCE:.0%} intervals of the mean's ratio to the best "
        f"loss of all, and a rate at which a seed is lost has no point.{DOTTED if sparse else ''}",
        "Right: the learning rate times the eigenvalue of largest size of the Hessian in the units of Adam's steps. "
        "Dotted: the limits that the theorem on inner momentum gives each θ on a quadratic.",
        curvature.measured_words(runs, about),
        curvature.floor_words(runs, about),
        *above,
        *curvature.end_notes(runs, about),
        GPA,
        *_at_largest(runs),
        *_words(about),
    )
    caption = (
        "Loss of the average over the learning rate (left), and the curvature at the end beside the limits of a "
        f"quadratic (right){excess}. {_range_words(runs)}"
    )
    return Plate("gpt-rates", "Which spring bears the widest range of learning rates?", caption, fig, notes)


def _draw_curve(ax: Any, runs: Runs, arm: Arm) -> None:
    points = []
    for lr in runs.lrs:
        losses = [*runs.losses(arm.name, lr).values()]
        known = [loss for loss in losses if loss is not None]
        if known and len(known) == len(losses):
            centre = sum(known) / len(known)
            spread = ratio(known, [centre] * len(known))
            reach = (
                (centre - centre * spread.low / spread.mean, centre * spread.high / spread.mean - centre)
                if spread
                else (0.0, 0.0)
            )
            points.append((lr, centre, *reach))
    if points:
        x, y, low, high = zip(*points, strict=True)
        quarter = arm is QUARTER  # its colour is near that of θ = −0.5
        ax.errorbar(
            x,
            y,
            (low, high),
            color=colour(arm),
            linestyle="--" if quarter else "-",
            marker="D" if quarter else "o",
            markersize=4.5 if quarter else 3,
            markerfacecolor="white" if quarter else None,
            label=title(arm.name),
            capsize=2,
        )


def _draw_tuning(ax: Any, runs: Runs, arm: Arm) -> None:
    """Draw the loss of the first seed for tuning over the rate, on the text for judging."""
    label = None if any(r["arm"] == arm.name for r in runs.judging) else f"{title(arm.name)}, tuning"
    found = [r for r in runs.tuning if r["arm"] == arm.name and r["fresh"] is not None]
    first = sorted((r["lr"], r["fresh"]) for r in found if r["seed"] == min(r["seed"] for r in found))
    if first:
        ax.plot(*zip(*first, strict=True), color=colour(arm), linestyle=":", linewidth=1, label=label)


def _at_largest(runs: Runs) -> tuple[str, ...]:
    """Return what each curve ends at, which may be far above the figure."""
    lr, words = runs.lrs[-1], []
    for arm in runs.arms:
        losses = [*runs.losses(arm, lr).values()]
        lost = sum(loss is None for loss in losses)
        if losses:
            words.append(f"{title(arm)} {mean(losses)}" + (f" ({lost} of {len(losses)} lost)" if lost else ""))
    return (f"At {lr:g}, the mean losses are: {listed(words)}.",) if words else ()


def _range_words(runs: Runs) -> str:
    """Return which hypotheses about the range of rates hold, as a sentence."""
    found = [h for h in judged(runs) if h.id.startswith("H2")]
    if any(h.answer in (Answer.OPEN, Answer.UNDECIDED) and not h.judged for h in found):
        return "Too few seeds have all their runs for a verdict."
    wider = [h.id.removeprefix("H2 ") for h in found if h.answer is Answer.HOLDS]
    if not wider:
        return f"No θ < 0 is shown to have a wider range of rates within {NEAR - 1:.0%} of its best than EMA."
    return f"The range of rates within {NEAR - 1:.0%} of the best is wider than EMA's with {listed(wider)}."


def _arms(runs: Runs, about: Record) -> Plate | None:
    columns = ("", CHOSEN, "Loss of the average", "÷ EMA, each at its chosen rate", "Loss of the weights", "Seeds lost")
    if not runs.tuned(CONSTANT.name):
        return None
    rows = []
    reference = (CONSTANT.name, runs.best_lr(CONSTANT.name))
    for arm in filter(runs.tuned, runs.arms):
        lr = runs.best_lr(arm)
        losses, own = ([*runs.losses(arm, lr, weights).values()] for weights in ("w2", "w1"))
        beside = "1" if arm == CONSTANT.name else format_ratio(ratio_of(runs, (arm, lr), reference))
        lost = f"{sum(loss is None for loss in losses)} of {len(losses)}"
        rows.append((title(arm), f"{lr:g}", mean(losses), beside, mean(own), lost))
    at = reference[1]
    others = [f"{name}: {mean([*runs.losses(CONSTANT.name, at, name).values()])}" for name in WATCHING]
    notes = (
        "The best rate of an arm is that of the lowest mean loss of its average on the seeds and the text for tuning; "
        "all other numbers are of other seeds and other text.",
        *lower_elsewhere(runs),
        *_weights_at_best(runs),
        f"Averages that only watch the run with EMA of rate {about['rate']:g}: {listed(others)}.",
        f"{GPA} θ = 0 at the same rate is the EMA that is matched to BELAY.",
        *_words(about),
    )
    caption = (
        "Each arm at the rate that tuning chose: the loss of its average and of its weights, in nats per byte. "
        f"{_lowest_words(runs)}"
    )
    return Plate("gpt-arms", "Every arm at the rate that tuning chose", caption, Table(columns, tuple(rows)), notes)


def _lowest_words(runs: Runs) -> str:
    """Return which arm's average has the lowest mean loss, and its ratio to EMA's, as a sentence."""
    best = {arm: runs.best_lr(arm) for arm in filter(runs.tuned, runs.arms)}
    losses = {arm: [*runs.losses(arm, lr).values()] for arm, lr in best.items()}
    means = {arm: fmean(found) for arm, each in losses.items() if (found := [x for x in each if x is not None])}
    if not means:
        return "No arm has a loss at its best rate yet."
    first = min(means, key=lambda arm: means[arm])
    if first == CONSTANT.name:
        return f"The lowest mean loss of an average is EMA's, {means[first]:.4f}."
    beside = format_ratio(ratio_of(runs, (first, best[first]), (CONSTANT.name, best[CONSTANT.name])))
    return f"The lowest mean loss of an average, {means[first]:.4f}, is that of {title(first)}; ÷ EMA it is {beside}."


def lower_elsewhere(runs: Runs) -> tuple[str, ...]:
    """Return which arms have a lower mean loss at another rate than at the one that was chosen, as a note."""
    words = []
    for arm in filter(runs.tuned, runs.arms):
        chosen, means = runs.best_lr(arm), _means_of_kept(runs, arm)
        best = min(means, key=means.__getitem__, default=chosen)
        if chosen in means and best != chosen:
            words.append(f"{title(arm)} at {best:g} ({means[best]:.4f})")
    if not words:
        return ()
    return (
        f"On the text for judging, these arms have a lower mean loss at another rate than the one chosen: "
        f"{listed(words)}. The choice stays: a rate chosen by the losses that judge it would look too good.",
    )


def _means_of_kept(runs: Runs, arm: str) -> dict[float, float]:
    """Return an arm's mean loss on the text for judging, at each rate at which it has all seeds and loses none."""
    losses = {lr: [*runs.losses(arm, lr).values()] for lr in runs.lrs}
    most = max(map(len, losses.values()))
    kept = {lr: [loss for loss in each if loss is not None] for lr, each in losses.items() if len(each) == most}
    return {lr: fmean(each) for lr, each in kept.items() if len(each) == most > 0}


def _weights_at_best(runs: Runs) -> tuple[str, ...]:
    """Return the loss of the cosine's weights at their own best rate: it is the usual training, without an average."""
    if not runs.tuned(COSINE.name):
        return ()
    lr = runs.best_lr(COSINE.name, "w1")
    loss = mean([*runs.losses(COSINE.name, lr, "w1").values()])
    return (f"Cosine without an average, at its own best rate {lr:g}: {loss}.",)


def _hypotheses(runs: Runs) -> Plate:
    return hypotheses_plate("gpt-hypotheses", "Does the sign matter with the controls in?", judged(runs))


def _words(about: Record) -> tuple[str, ...]:
    size = about["bytes"]
    unfinished = () if about["complete"] else ("The study is not complete: some arms lack runs.",)
    return (
        *unfinished,
        f"A GPT over bytes, {about['layers']} layers of {about['width']}, context {about['context']}, batch "
        f"{about['batch']}, {about['steps']:,} steps, the first {about['warmup']} of them warm-up, AdamW, gradients "
        "clipped at 1.",
        f"Python code of {about['packages']} packages, split by package: {size['train'] / 1e6:.1f} MB to train on, "
        f"{size['tune'] / 1e6:.1f} to tune and {size['judge'] / 1e6:.1f} to judge. SHA-256 {about['digest'][:16]}.",
        f"{about['device']}, torch {about['torch']}, {about['device_s']:,} s, {about['date']}.",
    )
