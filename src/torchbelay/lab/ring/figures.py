"""The ring's figures, drawn from its records alone."""

import math
from collections.abc import Iterable, Sequence
from statistics import median, quantiles
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Circle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from torchbelay.lab.arms import BELAY, EMA, MATCHED, PLAIN, REPULSIVE
from torchbelay.lab.part import Plate, Record
from torchbelay.lab.report import style
from torchbelay.lab.statistics import CONFIDENCE, WORKS

from .mixture import NEAR
from .statistics import MIXTURE, TUNED, Key, Table

_MARKERS = {PLAIN: "s", EMA: "o", MATCHED: "D", BELAY: "^", REPULSIVE: "v"}
_SPRINGS = ((style.BELAY_COLOUR, "^"), ("#F0A860", "o"), ("#7A3500", "s"))  # shades of BELAY's colour for its settings


def plates(records: Sequence[Record]) -> list[Plate]:
    """All of them."""
    about = next(record for record in records if record["kind"] == "protocol")
    table = Table(record for record in records if record["kind"] == "run")
    pairs, widths, samples = ([r for r in records if r["kind"] == kind] for kind in ("pair", "width", "samples"))
    with style.house():
        return [
            _curves(about, table, pairs),
            _pairs(about, pairs),
            _ranges(about, widths, pairs),
            _samples(about, samples),
        ]


def _colour(name: str) -> str:
    arm = name.removesuffix(TUNED)
    return style.MOMENTUM_COLOUR if arm == REPULSIVE else style.colour(arm)  # momentum, too, is a spring that repels


def _runs(about: Record) -> str:
    return (
        f"Networks of {about['weights']:,} weights, {about['steps']:,} steps of Adam on batches of {about['batch']}, "
        f"{about['seeds']} seeds with the same start and batches for every method and rate; the last weights."
    )


def _said(pair: Record) -> str:
    """A ratio with its interval."""
    if pair["ratio"] is None:
        return "lost"
    return f"{pair['ratio']:.3g} ({pair['low']:.3g} to {pair['high']:.3g})"


def _theta(setting: str) -> float:
    masses = dict(part.split() for part in setting.split(", "))
    return float(masses["m2"]) / float(masses["m1"])


