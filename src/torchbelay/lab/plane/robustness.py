"""Robustness to the learning rate, beyond the paper: the share of many starts that converge, at many rates.

Every figure against the nominal rate has a twin against the effective rate: a method with shorter steps tolerates
larger nominal rates, and that is no merit of its own. The centred family then varies the one number that is left, θ.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import StrMethodFormatter

from torchbelay.lab.arms import (
    BELAY_ADAM,
    BELAY_SGD,
    EMA_ADAM,
    EMA_SGD,
    MATCHED_ADAM,
    MATCHED_SGD,
    MOMENTUM,
    MOMENTUM_SGD,
    PAPER_SPRING,
    Arm,
    Lane,
)
from torchbelay.lab.part import Plate, Record, Settings, Tick
from torchbelay.lab.records import rounded, select, significant
from torchbelay.lab.report import style
from torchbelay.physics.coupling import Coupling
from torchbelay.physics.methods import centred, heavy_ball

from . import race
from .convergence import summarize
from .functions import BOWL, FUNCTIONS, ROSENBROCK, Function
from .trajectories import DIGITS

NAME, TITLE = "robustness", "Robustness to the learning rate"

STEPS, COUNT, RATES = 3000, 200, 40
LOWEST, HIGHEST = 1e-4, 100.0

# The weights of an EMA run are those of a run without one, so each of these gives two curves, for w1 and for w2.
_RUN = {
    "SGD": (EMA_SGD, BELAY_SGD, MATCHED_SGD, MOMENTUM_SGD),
    "Adam": (EMA_ADAM, BELAY_ADAM, MATCHED_ADAM),
}
_W1_NAMES = {"EMA": "{inner}", "matched EMA": "{inner} at BELAY's effective rate"}

THETAS = (-0.9, -0.75, -0.5, -0.25, 0.0, 0.5, 1.0, 2.0)
AVERAGING = PAPER_SPRING.kappa1 + PAPER_SPRING.kappa2  # the rate c of the centred family is that of the paper's setting


def _size(settings: Settings) -> tuple[int, int, int]:
    return (300, 20, 12) if settings.quick else (STEPS, COUNT, RATES)


def plan(settings: Settings) -> tuple[int, str]:
    """Return the units of work, and one line that says what would run."""
    steps, count, rates = _size(settings)
    line = f"{len(FUNCTIONS)} functions × 11 methods × {rates} learning rates × {count} starts, and θ from −0.9 to 2"
    return 3 * steps, f"{line}, {steps:,} steps"


def rate_grid(count: int, low: float = LOWEST, high: float = HIGHEST) -> list[float]:
    """Return learning rates that are even in their logarithm.

    >>> rate_grid(3, 0.01, 1.0)
    [0.01, 0.1, 1.0]
    """
    return [significant(low * (high / low) ** (i / (count - 1))) for i in range(count)]


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Run SGD's family, Adam's family, and the sweep of θ."""
    steps, count, rates = _size(settings)
    generator = torch.Generator().manual_seed(settings.seed)
    starts = torch.stack([race.random_starts(function, count, generator) for function in FUNCTIONS])
    records: list[Record] = []
    for inner, arms in _RUN.items():
        lanes = [Lane(arm, lr) for arm in arms for lr in rate_grid(rates)]
        for function, goal, outcome in _run_race(FUNCTIONS, starts, lanes, steps, tick):
            about = {"kind": "rate", "function": function.name, "half_width": function.half_width}
            about |= {"family": inner, "goal": rounded(goal, DIGITS)}
            for i, lane in enumerate(lanes):
                records += [
                    about | _curve_options(lane, which, function) | summarize(outcome, i, which)
                    for which in ((0, 1) if lane.arm.averages else (0,))
                ]
    return records + _sweep(settings, starts, tick)


