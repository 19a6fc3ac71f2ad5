"""Figure 1: one step of BELAY, drawn over Rosenbrock's loss."""

from collections.abc import Sequence

import torch
from matplotlib.axes import Axes

from torchbelay.lab.arms import Lane, belay_arm
from torchbelay.lab.part import Plate, Record, Settings, Tick
from torchbelay.lab.records import rounded
from torchbelay.lab.report import style
from torchbelay.physics.spring import Spring

from .functions import ROSENBROCK
from .race import Race
from .trajectories import DIGITS, draw_contours

NAME, TITLE = "fig1", "One step of BELAY"

SPRING = Spring(k=8.0, m1=10.0, m2=20.0)  # the paper's masses on a stiffer spring, so that the pull is visible
COIL = "#6b4226"
LR, START, STEPS = 0.008, (-0.22, 0.61), 2


def plan(settings: Settings) -> tuple[int, str]:
    """Return the units of work, and one line that says what would run."""
    return STEPS + 1, f"step {STEPS + 1} of BELAY+SGD on Rosenbrock from {START}"


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Take a few steps, and record all points of the next."""
    lane = Lane(belay_arm("SGD", SPRING), LR)
    race = Race([ROSENBROCK], torch.tensor([[START]], dtype=torch.float64), [lane])
    trail = []
    for _ in range(STEPS + 1):
        trail.append((race.w[0, 0, 0].tolist(), race.w2()[0, 0, 0].tolist()))
        race.step()
        tick(1)
    before1, before2 = trail[-1]
    u = [-LR * g for g in race.grad[0, 0, 0].tolist()]
    after1, after2 = race.w[0, 0, 0].tolist(), race.w2()[0, 0, 0].tolist()
    points = {
        "w1": before1,
        "w2": before2,
        "u": u,
        "w1_star": [x + d for x, d in zip(before1, u, strict=True)],
        "w1_new": after1,
        "w2_new": after2,
    }
    return [
        {
            "kind": "step",
            "function": ROSENBROCK.name,
            **lane.options(),
            "start": list(START),
            "step": STEPS + 1,
            **{name: [rounded(x, DIGITS) for x in point] for name, point in points.items()},
            "trail1": [[rounded(x, DIGITS) for x in w1] for w1, _ in trail],
            "trail2": [[rounded(x, DIGITS) for x in w2] for _, w2 in trail],
        }
    ]


def draw(records: Sequence[Record]) -> list[Plate]:
    """Draw the step, with every point that Algorithm 1 names."""
    (r,) = records
    with style.house():
        fig = style.figure(7.0, 5.2)
        ax = fig.subplots()
        points = [*r["trail1"], *r["trail2"], r["w1_star"], r["w1_new"], r["w2_new"]]
        xs, ys = [p[0] for p in points], [p[1] for p in points]
        margin_x, margin_y = 0.22 * (max(xs) - min(xs)), 0.15 * (max(ys) - min(ys))
        draw_contours(
            ax, ROSENBROCK, (min(xs) - margin_x, max(xs) + margin_x), (min(ys) - margin_y, max(ys) + margin_y)
        )
        for trail, hue in (("trail1", style.PLAIN_COLOUR), ("trail2", style.BELAY_COLOUR)):
            ax.plot(*zip(*r[trail], strict=True), ".-", color=hue, alpha=0.35, linewidth=1, markersize=4)
        ax.set(xlabel="x", ylabel="y")
        fig.draw_without_rendering()  # before this, the axes do not know the positions of points on the page
        draw_spring(ax, r["w1"], r["w2"])
        for tail, head, hue in (
            ("w1", "w1_star", style.PLAIN_COLOUR),
            ("w1_star", "w1_new", style.BELAY_COLOUR),
            ("w2", "w2_new", style.BELAY_COLOUR),
        ):
            arrow = {"arrowstyle": "-|>", "color": hue, "linewidth": 1.8, "shrinkA": 3, "shrinkB": 4}
            ax.annotate("", r[head], r[tail], arrowprops=arrow, zorder=4)
        for name, hue, filled, text, offset in (
            ("w1", style.PLAIN_COLOUR, True, "w1, the weights", (0, -12)),
            ("w1_star", style.PLAIN_COLOUR, False, "w1* = w1 + u,\nwhere the optimizer steps", (8, -4)),
            ("w1_new", style.BELAY_COLOUR, False, "w1', pulled back\ntowards the average", (9, 4)),
            ("w2", style.BELAY_COLOUR, True, "w2, the average", (9, 6)),
            ("w2_new", style.BELAY_COLOUR, False, "w2', drawn\nto the weights", (-10, -2)),
        ):
            face = hue if filled else "white"
            ax.plot(*r[name], "o", color=face, markeredgecolor=hue, markeredgewidth=1.8, markersize=9, zorder=6)
            side = "right" if offset[0] < 0 else "left" if offset[0] else "center"
            ax.annotate(
                text,
                r[name],
                xytext=offset,
                textcoords="offset points",
                ha=side,
                va="top" if offset[1] < 0 else "bottom",
                color="black",
                fontsize=9,
                zorder=7,
                bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1},
            )
        middle = ((r["w1"][0] + r["w2"][0]) / 2, (r["w1"][1] + r["w2"][1]) / 2)
        ax.annotate(
            "spring ", middle, xytext=(-8, -8), textcoords="offset points", ha="right", color=COIL, style="italic"
        )
    caption = (
        "The optimizer moves the weights from w1 to w1*; the spring then pulls them back towards the average w2, and "
        "w2 moves towards the old w1. Unlike an EMA, the average acts on the weights in training."
    )
    notes = (
        f"Step {r['step']} of SGD with BELAY on Rosenbrock's function {ROSENBROCK.formula}, from w1 = w2 = "
        f"{tuple(r['start'])} at learning rate {r['lr']:g}.",
        f"{r['method']}: the paper's masses on a stiffer spring, so that the pull is visible.",
        "Faint: the steps before.",
    )
    return [Plate("fig1", "One step of BELAY", caption, fig, notes)]


def draw_spring(ax: Axes, start: Sequence[float], end: Sequence[float], coils: int = 9) -> None:
    """Draw a coil spring between two points; its coils are even on the page, not in the plane of the weights."""
    a, b = (torch.tensor(p) for p in ax.transData.transform([start, end]))
    along = (b - a) / (b - a).norm()
    across = torch.stack((-along[1], along[0]))
    turns = 2 * coils + 2
    at = [a + (b - a) * i / turns + across * (0 if i in (0, turns) else 7 * (-1) ** i) for i in range(turns + 1)]
    back = ax.transData.inverted().transform(torch.stack(at).numpy())
    ax.plot(back[:, 0], back[:, 1], "-", color=COIL, linewidth=1.1, zorder=3)
