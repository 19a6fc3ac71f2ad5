"""The figures of `momentum`: the coupling table, and the two limits."""

from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torchbelay.lab.hypotheses import GPA
from torchbelay.lab.part import Plate, Record
from torchbelay.lab.records import select
from torchbelay.lab.report import style
from torchbelay.lab.report.words import listed
from torchbelay.lab.statistics import fit_power

from .functions import ROSENBROCK

_FLOOR = 1e-18  # a deviation of exactly 0 is drawn here


def _describe_sign(a: float) -> tuple[str, str, str]:
    """Return what a spring with this a does: a word, its colour and its mark."""
    if a > 0:
        return "attracts", style.BELAY_COLOUR, "o"
    return ("repels", style.MOMENTUM_COLOUR, "D") if a < 0 else ("only watches", style.EMA_COLOUR, "s")


def _format(x: float, digits: int = 3) -> str:
    return f"{x:.{digits}g}".replace("-", "−")


def _label(
    ax: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], colour: str, **more: object
) -> None:
    """Write a few words beside a point."""
    ax.annotate(text, at, xytext=offset, textcoords="offset points", color=colour, fontsize=8.5, **more)  # type: ignore[arg-type]


def _draw_methods(records: Sequence[Record]) -> Figure:
    rows = sorted(select(records, "method"), key=lambda r: (r["theta"], r["a"], r["b"]))
    fig = style.figure(8.6, 0.31 * len(rows) + 1.5)
    left, middle, right = fig.subplots(1, 3, sharey=True, width_ratios=(1.0, 1.25, 1.1))
    middle.set(xlim=(0, 4))
    middle.set_axis_off()
    for x, name in enumerate("abpq"):
        middle.text(x + 0.5, len(rows) - 0.25, name, ha="center", fontsize=10, style="italic")
    for y, row in enumerate(rows):
        _, colour, mark = _describe_sign(row["a"])
        left.plot(row["theta"], y, mark, color=colour)
        right.plot(max(row["deviation"], _FLOOR), y, mark, color=colour, mfc=colour if row["deviation"] else "white")
        for x, name in enumerate("abpq"):
            middle.text(x + 0.5, y, _format(row[name], 2), color=colour, ha="center", va="center", fontsize=8.5)
        _label(right, row["against"], (1, y), (6, 0), "#333333", xycoords=right.get_yaxis_transform(), va="center")
    left.axvline(0, color="#999999", lw=0.8)
    left.set_xscale("symlog", linthresh=1, linscale=1)
    left.set(xlim=(-1.3, 15), yticks=range(len(rows)), yticklabels=[row["name"] for row in rows])
    left.set_xticks([-1, 0, 1, 10], ["−1", "0", "1", "10"])
    left.set_title("θ = a/b")
    right.set(xscale="log", xlim=(_FLOOR / 2, 1e-11))
    right.set_xticks([_FLOOR, 1e-16, 1e-14, 1e-12], ["0", "10⁻¹⁶", "10⁻¹⁴", "10⁻¹²"])
    right.minorticks_off()
    right.axvline(torch.finfo(torch.float64).eps, color="#999999", lw=0.8, ls=":")
    right.set_title("largest relative deviation from …")
    for ax in (left, right):
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(-0.6, len(rows) - 0.4)
    for a, relation in ((1.0, ">"), (0.0, "="), (-1.0, "<")):
        word, colour, mark = _describe_sign(a)
        right.plot([], [], mark, color=colour, label=f"{word} (a {relation} 0)")
    fig.legend(loc="outside lower center", ncols=3)
    return fig


def _draw_reference_line(ax: Axes, x: Sequence[float], y: Sequence[float], power: int, through: int) -> None:
    """Draw the straight line of a power through one of the points."""
    ax.plot(x, [y[through] * (value / x[through]) ** power for value in x], color="#999999", lw=0.9, ls="--", zorder=1)


