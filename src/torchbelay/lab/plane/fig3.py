"""Figure 3: four functions, six methods at the paper's learning rates; and the time they take from many starts."""

from collections.abc import Sequence

import torch
from matplotlib.axes import Axes

from torchbelay.lab.arms import (
    ADAM,
    BELAY_ADAM,
    BELAY_SGD,
    EMA_ADAM,
    EMA_SGD,
    MOMENTUM_SGD,
    PAPER_EMA,
    PAPER_SPRING,
    SGD,
    SLOW_ADAM,
    SLOW_SGD,
    Arm,
    Lane,
)
from torchbelay.lab.part import Plate, Record, Settings, Tick
from torchbelay.lab.records import rounded, select
from torchbelay.lab.report import style

from . import race, trajectories
from .convergence import summarize
from .functions import BEALE, FUNCTIONS

NAME, TITLE = "fig3", "Figure 3: four functions"

PAPER = {BELAY_ADAM: 5e-2, BELAY_SGD: 1e-2, EMA_ADAM: 1e-2, EMA_SGD: 1e-3, ADAM: 1e-3, SGD: 1e-3}
START = {"Rosenbrock": (-0.2, 0.3), "Beale": (-0.8, -0.8), "absolute": (-0.8, 0.7), "bowl": (-0.8, 0.7)}
STEPS, COUNT = 3000, 200
_LANES = [Lane(arm, lr) for arm, lr in PAPER.items()]
# the controls have the paper's nominal rate for BELAY, so their actual rate is BELAY's effective one
_WITH_CONTROLS = [*_LANES, Lane(SLOW_ADAM, PAPER[BELAY_ADAM]), Lane(SLOW_SGD, PAPER[BELAY_SGD])]

# Near Beale's saddle (X = 0, Y = 1): does momentum struggle there, and does an average help? All methods have one
# nominal rate. At that rate momentum goes ten times as far as SGD, so it is also run at a tenth of it.
SADDLE, AROUND, SADDLE_LR = (-3.0, 0.5), 0.25, 0.01
_NEAR_SADDLE = [
    Lane(arm, SADDLE_LR)
    for arm in (
        SGD,
        MOMENTUM_SGD,
        Arm("momentum at SGD's effective rate", "momentum", lr_scale=1 / MOMENTUM_SGD.effective_scale),
        Arm("EMA+momentum", "momentum", PAPER_EMA, effective_scale=MOMENTUM_SGD.effective_scale),
        Arm(
            "BELAY+momentum",
            "momentum",
            PAPER_SPRING,
            effective_scale=MOMENTUM_SGD.effective_scale * PAPER_SPRING.effective_lr_scale,
        ),
        Arm(
            "momentum at BELAY's effective rate",
            "momentum",
            lr_scale=PAPER_SPRING.effective_lr_scale,
            effective_scale=MOMENTUM_SGD.effective_scale * PAPER_SPRING.effective_lr_scale,
        ),
        Arm("Adam without momentum", "Adam without momentum"),
        ADAM,
        EMA_ADAM,
        BELAY_ADAM,
        SLOW_ADAM,
    )
]


def _size(settings: Settings) -> tuple[int, int]:
    return (600, 30) if settings.quick else (STEPS, COUNT)


