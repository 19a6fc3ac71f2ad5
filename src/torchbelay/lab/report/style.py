"""How every figure looks: one colour per method everywhere, safe for colour-blind readers and doubled by line style.

The colour shows what is around the optimizer (BELAY, EMA, nothing, …). The line shows the optimizer: solid for SGD,
dashed for Adam. The colours are those of Okabe and Ito.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torchbelay.lab import arms

BELAY_COLOUR, EMA_COLOUR, PLAIN_COLOUR = "#D55E00", "#0072B2", "#555555"
EQUAL_COLOUR = "#56B4E9"
MATCHED_COLOUR, SLOWED_COLOUR, MOMENTUM_COLOUR = "#009E73", "#000000", "#CC79A7"

_HUES = {
    arms.BELAY: BELAY_COLOUR,
    arms.EMA: EMA_COLOUR,
    arms.EQUAL: EQUAL_COLOUR,
    arms.MATCHED: MATCHED_COLOUR,
    "SGD": PLAIN_COLOUR,
    "Adam": PLAIN_COLOUR,
    arms.PLAIN: PLAIN_COLOUR,
    "SGD at BELAY's effective rate": SLOWED_COLOUR,
    "Adam at BELAY's effective rate": SLOWED_COLOUR,
    "momentum at BELAY's effective rate": SLOWED_COLOUR,
    "momentum": MOMENTUM_COLOUR,
    "momentum at SGD's effective rate": MOMENTUM_COLOUR,
    "Adam without momentum": PLAIN_COLOUR,
}

_RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 160,
    "svg.fonttype": "path",
    "svg.hashsalt": "torchbelay",  # so that the same figure is the same file
}


def colour(arm: str) -> str:
    """Return the colour of an arm: the colour of the method around its optimizer."""
    return _HUES[arm] if arm in _HUES else _HUES[arm.split("+")[0]]


def dashes(arm: str) -> str:
    """Return the line style of an arm: solid for SGD, dashed for Adam."""
    return "--" if arm.endswith("Adam") or arm.startswith("Adam") else "-"


@contextmanager
def house() -> Iterator[None]:
    """Draw in the house style inside this block; the user's own settings stay as they are."""
    with mpl.rc_context(_RC):
        yield


def figure(width: float = 9.0, height: float = 5.0) -> Figure:
    """Return an empty figure that belongs to no window."""
    return Figure(figsize=(width, height), layout="constrained")


def label_end(ax: Axes, x: float, y: float, text: str, colour: str, **more: Any) -> None:
    """Write a curve's name at its end, in its colour."""
    ax.annotate(text, (x, y), xytext=(4, 0), textcoords="offset points", color=colour, va="center", fontsize=8, **more)


def as_bytes(fig: Figure, kind: str) -> bytes:
    """Return the bytes of the figure as a PNG or SVG file; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {"Software": None}
    with house():
        fig.savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()
