"""The figures of averages made after training, drawn from records alone; and that of the command's sweep."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from torchbelay.lab.part import Plate, Record
from torchbelay.lab.records import select
from torchbelay.lab.report import style

ACCEPTED = 0.01  # the `max_error` of `synthesize`, if nothing else is asked for
TARGET_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_RECORDED = {"power_05": ("#0072B2", "σ_rel 0.05"), "power_10": ("#D55E00", "σ_rel 0.10")}


def draw_plates(records: Sequence[Record]) -> list[Plate]:
    """Draw all figures."""
    with style.house():
        return [_profiles(records), _errors(records), _losses(records)]


def short(target: str) -> str:
    """Return a target as a reader knows it.

    >>> short("ema(half_life=400.0)"), short("decay(1500, 'cosine')"), short("window(1000)")
    ('EMA, half-life 400', 'cosine decay over 1500', 'mean of the last 1000')
    """
    name, _, given = target.rstrip(")").partition("(")
    values = [each.partition("=")[2] or each for each in given.split(", ")]
    if name == "ema" and given.startswith("half_life"):
        return f"EMA, half-life {float(values[0]):g}"
    if name == "power_ema" and given.startswith("sigma_rel"):
        return f"power function, σ_rel = {float(values[0]):g}"
    if name == "window":
        return f"mean of the last {values[0]}"
    if name == "decay":
        return f"{values[1].strip(chr(39)) if len(values) > 1 else 'linear'} decay over {values[0]}"
    return target


# Profiles -------------------------------------------------------------------------------------------------------------


def _profiles(records: Sequence[Record]) -> Plate:
    (about,), (updates,) = select(records, "protocol"), select(records, "updates")
    found = select(records, "profile")
    fig = style.figure(9.0, 3.7)
    left, right = fig.subplots(1, 2, sharey=True, sharex=True)
    for each in select(records, "recorded"):
        hue, name = _RECORDED[each["average"]]
        last = each["step"] == about["steps"]
        shown = [(s, p) for s, p in zip(updates["at"], each["p"], strict=True) if s <= each["step"]]
        left.plot(*zip(*shown, (each["step"], 0), strict=True), color=hue, alpha=1.0 if last else 0.45, lw=1.6)
        if last:
            left.plot([], [], color=hue, label=name)
    left.legend(loc="lower left", fontsize=8, handlelength=0.9, handletextpad=0.5, borderaxespad=0.1)
    left.set_title("what is recorded: two averages (faded: at earlier steps)")
    for each, hue in zip(found, TARGET_COLOURS, strict=False):
        right.plot(updates["at"], each["p"], color=hue, lw=5, alpha=0.3, solid_capstyle="butt")
        right.plot(updates["at"], each["made"], color=hue, lw=1.3, label=short(each["target"]))
    right.plot([], [], color="#777777", lw=5, alpha=0.3, label="broad: the average that is wanted")
    right.plot([], [], color="#777777", lw=1.3, label="thin: what the snapshots make")
    right.legend(loc="lower left", fontsize=8.5)
    right.set_title(f"what is made of {found[0]['snapshots']} snapshots of each")
    left.set(ylabel="share of an update that is held, P", ylim=(-0.04, 1.06), xlim=(0, 1.02 * about["steps"]))
    for ax in (left, right):
        ax.set_xlabel("step of the update")
    worst = max(found, key=lambda each: each["error"])
    caption = (
        "What an average holds of each update: all of the old ones, little of the newest. Two recorded averages (left) "
        f"are enough to imitate four others (right): thin lines on broad ones, which are {worst['error']:.1g} apart at "
        "most."
    )
    notes = (
        f"A run of {about['steps']:,} steps. Left: the averages after a quarter, a half, three quarters and all of it.",
        f"Right: broad lines are the targets at the last step, thin ones the best combinations of {2 * 16} snapshots "
        "and the first weights. Errors are root sums of squares over updates, relative to the distance of the target "
        "from the weights.",
    )
    return Plate("posthoc-profiles", "Impulse responses", caption, fig, notes)


def draw_sweep(curves: Sequence[tuple[str, Sequence[float], Sequence[float], float]], at: int) -> Figure:
    """Draw profiles of targets against those that were made, each with its predicted error; and their difference."""
    with style.house():
        fig = style.figure(9.0, 5.4)
        top, bottom = fig.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
        for i, (name, target, made, error) in enumerate(curves):
            hue = TARGET_COLOURS[i % len(TARGET_COLOURS)]
            steps = range(1, len(target) + 1)
            top.plot(steps, target, color=hue, lw=5, alpha=0.3, solid_capstyle="butt")
            top.plot(steps, made, color=hue, lw=1.3, label=f"{name}: {error:.1g}")
            bottom.plot(steps, [m - t for m, t in zip(made, target, strict=True)], color=hue, lw=1.0)
        top.legend(loc="lower left", fontsize=8.5, title="target: predicted error", title_fontsize=8.5)
        top.set(ylabel="share of an update, P", ylim=(-0.04, 1.06))
        top.set_title(f"averages at step {at:,}: targets (broad) and what the snapshots make (thin)")
        bottom.set(ylabel="made − target", xlabel="step of the update", xlim=(0, at * 1.01))
    return fig


# Errors ---------------------------------------------------------------------------------------------------------------


def _plain_ticks(axis: Any, places: Sequence[float]) -> None:
    axis.set_major_locator(FixedLocator(list(places)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _errors(records: Sequence[Record]) -> Plate:
    (about,) = select(records, "protocol")
    targets = list(dict.fromkeys(each["target"] for each in select(records, "error")))
    fig = style.figure(7.6, 4.6)
    ax = fig.subplots()
    for i, (target, hue) in enumerate(zip(targets, TARGET_COLOURS, strict=False)):
        for kind, dashes in (("averages", "-"), ("weights", (4 * (i % 2), (4, 4)))):  # two that coincide take turns
            lines = select(records, "error", target=target, recorded=kind)
            ax.plot([r["files"] for r in lines], [r["predicted"] for r in lines], color=hue, ls=dashes, lw=1.5)
        files = {r["steps"]: r["files"] for r in select(records, "error", target=target, recorded="averages")}
        white = select(records, "white", target=target)
        ax.plot([files[r["steps"]] for r in white], [r["actual"] for r in white], "o", color=hue, ms=5, mfc="white")
    ax.axhline(ACCEPTED, color="#999999", lw=0.8)
    ax.annotate(
        f"above {ACCEPTED:g}: refused, unless asked for", (1, ACCEPTED), xycoords=("axes fraction", "data"),
        xytext=(-4, -5), textcoords="offset points", ha="right", va="top", fontsize=8.5, color="#555555",
    )  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel="files on the disk", ylabel="error ÷ ‖w2 − w1‖")
    _plain_ticks(ax.xaxis, sorted({r["files"] for r in select(records, "error", recorded="averages")}))
    handles = [Line2D([], [], color=hue, label=short(t)) for t, hue in zip(targets, TARGET_COLOURS, strict=False)]
    handles += [
        Line2D([], [], color="#555555", label="from two averages, predicted"),
        Line2D([], [], color="#555555", marker="o", mfc="white", ls="", label="the same, measured on white updates"),
        Line2D([], [], color="#555555", ls=(0, (4, 4)), label="from checkpoints of the weights, predicted"),
    ]
    ax.legend(handles=handles, loc="lower left", fontsize=8.5)
    ratios = [r["actual"] / r["predicted"] for r in select(records, "white")]
    few, many = (select(records, "error", target=targets[0], recorded="averages")[i]["predicted"] for i in (0, -1))
    first, last = (select(records, "error", target=targets[0], recorded="averages")[i]["files"] for i in (0, -1))
    caption = (
        f"The error falls from {few:.1g} with {first} files to {many:.0e} with {last} ({short(targets[0])}), and is "
        f"the predicted one: {min(ratios):.2f} to {max(ratios):.2f} times. Checkpoints of the weights themselves are "
        "far from that."
    )
    notes = (
        f"A run of {about['steps']:,} steps with snapshots at even distances; the first weights are among the files.",
        f"Measured: {about['size']:,} weights that walk at random under Belay in float64, and the targets computed "
        "from all of their points.",
        "The error is the distance from the target, relative to the target's distance from the weights.",
    )
    return Plate("posthoc-errors", "Error against the number of snapshots", caption, fig, notes)


# Networks -------------------------------------------------------------------------------------------------------------


def _losses(records: Sequence[Record]) -> Plate:
    (about,), (of_mnist,) = select(records, "protocol"), select(records, "mnist protocol")
    networks, images = select(records, "network"), _by_length(select(records, "mnist network"))
    lrs = sorted({each["lr"] for each in networks})
    fig = style.figure(10.5, 3.9)
    ring, mnist, right = fig.subplots(1, 3, width_ratios=(1.25, 1, 1))
    for lr, hue in zip(lrs, TARGET_COLOURS, strict=False):
        mine = _by_length(select(networks, "network", lr=lr))
        _draw_losses(ring, mine, hue, f"learning rate {lr:g}")
        (plain,) = select(records, "weights", lr=lr)
        ring.axhline(fmean(plain["loss"]), color=hue, lw=0.9, ls=(0, (1, 1.5)))
        _draw_ratios(right, mine, hue, f"ring, rate {lr:g}")
    hue = TARGET_COLOURS[len(lrs)]
    _draw_losses(mnist, images, hue, f"learning rate {of_mnist['lr']:g}")
    mnist.axhline(select(records, "mnist weights")[0]["loss"], color=hue, lw=0.9, ls=(0, (1, 1.5)))
    _draw_ratios(right, images, hue, "MNIST")
    ring.plot([], [], color="#555555", label="trained along")
    ring.plot([], [], "o", color="#555555", label="made afterwards")
    ring.plot([], [], "o", color="#555555", mfc="white", label=f"the same, predicted error > {ACCEPTED:g}")
    ring.plot([], [], color="#555555", lw=0.9, ls=(0, (1, 1.5)), label="the weights themselves")
    ring.set(yscale="log", ylabel="excess test loss")
    ring.set_title("ring: loss over the averaging length")
    mnist.set(ylabel="test loss")
    mnist.set_title("MNIST: the same")
    right.axhline(1, color="#999999", lw=0.8)
    right.set(yscale="log", ylim=(0.15, 5))
    right.set_title("measured error ÷ predicted error")
    for ax, found in ((ring, networks), (mnist, images), (right, networks)):
        ax.set(xscale="log", xlabel="half-life of the EMA, steps")
        ax.legend(fontsize=8, loc="upper left")
        _plain_ticks(ax.xaxis, sorted({each["half_life"] for each in found}))
    _plain_ticks(ring.yaxis, (0.01, 0.02, 0.03, 0.05, 0.1, 0.2))
    _plain_ticks(right.yaxis, (0.2, 0.5, 1, 2, 5))
    both = [*networks, *images]
    factors = [actual / each["predicted"] for each in both for actual in _all(each["actual"])]
    caption = (
        "The loss over averaging lengths, of averages trained along and of those made afterwards from two recorded "
        f"ones: accepted ones differ by {_apart(networks):.1%} at most on the ring, {_apart(images):.2%} on MNIST. "
        f"Errors are {min(factors):.2g} to {max(factors):.2g} times the predicted ones."
    )
    notes = (
        f"Ring: networks of {about['weights']:,} weights on eight Gaussians, {about['trained_steps']:,} steps of "
        f"Adam at a constant rate on batches of {about['batch']}, {about['seeds']} seeds. Snapshots of two power "
        f"functions every {about['every']} steps.",
        f"MNIST: an EDM of {of_mnist['weights']:,} weights, {of_mnist['trained_steps']:,} steps of Adam at a constant "
        f"rate on batches of {of_mnist['batch']}, one seed, snapshots every {of_mnist['every']} steps; the loss is "
        f"that of {of_mnist['triples']} test images at fixed noise. {_origin(of_mnist)}",
        "Lines and points are means over seeds; the bands on the right have all seeds. Updates of Adam are correlated, "
        "and the prediction takes them for white.",
    )
    return Plate("posthoc-losses", "The loss over the averaging length, found after training", caption, fig, notes)


def _origin(about: Record) -> str:
    """Return when and on what the network of MNIST was trained, and why it was not trained anew."""
    made = f"It took {about['device_s']} s on a {about['device']} in {about['date']} (torch {about['torch']})."
    return f"{made} These are the records that come with the package: {about['why']}" if "committed" in about else made


def _by_length(lines: Sequence[Record]) -> list[Record]:
    return sorted(lines, key=lambda each: float(each["half_life"]))


def _all(values: float | Sequence[float]) -> Sequence[float]:
    """Return the values of all seeds; a record of one seed has one number."""
    return [values] if isinstance(values, float) else values


def _apart(lines: Sequence[Record]) -> float:
    """Return the largest relative difference of the two losses, of averages whose predicted error is accepted."""
    accepted = [each for each in lines if each["predicted"] <= ACCEPTED]
    pairs = [pair for each in accepted for pair in zip(_all(each["made"]), _all(each["along"]), strict=True)]
    return max(abs(made / along - 1) for made, along in pairs)


def _draw_ratios(ax: Axes, mine: Sequence[Record], hue: str, name: str) -> None:
    x = [each["half_life"] for each in mine]
    ratios = [[actual / each["predicted"] for actual in _all(each["actual"])] for each in mine]
    ax.fill_between(x, [min(r) for r in ratios], [max(r) for r in ratios], color=hue, alpha=0.2, lw=0)
    ax.plot(x, [fmean(r) for r in ratios], color=hue, marker="o", ms=4, label=name)


def _draw_losses(ax: Axes, mine: Sequence[Record], hue: str, name: str) -> None:
    x = [each["half_life"] for each in mine]
    ax.plot(x, [fmean(_all(each["along"])) for each in mine], color=hue, lw=1.6)
    for each in mine:
        good = each["predicted"] <= ACCEPTED
        ax.plot(each["half_life"], fmean(_all(each["made"])), "o", color=hue, ms=5.5, mfc=hue if good else "white")
    ax.plot([], [], color=hue, label=name)
