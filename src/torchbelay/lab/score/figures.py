"""What the figures of the score models share: colours, marks, axes, and the words below them."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from torchbelay.lab.arms import BELAY, EMA, MATCHED
from torchbelay.lab.part import Record
from torchbelay.lab.report import style
from torchbelay.lab.statistics import CONFIDENCE, MARGIN, Range

from .analysis import FAILED, Comparison, Study, compare, is_lost, middle, of

PAIRED = (
    f"Ratios are taken seed by seed (dots): their geometric mean and its {CONFIDENCE:.0%} t-interval; below 1 the "
    f"first named is better; grey: within {MARGIN - 1:.0%}"
)
LEFT_OUT = "A pair with a lost run has no ratio; where some have none, the number beside a point says how many have."

_MARKERS = {EMA: "o", MATCHED: "D", BELAY: "^"}
_SPRINGS = {BELAY: style.BELAY_COLOUR, "BELAY m1 2e4": "#E9A23B", "BELAY m1 2e5": "#7A3500", "BELAY tuned": "#7A3500"}
MODELS = {"ncsnv2": "NCSNv2", "edm": "EDM"}
_PAIRS = (0.2, 5.0)  # of a chart of ratios, at the most
_ROW = 0.075  # of a chart's height: a row of the strip for what was lost
_STRIP = 0.11  # and of the whole strip, at the least
_COLD, _WARM = "#0072B2", "#D55E00"  # the two signs of θ; pale near 0


# Looks ----------------------------------------------------------------------------------------------------------------


def colour(arm: str) -> str:
    """Of an arm: the house's, shades of BELAY's for its masses, and blue or orange by the sign of θ."""
    if arm.startswith("θ"):
        return hue_of(float(arm.removeprefix("θ").replace("−", "-")))
    return _SPRINGS.get(arm) or (style.colour(arm) if arm in _MARKERS else style.MOMENTUM_COLOUR)


def hue_of(theta: float) -> str:
    """Blue for a spring that repels, orange for one that attracts, the deeper the stronger; black for none.

    >>> hue_of(0.0), hue_of(-1.0), hue_of(1.0)
    ('#000000', '#0072b2', '#d55e00')
    """
    if theta == 0:
        return "#000000"
    end = _COLD if theta < 0 else _WARM
    share = 0.35 + 0.65 * min(1.0, abs(theta))
    channels = (int(end[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 + share * (channel - 255)):02x}" for channel in channels)


def marker(arm: str) -> str:
    """Of an arm."""
    return _MARKERS.get(arm, "s")


def ticks(axis: Any, places: Iterable[float]) -> None:
    """Numbers as people write them, at these places alone."""
    axis.set_major_locator(FixedLocator(list(places)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


@dataclass(frozen=True)
class LossAxis:
    """Where a logarithmic axis of losses ends, and how high each name's crosses stand in the strip above it."""

    top: float
    rows: Mapping[str, float]


def loss_axis(
    ax: Axes, losses: Iterable[float | None], rows: Sequence[str], also: Iterable[float] = (), label: str = "lost"
) -> LossAxis:
    """A logarithmic axis for the losses that are not lost, and for the others, if any, a strip on top with these rows.

    Those that work differ by per cents and those that are lost by a factor: one scale would show neither.
    """
    losses = list(losses)
    known = [loss for loss in losses if loss is not None and not is_lost(loss)] + list(also)
    low, top = 0.96 * min(known, default=0.05), 1.04 * max(known, default=FAILED)
    if not any(map(is_lost, losses)):
        rows = ()
    share = max(_ROW * len(rows), _STRIP) if rows else 0.0
    end = top * (top / low) ** (share / (1 - share))
    ax.set(yscale="log", ylim=(low, end))
    ticks(ax.yaxis, _spaced(low, top))
    heights = {name: top * (end / top) ** (1 - (i + 0.5) / len(rows)) for i, name in enumerate(rows)}
    if rows:
        ax.axhspan(top, end, color="#f3eeee", zorder=0)
        ax.annotate(
            label, (0.01, (top * end) ** 0.5), xycoords=("axes fraction", "data"), fontsize=8, va="center", color="#555"
        )
    return LossAxis(top, heights)


_STEPS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002)


