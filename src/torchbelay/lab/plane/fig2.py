"""Figure 2: Rosenbrock's function at three learning rates, six methods; and many starts, which the paper lacks."""

from collections.abc import Sequence

import torch

from torchbelay.lab.arms import BELAY_SGD, CONTROLS, EMA_SGD, MATCHED_SGD, PAPER_ARMS, PAPER_SPRING, SLOW_SGD, Lane
from torchbelay.lab.part import Plate, Record, Settings, Tick
from torchbelay.lab.records import rounded, select
from torchbelay.lab.report import style
from torchbelay.lab.report.words import listed

from . import race, trajectories
from .convergence import summarize
from .functions import ROSENBROCK

NAME, TITLE = "fig2", "Figure 2: three learning rates"

RATES = (0.001, 0.01, 0.15)
GAP = 0.01  # a rate between the limits of SGD and of BELAY at the minimum
LIMIT, BELAY_LIMIT = 2 / 202, PAPER_SPRING.max_stable_lr(202)
STARTS = ((-0.2, 0.3), (0.05, 0.05))
BOXES = (0.3, 0.5, 1.0)  # half-widths
BOX = 0.5  # the box of the caption, which the claims are judged by
STEPS, COUNT = 3000, 300
_LANES = [Lane(arm, lr) for lr in RATES for arm in PAPER_ARMS]
_CURVE = [Lane(arm, 0.004 + 0.0004 * i) for arm in (EMA_SGD, BELAY_SGD, MATCHED_SGD) for i in range(22)]
_MANY = [Lane(arm, lr) for lr in RATES for arm in (*PAPER_ARMS, *CONTROLS)] + _CURVE


def _size(settings: Settings) -> tuple[int, int]:
    return (600, 40) if settings.quick else (STEPS, COUNT)


