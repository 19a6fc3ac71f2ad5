"""Figure 3: four functions, six methods at the paper's learning rates; and how long they take from many starts."""

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
    SLOWED_ADAM,
    SLOWED_SGD,
    Arm,
    Lane,
)
from torchbelay.lab.part import Plate, Record, Settings, Tick
from torchbelay.lab.report import style

from . import race, trajectories
from .convergence import summary
from .functions import BEALE, FUNCTIONS

NAME, TITLE = "fig3", "Figure 3: four functions"

PAPER = {BELAY_ADAM: 5e-2, BELAY_SGD: 1e-2, EMA_ADAM: 1e-2, EMA_SGD: 1e-3, ADAM: 1e-3, SGD: 1e-3}
START = {"Rosenbrock": (-0.2, 0.3), "Beale": (-0.8, -0.8), "absolute": (-0.8, 0.7), "bowl": (-0.8, 0.7)}
STEPS, COUNT = 3000, 200
_LANES = [Lane(arm, lr) for arm, lr in PAPER.items()]
# the controls run at the paper's rate for BELAY, of which `slowed` takes the share that BELAY makes of it
_WITH_CONTROLS = [*_LANES, Lane(SLOWED_ADAM, PAPER[BELAY_ADAM]), Lane(SLOWED_SGD, PAPER[BELAY_SGD])]

# Near Beale's saddle (X = 0, Y = 1): does momentum struggle there, and does an average help? Everything at one rate.
SADDLE, AROUND, SADDLE_LR = (-3.0, 0.5), 0.25, 0.01
_NEAR_SADDLE = [
    Lane(arm, SADDLE_LR)
    for arm in (
        SGD,
        MOMENTUM_SGD,
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
        SLOWED_ADAM,
    )
]


def _size(settings: Settings) -> tuple[int, int]:
    return (600, 30) if settings.quick else (STEPS, COUNT)


