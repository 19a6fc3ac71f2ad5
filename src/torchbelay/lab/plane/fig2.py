"""Figure 2: Rosenbrock's function at three learning rates, six methods; and what the paper leaves out, other starts."""

from collections.abc import Sequence

import torch

from torchbelay.lab.arms import BELAY_SGD, CONTROLS, EMA_SGD, MATCHED_SGD, PAPER_SPRING, SIX, SLOWED_SGD, Lane
from torchbelay.lab.part import Plate, Record, Settings, Tick
from torchbelay.lab.report import style

from . import race, trajectories
from .convergence import summary
from .functions import ROSENBROCK

NAME, TITLE = "fig2", "Figure 2: three learning rates"

RATES = (0.001, 0.01, 0.15)
GAP = 0.01  # between the limits of SGD and of BELAY at the minimum
LIMIT, BELAY_LIMIT = 2 / 202, PAPER_SPRING.max_stable_lr(202)
STARTS = ((-0.2, 0.3), (0.05, 0.05))
BOXES = (0.3, 0.5, 1.0)  # half-widths
STEPS, COUNT = 3000, 300
_LANES = [Lane(arm, lr) for lr in RATES for arm in SIX]
_CURVE = [Lane(arm, 0.004 + 0.0004 * i) for arm in (EMA_SGD, BELAY_SGD, MATCHED_SGD) for i in range(22)]
_MANY = [Lane(arm, lr) for lr in RATES for arm in (*SIX, *CONTROLS)] + _CURVE


def _size(settings: Settings) -> tuple[int, int]:
    return (600, 40) if settings.quick else (STEPS, COUNT)


