"""Losses over steps, for docs/start.md: the weights jump about, and the average does not."""

import math
from collections.abc import Sequence

from .svg import BLUE, ORANGE, Axes, Drawing


def draw(steps: Sequence[int], weights: Sequence[float], average: Sequence[float]) -> str:
    """Return the picture of two losses over steps, on a logarithmic scale."""
    picture = Drawing(
        480,
        290,
        f"Test loss over {steps[-1]} steps. It ends at {weights[-1]:.2g} with the weights "
        f"and at {average[-1]:.2g} with their average.",
    )
    losses = [math.log10(loss) for loss in (*weights, *average)]
    low, high = math.floor(min(losses) * 2) / 2, math.ceil(max(losses) * 2) / 2
    axes = Axes(picture, (58, 44), (404, 196), (0, steps[-1]), (low, high))
    ticks = [value / 2 for value in range(round(low * 2), round(high * 2) + 1)]
    axes.frame(
        [(steps[-1] * i / 4, f"{steps[-1] * i / 4:g}") for i in range(5)], [(tick, f"{10**tick:.1g}") for tick in ticks]
    )
    for values, colour, width in ((weights, BLUE, 1.4), (average, ORANGE, 3.0)):
        axes.curve(steps, [math.log10(loss) for loss in values], colour, width)
    picture.line((58, 22), (82, 22), BLUE, 1.4)
    picture.text((88, 26), "loss of the weights", BLUE, size=13)
    picture.line((246, 22), (270, 22), ORANGE, 3.0)
    picture.text((276, 26), "loss of the average", ORANGE, size=13)
    picture.text((462, 284), "steps", size=12, anchor="end")
    return picture.render()