def _spaced(low: float, high: float) -> list[float]:
    """Round numbers between two: up to seven.

    >>> _spaced(0.15, 0.19), _spaced(0.05, 1.2)
    ([0.15, 0.16, 0.17, 0.18, 0.19], [0.05, 0.1, 0.2, 0.5, 1.0])
    """
    if high / low > 4:
        decades = (10.0**e for e in range(-4, 2))
        return [x for d in decades for x in (d, 2 * d, 5 * d) if low <= x <= high * 1.001]
    for step in reversed(_STEPS):
        found = [round(i * step, 6) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
        if len(found) <= 7:
            break
    return found


def plain_curve(ax: Axes, x: Sequence[float], losses: Sequence[Sequence[float | None]], hue: str, **line: Any) -> None:
    """The median loss over the seeds; nothing where at least half of them are lost."""
    shown = [math.nan if _mostly_lost(each) else middle(each) for each in losses]
    ax.plot(x, [math.nan if y is None else y for y in shown], color=hue, **line)


def curve(
    ax: Axes,
    x: Sequence[float],
    losses: Sequence[Sequence[float | None]],
    hue: str,
    axis: LossAxis,
    row: str,
    **line: Any,
) -> None:
    """The median with the band from the best to the worst seed, and what was lost.

    Where at least half of the seeds are, there is a cross in the strip instead of a median; where some are and not all,
    their number stands beside.
    """
    plain_curve(ax, x, losses, hue, **line)
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
            height = middle(each) or axis.top
            ax.annotate(f"{count} of {seeds} lost", (place, height), xytext=(8, 5), **look)


def _mostly_lost(losses: Sequence[float | None]) -> bool:
    return 2 * sum(map(is_lost, losses)) >= len(losses)


def over_training(ax: Axes, study: Study, lr: float, *, x_for_a_step: float = 1.0) -> None:
    """The loss as training goes on: medians, bold of the average, over the hairs of its seeds; dotted of the weights.

    EMA is dashed, as others may lie on it. Early on an average has much of the start in it: here no loss is lost.
    """
    lines = {(arm, w): study.along(arm, lr, w) for arm in study.arms for w in ("w1", "w2")}
    known = [loss for _, rows in lines.values() for row in rows for loss in row if loss is not None]
    low, top = 0.97 * min(known, default=0.1), 1.03 * max(known, default=1.0)
    ax.set(yscale="log", ylim=(low, top))
    ticks(ax.yaxis, _spaced(low, top))
    for (arm, weights), (steps, losses) in lines.items():
        x = [x_for_a_step * step for step in steps]
        look: dict[str, Any] = {"linewidth": 0.9, "linestyle": ":"}
        if weights == "w2":
            look = {"linewidth": 2.0, "label": arm} | ({"linestyle": (0, (5, 2)), "zorder": 3} if arm == EMA else {})
            for seed in zip(*losses, strict=True):
                hair = [math.nan if loss is None else loss for loss in seed]
                ax.plot(x, hair, color=colour(arm), linewidth=0.7, alpha=0.5)
        middles = [math.nan if (found := middle(each)) is None else found for each in losses]
        ax.plot(x, middles, color=colour(arm), **look)


def ratio_axis(ax: Axes, found: Sequence[Comparison], margin: float = MARGIN) -> None:
    """A logarithmic axis for ratios, with the margin of what counts as equal."""
    ends = [end for each in found if each.ratio for end in (each.ratio.low, each.ratio.high)]
    ends += [each.point for each in found if each.point]
    low, high = max(_PAIRS[0], 0.97 * min([*ends, 1 / margin])), min(_PAIRS[1], 1.03 * max([*ends, margin]))
    ax.axhspan(1 / margin, margin, color="#e9e9e9", zorder=0)
    ax.axhline(1, color="#333333", linewidth=0.8)
    ax.set(yscale="log", ylim=(low, high))
    ticks(ax.yaxis, _spaced(low, high))


def pair(
    ax: Axes, x: float, names: tuple[str, str], ones: Mapping[int, float | None], others: Mapping[int, float | None]
) -> None:
    """A ratio with its interval, over the dots of its seeds; words where runs were lost or it is out of sight."""
    found, hue, mark = compare(ones, others), colour(names[0]), marker(names[0])
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


# Words ----------------------------------------------------------------------------------------------------------------


def listed(words: Sequence[str]) -> str:
    """As a sentence has them."""
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else "".join(words)


def about(study: Study) -> str:
    """The networks and how long they were trained, as the runs say it."""

    def said(key: str) -> str:
        return listed([f"{value:,}" for value in sorted({run[key] for run in study.runs})])

    models = listed([MODELS.get(name, name) for name in sorted({str(run["model"]) for run in study.runs})])
    seeds = len(study.seeds)
    many = f"{seeds} seeds, each with the same start, batches and noise for every arm" if seeds > 1 else "one seed"
    return (
        f"{models} with {said('parameters')} weights, {said('steps')} steps of Adam on batches of {said('batch')}; "
        f"{many}; losses at the end, on fixed images and noise."
    )


def lost(study: Study) -> str:
    """How many runs are lost and what that means, as a sentence; the bar lies between two kinds of runs."""
    count = sum(study.lost(arm, lr) for arm in study.arms for lr in study.rates(arm))
    if not count:
        return "No run is lost."
    kept, gone = study.gap()
    ends = [f"those that work end below {_up(kept)}"] if kept is not None else []
    ends += [f"those that collapsed above {_down(gone)}"] if gone is not None else []
    between = f"; {listed(ends)}" if ends else ""
    return (
        f"Lost are {count} of {len(study.runs)} runs: a test loss above {FAILED:g}, half of what predicting nothing "
        f"gives, or none that is finite{between}."
    )


def _up(value: float) -> str:
    """To two digits, never below the value.

    >>> _up(0.1864), _down(0.6239)
    ('0.19', '0.62')
    """
    return f"{math.ceil(value * 100 - 1e-9) / 100:g}"


def _down(value: float) -> str:
    return f"{math.floor(value * 100 + 1e-9) / 100:g}"


def width(found: Range | None) -> str:
    """How far a range of learning rates reaches; it may reach beyond the rates that were tried."""
    if found is None:
        return "none"
    sign = "≥" if found.open_low or found.open_high else ""
    return f"{sign}{found.width:.3g}× ({found.low:.2g} to {found.high:.2g})"


_KNOWN = ("kind", "study", "differs", "dataset", "model", "steps", "batch")  # told elsewhere


def settings(records: Sequence[Record], study: str) -> tuple[str, ...]:
    """The numbers of a study's protocol, as a note; none if there is no protocol."""
    for record in of(records, "protocol", study=study):
        plain = [
            f"{key.replace('_', ' ')} {'−' * (value < 0)}{abs(value):.4g}"
            if isinstance(value, int | float)
            else f"{key.replace('_', ' ')} {value}"
            for key, value in record.items()
            if key not in _KNOWN and isinstance(value, int | float | str)
        ]
        return (f"Settings: {', '.join(plain)}.",) if plain else ()
    return ()


def differs(records: Sequence[Record], study: str) -> tuple[str, ...]:
    """What differs from the paper's setting, or is unknown there; each once. What `times` says better is left to it."""
    told = [said for r in of(records, "protocol", study=study) for said in r.get("differs", ())]
    return tuple(dict.fromkeys(said for said in told if "shared_gpu" not in said))


def times(study: Study) -> tuple[str, ...]:
    """How long each run took, as a note; those that had to share the GPU are set apart, what was stopped left out."""
    groups: dict[tuple[bool, int], set[float]] = {}
    for run in study.runs:
        if "wall_s" in run and run.get("steps_taken", run["steps"]) == run["steps"]:
            groups.setdefault((bool(run.get("shared_gpu")), run["side_by_side"]), set()).add(float(run["wall_s"]))
    said = [
        f"{_span(seconds)} with {many} side by side"
        + (", while other work had a share of the GPU: not to be compared" if shared else "")
        for (shared, many), seconds in sorted(groups.items())
    ]
    note = "its part, by steps, of the time of a group that trains side by side"
    return (f"Time a run took ({note}): {'; '.join(said)}.",) if said else ()


def _span(seconds: Collection[float]) -> str:
    """From the least to the most.

    >>> _span([12.04, 5.6]), _span([11.5])
    ('5.6 to 12 s', '11.5 s')
    """
    low, high = f"{min(seconds):.3g}", f"{max(seconds):.3g}"
    return f"{low} s" if low == high else f"{low} to {high} s"