def _draw_limits(records: Sequence[Record]) -> Figure:
    fig = style.figure(8.6, 3.7)
    left, right = fig.subplots(1, 2)
    found = select(records, "gradient")
    curved = [r for r in found if r["function"] == ROSENBROCK.name]
    straight = [r for r in found if r["function"] != ROSENBROCK.name]
    x, y = [r["distance"] for r in curved], [r["deviation"] for r in curved]
    _draw_reference_line(left, x, y, 2, 0)
    left.plot(x, y, "o", color=style.MOMENTUM_COLOUR)
    flat = [max(r["deviation"], _FLOOR) for r in straight]
    left.plot([r["distance"] for r in straight], flat, "s", color=style.PLAIN_COLOUR)
    _label(left, "quadratic loss", (straight[1]["distance"], flat[1]), (0, 8), style.PLAIN_COLOUR, ha="center")
    middle = len(x) // 2
    _label(left, f"Rosenbrock: slope {fit_power(x, y):.2f}", (x[middle], y[middle]), (6, -10), style.MOMENTUM_COLOUR)
    left.set(xscale="log", yscale="log", ylim=(1e-17, 10), xlabel="largest distance between w1 and w2")
    left.set_title("gradient at the EMA, off the EMA of gradients by")

    limit = select(records, "limit")
    (ema,) = select(records, "ema")
    masses, differences = [r["m1"] for r in limit], [r["difference"] for r in limit]
    _draw_reference_line(right, masses, differences, -1, len(masses) - 2)
    right.plot(masses, differences, "o", color=style.BELAY_COLOUR)
    middle = len(masses) // 2
    power = _format(fit_power(masses, differences))
    _label(right, f"slope {power}", (masses[middle], differences[middle]), (8, 2), style.BELAY_COLOUR)
    for key, text in (
        ("deviation_same_step", "m1 = ∞ and torch's EMA, same step"),
        ("deviation_one_step_later", "m1 = ∞ and torch's EMA, a step apart"),
    ):
        right.axhline(max(ema[key], _FLOOR), color=style.EMA_COLOUR, lw=1.2)
        at = (0.02, max(ema[key], _FLOOR))
        _label(right, text, at, (0, 3), style.EMA_COLOUR, xycoords=right.get_yaxis_transform())
    right.set(xscale="log", yscale="log", ylim=(1e-17, 10), xlabel="m1, the mass of the weights")
    right.set_title("w2 of BELAY, off that of m1 = ∞ by")
    return fig


def draw_plates(records: Sequence[Record]) -> list[Plate]:
    """Draw the table as a figure, and the two limits."""
    with style.house():
        return [_make_methods_plate(records), _make_limits_plate(records)]


def _make_methods_plate(records: Sequence[Record]) -> Plate:
    rows = select(records, "method")
    (momentum,) = select(records, "form", name="momentum")
    (centre,) = [r for r in select(records, "form") if r["name"] != "momentum"]
    worst = max(rows, key=lambda r: r["deviation"])
    repulsive = listed([r["name"] for r in rows if r["a"] < 0])
    caption = (
        "Every method is a spring: it attracts the weights (a > 0), only watches them (a = 0) or repels them (a < 0: "
        f"{repulsive}). Run as a spring, each differs from the program on the right by at most "
        f"{worst['deviation']:.1e} ({worst['name']})."
    )
    notes = (
        f"Each method runs through Belay around torch's SGD: Rosenbrock, lr {rows[0]['lr']:g}, {rows[0]['starts']} "
        f"random starts, {rows[0]['steps']} steps, float64. Beside it runs the program named on the right, which is "
        "written without springs. A deviation is the largest relative difference at any step, in w1 or w2.",
        "Dotted: the rounding of one operation. Hollow mark: a difference of exactly 0.",
        f"For any loss, BELAY is also an EMA of its centre of mass (to {centre['deviation']:.1e}), and a momentum "
        f"method with momentum {momentum['beta']:.3f} and a share ν = {_format(momentum['nu'])} of it in the step (to "
        f"{momentum['deviation']:.1e}). Ordinary momentum has ν = 1: BELAY subtracts what momentum adds.",
        f"In the centre-of-mass family, {GPA} Heavy ball and Nesterov's momentum are outside that family.",
    )
    title = "Every averaging method, and momentum, is a spring"
    return Plate("momentum-methods", title, caption, _draw_methods(records), notes)


def _make_limits_plate(records: Sequence[Record]) -> Plate:
    (ema,) = select(records, "ema")
    gradients = select(records, "gradient")
    curved = [r for r in gradients if r["function"] == ROSENBROCK.name]
    straight = max(r["deviation"] for r in gradients if r["function"] != ROSENBROCK.name)
    power = fit_power([r["distance"] for r in curved], [r["deviation"] for r in curved])
    rates = [r["lr"] for r in curved]
    caption = (
        "Left: the gradient at an EMA is the EMA of the gradients for a quadratic loss; on Rosenbrock the difference "
        f"goes as the distance to the power {power:.2f}. Right: BELAY tends to an EMA as m1 grows; at m1 = ∞ it is "
        "torch's EMA one step late."
    )
    notes = (
        f"Left: an EMA (decay {ema['decay']:g}) of SGD over {ema['steps']} steps from {ema['starts']} starts. For the "
        f"quadratic loss the two agree to {straight:.1e}. Differences are relative to the first gradient. Learning "
        f"rates on Rosenbrock: {min(rates):.0e} to {max(rates):.0e}.",
        f"Right: the average w2 of BELAY (k 1, m2 10) on Rosenbrock, lr {ema['lr']:g}; its difference from m1 = ∞ goes "
        "as 1/m1 in theory (dashed).",
        f"At m1 = ∞ it is {ema['deviation_one_step_later']:.1e} away from torch's EMA of the step before, and "
        f"{ema['deviation_same_step']:.1e} from that of the same step.",
    )
    title = "When an average is momentum, and when BELAY is an EMA"
    return Plate("momentum-limits", title, caption, _draw_limits(records), notes)
