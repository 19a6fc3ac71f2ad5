"""All parts, in the order of the report."""

from typing import cast

from . import fig1, fig2, fig3, invariance, momentum, overhead, ring, robustness
from .part import Part

PARTS: dict[str, Part] = {
    part.NAME: part
    for part in cast("tuple[Part, ...]", (fig1, fig2, fig3, robustness, momentum, invariance, overhead, ring))
}
ALONE = ("overhead",)  # it takes times, which others at work would spoil
