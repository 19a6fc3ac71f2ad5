"""The ring's figures, drawn from its records alone."""

import math
from collections.abc import Iterable, Sequence
from statistics import median, quantiles
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from torchbelay.lab.arms import BELAY, EMA, MATCHED, PLAIN, REPULSIVE
from torchbelay.lab.hypotheses import GPA
from torchbelay.lab.part import Plate, Record
from torchbelay.lab.records import select
from torchbelay.lab.report import style
from torchbelay.lab.report.words import listed
from torchbelay.lab.score.effects import WAYS, Effect, spans
from torchbelay.lab.statistics import CONFIDENCE, WORKS

from .effects import effects, effects_plate
from .sample_figures import arm_colour, draw_samples
from .statistics import TUNED, Key, RunTable

_MARKERS = {PLAIN: "s", EMA: "o", MATCHED: "D", BELAY: "^", REPULSIVE: "v"}
_SIGN = f"The repulsive spring has θ < 0. {GPA}"
_SPRINGS = ((style.BELAY_COLOUR, "^"), ("#F0A860", "o"), ("#7A3500", "s"))  # shades of BELAY's colour for its settings


def draw_plates(records: Sequence[Record]) -> list[Plate]:
    """Draw all figures."""
    (about,) = select(records, "protocol")
    table = RunTable(select(records, "run"))
    pairs, widths, samples = (select(records, kind) for kind in ("pair", "width", "samples"))
    with style.house():
        return [
            _draw_curves(about, table, pairs),
            *filter(None, [effects_plate(records)]),
            _draw_pairs(about, pairs, effects(records)),
            _draw_ranges(about, widths, pairs),
            draw_samples(about, samples),
        ]


def _describe_runs(about: Record) -> str:
    return (
        f"Networks of {about['weights']:,} weights, {about['steps']:,} steps of Adam on batches of {about['batch']}, "
        f"{about['seeds']} seeds with the same start and batches for every method and rate. The last weights are "
        "judged."
    )


def _format_mean(pair: Record) -> str:
    """Return a ratio without its interval."""
    return "lost" if pair["ratio"] is None else f"{pair['ratio']:.3g}"


def _format_ratio(pair: Record) -> str:
    """Return a ratio with its interval."""
    if pair["ratio"] is None:
        return "lost"
    return f"{pair['ratio']:.3g} ({pair['low']:.3g} to {pair['high']:.3g})"


def _theta(setting: str) -> float:
    masses = dict(part.split() for part in setting.split(", "))
    return float(masses["m2"]) / float(masses["m1"])