def _ticks(axis: Any, places: Sequence[float]) -> None:
    """Numbers as people write them, at these places alone."""
    axis.set_major_locator(FixedLocator(list(places)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


# Loss against learning rate -------------------------------------------------------------------------------------------


def _curves(about: Record, table: Table, pairs: Sequence[Record]) -> Plate:
    springs, emas = table.settings(BELAY), table.settings(EMA)
    runs = [run for key in table.keys for lr in table.lrs for run in table.at(key, lr).values()]
    lowest = min((run["test"] for run in runs if run["test"] is not None), default=about["linear"])
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
                _curve(ax, table, key, effective=effective, top=top)
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
    ends = [
        f"{_said(pair)} at θ = {_theta(pair['one_setting']):g} ({pair['one_setting']})"
        for pair in _of(pairs, "high_effective", BELAY, MATCHED)
    ]
    caption = (
        "Mean squared distance to the exact denoiser, weighted as the training loss, on "
        f"{about['triples']:,} fixed noisy points, of the average (w2; w1 for no averaging): median of the seeds, and "
        f"the band of their middle half. {_runs(about)} Each row has a spring, its matched EMA (same effective rate "
        "and memory: the difference is BELAY itself), and the EMA that it would be with an infinitely heavy model; "
        "dotted, BELAY's own weights w1. Right: against the rate at which a constant gradient moves the weights. A "
        "cross: at least half of the runs failed, with a loss above 0.9 of the best linear denoiser's; a triangle at "
        f"the top: the median is out of sight. Of {len(runs)} results {sum(run['failed'] for run in runs)} are "
        f"failures, {sum(run['diverged'] for run in runs)} of them not finite. The largest effective rate at which "
        f"BELAY works (as in the chart of ranges), over that of its matched EMA: {'; '.join(ends)}."
    )
    return Plate("ring-curves", "Loss against learning rate", caption, fig)


def _curve(ax: Axes, table: Table, key: Key, *, effective: bool, top: float) -> None:
    scale = table.scale(key) if effective else 1.0
    x = [lr * scale for lr in table.lrs]
    losses = [_known(table.tests(key, lr)) for lr in table.lrs]
    middle = [min(median(each), top) for each in losses]
    quarters = [_quarters(each, top) for each in losses]
    hue = _colour(key[0])
    setting = f" ({key[1].split(',')[0]})" if key[0] in (EMA, REPULSIVE) else ""
    ax.fill_between(x, [q[0] for q in quarters], [q[1] for q in quarters], color=hue, alpha=0.15, linewidth=0)
    ax.plot(x, middle, color=hue, marker=_MARKERS[key[0]], markersize=4, label=key[0] + setting)
    if key[0] == BELAY:
        own = [median(_known(run["w1_test"] for run in table.at(key, lr).values())) for lr in table.lrs]
        ax.plot(x, [min(each, top) for each in own], ":", color=hue, linewidth=1.1)
    for place, each, lr in zip(x, middle, table.lrs, strict=True):
        failed = [run["failed"] for run in table.at(key, lr).values()]
        if each >= top:
            ax.plot(place, top, marker="^", color=hue, markersize=8, markeredgecolor="white", clip_on=False, zorder=3)
        elif 2 * sum(failed) >= len(failed):
            ax.plot(place, each, marker="X", color=hue, markersize=9, markeredgecolor="white", zorder=3)


def _known(losses: Iterable[float | None]) -> list[float]:
    """A run that was lost is infinitely far up."""
    return [math.inf if loss is None else loss for loss in losses]


def _quarters(values: Sequence[float], top: float) -> tuple[float, float]:
    first, _, last = quantiles([min(value, top) for value in values], n=4, method="inclusive")
    return first, last


# Paired differences ---------------------------------------------------------------------------------------------------


def _of(pairs: Sequence[Record], scope: str, one: str, other: str) -> list[Record]:
    return [p for p in pairs if (p["scope"], p["one"], p["other"]) == (scope, one, other)]


def _pairs(about: Record, pairs: Sequence[Record]) -> Plate:
    chosen = [pair for pair in pairs if pair["scope"] == "chosen"]
    margin = next((pair["margin"] for pair in pairs if pair["margin"]), 1.0)
    fig = style.figure(9.0, 5.4)
    halves: Any = fig.subfigures(1, 2, width_ratios=(1.1, 1))
    left, right = halves
    forest = left.subplots()
    forest.axvspan(1 / margin, margin, color="#e9e9e9", zorder=0)
    forest.axvline(1, color="#333333", linewidth=0.8)
    _forest(forest, chosen)
    forest.set_title("each at the rate and setting that it chose", fontsize=9)
    stacked: Any = right.subplots(2, 1, sharex=True, sharey=True)
    for ax, other in zip(stacked, (EMA, MATCHED), strict=True):
        ax.axhspan(1 / margin, margin, color="#e9e9e9", zorder=0)
        ax.axhline(1, color="#333333", linewidth=0.8)
        _along(ax, _of(pairs, "rate", BELAY, other))
        ax.set_title(f"BELAY ÷ {other}, at the same nominal rate", fontsize=9)
    stacked[0].legend(fontsize=8, loc="upper left", labelspacing=0.3)
    stacked[0].set(xscale="log", yscale="log")
    _ticks(stacked[0].yaxis, (0.5, 0.7, 1, 1.5, 2, 3, 5))
    stacked[1].set_xlabel("nominal learning rate")
    caption = (
        f"Ratios of excess test losses, seed by seed: geometric mean and its {CONFIDENCE:.0%} t-interval; below 1 the "
        f"first named is better. {_runs(about)} Left: rate and setting are chosen by the validation loss of half of "
        "the seeds and judged by the test loss of the other half, both ways round; in brackets the trials that each "
        f"side chose from. Grey: within {margin - 1:.0%}, which counts as equal where a test of equivalence (two "
        f"one-sided t-tests at {1 - CONFIDENCE:.0%}) says so. Intervals are not widened for their number. "
        f"{_sentence(chosen)}"
    )
    return Plate("ring-pairs", "BELAY against its controls, seed by seed", caption, fig)


def _forest(ax: Axes, chosen: Sequence[Record]) -> None:
    for at, pair in enumerate(reversed(chosen)):
        hue = _colour(pair["one"])
        if pair["ratio"] is None:
            ax.annotate("lost", (1, at), color=hue, fontsize=8, va="center", ha="center")
            continue
        ax.plot([pair["low"], pair["high"]], [at, at], color=hue, linewidth=2.4, solid_capstyle="butt")
        ax.plot(pair["ratio"], at, _MARKERS[pair["one"].removesuffix(TUNED)], color=hue, markersize=5)
    labels = [f"{p['one']}\n÷ {p['other']} ({p['trials'][0]} : {p['trials'][1]})" for p in reversed(chosen)]
    ax.set_yticks(range(len(chosen)), labels, fontsize=8)
    ax.set(xscale="log", xlabel="ratio of excess test losses", ylim=(-0.6, len(chosen) - 0.4))
    ax.grid(axis="y", visible=False)
    _ticks(ax.xaxis, (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2))


def _along(ax: Axes, pairs: Sequence[Record]) -> None:
    """The ratio at every learning rate, a line to a spring."""
    springs = list(dict.fromkeys(pair["one_setting"] for pair in pairs))
    for spring, (hue, marker) in zip(springs, _SPRINGS, strict=True):
        row = [pair for pair in pairs if pair["one_setting"] == spring and pair["ratio"] is not None]
        reach = [[p["ratio"] - p["low"] for p in row], [p["high"] - p["ratio"] for p in row]]
        x, y = [p["lr"] for p in row], [p["ratio"] for p in row]
        label = f"{spring} (θ = {_theta(spring):g})"
        ax.errorbar(x, y, yerr=reach, color=hue, marker=marker, markersize=4, capsize=2, label=label)


def _sentence(chosen: Sequence[Record]) -> str:
    """What became of BELAY, in words."""
    words = {"equal": "as good as equal to", "lower": "better than", "higher": "worse than", "open": "not told from"}
    told = []
    for name in (BELAY, BELAY + TUNED):
        found = [p for p in chosen if p["one"] == name and p["other"] != PLAIN and p["reading"] in words]
        told += [f"{p['one']} is {words[p['reading']]} {p['other']}: {_said(p)}" for p in found]
    return "; ".join(told) + "." if told else ""


# Ranges that work -----------------------------------------------------------------------------------------------------


def _ranges(about: Record, widths: Sequence[Record], pairs: Sequence[Record]) -> Plate:
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
                        at, high - low, left=low, height=height, color=_colour(width["arm"]), alpha=alpha, linewidth=0
                    )
            if width["low"] is not None:
                least = "≥" if width["open_low"] or width["open_high"] else "×"  # it may reach beyond the rates tried
                text = f"{least}{width['width']:.3g}"
                style.label_end(ax, width["high" + suffix], at, text, _colour(width["arm"]))
        ax.set(xscale="log", xlabel=f"{name} learning rate", ylim=(-0.7, len(own) - 0.3))
        ax.grid(axis="y", visible=False)
    low, high = axes[0].get_xlim()
    fine = high / low < 100
    _ticks(axes[0].xaxis, (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1) if fine else (0.001, 0.01, 0.1))
    axes[0].set_xlim(low * (low / high) ** 0.02, high * (high / low) ** 0.06)  # room for the numbers at the ends
    axes[0].set_yticks(range(len(own)), [_label(width) for width in own], fontsize=8)
    for tick, width in zip(axes[0].get_yticklabels(), own, strict=True):
        tick.set_color(_colour(width["arm"]))
    compared = [
        f"{_said(own)} times that of {other} ({own['other_setting']}), or {_said(shared)} times where both are held "
        "against the better one of their best losses"
        for other in (EMA, MATCHED)
        for own, shared in zip(
            _of(pairs, "width", BELAY, other)[:1], _of(pairs, "width_shared", BELAY, other)[:1], strict=True
        )
    ]
    caption = (
        f"The learning rates at which a method works: its median loss is at most {WORKS:g} times its own best one "
        f"(pale; the number is the largest rate over the smallest, ≥ where no end was found), or {WORKS:g} times the "
        f"best one of all methods (full; missing where even its best is not that good). {_runs(about)} Between "
        f"the {len(about['lrs'])} rates tried the logarithm of the loss is taken to be linear. A smaller effective "
        "step moves a range and leaves its width as it is; a poor best loss widens the pale one. Seed by seed, the "
        f"width of BELAY's range at the paper's setting is {', and '.join(compared)}."
    )
    return Plate("ring-ranges", "The range of learning rates that work", caption, fig)


def _label(width: Record) -> str:
    return str(width["arm"] if width["arm"] == PLAIN else f"{width['arm']}, {width['setting']}")


# Samples --------------------------------------------------------------------------------------------------------------


def _samples(about: Record, samples: Sequence[Record]) -> Plate:
    found = {(record["contestant"], record["rate"]): record for record in samples}
    names = list(dict.fromkeys(record["contestant"] for record in samples if record["contestant"] != MIXTURE))
    true = found[MIXTURE, "true"]
    fig = style.figure(9.0, 3.8)
    axes: Any = fig.subplots(2, 1 + len(names), squeeze=False)
    _scatter(axes[0, 0], about, true, "#333333")
    axes[0, 0].set_title("the mixture", fontsize=8, loc="center")
    for row, rate in zip(axes, ("chosen", "high"), strict=True):
        for ax, name in zip(row[1:], names, strict=True):
            _scatter(ax, about, found[name, rate], _colour(name))
    for ax, name in zip(axes[0, 1:], names, strict=True):
        ax.set_title(name, fontsize=8, loc="center", color=_colour(name))
    axes[1, 0].axis("off")
    note = f"above: at the\nrate it chose\n\nbelow: at a\nhigh rate\n\n%: within {NEAR:g}\nst. dev. of\na centre"
    axes[1, 0].annotate(note, (0.5, 0.5), xycoords="axes fraction", ha="center", va="center", fontsize=8)
    caption = (
        f"{len(true['points'])} points of the mixture, and as many drawn by Heun's method (18 steps) with networks of "
        f"one seed ({found[names[0], 'chosen']['seed']}), the average where there is one, from the same noise: above "
        "at the rate and setting chosen for it on other seeds, below at the nominal rate "
        f"{about['high_lr']:g}. Circles: two standard deviations around each centre. Points outside the frame are "
        "counted, but not seen. One seed shows what a loss looks like; it decides nothing."
    )
    return Plate("ring-samples", "What the score models draw", caption, fig)


def _scatter(ax: Axes, about: Record, record: Record, hue: str) -> None:
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
