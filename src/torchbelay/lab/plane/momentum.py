"""Momentum and every averaging method as one spring: the coupling table run live, and the paper's §3.1.

Each method of the table is trained through `Belay` around torch's SGD, and beside it an independent program
(`programs`). BELAY itself is also run as what it comes to: an average of its centre of mass, and a momentum method.
Then the two limits of the paper: gradients of an average (erratum E12), and an infinite m1 (E6).
"""

import copy
import math
from collections.abc import Sequence
from itertools import islice

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from torchbelay.lab.arms import PAPER_SPRING, Arm, Lane
from torchbelay.lab.part import Plate, Record, Settings, Tick
from torchbelay.lab.report import style
from torchbelay.physics.spring import Spring

from .functions import ROSENBROCK, Function
from .programs import DECAY, LR, Program, Row, centre_of_mass, gradient, quasi_hyperbolic, table, torch_ema
from .race import Race, box

NAME = "momentum"
TITLE = "One spring: momentum and every average"

STARTS = 16

# Its minimum is not the origin, so that the gradient is affine and not linear: that is what E12 is about.
BOWL = Function(
    "shifted bowl",
    "(4·(x − 1)² + (y + ½)²)/2",
    lambda x, y: (4 * (x - 1) ** 2 + (y + 0.5) ** 2) / 2,
    lambda x, y: (4 * (x - 1), y + 0.5),
    curvature=4.0,
    half_width=0.5,
)


Paths = tuple[Tensor, Tensor]  # of w1 and w2: (steps, lanes, starts, 2)


def train(lanes: Sequence[Lane], starts: Tensor, steps: int, tick: Tick, function: Function = ROSENBROCK) -> Paths:
    """Train every lane from every start through `Belay`, and keep all that was visited."""
    race = Race([function], starts[None], lanes)
    w1, w2 = [], []
    for _ in range(steps):
        race.step()
        w1.append(race.w[:, 0].clone())
        w2.append(race.w2()[:, 0])
        tick(1)
    return torch.stack(w1), torch.stack(w2)


def deviation(mine: Paths, lane: int, program: Program, starts: Tensor) -> float:
    """The largest difference from the program at any step, from any start, relative to the largest weight."""
    furthest, largest = 0.0, 0.0
    for t, theirs in enumerate(islice(program(starts), len(mine[0]))):
        for ours, other in zip(mine, theirs, strict=True):
            if other is not None:
                furthest = max(furthest, float((ours[t, lane] - other).abs().max()))
                largest = max(largest, float(other.abs().max()))
    return furthest / largest


def _method_record(row: Row, steps: int, found: float) -> Record:
    coupling = copy.copy(row.method).coupling(steps, LR)  # a copy: some remember that they were asked
    return {
        "kind": "method",
        "name": row.name,
        "method": repr(row.method),
        "against": row.against,
        "a": coupling.a,
        "b": coupling.b,
        "p": coupling.p,
        "q": coupling.q,
        "theta": coupling.theta,
        "deviation": found,
    }


def _form_records(mine: Paths, lane: int, starts: Tensor) -> list[Record]:
    """BELAY as what it comes to; the numbers of each form are from k, m1 and m2 alone."""
    k, m1, m2 = PAPER_SPRING.k, PAPER_SPRING.m1, PAPER_SPRING.m2
    rate, theta = k / 2 * (1 / m1 + 1 / m2), m2 / m1
    share = (1 - k / (2 * m1)) * m1 / (m1 + m2)
    beta, nu = 1 - rate, -theta / (1 - rate)
    momentum = quasi_hyperbolic(beta, nu, share * LR)
    return [
        {
            "kind": "form",
            "name": "average of the centre of mass",
            "method": repr(PAPER_SPRING),
            "theta": theta,
            "rate": rate,
            "lr_share": share,
            "deviation": deviation(mine, lane, centre_of_mass(k, m1, m2), starts),
        },
        {
            "kind": "form",
            "name": "momentum",
            "method": repr(PAPER_SPRING),
            "beta": beta,
            "nu": nu,
            "lr_share": share,
            "deviation": deviation((mine[0], mine[0]), lane, momentum, starts),
        },
    ]


# Eq. 1's EMA as BELAY with an infinite mass --------------------------------------------------------------------------

HEAVY = Spring(k=1.0, m1=math.inf, m2=10.0)  # κ2 = 1/20, decay 0.95
MASSES = tuple(10.0**n for n in range(2, 11))