def plan(settings: Settings) -> tuple[int, str]:
    """Return the units of work, and one line that says what would run."""
    steps, count = _size(settings)
    line = f"6 methods at {len(RATES)} learning rates from {len(STARTS)} starts, and from {count} starts in 3 boxes"
    return 2 * steps, f"{line}, {steps:,} steps"


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Run all methods from two starts with their paths, and from many starts for the shares that converge."""
    steps, count = _size(settings)
    records = trajectories.trace(ROSENBROCK, STARTS, _LANES, steps, tick)
    generator = torch.Generator().manual_seed(settings.seed)
    starts = torch.stack([race.random_starts(ROSENBROCK, count, generator, half_width) for half_width in BOXES])
    goals = [race.tolerance(ROSENBROCK, each) for each in starts]
    outcomes = race.run(
        [ROSENBROCK] * len(BOXES),
        starts,
        _MANY,
        steps=steps,
        tolerances=goals,
        observed=range(0, steps, 5),
        tick=tick,
    )
    for half_width, goal, outcome in zip(BOXES, goals, outcomes, strict=True):
        records += _share_records(half_width, goal, outcome)
    return records


def _share_records(half_width: float, goal: float, outcome: race.Outcome) -> list[Record]:
    common = {"function": ROSENBROCK.name, "half_width": half_width, "goal": rounded(goal, trajectories.DIGITS)}
    records = []
    for i, lane in enumerate(_MANY):
        kind = "share" if i < len(_MANY) - len(_CURVE) else "curve"
        records += [
            {"kind": kind, **common, **lane.options(), **summarize(outcome, i, which)}
            for which in ((0, 1) if lane.arm.averages else (0,))
        ]
    return records


def draw(records: Sequence[Record]) -> list[Plate]:
    """Draw the paths, the losses, and the shares of many starts."""
    first, second = (select(records, "path", start=list(start)) for start in STARTS)
    with style.house():
        return [_draw_paths(first, second), _draw_losses(first), _draw_shares(records)]


def _draw_paths(first: Sequence[Record], second: Sequence[Record]) -> Plate:
    rows = [
        (f"learning rate {lr:g}", [r for r in first if r["lr"] == lr], (-0.45, 0.45), (-0.4, 0.4), None) for lr in RATES
    ]
    nearer = [r for r in second if r["lr"] == GAP]
    rows.append((f"learning rate {GAP:g}", nearer, (-0.11, 0.11), (-0.1, 0.1), None))
    caption = (
        f"Six methods at three learning rates: at {GAP:g}, from {STARTS[0]}, {_describe_ends(first)}. An EMA does not "
        "act on the weights, so its run diverges whenever its optimizer does."
    )
    notes = (
        f"Rosenbrock's function as the paper prints it, {ROSENBROCK.formula}, from {STARTS[0]} and, in the last row, "
        f"from {STARTS[1]}; {first[0]['steps']:,} steps. The paper gives neither its start nor its number of steps.",
        "Thick: the average w2. Thin and pale: the weights w1. Methods without an average have w1 only.",
        f"At learning rate {GAP:g}, from {STARTS[1]}: {_describe_ends(second)}.",
    )
    return Plate("fig2", TITLE, caption, trajectories.draw_path_grid(rows, lambda r: r["arm"]), notes)


def _describe_ends(paths: Sequence[Record]) -> str:
    """Say how the runs of SGD, alone and with an average, end at the rate between their limits."""
    ends = []
    for arm in ("SGD", "EMA+SGD", "BELAY+SGD"):
        r = next(r for r in paths if r["arm"] == arm and r["lr"] == GAP)
        if r["diverged_at"] is not None:
            ends.append(f"{arm} diverges at step {r['diverged_at']}")
        else:
            ends.append(f"{arm} arrives at step {r['arrived_at']}" if r["arrived_at"] else f"{arm} is under way")
    return listed(ends)


def _draw_losses(paths: Sequence[Record]) -> Plate:
    fig = style.figure(9.0, 3.6)
    axes = fig.subplots(1, len(RATES), sharey=True)
    for ax, lr in zip(axes, RATES, strict=True):
        trajectories.draw_losses(ax, [r for r in paths if r["lr"] == lr])
        ax.set_title(f"learning rate {lr:g}")
    axes[0].set(ylabel="loss", ylim=(1e-10, 1e6))
    fig.supxlabel(trajectories.describe_start(paths[0]).replace("\n", ", "), fontsize=8)
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=6, fontsize=8)
    caption = (
        f"The same runs as losses: at learning rate {GAP:g}, {_describe_ends(paths)}. This rate lies between the "
        f"limits that theory predicts at the minimum: {LIMIT:.5f} for SGD, with or without EMA, and {BELAY_LIMIT:.5f} "
        "for BELAY."
    )
    notes = (
        f"From {STARTS[0]}, {paths[0]['steps']:,} steps.",
        "Thick: w2 (w1 without an average). Pale: w1. ✕: diverged.",
        f"The limits follow from the curvature at the minimum, {ROSENBROCK.curvature:g}.",
    )
    return Plate("fig2-loss", "Figure 2 as losses", caption, fig, notes)


def _draw_shares(records: Sequence[Record]) -> Plate:
    fig = style.figure(9.0, 3.4)
    axes = fig.subplots(1, len(BOXES), sharey=True)
    curves = (
        ("EMA+SGD", "w1", "SGD"),
        ("EMA+SGD", "w2", "EMA+SGD"),
        ("BELAY+SGD", "w2", "BELAY+SGD"),
        ("matched EMA+SGD", "w1", SLOW_SGD.name),
    )
    for ax, half_width in zip(axes, BOXES, strict=True):
        for arm, judged, label in curves:
            curve = select(records, "curve", half_width=half_width, arm=arm, judged=judged)
            marker = {"marker": "o", "markersize": 3.5, "linestyle": "none"} if label == "EMA+SGD" else {}
            ax.plot(
                [r["lr"] for r in curve],
                [r["converged"] for r in curve],
                color=style.colour(label),
                label=label,
                **marker,
            )
        for limit, hue in ((LIMIT, style.PLAIN_COLOUR), (BELAY_LIMIT, style.BELAY_COLOUR)):
            ax.axvline(limit, color=hue, linestyle=":", linewidth=1)
        ax.set(title=f"starts within ±{half_width:g}", xlabel="learning rate", ylim=(-0.03, 1.03))
    axes[0].set_ylabel("share of starts that converge")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=8)
    first = select(records, "curve")[0]
    shares = {half_width: _describe_shares(records, half_width) for half_width in BOXES}
    caption = (
        f"The share of starts that converge; at learning rate {GAP:g} and {shares[BOX]}. A fair comparison needs "
        "many starts, and plain SGD with steps as short as BELAY's."
    )
    notes = (
        f"{first['starts']} random starts around the minimum, {first['steps']:,} steps. A run converges if its loss "
        f"stays under {ROSENBROCK.goal:g} of the starts' median loss.",
        f"At learning rate {GAP:g}, {'; '.join(shares.values())}.",
        "Dotted: the predicted limits at the minimum.",
    )
    return Plate("fig2-starts", "Rosenbrock from many starts", caption, fig, notes)


def _describe_shares(records: Sequence[Record], half_width: float) -> str:
    """Return the shares of a box that converge at the rate between the limits."""
    at = {(r["arm"], r["judged"]): r["converged"] for r in select(records, "share", half_width=half_width, lr=GAP)}
    return (
        f"within ±{half_width:g}: {at['BELAY+SGD', 'w2']:.0%} for BELAY+SGD, {at['SGD', 'w1']:.0%} for SGD and "
        f"{at[SLOW_SGD.name, 'w1']:.0%} for {SLOW_SGD.name}"
    )
