"""Losses over steps, for docs/start.md: the weights jump about, and the average does not."""

import math
from collections.abc import Sequence

from .svg import BLUE, ORANGE, Axes, Drawing


def draw(steps: Sequence[int], weights: Sequence[float], average: Sequence[float]) -> str:
    """Return the picture of two losses over steps, on a logarithmic scale."""
    picture = Drawing(
        640,
        300,
        f"Test loss over {steps[-1]} steps. It ends at {weights[-1]:.2g} with the weights "
        f"and at {average[-1]:.2g} with their average.",
    )
    losses = [math.log10(loss) for loss in (*weights, *average)]
    low, high = math.floor(min(losses) * 2) / 2, math.ceil(max(losses) * 2) / 2
    axes = Axes(picture, (64, 44), (556, 206), (0, steps[-1]), (low, high))
    ticks = [value / 2 for value in range(round(low * 2), round(high * 2) + 1)]
    axes.frame(
        [(steps[-1] * i / 4, f"{steps[-1] * i / 4:g}") for i in range(5)], [(tick, f"{10**tick:.1g}") for tick in ticks]
    )
    for values, colour, width in ((weights, BLUE, 1.4), (average, ORANGE, 3.0)):
        axes.curve(steps, [math.log10(loss) for loss in values], colour, width)
    picture.line((64, 22), (88, 22), BLUE, 1.4)
    picture.text((94, 26), "loss of the weights", BLUE, size=13)
    picture.line((250, 22), (274, 22), ORANGE, 3.0)
    picture.text((280, 26), "loss of the average", ORANGE, size=13)
    picture.text((620, 292), "steps", size=12, anchor="end")
    return picture.render()