def plan(settings: Settings) -> tuple[int, str]:
    """Paths, times from many starts, and the saddle."""
    steps, count = _size(settings)
    line = (
        f"6 methods on {len(FUNCTIONS)} functions at the paper's rates, from one start and from {count}; Beale's saddle"
    )
    return steps * (len(FUNCTIONS) + 2), f"{line}, {steps:,} steps"


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Run it."""
    steps, count = _size(settings)
    records = []
    for function in FUNCTIONS:
        records += trajectories.trace(function, [START[function.name]], _LANES, steps, tick)
    generator = torch.Generator().manual_seed(settings.seed)
    starts = torch.stack([race.box(function, count, generator) for function in FUNCTIONS])
    goals = [race.tolerance(function, of) for function, of in zip(FUNCTIONS, starts, strict=True)]
    looks = range(steps)
    outcomes = race.run(FUNCTIONS, starts, _WITH_CONTROLS, steps=steps, tolerances=goals, looks=looks, tick=tick)
    for function, goal, outcome in zip(FUNCTIONS, goals, outcomes, strict=True):
        about = {"function": function.name, "half_width": function.half_width, "goal": trajectories.number(goal)}
        records += _arrivals("arrival", about, _WITH_CONTROLS, outcome)
    near = torch.tensor(SADDLE) + race.box(BEALE, count, generator, AROUND)
    (outcome,) = race.run(
        [BEALE],
        near[None],
        _NEAR_SADDLE,
        steps=steps,
        tolerances=[goals[FUNCTIONS.index(BEALE)]],
        looks=looks,
        tick=tick,
    )
    about = {
        "function": BEALE.name,
        "around": list(SADDLE),
        "half_width": AROUND,
        "goal": trajectories.number(goals[1]),
    }
    return records + _arrivals("saddle", about, _NEAR_SADDLE, outcome)


def _arrivals(kind: str, about: Record, lanes: Sequence[Lane], outcome: race.Outcome) -> list[Record]:
    return [
        {"kind": kind, **about, **lane.options(), **summary(outcome, i, int(lane.arm.averages))}
        for i, lane in enumerate(lanes)
    ]


def stop(records: Sequence[Record]) -> int:
    """The step near which BELAY has converged: that at which the first of its two runs on a function arrived."""
    arrived: list[int] = [
        r["arrived_at"] for r in records if r["arm"].startswith("BELAY") and r["arrived_at"] is not None
    ]
    return min(arrived, default=int(records[0]["steps"]))


# Drawing ---------------------------------------------------------------------------------------------------------


def draw(records: Sequence[Record]) -> list[Plate]:
    """The trajectories, the losses, the times from many starts, and the saddle."""
    with style.house():
        return [_paths(records), _losses(records), _times(records), _saddle(records)]


def _traced(records: Sequence[Record]) -> dict[str, list[Record]]:
    return {f.name: [r for r in records if r["kind"] == "path" and r["function"] == f.name] for f in FUNCTIONS}


def _paths(records: Sequence[Record]) -> Plate:
    rows, stops = [], []
    for name, traced in _traced(records).items():
        until = stop(traced)
        x0, y0 = START[name]
        x = (-1.35 * abs(x0), 1.35 * abs(x0))
        y = (-1.35 * abs(y0), 1.35 * abs(y0))
        rows.append((name, traced, x, y, until))
        stops.append(f"{name} {START[name]}, {until} steps")
    caption = (
        "The paper's four functions, each method at the paper's own rate for it. Starts and steps: "
        f"{'; '.join(stops)}. Stopped where the first BELAY run has arrived. Thick: w2; pale: w1; dot: the end; +: "
        "the minimum. Note that the methods run at rates that differ by a factor of up to "
        f"{max(PAPER.values()) / min(PAPER.values()):g}."
    )
    fig = trajectories.path_grid(rows, lambda r: f"{r['arm']}\nlr {r['lr']:g}")
    return Plate("fig3", TITLE, caption, fig)


def _losses(records: Sequence[Record]) -> Plate:
    fig = style.figure(9.0, 6.0)
    axes = fig.subplots(2, 2).flat
    for ax, (name, traced) in zip(axes, _traced(records).items(), strict=True):
        trajectories.loss_panel(ax, traced)
        ax.axvline(stop(traced) + 1, color="#999999", linewidth=0.8, linestyle=":")
        ax.set_title(f"{name}, {trajectories.said_of(traced[0])}".replace("\n", ", "))
        ax.set_ylabel("loss")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=6, fontsize=8)
    steps = records[0]["steps"]
    caption = (
        f"The same runs, from the same starts, as losses, for {steps:,} steps, at the paper's rates (BELAY+Adam 0.05, "
        "BELAY+SGD and EMA+Adam 0.01, the others 0.001). Thick: w2 (w1 where there is no average); pale: w1; "
        "✕: diverged; dotted: where the paths above stop."
    )
    return Plate("fig3-loss", "Figure 3 as losses", caption, fig)


def _times(records: Sequence[Record]) -> Plate:
    fig = style.figure(9.0, 4.2)
    axes = fig.subplots(1, len(FUNCTIONS), sharey=True)
    arms = [lane.arm.name for lane in _WITH_CONTROLS]
    for ax, function in zip(axes, FUNCTIONS, strict=True):
        chosen = {r["arm"]: r for r in records if r["kind"] == "arrival" and r["function"] == function.name}
        _dots(ax, [chosen[arm] for arm in arms])
        ax.set_title(function.name)
    fig.supxlabel("median steps to arrive, with the share of starts that converged", fontsize=9)
    first = next(r for r in records if r["kind"] == "arrival")
    boxes = ", ".join(f"{f.name} ±{f.half_width:g}" for f in FUNCTIONS)
    caption = (
        f"How long each method takes at the paper's rate, from {first['starts']} random starts around the minimum "
        f"({boxes}): the median step from which on the loss stays under the goal (1% of the starts' median loss, "
        f"0.1% for Rosenbrock), and the share of starts that converged within {first['steps']:,} steps. The last two "
        "rows are the controls that the paper lacks: the inner optimizer alone at the learning rate that BELAY "
        f"effectively has ({PAPER_SPRING.effective_lr_scale:.4g} of its nominal one)."
    )
    return Plate("fig3-times", "How long it takes from many starts", caption, fig)


def _saddle(records: Sequence[Record]) -> Plate:
    fig = style.figure(7.0, 4.2)
    ax = fig.subplots()
    chosen = [r for r in records if r["kind"] == "saddle"]
    _dots(ax, chosen, "median_of_arrived")
    ax.set_xlabel("median steps of those that arrive at the minimum, with the share of starts that converged")
    caption = (
        f"Beale's function from {chosen[0]['starts']} starts within ±{AROUND:g} of its saddle at {SADDLE}, "
        f"everything at learning rate {SADDLE_LR:g}, {chosen[0]['steps']:,} steps: SGD and Adam with and without "
        "momentum, and momentum with an average, and at the rate that BELAY effectively has. About half of the "
        "starts roll off the other side of the saddle."
    )
    return Plate("fig3-saddle", "Starting at a saddle", caption, fig)


def _dots(ax: Axes, chosen: Sequence[Record], field: str = "median_arrival") -> None:
    """A row for each arm: a dot at its median, or a cross at the right edge where there is none."""
    steps = chosen[0]["steps"]
    for y, r in enumerate(chosen):
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
    ax.set(xscale="log", xlim=(0.8, 2.6 * steps), ylim=(len(chosen) - 0.4, -0.6))
    ax.set_yticks(range(len(chosen)), [r["arm"].replace(" at BELAY's", "\nat BELAY's") for r in chosen], fontsize=8)
    ax.grid(axis="y", visible=False)