def _ema_record(mine: Paths, heavy: int, after: int, starts: Tensor) -> Record:
    """BELAY at m1 = ∞ beside torch's EMA: at the same step, and one step later."""
    torchs = torch.stack([w2 for _, w2 in islice(torch_ema()(starts), len(mine[1])) if w2 is not None])
    scale = float(torchs.abs().max())

    def apart(x: Tensor, y: Tensor) -> float:
        return float((x - y).abs().max()) / scale

    delayed = torch.cat([starts[None], torchs[:-1]])  # before its first step the average is the start
    return {
        "kind": "ema",
        "method": repr(HEAVY),
        "decay": DECAY,
        "deviation_one_step_later": apart(mine[1][:, heavy], delayed),
        "deviation_same_step": apart(mine[1][:, heavy], torchs),
        "deviation_follow_after": apart(mine[1][:, after], torchs),
    }


# Gradients of an average ---------------------------------------------------------------------------------------------

LEARNING_RATES = tuple(10 ** (n / 2) for n in range(-16, -9))  # 1e-8 … 1e-5
BOWL_RATES = (1e-4, 1e-3, 1e-2, 1e-1)


def _gradient_record(function: Function, lr: float, w1: Tensor, w2: Tensor, start: Tensor) -> Record:
    """The gradient at the EMA against the EMA of the gradients, over one lane's path (steps, starts, 2)."""
    mean = gradient(start, function)  # the average starts as a copy, and so does that of the gradients
    size, worst = float(mean.abs().max()), 0.0
    for point, average in zip(w1, w2, strict=True):
        mean = DECAY * mean + (1 - DECAY) * gradient(point, function)
        worst = max(worst, float((gradient(average, function) - mean).abs().max()))
    return {
        "kind": "gradient",
        "function": function.name,
        "lr": lr,
        "decay": DECAY,
        "distance": float((w1 - w2).abs().max()),
        "deviation": worst / size,
    }


def _printed_record(function: Function, lr: float, w1: Tensor) -> Record:
    """The same as printed, with weights that sum to less than 1: how far off it is, and whether E12 says why."""
    mean, of_gradients = torch.zeros_like(w1[0]), torch.zeros_like(w1[0])
    constant, size = gradient(mean, function), float(gradient(w1[0], function).abs().max())
    worst, unexplained = 0.0, 0.0
    for t, point in enumerate(w1, 1):
        mean = DECAY * mean + (1 - DECAY) * point
        of_gradients = DECAY * of_gradients + (1 - DECAY) * gradient(point, function)
        gap = gradient(mean, function) - of_gradients
        worst = max(worst, float(gap.abs().max()))
        unexplained = max(unexplained, float((gap - DECAY**t * constant).abs().max()))
    return {
        "kind": "gradient as printed",
        "function": function.name,
        "lr": lr,
        "decay": DECAY,
        "deviation": worst / size,
        "deviation_unexplained": unexplained / size,
    }


# The part ------------------------------------------------------------------------------------------------------------


def _steps(settings: Settings) -> int:
    return 60 if settings.quick else 300  # a multiple of Lookahead's 6 and Switch EMA's 10: the last step is a sync


def plan(settings: Settings) -> tuple[int, str]:
    """Units of work, and one line that says what would be run."""
    steps = _steps(settings)
    line = f"{len(table())} methods beside independent programs, {steps} steps from {STARTS} starts, and two limits"
    return 3 * steps, line


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Train everything, and compare."""
    steps, rows = _steps(settings), table()
    starts = box(ROSENBROCK, STARTS, torch.Generator().manual_seed(settings.seed))
    said = {"steps": steps, "starts": STARTS}

    limits = [HEAVY, Spring.ema(decay=DECAY), *(Spring(k=1.0, m1=m1, m2=10.0) for m1 in MASSES)]
    tried = [row.method for row in rows] + limits
    mine = train([Lane(Arm(f"{i}", "SGD", method), LR) for i, method in enumerate(tried)], starts, steps, tick)
    records = [_method_record(row, steps, deviation(mine, lane, row.program, starts)) for lane, row in enumerate(rows)]
    records += _form_records(mine, 0, starts)
    heavy = len(rows)
    records.append(_ema_record(mine, heavy, heavy + 1, starts))
    ema, scale = mine[1][:, heavy], float(mine[1][:, heavy].abs().max())
    for lane, m1 in enumerate(MASSES, heavy + 2):
        apart = float((mine[1][:, lane] - ema).abs().max()) / scale
        records.append({"kind": "limit", "k": 1.0, "m1": m1, "m2": 10.0, "difference": apart})
    records = [record | said | {"function": ROSENBROCK.name, "lr": LR} for record in records]

    for function, rates in ((BOWL, BOWL_RATES), (ROSENBROCK, LEARNING_RATES)):
        begin = box(function, STARTS, torch.Generator().manual_seed(settings.seed))
        lanes = [Lane(Arm(f"{lr}", "SGD", Spring.ema(decay=DECAY)), lr) for lr in rates]
        w1, w2 = train(lanes, begin, steps, tick, function)
        for lane, lr in enumerate(rates):
            records.append(_gradient_record(function, lr, w1[:, lane], w2[:, lane], begin) | said)
        if function is BOWL:
            records.append(_printed_record(function, BOWL_RATES[-1], w1[:, -1]) | said)
    return records


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The power of x that y goes as: a straight line through the logarithms, by least squares; 0 where y is."""
    if min(y) <= 0:
        return 0.0
    u, v = ([math.log(value) for value in values] for values in (x, y))
    mean_u, mean_v = math.fsum(u) / len(u), math.fsum(v) / len(v)
    shared = math.fsum((a - mean_u) * (b - mean_v) for a, b in zip(u, v, strict=True))
    return shared / math.fsum((a - mean_u) ** 2 for a in u)


