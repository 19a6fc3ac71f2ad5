"""Record paths over a loss, and draw paths and losses as Figures 2 and 3 show them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor

from torchbelay.lab.arms import Lane
from torchbelay.lab.part import Record, Tick
from torchbelay.lab.records import rounded
from torchbelay.lab.report import style

from . import race
from .functions import Function, find_function

DIGITS = 9  # of a recorded number: more than a figure shows, and few enough that all processors agree
_STEP_BY_STEP = 80  # all of the first steps are recorded, later ones ever more sparsely


def recorded_steps(steps: int) -> list[int]:
    """Return the steps that are recorded: all of the first ones, then about 40 per doubling.

    >>> recorded_steps(90)[-8:]
    [80, 81, 83, 84, 86, 87, 89, 90]
    """
    found, at = list(range(min(steps, _STEP_BY_STEP) + 1)), float(_STEP_BY_STEP)
    while at < steps:
        at *= 1.0175
        found.append(min(steps, round(at)))
    return sorted(set(found))


def trace(
    function: Function, starts: Sequence[tuple[float, float]], lanes: Sequence[Lane], steps: int, tick: Tick
) -> list[Record]:
    """Run all lanes from each start, and return a record of each path."""
    points = torch.tensor([starts], dtype=torch.float64)
    goal = function.goal * float(function(points).min())
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def watch(step: int, w1: Tensor, w2: Tensor) -> None:
        seen[step] = w1[:, 0].clone(), w2[:, 0].clone()

    observed = set(recorded_steps(steps))
    (outcome,) = race.run(
        [function], points, lanes, steps=steps, tolerances=[goal], observed=observed, tick=tick, watch=watch
    )
    records = []
    for s, start in enumerate(starts):
        for i, lane in enumerate(lanes):
            diverged, arrived = int(outcome.diverged[i, s]), int(outcome.arrived[1][i, s])
            at = [step for step in seen if step < diverged]
            w1, w2 = (
                [[rounded(x, DIGITS) for x in seen[step][which][i, s].tolist()] for step in at] for which in (0, 1)
            )
            records.append(
                {
                    "kind": "path",
                    "function": function.name,
                    **lane.options(),
                    "start": list(start),
                    "steps": steps,
                    "goal": rounded(goal, DIGITS),
                    "arrived_at": arrived if arrived <= steps else None,
                    "diverged_at": diverged if diverged <= steps else None,
                    "at": at,
                    "w1": w1,
                    "w2": w2 if lane.arm.averages else None,
                }
            )
    return records


def losses(record: Record, which: str) -> list[float]:
    """Return the loss along the recorded path of w1 or w2."""
    points = torch.tensor(record[which], dtype=torch.float64)
    return [float(x) for x in find_function(record["function"])(points)]


# Drawing ---------------------------------------------------------------------------------------------------------


def draw_contours(ax: Axes, function: Function, x: tuple[float, float], y: tuple[float, float]) -> None:
    """Draw the loss as shades of grey, evenly in its logarithm, and mark the minimum."""
    xs, ys = torch.linspace(*x, 160, dtype=torch.float64), torch.linspace(*y, 160, dtype=torch.float64)
    grid_y, grid_x = torch.meshgrid(ys, xs, indexing="ij")
    z = function.value(grid_x, grid_y)
    low = float(z.flatten().quantile(0.01).clamp_min(1e-12).log10())
    high = float(z.max().log10())
    shade = ((z.clamp_min(1e-12).log10() - low) / (high - low)).clamp(0, 1).mul(11).floor() / 11  # as contours are
    image: Any = {"origin": "lower", "aspect": "auto", "cmap": "Greys", "alpha": 0.45, "interpolation": "bilinear"}
    ax.imshow(shade.numpy(), extent=(*x, *y), **image)
    ax.plot(0, 0, "+", color="black", markersize=7, markeredgewidth=1.2, zorder=5)
    ax.set(xlim=x, ylim=y)
    ax.grid(False)


def draw_path(ax: Axes, record: Record, until: int | None = None) -> None:
    """Draw the path of w1 (thin, pale) and of w2 (thick) with its start and its end, or a cross if it diverged."""
    hue = style.colour(record["arm"])
    shown = [i for i, step in enumerate(record["at"]) if until is None or step <= until]
    averages = record["w2"] is not None
    for which, width, alpha in (("w1", 0.8, 0.45 if averages else 1.0), ("w2", 1.8, 1.0)):
        if record[which] is None:
            continue
        xs, ys = zip(*(record[which][i] for i in shown), strict=True)
        ax.plot(xs, ys, "-", color=hue, linewidth=width, alpha=alpha, zorder=3 if which == "w1" else 4)
    end = record["w2" if averages else "w1"][shown[-1]]
    ax.plot(*record["start"], "o", color="white", markeredgecolor="black", markersize=4, zorder=6)
    diverged = record["diverged_at"] is not None and (until is None or record["diverged_at"] <= until)
    if diverged:
        ax.text(
            0.5,
            0.04,
            f"✕ diverged, step {record['diverged_at']}",
            transform=ax.transAxes,
            ha="center",
            color="#b00020",
            fontsize=8,
            bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.5},
            zorder=7,
        )
    else:
        ax.plot(*end, "o", color=hue, markeredgecolor="black", markersize=5, zorder=6)


def draw_path_grid(
    rows: Sequence[tuple[str, Sequence[Record], tuple[float, float], tuple[float, float], int | None]],
    headings: Callable[[Record], str],
) -> Any:
    """Draw small multiples: one row of panels per (label, records, x range, y range, last step shown)."""
    columns = len(rows[0][1])
    fig = style.figure(9.0, 0.6 + 1.55 * len(rows))
    axes = fig.subplots(len(rows), columns, squeeze=False)
    for row, (label, records, x, y, until) in zip(axes, rows, strict=True):
        for ax, record in zip(row, records, strict=True):
            draw_contours(ax, find_function(record["function"]), x, y)
            draw_path(ax, record, until)
            ax.set_title(headings(record), fontsize=8, color=style.colour(record["arm"]), loc="center")
            ax.set(xticks=[], yticks=[])
        row[0].set_ylabel(f"{label}\n{describe_start(records[0], until)}", fontsize=8)
    fig.supxlabel("○ start   ● end   + minimum   thick: the average w2   thin: the weights w1", fontsize=8)
    return fig


def describe_start(record: Record, until: int | None = None) -> str:
    """Return a text with the start of a run and the number of steps that are shown."""
    x, y = record["start"]
    return f"from ({x:g}, {y:g})\n{until or record['steps']:,} steps".replace("-", "−")


def draw_losses(ax: Axes, records: Sequence[Record]) -> None:
    """Draw loss against steps, both logarithmic: w2 if there is one, with w1 beside it thin and pale."""
    for record in records:
        hue, dashes = style.colour(record["arm"]), style.dashes(record["arm"])
        averages = record["w2"] is not None
        steps = [step + 1 for step in record["at"]]
        if averages:
            ax.plot(steps, losses(record, "w1"), dashes, color=hue, linewidth=0.6, alpha=0.35)
        ax.plot(steps, losses(record, "w2" if averages else "w1"), dashes, color=hue, label=record["arm"])
        if record["diverged_at"] is not None:  # at the upper edge, independent of the average's loss
            at, place = record["diverged_at"] + 1, ax.get_xaxis_transform()
            ax.plot(at, 1, "X", color=hue, markeredgecolor="#b00020", markersize=8, transform=place, clip_on=False)
    ax.set(xscale="log", yscale="log", xlabel="step + 1")
    ax.set_ylim(bottom=max(1e-13, ax.get_ylim()[0]))  # a lower loss is zero for the eye