def plan(settings: Settings) -> tuple[int, str]:
    """Return the units of work, and one line that says what would run."""
    steps, count = _size(settings)
    line = (
        f"6 methods on {len(FUNCTIONS)} functions at the paper's rates, from 1 and from {count} starts; Beale's saddle"
    )
    return steps * (len(FUNCTIONS) + 2), f"{line}, {steps:,} steps"


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Run all methods from one start with their paths, from many starts, and from starts near the saddle."""
    steps, count = _size(settings)
    records = []
    for function in FUNCTIONS:
        records += trajectories.trace(function, [START[function.name]], _LANES, steps, tick)
    generator = torch.Generator().manual_seed(settings.seed)
    starts = torch.stack([race.random_starts(function, count, generator) for function in FUNCTIONS])
    goals = [race.tolerance(function, each) for function, each in zip(FUNCTIONS, starts, strict=True)]
    outcomes = race.run(
        FUNCTIONS, starts, _WITH_CONTROLS, steps=steps, tolerances=goals, observed=range(steps), tick=tick
    )
    for function, goal, outcome in zip(FUNCTIONS, goals, outcomes, strict=True):
        about = {
            "function": function.name,
            "half_width": function.half_width,
            "goal": rounded(goal, trajectories.DIGITS),
        }
        records += _arrival_records("arrival", about, _WITH_CONTROLS, outcome)
    near = torch.tensor(SADDLE) + race.random_starts(BEALE, count, generator, AROUND)
    (outcome,) = race.run(
        [BEALE],
        near[None],
        _NEAR_SADDLE,
        steps=steps,
        tolerances=[goals[FUNCTIONS.index(BEALE)]],
        observed=range(steps),
        tick=tick,
    )
    about = {
        "function": BEALE.name,
        "around": list(SADDLE),
        "half_width": AROUND,
        "goal": rounded(goals[1], trajectories.DIGITS),
    }
    return records + _arrival_records("saddle", about, _NEAR_SADDLE, outcome)


def _arrival_records(kind: str, about: Record, lanes: Sequence[Lane], outcome: race.Outcome) -> list[Record]:
    return [
        {"kind": kind, **about, **lane.options(), **summarize(outcome, i, int(lane.arm.averages))}
        for i, lane in enumerate(lanes)
    ]


def stop_step(records: Sequence[Record]) -> int:
    """Return the step at which the first of BELAY's two runs on a function arrives; the last step if neither does."""
    arrived: list[int] = [
        r["arrived_at"] for r in records if r["arm"].startswith("BELAY") and r["arrived_at"] is not None
    ]
    return min(arrived, default=int(records[0]["steps"]))


# Drawing ---------------------------------------------------------------------------------------------------------


def draw(records: Sequence[Record]) -> list[Plate]:
    """Draw the paths, the losses, the times from many starts, and the times from the saddle."""
    with style.house():
        return [_draw_paths(records), _draw_losses(records), _draw_times(records), _draw_saddle(records)]


def _paths_by_function(records: Sequence[Record]) -> dict[str, list[Record]]:
    return {function.name: select(records, "path", function=function.name) for function in FUNCTIONS}


def _draw_paths(records: Sequence[Record]) -> Plate:
    rows, stops = [], []
    for name, paths in _paths_by_function(records).items():
        until = stop_step(paths)
        x0, y0 = START[name]
        x = (-1.35 * abs(x0), 1.35 * abs(x0))
        y = (-1.35 * abs(y0), 1.35 * abs(y0))
        rows.append((name, paths, x, y, until))
        stops.append(f"{name} {START[name]}, {until} steps")
    caption = (
        "Paths on the paper's four functions, each method at the paper's learning rate for it, until the first BELAY "
        f"run arrives. The rates differ by a factor of up to {max(PAPER.values()) / min(PAPER.values()):g}, so the "
        "paths compare rates as much as methods."
    )
    notes = (
        f"Starts and steps: {'; '.join(stops)}.",
        "Thick: w2. Pale: w1. Dot: the end. +: the minimum.",
    )
    fig = trajectories.draw_path_grid(rows, lambda r: f"{r['arm']}\nlr {r['lr']:g}")
    return Plate("fig3", TITLE, caption, fig, notes)


def _draw_losses(records: Sequence[Record]) -> Plate:
    fig = style.figure(9.0, 6.0)
    axes = fig.subplots(2, 2).flat
    for ax, (name, paths) in zip(axes, _paths_by_function(records).items(), strict=True):
        trajectories.draw_losses(ax, paths)
        ax.axvline(stop_step(paths) + 1, color="#999999", linewidth=0.8, linestyle=":")
        ax.set_title(f"{name}, {trajectories.describe_start(paths[0])}".replace("\n", ", "))
        ax.set_ylabel("loss")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=6, fontsize=8)
    first = select(records, "path", function=FUNCTIONS[0].name)
    rates = ", ".join(f"{r['arm']} {r['lr']:g}" for r in first)
    caption = (
        "The same runs as losses; the dotted lines mark where the paths above stop. Each method has the paper's "
        "learning rate for it, so a curve may fall first because of its rate alone."
    )
    notes = (
        f"From the same starts, {first[0]['steps']:,} steps. Learning rates: {rates}.",
        "Thick: w2 (w1 without an average). Pale: w1. ✕: diverged.",
    )
    return Plate("fig3-loss", "Figure 3 as losses", caption, fig, notes)


