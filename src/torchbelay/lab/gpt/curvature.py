"""The curvature of the runs times their learning rate, beside the limits and the floor of theorem 2."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

from matplotlib import colormaps
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from torchbelay.lab.hypotheses import GPA
from torchbelay.lab.part import Plate, Record
from torchbelay.lab.report import style
from torchbelay.lab.report.words import listed
from torchbelay.physics.inner_momentum import stable_range, theta_floor
from torchbelay.physics.methods import centred

from .analysis import Runs
from .arms import ARMS, CONSTANT, Arm
from .labels import colour, mean, title

# The labels of an axis of at most so many decades, as multiples of the powers of ten: more would overlap
LABELS = ((2.6, (1.0, 2.0, 3.0, 5.0, 7.0)), (4.0, (1.0, 3.0)), (math.inf, (1.0,)))


class Look(NamedTuple):
    """One measurement of the curvature, in a run of an arm of the family of θ."""

    arm: Arm
    lr: float
    step: int
    curvature: float | None  # the eigenvalue of largest size; None: it is not finite
    loss: float | None  # the average's at the end of such a run, on the text for tuning; None: the run is lost

    @property
    def x(self) -> float:
        """Return the learning rate times the curvature, which the theorems are about."""
        return self.lr * (self.curvature or 0.0)

    @property
    def has_point(self) -> bool:
        """Whether the curvature is positive, as that of a limit is."""
        return self.x > 0


def looks(runs: Runs, steps: int) -> list[Look]:
    """Return all measurements, by arm, rate and step. Older records have one per run, at its end."""
    losses = {(r["arm"], r["lr"], r["seed"]): r["losses"]["w2"] for r in runs.tuning}
    found = [
        Look(ARMS[r["arm"]], r["lr"], step, curvature, losses.get((r["arm"], r["lr"], r["seed"])))
        for r in runs.traced
        for step, curvature in r["curvatures"]
    ] or [
        Look(ARMS[r["arm"]], r["lr"], steps, r["sharpness"], r["losses"]["w2"])
        for r in runs.tuning
        if r.get("sharpness") is not None
    ]
    order = [*ARMS]
    return sorted(
        (each for each in found if each.arm.theta is not None),
        key=lambda each: (order.index(each.arm.name), each.lr, each.step),
    )


def ends(runs: Runs, steps: int) -> list[Look]:
    """Return the measurements after the last step."""
    return [each for each in looks(runs, steps) if each.step == steps]


def points(found: Sequence[Look]) -> list[Look]:
    """Return the measurements that a figure has a point for."""
    return [each for each in found if each.has_point]


def limit(arm: Arm, rate: float) -> float:
    """Return the largest rate × curvature at which the arm is stable on a quadratic."""
    assert arm.theta is not None
    return stable_range(centred(theta=arm.theta, rate=rate).coupling(1, 1.0), arm.beta1)


def draw_ends(ax: Any, runs: Runs, about: Record) -> None:
    """Draw the curvature after the last step over the learning rate."""
    for arm, found in groupby(ends(runs, about["steps"]), key=lambda each: each.arm):
        line = _line([*found], "lr")
        if line:
            ax.plot(*line, color=colour(arm), marker="o", markersize=3, label=title(arm.name))
            ax.axhline(limit(arm, about["rate"]), color=colour(arm), linestyle=":", linewidth=1)
    _set_axis(ax)
    if ax.get_legend_handles_labels()[0]:
        ax.plot([], [], color="#777777", linestyle=":", linewidth=1, label="limit of this θ on a quadratic")
        ax.legend(fontsize=7)


def _line(found: Sequence[Look], over: Literal["lr", "step"]) -> tuple[list[float], list[float]] | None:
    """Return the points of a line, which is broken at a measurement without a point; None if no measurement has one."""
    if not points(found):
        return None
    return [float(getattr(each, over)) for each in found], [each.x if each.has_point else math.nan for each in found]


def _set_axis(ax: Any) -> None:
    """Set a logarithmic axis for what has been drawn, with fewer labels if it has many decades."""
    ax.set(yscale="log", ylabel="x = rate × curvature")
    bottom, top = ax.get_ylim()
    decades = math.log10(top / bottom)
    ax.yaxis.set_major_locator(LogLocator(subs=next(labels for most, labels in LABELS if decades <= most)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def during_plate(runs: Runs, about: Record) -> Plate | None:
    """Draw the curvature over the steps of the runs; there is no plate if it was measured at the end alone."""
    found, steps, rate = looks(runs, about["steps"]), about["steps"], about["rate"]
    if all(each.step == steps for each in found) or not points(found):
        return None
    arms = [arm for arm, _ in groupby(found, key=lambda each: each.arm)]
    lrs = sorted({each.lr for each in found})
    shades = colormaps["viridis"].resampled(len(lrs) + 1)
    fig = style.figure(9.0, 3.6)
    axes: Any = fig.subplots(1, len(arms), sharey=True, squeeze=False)
    for ax, arm in zip(axes[0], arms, strict=True):
        for i, lr in enumerate(lrs):
            line = _line([each for each in found if (each.arm, each.lr) == (arm, lr)], "step")
            if line:
                ax.plot(*line, color=shades(i), marker="o", markersize=3)
        ax.axhline(limit(arm, rate), color="black", linestyle=":", linewidth=1)
        ax.set(title=title(arm.name), xlabel="step", xlim=(0, 1.05 * steps))
    for ax in axes[0]:  # they share the axis, which must have all lines
        _set_axis(ax)
        ax.label_outer()
    handles = [Line2D([], [], color=shades(i), marker="o", markersize=3, label=f"{lr:g}") for i, lr in enumerate(lrs)]
    axes[0, -1].legend(
        handles=handles,
        fontsize=7,
        title="learning rate",
        title_fontsize=7,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
    )
    before, after = ([each for each in points(found) if (each.step == steps) is last] for last in (False, True))
    caption = (
        "Rate × curvature during the runs, a line for each learning rate, and the limit of each θ on a quadratic "
        f"(dotted). Above its limit: {_share(before, rate)} points before the end, {_share(after, rate)} at the end."
    )
    at = sorted({each.step for each in found})
    notes = (
        f"The runs of the first seed for tuning, made once more; measured on the text that comes next{_how(runs)}, "
        f"after steps {listed([f'{n:,}' for n in at])}.",
        "The curvature is the eigenvalue of largest size of the Hessian in the units of Adam's steps.",
        *_each_without_point(found),
        GPA,
    )
    return Plate("gpt-curvature", "Curvature during the runs", caption, fig, notes)


def _share(found: Sequence[Look], rate: float) -> str:
    return f"{sum(each.x > limit(each.arm, rate) for each in found)} of {len(found)}"


def floor_plate(runs: Runs, about: Record) -> Plate | None:
    """Draw theorem 2's limit and floor over θ, with the learning rate × curvature of the runs."""
    rate, beta = about["rate"], CONSTANT.beta1
    measured = [each for each in ends(runs, about["steps"]) if each.arm.beta1 == beta]
    found = points(measured)
    if not found:
        return None
    floor = theta_floor(beta, rate)
    fig = style.figure(6.4, 4.0)
    ax: Any = fig.subplots()
    fine = [-0.98 + 1.53 * i / 400 for i in range(401)]
    limits = [stable_range(centred(theta=theta, rate=rate).coupling(1, 1.0), beta) for theta in fine]
    ax.plot(fine, limits, color="#333333", label="limit on a quadratic (theorem 2)")
    ax.axvline(floor, color="#333333", linestyle=":", label=f"floor of θ, {floor:.2f}".replace("-", "−"))
    rates = sorted({each.lr for each in found})
    for each in found:
        size = 3.0 + 1.2 * rates.index(each.lr)
        ax.plot(each.arm.theta, each.x, "o", color=colour(each.arm), markersize=size, markerfacecolor="none")
    ax.plot([], [], "o", color="#777777", markerfacecolor="none", label="a run at its end; larger: a larger rate")
    ax.set(yscale="log", xlim=(-1.0, 0.6), xlabel="θ    (repels ← 0 = EMA → attracts)", ylabel="x = rate × curvature")
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.legend(fontsize=8, loc="lower right")
    low = list(dict.fromkeys(title(e.arm.name) for e in found if e.arm.theta is not None and e.arm.theta < floor))
    caption = (
        "The largest stable rate × curvature of a quadratic over θ (line) and θ's floor (dotted), with the curvature "
        f"of the runs at their end (circles). Below the floor: {listed(low) or 'no run'}; above the limit: "
        f"{_share(found, rate)}."
    )
    notes = (
        f"Theorem 2 at the study's momentum, β1 = {beta:g}, and averaging rate, c = {rate:g}; left of the floor the "
        "range collapses.",
        f"Rates of the circles: {listed([f'{lr:g}' for lr in rates])}, where there is a point. The curvature is that "
        "of the figure of losses, in the units of Adam's steps.",
        *_without_point(measured),
        GPA,
    )
    return Plate("gpt-floor", "The limit and the floor of θ", caption, fig, notes)


