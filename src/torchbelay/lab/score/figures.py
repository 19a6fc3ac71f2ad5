"""What the figures of the score models share: colours, marks, axes and curves."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from torchbelay.lab.arms import BELAY, EMA, EQUAL, MATCHED
from torchbelay.lab.report import style
from torchbelay.lab.statistics import MARGIN

from .analysis import FAILED, HEAVIER, StudyResults, is_lost, median_loss
from .comparison import Comparison, compare

_MARKERS = {EMA: "o", EQUAL: "o", MATCHED: "D", BELAY: "^"}
_SPRINGS = {BELAY: style.BELAY_COLOUR, **dict(zip(HEAVIER, ("#E9A23B", "#7A3500"), strict=True))}
_PAIRS = (0.2, 5.0)  # the widest axis of a chart of ratios
_ROW = 0.075  # of a chart's height: one row of the strip for lost runs
_STRIP = 0.11  # of a chart's height: the least height of the whole strip
_COLD, _WARM = "#0072B2", "#D55E00"  # the two signs of θ; pale near 0


def arm_colour(arm: str) -> str:
    """Return the colour of an arm: the report's own, shades of BELAY's for its masses, blue or orange by θ's sign."""
    if arm.startswith("θ"):
        return theta_colour(float(arm.removeprefix("θ").replace("−", "-")))
    return _SPRINGS.get(arm) or (style.colour(arm) if arm in _MARKERS else style.MOMENTUM_COLOUR)