def _ticks(axis: Any, places: Sequence[float]) -> None:
    """Write plain numbers, at these places only."""
    axis.set_major_locator(FixedLocator(list(places)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


# Loss against learning rate -------------------------------------------------------------------------------------------


def _draw_curves(about: Record, table: RunTable, pairs: Sequence[Record]) -> Plate:
    springs, emas = table.settings(BELAY), table.settings(EMA)
    runs = [run for key in table.keys for lr in table.lrs for run in table.runs(key, lr).values()]
    lowest = min((run["test"] for run in runs if run["test"] is not None), default=about["linear"])
    failures, diverged = (sum(run[field] for run in runs) for field in ("failed", "diverged"))
    top = 2 * about["linear"]
    fig = style.figure(9.0, 0.8 + 2.7 * len(springs))
    axes: Any = fig.subplots(len(springs), 2, sharex=True, sharey=True, squeeze=False)
    for i, (row, spring, ema) in enumerate(zip(axes, springs, emas, strict=True)):
        keys: list[Key] = [(PLAIN, table.settings(PLAIN)[0]), (EMA, ema), (MATCHED, spring), (BELAY, spring)]
        if i == 1:  # the row whose EMA has its memory
            keys += [(REPULSIVE, setting) for setting in table.settings(REPULSIVE)]
        for ax, effective in zip(row, (False, True), strict=True):
            ax.axhline(about["linear"], color="#333333", linewidth=1, linestyle=(0, (1, 1.5)))
            for key in keys:
                _draw_curve(ax, table, key, effective=effective, top=top)
        row[0].set_title(
            f"BELAY with {spring}{', as in the paper on MNIST' if i == 0 else ''} (θ = {_theta(spring):g})"
        )
        row[0].legend(fontsize=8, loc="lower left", handlelength=1.6, borderaxespad=0.2, labelspacing=0.3)
        row[0].set_ylabel("excess test loss")
    axes[0, 0].set(xscale="log", yscale="log", ylim=(0.62 * lowest, 1.15 * top))
    _ticks(axes[0, 0].yaxis, (0.01, 0.02, 0.05, 0.1, 0.2))
    axes[0, 1].annotate(
        "best linear denoiser",
        (min(table.lrs), about["linear"]),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=8,
    )
    axes[-1, 0].set_xlabel("nominal learning rate")
    axes[-1, 1].set_xlabel("effective learning rate")
    ends = select(pairs, "pair", scope="high_effective", one=BELAY, other=MATCHED)
    intervals = [f"{_format_ratio(p)} at {p['one_setting']} (θ = {_theta(p['one_setting']):g})" for p in ends]
    reach = listed([_format_mean(p) for p in ends])
    caption = (
        f"Excess loss over the exact denoiser, for {len(springs)} springs and their controls, against the nominal "
        f"(left) and the effective learning rate (right). In the effective rate, BELAY works up to {reach} times the "
        "largest rate of its matched EMA."
    )
    notes = (
        f"{_describe_runs(about)} Lines: the median of the seeds, for the average (w2; w1 for no averaging). Bands: "
        "their middle half. Dotted: BELAY's own weights w1.",
        "The excess loss is the mean squared distance to the exact denoiser, weighted as the training loss, on "
        f"{about['triples']:,} fixed noisy points. The effective rate is the rate at which a constant gradient moves "
        "the weights.",
        "Each row has a spring, its matched EMA (same effective rate and memory: the difference is BELAY's feedback), "
        "and the EMA that the spring is with an infinitely heavy model.",
        f"Cross: at least half of the runs failed, with a loss above {about['failed_above'] / about['linear']:.2g} of "
        f"the best linear denoiser's. Triangle at the top: the median is above the frame. Of {len(runs)} results "
        f"{failures} are failures, {diverged} of them not finite.",
        "The largest effective rate at which BELAY works (see the figure of ranges), over that of its matched EMA: "
        f"{'; '.join(intervals)}.",
        _SIGN,
    )
    return Plate("ring-curves", "Loss against learning rate", caption, fig, notes)


def _draw_curve(ax: Axes, table: RunTable, key: Key, *, effective: bool, top: float) -> None:
    scale = table.scale(key) if effective else 1.0
    x = [lr * scale for lr in table.lrs]
    losses = [_fill_lost(table.tests(key, lr)) for lr in table.lrs]
    middle = [min(median(each), top) for each in losses]
    quarters = [_quarters(each, top) for each in losses]
    hue = arm_colour(key[0])
    setting = f" ({key[1].split(',')[0]})" if key[0] in (EMA, REPULSIVE) else ""
    ax.fill_between(x, [q[0] for q in quarters], [q[1] for q in quarters], color=hue, alpha=0.15, linewidth=0)
    ax.plot(x, middle, color=hue, marker=_MARKERS[key[0]], markersize=4, label=key[0] + setting)
    if key[0] == BELAY:
        own = [median(_fill_lost(run["w1_test"] for run in table.runs(key, lr).values())) for lr in table.lrs]
        ax.plot(x, [min(each, top) for each in own], ":", color=hue, linewidth=1.1)
    for place, each, lr in zip(x, middle, table.lrs, strict=True):
        failed = [run["failed"] for run in table.runs(key, lr).values()]
        if each >= top:
            ax.plot(place, top, marker="^", color=hue, markersize=8, markeredgecolor="white", clip_on=False, zorder=3)
        elif 2 * sum(failed) >= len(failed):
            ax.plot(place, each, marker="X", color=hue, markersize=9, markeredgecolor="white", zorder=3)


def _fill_lost(losses: Iterable[float | None]) -> list[float]:
    """Replace the loss of a lost run by infinity."""
    return [math.inf if loss is None else loss for loss in losses]


def _quarters(values: Sequence[float], top: float) -> tuple[float, float]:
    first, _, last = quantiles([min(value, top) for value in values], n=4, method="inclusive")
    return first, last


# Paired differences ---------------------------------------------------------------------------------------------------


def _draw_pairs(about: Record, pairs: Sequence[Record], found: Sequence[Effect]) -> Plate:
    contests = select(pairs, "pair", scope="chosen")
    margin = next((pair["margin"] for pair in pairs if pair["margin"]), 1.0)
    fig = style.figure(9.0, 5.4)
    halves: Any = fig.subfigures(1, 2, width_ratios=(1, 1.1))
    left, right = halves
    stacked: Any = left.subplots(2, 1, sharex=True, sharey=True)
    for ax, other, way in zip(stacked, (EMA, MATCHED), WAYS, strict=False):
        ax.axhspan(1 / margin, margin, color="#e9e9e9", zorder=0)
        ax.axhline(1, color="#333333", linewidth=0.8)
        _draw_rates(ax, select(pairs, "pair", scope="rate", one=BELAY, other=other))
        ax.set_title(f"{way}: BELAY ÷ {other}", fontsize=9)
    stacked[0].legend(fontsize=8, loc="upper left", labelspacing=0.3)
    stacked[0].set(xscale="log", yscale="log")
    _ticks(stacked[0].yaxis, (0.5, 0.7, 1, 1.5, 2, 3, 5))
    stacked[1].set_xlabel("nominal learning rate")
    forest = right.subplots()
    forest.axvspan(1 / margin, margin, color="#e9e9e9", zorder=0)
    forest.axvline(1, color="#333333", linewidth=0.8)
    _draw_forest(forest, contests)
    forest.set_title(f"{WAYS[-1]} rate and setting", fontsize=9)
    at_first = f" With {found[0].study}, BELAY ÷ EMA is {listed(spans(found[:1]))}." if found else ""
    caption = (
        "Ratios of excess test losses, seed by seed: at equal nominal rate (left, above), at equal effective rate "
        f"(left, below) and at each one's best (right).{at_first}"
    )
    notes = (
        f"Geometric mean and {CONFIDENCE:.0%} t-interval; intervals are not widened for their number. "
        f"{_describe_runs(about)}",
        "Below 1 the method named first is better. At the left, failed runs count with their loss, if it is finite. "
        "The caption leaves out rates at which one of the two arms has such a run.",
        "Right: rate and setting are chosen by the validation loss of half of the seeds and judged by the test loss of "
        "the other half, both ways round. In brackets: the trials of each side.",
        f"Grey: within {margin - 1:.0%}. Two methods count as equal if a test of equivalence says so (two one-sided "
        f"t-tests at {1 - CONFIDENCE:.0%}).",
        _describe_belay(contests, BELAY),
        _describe_belay(contests, BELAY + TUNED),
        _SIGN,
    )
    title = "BELAY against its controls, seed by seed"
    return Plate("ring-pairs", title, caption, fig, tuple(filter(None, notes)))


def _draw_forest(ax: Axes, contests: Sequence[Record]) -> None:
    for at, pair in enumerate(reversed(contests)):
        hue = arm_colour(pair["one"])
        if pair["ratio"] is None:
            ax.annotate("lost", (1, at), color=hue, fontsize=8, va="center", ha="center")
            continue
        ax.plot([pair["low"], pair["high"]], [at, at], color=hue, linewidth=2.4, solid_capstyle="butt")
        ax.plot(pair["ratio"], at, _MARKERS[pair["one"].removesuffix(TUNED)], color=hue, markersize=5)
    labels = [f"{p['one']}\n÷ {p['other']} ({p['trials'][0]} : {p['trials'][1]})" for p in reversed(contests)]
    ax.set_yticks(range(len(contests)), labels, fontsize=8)
    ax.set(xscale="log", xlabel="ratio of excess test losses", ylim=(-0.6, len(contests) - 0.4))
    ax.grid(axis="y", visible=False)
    _ticks(ax.xaxis, (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2))


def _draw_rates(ax: Axes, pairs: Sequence[Record]) -> None:
    """Draw the ratio at every learning rate, one line per spring."""
    springs = list(dict.fromkeys(pair["one_setting"] for pair in pairs))
    for spring, (hue, marker) in zip(springs, _SPRINGS, strict=True):
        row = [pair for pair in pairs if pair["one_setting"] == spring and pair["ratio"] is not None]
        reach = [[p["ratio"] - p["low"] for p in row], [p["high"] - p["ratio"] for p in row]]
        x, y = [p["lr"] for p in row], [p["ratio"] for p in row]
        label = f"{spring} (θ = {_theta(spring):g})"
        ax.errorbar(x, y, yerr=reach, color=hue, marker=marker, markersize=4, capsize=2, label=label)


def _describe_belay(contests: Sequence[Record], name: str) -> str:
    """Return one sentence that compares a BELAY with its controls; empty if all comparisons were lost."""
    words = {"equal": "equal to", "lower": "better than", "higher": "worse than", "open": "not distinguishable from"}
    readings = [
        f"{words[p['reading']]} {p['other']} ({p['ratio']:.3g}; {p['low']:.3g} to {p['high']:.3g})"
        for p in select(contests, "pair", one=name)
        if p["other"] != PLAIN and p["reading"] in words
    ]
    return f"{name} is {listed(readings)}." if readings else ""


# Ranges that work -----------------------------------------------------------------------------------------------------


def _draw_ranges(about: Record, widths: Sequence[Record], pairs: Sequence[Record]) -> Plate:
    own = [width for width in widths if width["against"] == "own"][::-1]
    best = {(w["arm"], w["setting"]): w for w in widths if w["against"] == "best"}
    fig = style.figure(9.0, 0.9 + 0.36 * len(own))
    axes: Any = fig.subplots(1, 2, sharey=True, sharex=True)
    for ax, suffix, name in zip(axes, ("", "_effective"), ("nominal", "effective"), strict=True):
        ax.set_axisbelow(True)
        for at, width in enumerate(own):
            both = ((width, 0.62, 0.3), (best[width["arm"], width["setting"]], 0.34, 1.0))
            for record, height, alpha in both:
                if record["low"] is not None:
                    low, high = record["low" + suffix], record["high" + suffix]
                    ax.barh(
                        at,
                        high - low,
                        left=low,
                        height=height,
                        color=arm_colour(width["arm"]),
                        alpha=alpha,
                        linewidth=0,
                    )
            if width["low"] is not None:
                open_end = width["open_low"] or width["open_high"]  # the range may reach beyond the rates tried
                least = "≥" if open_end else "×"
                text = f"{least}{width['width']:.3g}"
                style.label_end(ax, width["high" + suffix], at, text, arm_colour(width["arm"]))
        ax.set(xscale="log", xlabel=f"{name} learning rate", ylim=(-0.7, len(own) - 0.3))
        ax.grid(axis="y", visible=False)
    low, high = axes[0].get_xlim()
    fine = high / low < 100
    _ticks(axes[0].xaxis, (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1) if fine else (0.001, 0.01, 0.1))
    axes[0].set_xlim(low * (low / high) ** 0.02, high * (high / low) ** 0.06)  # room for the numbers at the ends
    axes[0].set_yticks(range(len(own)), [_label(width) for width in own], fontsize=8)
    for tick, width in zip(axes[0].get_yticklabels(), own, strict=True):
        tick.set_color(arm_colour(width["arm"]))
    own_pairs, shared_pairs = (
        [select(pairs, "pair", scope=scope, one=BELAY, other=other)[0] for other in (EMA, MATCHED)]
        for scope in ("width", "width_shared")
    )
    caption = (
        f"The learning rates that work: the median loss is at most {WORKS:g} times the method's own best (pale), or "
        f"the best of all (full). At the paper's setting BELAY's range is {_format_mean(own_pairs[0])} times as wide "
        f"as EMA's by their own best losses, {_format_mean(shared_pairs[0])} times by the better of both."
    )
    notes = (
        f"{_describe_runs(about)} Between the {len(about['lrs'])} rates tried, the logarithm of the loss is taken to "
        "be linear.",
        "The number is the largest rate over the smallest; ≥ if no end was found. A full bar is missing if even the "
        "best loss of a method is not good enough.",
        "A smaller effective step moves a range and does not change its width. A poor best loss widens the pale range.",
        f"The width of BELAY's range at the paper's setting, seed by seed, is {_describe_widths(own_pairs)}. If both "
        f"are judged by the better of their best losses, it is {_describe_widths(shared_pairs)}.",
        _SIGN,
    )
    return Plate("ring-ranges", "The range of learning rates that work", caption, fig, notes)


def _describe_widths(pairs: Sequence[Record]) -> str:
    return listed([f"{_format_ratio(p)} times that of {p['other']} ({p['other_setting']})" for p in pairs])


def _label(width: Record) -> str:
    return str(width["arm"] if width["arm"] == PLAIN else f"{width['arm']}, {width['setting']}")