# Words ----------------------------------------------------------------------------------------------------------------


def measured_words(runs: Runs, about: Record) -> str:
    """Return when and how the curvature at the end was measured, and whether it is known before, as sentences."""
    before = "The figure of curvature has earlier steps." if runs.traced else "At earlier steps it is not known."
    return (
        f"The curvature was measured once per point, after the last of {about['steps']:,} steps of the first seed for "
        f"tuning{_how(runs)}. {before}"
    )


def _how(runs: Runs) -> str:
    """Return by what the curvature was found; records without a number of products are of an older program."""
    products = next((r["products"] for r in runs.traced), None)
    older = "20 steps of power iteration, which may end before it is found; new runs take Lanczos' method"
    return f", by {older if products is None else f'Lanczos, {products} products'}"


def floor_words(runs: Runs, about: Record) -> str:
    """Return where θ's floor is drawn, and which arms lie below their floor."""
    rate = about["rate"]
    family = [arm for arm in map(ARMS.__getitem__, runs.arms) if arm.theta is not None]
    floor = f"{theta_floor(CONSTANT.beta1, rate):.2f}".replace("-", "−")
    below = [title(arm.name) for arm in family if arm.theta is not None and arm.theta < theta_floor(arm.beta1, rate)]
    found = f"below it: {listed(below)}" if below else "every θ drawn lies above it"
    is_drawn = any(each.has_point for each in ends(runs, about["steps"]))
    where = "the figure of the floor has it" if is_drawn else "it is not a line of this figure"
    return (
        f"θ's floor is a bound on θ, and no axis here is θ: {where}. At β1 = "
        f"{CONSTANT.beta1:g} and averaging rate {rate:g} it is {floor}; {found}."
    )