def plan(settings: Settings) -> tuple[int, str]:
    """Paths from two starts, and shares of many."""
    steps, count = _size(settings)
    line = (
        f"6 methods at {len(RATES)} learning rates from {len(STARTS)} starts, and shares of {count} starts in 3 boxes"
    )
    return 2 * steps, f"{line}, {steps:,} steps"


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Run it."""
    steps, count = _size(settings)
    records = trajectories.trace(ROSENBROCK, STARTS, _LANES, steps, tick)
    generator = torch.Generator().manual_seed(settings.seed)
    starts = torch.stack([race.box(ROSENBROCK, count, generator, half_width) for half_width in BOXES])
    goals = [race.tolerance(ROSENBROCK, of_box) for of_box in starts]
    outcomes = race.run(
        [ROSENBROCK] * len(BOXES),
        starts,
        _MANY,
        steps=steps,
        tolerances=goals,
        looks=range(0, steps, 5),
        tick=tick,
    )
    for half_width, goal, outcome in zip(BOXES, goals, outcomes, strict=True):
        records += _shares(half_width, goal, outcome)
    return records


def _shares(half_width: float, goal: float, outcome: race.Outcome) -> list[Record]:
    common = {"function": ROSENBROCK.name, "half_width": half_width, "goal": trajectories.number(goal)}
    records = []
    for i, lane in enumerate(_MANY):
        kind = "share" if i < len(_MANY) - len(_CURVE) else "curve"
        records += [
            {"kind": kind, **common, **lane.options(), **summary(outcome, i, which)}
            for which in ((0, 1) if lane.arm.averages else (0,))
        ]
    return records


def draw(records: Sequence[Record]) -> list[Plate]:
    """The trajectories, the losses, and the shares."""
    first, second = ([r for r in records if r["kind"] == "path" and tuple(r["start"]) == start] for start in STARTS)
    with style.house():
        return [_paths(first, second), _losses(first), _starts(records)]


def _paths(first: Sequence[Record], second: Sequence[Record]) -> Plate:
    rows = [
        (f"learning rate {lr:g}", [r for r in first if r["lr"] == lr], (-0.45, 0.45), (-0.4, 0.4), None) for lr in RATES
    ]
    nearer = [r for r in second if r["lr"] == GAP]
    rows.append((f"learning rate {GAP:g}", nearer, (-0.11, 0.11), (-0.1, 0.1), None))
    ends = "; ".join(f"from {start} {_ends(of)}" for start, of in zip(STARTS, (first, second), strict=True))
    caption = (
        f"Rosenbrock's function as the paper prints it, {ROSENBROCK.formula}, from {STARTS[0]} and, in the last row, "
        f"from {STARTS[1]}, {first[0]['steps']:,} steps; the paper does not say from where it started, nor for how "
        "long. Thick: the average w2; thin and pale: the weights w1; methods without an average have w1 only. At "
        f"learning rate {GAP:g}, {ends}."
    )
    return Plate("fig2", TITLE, caption, trajectories.path_grid(rows, lambda r: r["arm"]))


def _ends(traced: Sequence[Record]) -> str:
    """What became of the three kinds of SGD in the gap between the limits of BELAY and of the others."""
    said = []
    for arm in ("SGD", "EMA+SGD", "BELAY+SGD"):
        r = next(r for r in traced if r["arm"] == arm and r["lr"] == GAP)
        if r["diverged_at"] is not None:
            said.append(f"{arm} diverges at step {r['diverged_at']}")
        else:
            said.append(f"{arm} arrives at step {r['arrived_at']}" if r["arrived_at"] else f"{arm} is on its way")
    return ", ".join(said)


def _losses(traced: Sequence[Record]) -> Plate:
    fig = style.figure(9.0, 3.6)
    axes = fig.subplots(1, len(RATES), sharey=True)
    for ax, lr in zip(axes, RATES, strict=True):
        trajectories.loss_panel(ax, [r for r in traced if r["lr"] == lr])
        ax.set_title(f"learning rate {lr:g}")
    axes[0].set(ylabel="loss", ylim=(1e-10, 1e6))
    fig.supxlabel(trajectories.said_of(traced[0]).replace("\n", ", "), fontsize=8)
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=6, fontsize=8)
    caption = (
        f"The same runs, from {STARTS[0]} for {traced[0]['steps']:,} steps, as losses. Thick: w2 "
        f"(w1 where there is no average); pale: w1. ✕: diverged. At learning rate {GAP:g}, {_ends(traced)}. The limits "
        f"predicted for the curvature of {ROSENBROCK.curvature:g} at the minimum: {LIMIT:.5f} for SGD, with or without "
        f"EMA, and {BELAY_LIMIT:.5f} for BELAY."
    )
    return Plate("fig2-loss", "Figure 2 as losses", caption, fig)


def _starts(records: Sequence[Record]) -> Plate:
    fig = style.figure(9.0, 3.4)
    axes = fig.subplots(1, len(BOXES), sharey=True)
    curves = (
        ("EMA+SGD", "w1", "SGD"),
        ("EMA+SGD", "w2", "EMA+SGD"),
        ("BELAY+SGD", "w2", "BELAY+SGD"),
        ("matched EMA+SGD", "w1", SLOWED_SGD.name),
    )
    for ax, half_width in zip(axes, BOXES, strict=True):
        for arm, judged, label in curves:
            chosen = [
                r
                for r in records
                if r["kind"] == "curve" and r["half_width"] == half_width and (r["arm"], r["judged"]) == (arm, judged)
            ]
            marker = {"marker": "o", "markersize": 3.5, "linestyle": "none"} if label == "EMA+SGD" else {}
            ax.plot(
                [r["lr"] for r in chosen],
                [r["converged"] for r in chosen],
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
    first = next(r for r in records if r["kind"] == "curve")
    shown = []
    for half_width in BOXES:
        at = {
            (r["arm"], r["judged"]): r["converged"]
            for r in records
            if r["kind"] == "share" and r["half_width"] == half_width and r["lr"] == GAP
        }
        shown.append(
            f"within ±{half_width:g} {at['BELAY+SGD', 'w2']:.0%} for BELAY+SGD, {at['SGD', 'w1']:.0%} for SGD and "
            f"{at[SLOWED_SGD.name, 'w1']:.0%} for {SLOWED_SGD.name}"
        )
    caption = (
        f"The share of {first['starts']} random starts around the minimum that converge within {first['steps']:,} "
        f"steps (the loss stays under {ROSENBROCK.goal:g} of the starts' median). At learning rate {GAP:g}: "
        f"{'; '.join(shown)}. Dotted: the predicted limits at the minimum. A single start tells whatever story one "
        "wants to hear; and before a spring is credited with a rescue, look at plain SGD with steps as short as "
        "BELAY's."
    )
    return Plate("fig2-starts", "Rosenbrock from many starts", caption, fig)