def _run_race(
    functions: Sequence[Function], starts: torch.Tensor, lanes: Sequence[Lane], steps: int, tick: Tick
) -> Any:
    goals = [race.tolerance(function, each) for function, each in zip(functions, starts, strict=True)]
    observed = range(0, steps, 10)
    outcomes = race.run(functions, starts, lanes, steps=steps, tolerances=goals, observed=observed, tick=tick)
    return zip(functions, goals, outcomes, strict=True)


def _curve_options(lane: Lane, which: int, function: Function) -> Record:
    """Return the fields that describe a curve; w1 of a run with an EMA is the run without one."""
    outer, _, inner = lane.arm.name.partition("+")
    about = lane.options()
    if which == 0 and outer in _W1_NAMES:
        about |= {"arm": _W1_NAMES[outer].format(inner=inner), "method": None}
    return about | {"limit": stability_limit(lane.arm, function)}


def stability_limit(arm: Arm, function: Function) -> float | None:
    """Return the nominal rate under which theory says that SGD is stable at the minimum; None if it says nothing."""
    if function.curvature is None or arm.inner not in ("SGD", "momentum"):
        return None
    coupling = Coupling(a=0.0, b=0.0, p=1.0, q=0.0)
    if arm.inner == "momentum":
        coupling = heavy_ball(MOMENTUM).coupling(1, 1.0)
    elif arm.method is not None:
        coupling = arm.method.coupling(1, 1.0)
    return rounded(coupling.max_stable_lr(function.curvature) / arm.lr_scale, DIGITS)


# The centred family --------------------------------------------------------------------------------------------------


def theta_limit(theta: float, c: float = AVERAGING) -> float:
    """Return the largest stable η·h of SGD with `centred(θ, c, follow="before")`: about 2/(1+θ)."""
    flip, turn = 2 * (1 + theta) - c, c - (1 + theta)
    through_minus_one = 2 * (2 - c) / flip if flip > 0 else math.inf
    as_a_complex_pair = c / turn if turn > 0 else math.inf  # roots can also leave the unit circle this way
    return min(through_minus_one, as_a_complex_pair)