def of(records: Sequence[Record], kind: str) -> list[Record]:
    """The records of a kind."""
    return [record for record in records if record["kind"] == kind]


# Figures -------------------------------------------------------------------------------------------------------------

ATTRACTS, WATCHES, REPELS = style.BELAY_COLOUR, style.EMA_COLOUR, style.MOMENTUM_COLOUR
_FLOOR = 1e-18  # where a deviation of exactly 0 is drawn


def _sign(a: float) -> tuple[str, str, str]:
    """What a spring with this a does: a word, its colour, its mark."""
    if a > 0:
        return "attracts", ATTRACTS, "o"
    return ("repels", REPELS, "D") if a < 0 else ("only watches", WATCHES, "s")


def _number(x: float, digits: int = 3) -> str:
    return f"{x:.{digits}g}".replace("-", "−")


def _note(
    ax: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], colour: str, **more: object
) -> None:
    """A few words beside a point."""
    ax.annotate(text, at, xytext=offset, textcoords="offset points", color=colour, fontsize=8.5, **more)  # type: ignore[arg-type]


def _draw_methods(records: Sequence[Record]) -> Figure:
    rows = sorted(of(records, "method"), key=lambda r: (r["theta"], r["a"], r["b"]))
    fig = style.figure(8.6, 0.31 * len(rows) + 1.5)
    left, middle, right = fig.subplots(1, 3, sharey=True, width_ratios=(1.0, 1.25, 1.1))
    middle.set(xlim=(0, 4))
    middle.set_axis_off()
    for x, name in enumerate("abpq"):
        middle.text(x + 0.5, len(rows) - 0.25, name, ha="center", fontsize=10, style="italic")
    for y, row in enumerate(rows):
        _, colour, mark = _sign(row["a"])
        left.plot(row["theta"], y, mark, color=colour)
        right.plot(max(row["deviation"], _FLOOR), y, mark, color=colour, mfc=colour if row["deviation"] else "white")
        for x, name in enumerate("abpq"):
            middle.text(x + 0.5, y, _number(row[name], 2), color=colour, ha="center", va="center", fontsize=8.5)
        _note(right, row["against"], (1, y), (6, 0), "#333333", xycoords=right.get_yaxis_transform(), va="center")
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
        word, colour, mark = _sign(a)
        right.plot([], [], mark, color=colour, label=f"{word} (a {relation} 0)")
    fig.legend(loc="outside lower center", ncols=3)
    return fig


def _reference_line(ax: Axes, x: Sequence[float], y: Sequence[float], power: int, where: int) -> None:
    """A straight line of a power through one of the points."""
    ax.plot(x, [y[where] * (value / x[where]) ** power for value in x], color="#999999", lw=0.9, ls="--", zorder=1)


