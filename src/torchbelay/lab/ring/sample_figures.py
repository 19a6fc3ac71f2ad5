"""What the ring's score models draw, as points beside the mixture, from its records alone."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Circle

from torchbelay.lab.arms import REPULSIVE
from torchbelay.lab.part import Plate, Record
from torchbelay.lab.report import style

from .mixture import NEAR
from .statistics import MIXTURE, TUNED


def arm_colour(name: str) -> str:
    """Return the colour of an arm, tuned or not."""
    arm = name.removesuffix(TUNED)
    return style.MOMENTUM_COLOUR if arm == REPULSIVE else style.colour(arm)  # momentum is a repulsive spring, too


def draw_samples(about: Record, samples: Sequence[Record]) -> Plate:
    """Draw the samples of one seed, at the rate that each method chose and at a high one."""
    found = {(record["contestant"], record["rate"]): record for record in samples}
    names = list(dict.fromkeys(record["contestant"] for record in samples if record["contestant"] != MIXTURE))
    true = found[MIXTURE, "true"]
    fig = style.figure(9.0, 3.8)
    axes: Any = fig.subplots(2, 1 + len(names), squeeze=False)
    _draw_points(axes[0, 0], about, true, "#333333")
    axes[0, 0].set_title("the mixture", fontsize=8, loc="center")
    for row, rate in zip(axes, ("chosen", "high"), strict=True):
        for ax, name in zip(row[1:], names, strict=True):
            _draw_points(ax, about, found[name, rate], arm_colour(name))
    for ax, name in zip(axes[0, 1:], names, strict=True):
        ax.set_title(name, fontsize=8, loc="center", color=arm_colour(name))
    axes[1, 0].axis("off")
    note = f"above: at the\nrate it chose\n\nbelow: at a\nhigh rate\n\n%: within {NEAR:g}\nst. dev. of\na centre"
    axes[1, 0].annotate(note, (0.5, 0.5), xycoords="axes fraction", ha="center", va="center", fontsize=8)
    caption = (
        "Samples of one seed's networks: above at the rate chosen for each method, below at the high nominal rate "
        f"{about['high_lr']:g}. One seed shows what a loss looks like; it decides nothing."
    )
    notes = (
        f"{len(true['points'])} points of the mixture, and as many drawn by Heun's method (18 steps) from the same "
        f"noise with the networks of seed {found[names[0], 'chosen']['seed']}: the average if there is one, else the "
        "weights. The rate and setting above were chosen on other seeds.",
        "Circles: two standard deviations around each centre. The percentage counts points within "
        f"{NEAR:g} standard deviations of a centre. Points outside the frame are counted but not shown.",
    )
    return Plate("ring-samples", "What the score models draw", caption, fig, notes)


def _draw_points(ax: Axes, about: Record, record: Record, hue: str) -> None:
    reach = about["radius"] + 4.5 * about["spread"]
    ax.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", xticks=[], yticks=[])
    ax.grid(False)
    ax.spines[:].set(visible=True, color="#bbbbbb", linewidth=0.6)
    for i in range(about["modes"]):
        angle = 2 * math.pi * i / about["modes"]
        centre = about["radius"] * math.cos(angle), about["radius"] * math.sin(angle)
        ax.add_patch(Circle(centre, 2 * about["spread"], facecolor="none", edgecolor="#bbbbbb", linewidth=0.7))
    lr = "" if record["lr"] is None else f"lr {record['lr']:g}: "
    if record["points"] is None:
        ax.annotate("lost", (0, 0), ha="center", va="center", color=hue)
        ax.set_xlabel(f"{lr}lost", fontsize=8)
        return
    ax.scatter([x for x, _ in record["points"]], [y for _, y in record["points"]], s=3, color=hue, linewidths=0)
    ax.set_xlabel(f"{lr}{100 * record['near']:.0f}%", fontsize=8)