def _sweep(settings: Settings, starts: torch.Tensor, tick: Tick) -> list[Record]:
    steps, _, rates = _size(settings)
    functions = (ROSENBROCK, BOWL)
    starts = starts[[FUNCTIONS.index(function) for function in functions]]
    lanes = [
        Lane(Arm(f"θ = {theta:g}", "SGD", centred(theta, AVERAGING, follow="before")), x)
        for theta in THETAS
        for x in rate_grid(rates, 1e-3, 100.0)
    ]
    records: list[Record] = []
    for function, goal, outcome in _run_race(functions, starts, lanes, steps, tick):
        about = {
            "kind": "theta",
            "function": function.name,
            "half_width": function.half_width,
            "goal": rounded(goal, DIGITS),
        }
        about |= {"rate": AVERAGING}
        for i, lane in enumerate(lanes):
            theta = THETAS[i // rates]
            predicted = rounded(theta_limit(theta) / function.curvature, DIGITS) if function.curvature else None
            records.append(about | {"theta": theta, "limit": predicted} | lane.options() | summarize(outcome, i, 1))
    return records


# Drawing ---------------------------------------------------------------------------------------------------------


def draw(records: Sequence[Record]) -> list[Plate]:
    """Draw each family against the nominal and the effective rate, and the sweep of θ."""
    with style.house():
        plates = [_draw_family(records, inner, axis) for inner in _RUN for axis in ("lr", "effective_lr")]
        return [*plates, _draw_theta(records)]


def arm_order(records: Sequence[Record], family: str) -> list[str]:
    """Return the arms of a family, from top to bottom."""
    wanted = [
        family,
        f"EMA+{family}",
        f"BELAY+{family}",
        f"{family} at BELAY's effective rate",
        f"matched EMA+{family}",
    ]
    present = {r["arm"] for r in records if r.get("family") == family}
    return [arm for arm in (*wanted, "momentum") if arm in present]


def _draw_family(records: Sequence[Record], family: str, axis: str) -> Plate:
    arms = arm_order(records, family)
    fig = style.figure(9.0, 0.9 + 0.72 * len(arms))
    axes = fig.subplots(len(arms), len(FUNCTIONS), sharex=True, sharey=True, squeeze=False)
    for column, function in zip(axes.T, FUNCTIONS, strict=True):
        for ax, arm in zip(column, arms, strict=True):
            ships = "w1" if arm in (family, f"{family} at BELAY's effective rate", "momentum") else "w2"
            curve = select(records, "rate", function=function.name, arm=arm, judged=ships)
            draw_ridge(ax, curve, axis, style.colour(arm))
        column[0].set_title(function.name)
        column[-1].set_xlabel("learning rate" if axis == "lr" else "effective learning rate", fontsize=8)
    for ax, arm in zip(axes[:, 0], arms, strict=True):
        label = arm.replace(" at BELAY's effective rate", "\nat BELAY's\neffective rate").replace(
            "matched EMA", "matched\nEMA"
        )
        ax.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8, color=style.colour(arm))
    first = records[0]
    boxes = ", ".join(f"{function.name} ±{function.half_width:g}" for function in FUNCTIONS)
    kind = "nominal" if axis == "lr" else "effective"
    limits = " Black tick: the predicted limit at the minimum." if family == "SGD" else ""
    follows = (
        "A method whose steps are shorter tolerates larger nominal rates, so look at the effective rate, too."
        if axis == "lr"
        else "Here a method gains nothing by shorter steps: what is left is its own robustness."
    )
    caption = f"The share of starts (height, 0 to 1) that converge, against the {kind} learning rate. {follows}"
    notes = (
        f"{first['starts']} starts in the box around the minimum ({boxes}), {first['steps']:,} steps.",
        f"Colour: converged. White: neither. Red hatching, from the top: diverged. Grey: not measured.{limits}",
        "Methods that average are judged by w2.",
        "The effective rate is how far a constant gradient moves the weights: "
        f"{PAPER_SPRING.effective_lr_scale:.4g} of the nominal one for BELAY, {MOMENTUM_SGD.effective_scale:.3g} times "
        f"the nominal one for momentum {MOMENTUM:g}.",
    )
    name = f"robustness-{family.lower()}-{kind}"
    return Plate(name, f"{family}: which learning rates work ({kind})", caption, fig, notes)


def draw_ridge(ax: Axes, curve: Sequence[Record], axis: str, hue: str) -> None:
    """Draw the share that converged from below and the share that diverged from above; the rest is under way."""
    x = [r[axis] for r in curve]
    ax.set_facecolor("#ececec")
    ax.axvspan(x[0], x[-1], color="white", zorder=0)
    ax.fill_between(x, 0, [r["converged"] for r in curve], color=hue, alpha=0.85, linewidth=0)
    top = [1 - r["diverged"] for r in curve]
    ax.fill_between(x, top, 1, facecolor="#fbe9e7", edgecolor="#c62828", hatch="////", linewidth=0)
    if curve[0].get("limit") is not None:
        ax.axvline(curve[0]["limit"] * curve[0][axis] / curve[0]["lr"], color="black", linewidth=1.4)
    ax.set(xscale="log", ylim=(0, 1), yticks=[])
    ax.grid(False)


def measure_limit(curve: Sequence[Record]) -> float | None:
    """Return the rate between the last that loses fewer than half of the starts and the first that loses more."""
    safe = max((r["lr"] for r in curve if r["diverged"] < 0.5), default=None)
    lost = min((r["lr"] for r in curve if r["diverged"] >= 0.5), default=None)
    return None if safe is None or lost is None else float((safe * lost) ** 0.5)


def _area_handles() -> list[Artist]:
    """Return what the areas and the line of a ridge are, for a legend."""
    return [
        Patch(color="#777777", label="converge (any colour)"),
        Patch(facecolor="#fbe9e7", edgecolor="#c62828", hatch="////", linewidth=0, label="diverge"),
        Patch(facecolor="white", edgecolor="#bbbbbb", linewidth=0.6, label="neither"),
        Line2D([], [], color="black", linewidth=1.4, label="predicted limit"),
        Patch(color="#ececec", label="not measured"),
    ]