def _draw_limits(records: Sequence[Record]) -> Figure:
    fig = style.figure(8.6, 3.7)
    left, right = fig.subplots(1, 2)
    found = of(records, "gradient")
    curved = [r for r in found if r["function"] == ROSENBROCK.name]
    straight = [r for r in found if r["function"] == BOWL.name]
    x, y = [r["distance"] for r in curved], [r["deviation"] for r in curved]
    _reference_line(left, x, y, 2, 0)
    left.plot(x, y, "o", color=style.MOMENTUM_COLOUR)
    flat = [max(r["deviation"], _FLOOR) for r in straight]
    left.plot([r["distance"] for r in straight], flat, "s", color=style.PLAIN_COLOUR)
    _note(left, "quadratic loss", (straight[1]["distance"], flat[1]), (0, 8), style.PLAIN_COLOUR, ha="center")
    middle = len(x) // 2
    _note(left, f"Rosenbrock: slope {slope(x, y):.2f}", (x[middle], y[middle]), (6, -10), style.MOMENTUM_COLOUR)
    left.set(xscale="log", yscale="log", ylim=(1e-17, 10), xlabel="largest distance between w1 and w2")
    left.set_title("gradient at the EMA, off the EMA of gradients by")

    limit = of(records, "limit")
    (ema,) = of(records, "ema")
    masses, apart = [r["m1"] for r in limit], [r["difference"] for r in limit]
    _reference_line(right, masses, apart, -1, len(masses) - 2)
    right.plot(masses, apart, "o", color=style.BELAY_COLOUR)
    middle = len(masses) // 2
    _note(right, f"slope {_number(slope(masses, apart))}", (masses[middle], apart[middle]), (8, 2), style.BELAY_COLOUR)
    for key, what in (
        ("deviation_same_step", "m1 = ∞ and torch's EMA, same step"),
        ("deviation_one_step_later", "m1 = ∞ and torch's EMA, a step apart"),
    ):
        right.axhline(max(ema[key], _FLOOR), color=style.EMA_COLOUR, lw=1.2)
        at = (0.02, max(ema[key], _FLOOR))
        _note(right, what, at, (0, 3), style.EMA_COLOUR, xycoords=right.get_yaxis_transform())
    right.set(xscale="log", yscale="log", ylim=(1e-17, 10), xlabel="m1, the mass of the weights")
    right.set_title("w2 of BELAY, off that of m1 = ∞ by")
    return fig


def draw(records: Sequence[Record]) -> list[Plate]:
    """The table as a figure, and the two limits."""
    rows, (momentum,) = of(records, "method"), [r for r in of(records, "form") if r["name"] == "momentum"]
    (centre,) = [r for r in of(records, "form") if r["name"] != "momentum"]
    worst = max(rows, key=lambda r: r["deviation"])
    (ema,) = of(records, "ema")
    bowl = max(r["deviation"] for r in of(records, "gradient") if r["function"] == BOWL.name)
    steps, starts = rows[0]["steps"], rows[0]["starts"]
    with style.house():
        return [
            Plate(
                "momentum-methods",
                "Every averaging method, and momentum, is a spring",
                f"Each method ran through Belay around torch's SGD (Rosenbrock, lr {rows[0]['lr']:g}, {starts} random "
                f"starts, {steps} steps, float64), and beside it as the program named on the right, which knows "
                "nothing of springs. The largest relative difference at any step, in w1 or w2, is "
                f"{worst['deviation']:.1e} ({worst['name']}); the dotted line is the rounding of one operation, a "
                "hollow mark a difference of exactly 0. Attractive springs (a > 0) have θ > 0, momentum and "
                "schedule-free are repulsive ones (a < 0), and an EMA only watches. BELAY itself, for any loss, is "
                f"also an EMA of its centre of mass (to {centre['deviation']:.1e}), and a momentum method with "
                f"momentum {momentum['beta']:.3f} of which it takes the share ν = {_number(momentum['nu'])} (to "
                f"{momentum['deviation']:.1e}); ordinary momentum has ν = 1, so that BELAY subtracts what momentum "
                "adds.",
                _draw_methods(records),
            ),
            Plate(
                "momentum-limits",
                "When an average is momentum, and when BELAY is an EMA",
                f"Left: an EMA (decay {DECAY}) of SGD over {steps} steps from {starts} starts. The gradient at the "
                f"average is the average of the gradients for a quadratic loss (to {bowl:.1e}) and for no "
                "other: on Rosenbrock's function the difference, relative to the first gradient, goes as the square of "
                f"the distance; learning rates from {LEARNING_RATES[0]:.0e} to {LEARNING_RATES[-1]:.0e}. Right: the "
                f"average w2 of BELAY (k 1, m2 10) on Rosenbrock's function, lr {rows[0]['lr']:g}: its difference from "
                f"m1 = ∞ goes as 1/m1. At m1 = ∞ it is the EMA that everybody uses, one step late: "
                f"{ema['deviation_one_step_later']:.1e} away from torch's of the step before, "
                f"{ema['deviation_same_step']:.1e} from that of the same step.",
                _draw_limits(records),
            ),
        ]