def theta_colour(theta: float) -> str:
    """Return blue for θ < 0, orange for θ > 0, deeper for a larger |θ|, and black for θ = 0.

    >>> theta_colour(0.0), theta_colour(-1.0), theta_colour(1.0)
    ('#000000', '#0072b2', '#d55e00')
    """
    if theta == 0:
        return "#000000"
    end = _COLD if theta < 0 else _WARM
    share = 0.35 + 0.65 * min(1.0, abs(theta))
    channels = (int(end[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 + share * (channel - 255)):02x}" for channel in channels)


def arm_marker(arm: str) -> str:
    """Return the marker of an arm."""
    return _MARKERS.get(arm, "s")


def set_ticks(axis: Any, places: Iterable[float]) -> None:
    """Put plain decimal numbers at these places of an axis, and at no others."""
    axis.set_major_locator(FixedLocator(list(places)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


@dataclass(frozen=True)
class LossAxis:
    """The top of a logarithmic axis of losses, and the height of each row in the strip for lost runs above it."""

    top: float
    rows: Mapping[str, float]


def set_loss_axis(
    ax: Axes, losses: Iterable[float | None], rows: Sequence[str], also: Iterable[float] = (), label: str = "lost"
) -> LossAxis:
    """Set a logarithmic axis for losses that are not lost and, if any is, a strip with these rows above it.

    Runs that work differ by per cents and lost runs by a factor: one scale could not show both.
    """
    losses = list(losses)
    known = [loss for loss in losses if loss is not None and not is_lost(loss)] + list(also)
    low, top = 0.96 * min(known, default=0.05), 1.04 * max(known, default=FAILED)
    if not any(map(is_lost, losses)):
        rows = ()
    share = max(_ROW * len(rows), _STRIP) if rows else 0.0
    end = top * (top / low) ** (share / (1 - share))
    ax.set(yscale="log", ylim=(low, end))
    set_ticks(ax.yaxis, spaced(low, top))
    heights = {name: top * (end / top) ** (1 - (i + 0.5) / len(rows)) for i, name in enumerate(rows)}
    if rows:
        ax.axhspan(top, end, color="#f3eeee", zorder=0)
        ax.annotate(
            label, (0.01, (top * end) ** 0.5), xycoords=("axes fraction", "data"), fontsize=8, va="center", color="#555"
        )
    return LossAxis(top, heights)


_STEPS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002)


def spaced(low: float, high: float) -> list[float]:
    """Return up to seven round numbers between two numbers.

    >>> spaced(0.15, 0.19), spaced(0.05, 1.2)
    ([0.15, 0.16, 0.17, 0.18, 0.19], [0.05, 0.1, 0.2, 0.5, 1.0])
    """
    if high / low > 4:
        decades = (10.0**e for e in range(-4, 4))
        return [x for d in decades for x in (d, 2 * d, 5 * d) if low <= x <= high * 1.001]
    for step in reversed(_STEPS):
        found = [round(i * step, 6) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
        if len(found) <= 7:
            break
    return found


def draw_median(ax: Axes, x: Sequence[float], losses: Sequence[Sequence[float | None]], hue: str, **line: Any) -> None:
    """Draw the median loss over the seeds; leave a gap if at least half of them are lost."""
    shown = [math.nan if _mostly_lost(each) else median_loss(each) for each in losses]
    ax.plot(x, [math.nan if y is None else y for y in shown], color=hue, **line)


def draw_curve(
    ax: Axes,
    x: Sequence[float],
    losses: Sequence[Sequence[float | None]],
    hue: str,
    axis: LossAxis,
    row: str,
    **line: Any,
) -> None:
    """Draw the median with the band from the best to the worst seed, and mark lost seeds.

    If at least half of the seeds are lost, a cross in the strip replaces the median. If some are lost, but fewer, their
    number stands beside it.
    """
    draw_median(ax, x, losses, hue, **line)
    gone = [_mostly_lost(each) for each in losses]
    ends = [[axis.top if loss is None else min(loss, axis.top) for loss in each] for each in losses]
    low = [math.nan if lost else min(each) for lost, each in zip(gone, ends, strict=True)]
    ax.fill_between(x, low, [max(each, default=math.nan) for each in ends], color=hue, alpha=0.13, linewidth=0)
    for place, lost, each in zip(x, gone, losses, strict=True):
        count, seeds = sum(map(is_lost, each)), len(each)
        look: dict[str, Any] = {"color": hue, "fontsize": 7.5, "textcoords": "offset points", "va": "center"}
        if lost:
            height = axis.rows[row]
            ax.plot(place, height, "X", color=hue, markersize=7, markeredgecolor="white", clip_on=False, zorder=4)
            if count < seeds:
                ax.annotate(f"{count} of {seeds}", (place, height), xytext=(7, 0), **look)
        elif count:
            height = median_loss(each) or axis.top
            ax.annotate(f"{count} of {seeds} lost", (place, height), xytext=(8, 5), **look)


def _mostly_lost(losses: Sequence[float | None]) -> bool:
    return 2 * sum(map(is_lost, losses)) >= len(losses)


def draw_training(ax: Axes, study: StudyResults, lr: float, *, x_per_step: float = 1.0, images: str = "test") -> None:
    """Draw the loss during training: the average bold, its seeds as thin lines, the weights dotted.

    Here no loss counts as lost: an early average still contains much of the initial weights.
    """
    lines = {(arm, w): study.loss_curve(arm, lr, w, images) for arm in study.arms for w in ("w1", "w2")}
    known = [loss for _, rows in lines.values() for row in rows for loss in row if loss is not None]
    low, top = 0.97 * min(known, default=0.1), 1.03 * max(known, default=1.0)
    ax.set(yscale="log", ylim=(low, top))
    set_ticks(ax.yaxis, spaced(low, top))
    for (arm, weights), (steps, losses) in lines.items():
        x = [x_per_step * step for step in steps]
        if weights == "w2":
            draw_average(ax, x, losses, arm)
        else:
            ax.plot(x, _medians(losses), color=arm_colour(arm), linewidth=0.9, linestyle=":")


def draw_average(ax: Axes, x: Sequence[float], values: Sequence[Sequence[float | None]], arm: str, **look: Any) -> None:
    """Draw the median over the seeds as a bold line, and every seed as a thin one; `values` has a row per place.

    EMA is dashed, because other curves may lie on it. `look` may name another label than the arm's name.
    """
    hue = arm_colour(arm)
    for seed in zip(*values, strict=True):
        ax.plot(x, [math.nan if y is None else y for y in seed], color=hue, linewidth=0.7, alpha=0.5)
    if arm in (EMA, EQUAL):
        look = {"linestyle": (0, (5, 2)), "zorder": 3} | look
    look = {"label": arm} | look
    ax.plot(x, _medians(values), color=hue, linewidth=2.0, **look)


def _medians(values: Sequence[Sequence[float | None]]) -> list[float]:
    return [math.nan if (found := median_loss(each)) is None else found for each in values]


def set_ratio_axis(ax: Axes, found: Sequence[Comparison], margin: float = MARGIN) -> None:
    """Set a logarithmic axis for ratios, with a grey band for the margin of equality."""
    ends = [end for each in found if each.ratio for end in (each.ratio.low, each.ratio.high)]
    ends += [each.point for each in found if each.point]
    low, high = max(_PAIRS[0], 0.97 * min([*ends, 1 / margin])), min(_PAIRS[1], 1.03 * max([*ends, margin]))
    ax.axhspan(1 / margin, margin, color="#e9e9e9", zorder=0)
    ax.axhline(1, color="#333333", linewidth=0.8)
    ax.set(yscale="log", ylim=(low, high))
    set_ticks(ax.yaxis, spaced(low, high))


def draw_ratio(
    ax: Axes,
    x: float,
    names: tuple[str, str],
    ones: Mapping[int, float | None],
    others: Mapping[int, float | None],
    noise: float = 0.0,
) -> None:
    """Draw a ratio with its interval over the dots of its seeds; write text for lost runs or a ratio off the axis.

    `noise` is that of `compare`.
    """
    found, hue, mark = compare(ones, others, noise=noise), arm_colour(names[0]), arm_marker(names[0])
    for seed in ones:
        if (one := ones[seed]) is not None and (other := others.get(seed)) is not None:
            ax.plot(x, one / other, ".", color=hue, alpha=0.4, markersize=4, zorder=2)
    low, high = ax.get_ylim()
    if found.point is not None and not low <= found.point <= high:
        down = found.point < low
        ax.annotate(
            f"{'↓' if down else '↑'} {found.point:.2g}",
            (x, low if down else high),
            xytext=(0, 4 if down else -4),
            textcoords="offset points",
            color=hue,
            fontsize=8,
            ha="center",
            va="bottom" if down else "top",
        )
    elif found.ratio is not None:
        reach = [[found.ratio.mean - found.ratio.low], [found.ratio.high - found.ratio.mean]]
        ax.errorbar([x], [found.ratio.mean], yerr=reach, color=hue, marker=mark, markersize=5, capsize=2.5, zorder=3)
    elif found.point is not None:
        ax.plot(x, found.point, marker=mark, markerfacecolor="white", color=hue, markersize=5, zorder=3)
    elif found.seeds:
        ours, theirs = found.both_lost + found.only_one_lost, found.both_lost + found.only_other_lost
        words = f"{ours} and {theirs} of {found.seeds} lost"
        if {ours, theirs} <= {0, found.seeds}:
            words = "both lost" if ours == theirs else f"{names[0] if ours else names[1]} lost"
        look: dict[str, Any] = {"color": "#555", "fontsize": 8, "ha": "center", "va": "bottom", "rotation": 90}
        ax.annotate(words, (x, low), xytext=(0, 5), textcoords="offset points", **look)
    if found.unpaired and found.point is not None:
        words = f"{found.seeds - found.unpaired} of {found.seeds}"
        ax.annotate(
            words,
            (x, min(max(found.point, low), high)),
            xytext=(6, 0),
            textcoords="offset points",
            fontsize=7.5,
            va="center",
        )