def end_notes(runs: Runs, about: Record) -> tuple[str, ...]:
    """Return which measurements at the end have no point, as a note."""
    return _without_point(ends(runs, about["steps"]))


def _without_point(found: Sequence[Look]) -> tuple[str, ...]:
    """Return which measurements have no point because the curvature is negative, and how good their runs are."""
    measured = [each for each in found if each.curvature is not None]
    negative = [each for each in measured if not each.has_point]
    if not negative:
        return ()
    words = []
    for arm, some in groupby(negative, key=lambda each: each.arm):
        known = [each.loss for each in measured if each.arm == arm and each.loss is not None]
        best = f" ({min(known):.4f} at the best rate)" if known else ""
        own = [f"{mean([each.loss])} at {each.lr:g}" for each in some]
        words.append(f"{title(arm.name)} with a loss of {listed(own)}{best}")
    return (
        f"{len(negative)} of {len(measured)} measured runs have no point, because their eigenvalue of largest size is "
        f"negative: {'; '.join(words)}. These losses are of the seed that was measured, on the text for tuning.",
    )


def _each_without_point(found: Sequence[Look]) -> tuple[str, ...]:
    """Return each measurement that has no point, as a note."""
    missing = [each for each in found if not each.has_point]
    if not missing:
        return ()
    words = []
    for (arm, lr), some in groupby(missing, key=lambda each: (each.arm, each.lr)):
        own = [f"{_in_words(each)} after step {each.step:,}" for each in some]
        words.append(f"{title(arm.name)} at {lr:g} {listed(own)}")
    return (
        f"{len(missing)} of {len(found)} measurements have no point, which breaks their line, because the eigenvalue "
        f"of largest size is negative, or is not finite. Rate × curvature is: {'; '.join(words)}.",
    )


def _in_words(look: Look) -> str:
    return "not finite" if look.curvature is None else f"{look.x:.3g}".replace("-", "−")


def limit_words(runs: Runs, about: Record) -> tuple[str, tuple[str, ...]]:
    """Return how many points lie above the limit of a quadratic, for the caption; and what follows, as a note."""
    found = points(ends(runs, about["steps"]))
    above = [each for each in found if each.x > limit(each.arm, about["rate"])]
    if not above:
        return "", ()
    count = f"{len(above)} of {len(found)} points"
    each_arm = listed(
        [f"{title(arm.name)} {_share(list(own), about['rate'])}" for arm, own in groupby(found, lambda each: each.arm)]
    )
    lost = sum(each.loss is None for each in above)
    follows = (
        f"{lost} of those runs diverged."
        if lost
        else "None of those runs diverged: a run of this network may end above the limit for a quadratic."
    )
    return f"; {count} lie above theirs", (
        f"{count} at the right lie above the limit of their θ: {each_arm}. {follows}",
    )