def _draw_times(records: Sequence[Record]) -> Plate:
    fig = style.figure(9.0, 4.2)
    axes = fig.subplots(1, len(FUNCTIONS), sharey=True)
    arms = [lane.arm.name for lane in _WITH_CONTROLS]
    for ax, function in zip(axes, FUNCTIONS, strict=True):
        by_arm = {r["arm"]: r for r in select(records, "arrival", function=function.name)}
        _draw_medians(ax, [by_arm[arm] for arm in arms])
        ax.set_title(function.name)
    fig.supxlabel("median steps to arrive, with the share of starts that converged", fontsize=9)
    first = select(records, "arrival")[0]
    boxes = ", ".join(f"{f.name} ±{f.half_width:g}" for f in FUNCTIONS)
    goals = ", ".join(f"{f.name} {f.goal:.1%}" for f in FUNCTIONS)
    caption = (
        "The median step at which each method arrives at the paper's rate, and the share of random starts that "
        "converge. The last two rows are controls that the paper lacks: the optimizer alone, with steps as short as "
        "BELAY's."
    )
    notes = (
        f"{first['starts']} random starts around the minimum ({boxes}), {first['steps']:,} steps.",
        "A run arrives at the step after which its loss stays under the goal, a share of the starts' median loss "
        f"({goals}).",
        "The controls run at the learning rate that BELAY effectively has, "
        f"{PAPER_SPRING.effective_lr_scale:.4g} of its nominal one.",
    )
    return Plate("fig3-times", "How long it takes from many starts", caption, fig, notes)


def _draw_saddle(records: Sequence[Record]) -> Plate:
    fig = style.figure(7.0, 4.2)
    ax = fig.subplots()
    rows = select(records, "saddle")
    _draw_medians(ax, rows, "median_of_arrived")
    ax.set_xlabel("median steps to arrive, with the share of starts that converged")
    (sgd,) = select(rows, "saddle", arm=SGD.name)
    caption = (
        "The median steps of the runs that reach the minimum from near Beale's saddle, and the share of starts that "
        f"converge. With SGD {sgd['converged']:.0%} of the starts do; runs may also leave the saddle on its other side."
    )
    notes = (
        f"{sgd['starts']} starts within ±{AROUND:g} of the saddle at {SADDLE}, {sgd['steps']:,} steps, every method at "
        f"learning rate {SADDLE_LR:g}.",
        "SGD and Adam with and without momentum, momentum with an average, and momentum and Adam at the rate that "
        "BELAY effectively has.",
        "Momentum goes ten times as far as SGD at the same learning rate; a row has it at a tenth of that.",
    )
    return Plate("fig3-saddle", "Starting at a saddle", caption, fig, notes)


def _draw_medians(ax: Axes, rows: Sequence[Record], field: str = "median_arrival") -> None:
    """Draw one row per arm: a dot at its median, or a cross at the right edge if it has none."""
    steps = rows[0]["steps"]
    for y, r in enumerate(rows):
        hue, median = style.colour(r["arm"]), r[field]
        arrived = median is not None
        at = max(1, median) if arrived else 1.6 * steps
        ax.plot(at, y, "o" if arrived else "X", color=hue if arrived else "white", markeredgecolor=hue, markersize=7)
        text = f"{median} · {r['converged']:.0%}" if arrived else f"never · {r['converged']:.0%}"
        left = at > steps**0.5
        ax.annotate(
            text,
            (at, y),
            xytext=(-7 if left else 7, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=8,
        )
    ax.set(xscale="log", xlim=(0.8, 2.6 * steps), ylim=(len(rows) - 0.4, -0.6))
    ax.set_yticks(range(len(rows)), [r["arm"].replace(" at ", "\nat ") for r in rows], fontsize=8)
    ax.grid(axis="y", visible=False)