def _draw_theta(records: Sequence[Record]) -> Plate:
    swept = select(records, "theta")
    thetas = sorted({r["theta"] for r in swept})
    fig = style.figure(9.0, 6.0)
    halves: Any = fig.subfigures(1, 2, width_ratios=(1.25, 1))
    left, right = halves
    axes = left.subplots(len(thetas), 2, sharex=True, sharey=True)
    ramp = {
        theta: style.EMA_COLOUR if theta < 0 else style.PLAIN_COLOUR if theta == 0 else style.BELAY_COLOUR
        for theta in thetas
    }
    for column, function in zip(axes.T, (ROSENBROCK, BOWL), strict=True):
        for ax, theta in zip(column, thetas, strict=True):
            draw_ridge(ax, select(swept, "theta", function=function.name, theta=theta), "lr", ramp[theta])
        column[0].set_title(function.name)
        column[-1].set_xlabel("learning rate (nominal = effective)", fontsize=8)
    for ax, theta in zip(axes[:, 0], thetas, strict=True):
        ax.set_ylabel(
            f"θ = {theta:g}".replace("-", "−"), rotation=0, ha="right", va="center", fontsize=8, color=ramp[theta]
        )
        ax.set_yticks((0, 1), ("0", "1"), fontsize=6.5)
    left.supylabel("share of the starts, from 0 to 1", fontsize=8)
    left.legend(handles=_area_handles(), loc="outside lower center", ncols=3, fontsize=7.5, columnspacing=1.2)
    ax = right.subplots()
    fine = torch.linspace(-0.92, 2.1, 200).tolist()
    ax.plot(fine, [theta_limit(t) for t in fine], color="black", linewidth=1.2, label="predicted, exact")
    ax.plot(fine, [2 / (1 + t) for t in fine], ":", color="black", linewidth=1.2, label="predicted, 2/(1+θ)")
    for function, marker in ((BOWL, "o"), (ROSENBROCK, "s")):
        for theta in thetas:
            found = measure_limit(select(swept, "theta", function=function.name, theta=theta))
            if found is not None:
                face = ramp[theta] if function is BOWL else "white"
                ax.plot(theta, found * (function.curvature or 1), marker, color=face, markeredgecolor=ramp[theta])
    ax.plot([], [], "o", color="#777777", label="measured: bowl, half of the starts lost")
    ax.plot([], [], "s", color="white", markeredgecolor="#777777", label="measured: Rosenbrock")
    ax.set(yscale="log", xlabel="θ    (repels ← 0 = EMA → attracts)", title="largest learning rate × curvature")
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.legend(fontsize=8)
    first = swept[0]
    caption = (
        "Left: the share of starts that converge for each θ, the sign and strength of the spring. Right: the largest "
        "stable rate, measured and predicted; theory gives about 2/(1+θ), so a repulsive spring (θ < 0) tolerates "
        "larger rates than BELAY's."
    )
    notes = (
        f"The centre-of-mass family at averaging rate {first['rate']:g}, SGD, {first['starts']} starts, "
        f"{first['steps']:,} steps. All make the same progress at the same rate. Left: colours as above.",
        "The average is an EMA of a trajectory. Gradients are taken beyond the trajectory, away from the average (θ > "
        f"0: BELAY, θ = {PAPER_SPRING.m2 / PAPER_SPRING.m1:g} in the paper's setting), on it (θ = 0: EMA), or between "
        "it and the average (θ < 0: Generalized Primal Averaging, of which schedule-free is the case of an averaging "
        "rate 1/t).",
        "On Rosenbrock the curvature at the starts is larger than at the minimum.",
    )
    return Plate("robustness-theta", "The sign of the spring", caption, fig, notes)
