"""The rule k(T) of §3.3: the same problem trained for 1,000 to 1,000,000 steps, with the rule and without.

Two ways to train longer. In the first the training time lr·T is the same for every T, so that gradient descent follows
the same flow in finer steps; with the rule the average should follow the same path, too. In the second the learning
rate stays as it is and gradients are noisy, as when people train for longer.

On a quadratic both are linear: a run of any length is a power of a matrix, and so are the expected losses. Real runs
through `Belay` stand beside the matrices where that many steps can be taken.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from torchbelay.lab.arms import Arm, Lane
from torchbelay.lab.part import Plate, Record, Settings, Tick
from torchbelay.lab.report import style
from torchbelay.physics.spring import Spring

from .functions import Function
from .race import Race

NAME = "invariance"
TITLE = "The rule k(T): one setting for runs of every length"

LENGTHS = (1_000, 10_000, 100_000, 1_000_000)
T0 = 1_000_000  # the length that the setting is good for
MARKS = 100  # points of a path that are kept, evenly over the run
CURVATURES = (4.0, 1.0)  # along x and y
TIME = 4.0  # lr·T of the first way
LR, NOISE = 0.05, 1.0  # of the second: constant learning rate, standard deviation of each component of a gradient

QUADRATIC = Function(
    "quadratic",
    "(4·x² + y²)/2",
    lambda x, y: (CURVATURES[0] * x**2 + CURVATURES[1] * y**2) / 2,
    lambda x, y: (CURVATURES[0] * x, CURVATURES[1] * y),
    curvature=max(CURVATURES),
    half_width=1.0,
)


@dataclass(frozen=True)
class Masses:
    """A setting (k0 = 1) that is good for runs of T0 steps."""

    name: str
    m1: float
    m2: float
    rules: "tuple[Rule, ...]"


Rule = Literal["printed", "exact", "k of 1,000,000", "k of 1,000"]

# With the paper's masses an average remembers 1/1250 of the run: good for training, but nothing to see, and too stiff
# for the shortest runs. A hundred times the mass makes it 8% of the run.
PAPER = Masses("MNIST", 2000.0, 500.0, ("printed", "exact", "k of 1,000,000"))
HEAVY = Masses("100 × MNIST", 200_000.0, 50_000.0, ("printed", "exact", "k of 1,000,000", "k of 1,000"))


def spring(masses: Masses, rule: Rule, steps: int) -> Spring:
    """The spring of a run of so many steps; a `ValueError` where the rule makes none."""
    m1, m2 = masses.m1, masses.m2
    if rule == "printed" or rule == "exact":
        return Spring.for_steps(steps, m1=m1, m2=m2, T0=T0, rule=rule)
    if rule == "k of 1,000,000":
        return Spring(k=1.0, m1=m1, m2=m2)
    return Spring(k=T0 / LENGTHS[0], m1=m1, m2=m2)


# Linear algebra ------------------------------------------------------------------------------------------------------


def matrix(of: Spring, lr: float, curvature: float) -> Tensor:
    """One step of SGD with this spring on a curvature: (w1, w2)' = M·(w1, w2)."""
    c, pull = of.coupling(), lr * curvature
    rows = [[1 - c.a - c.p * pull, c.a], [c.b - c.q * pull, 1 - c.b]]
    return torch.tensor(rows, dtype=torch.float64)


def _walk(strides: Sequence[Tensor]) -> Tensor:
    """w2 at the marks of a run from (1, 1), the start included, by the matrix of each coordinate: (MARKS + 1, 2)."""
    columns = []
    for stride in strides:
        state, seen = torch.ones(2, dtype=torch.float64), [1.0]
        for _ in range(MARKS):
            state = stride @ state
            seen.append(float(state[1]))
        columns.append(torch.tensor(seen, dtype=torch.float64))
    return torch.stack(columns, dim=1)


def path(of: Spring, lr: float, steps: int) -> Tensor:
    """The path of w2 in a run of so many steps, a multiple of MARKS."""
    return _walk([torch.linalg.matrix_power(matrix(of, lr, h), steps // MARKS) for h in CURVATURES])


def flow(masses: Masses) -> Tensor:
    """Where the paths with the rule tend to for many steps: gradient flow with a spring in continuous time."""
    pull1, pull2 = (T0 / (2 * m) for m in (masses.m1, masses.m2))  # κ·T, which the rule keeps
    drifts = [[[-pull1 - TIME * h, pull1], [pull2, -pull2]] for h in CURVATURES]
    return _walk([torch.linalg.matrix_exp(torch.tensor(drift, dtype=torch.float64) / MARKS) for drift in drifts])


def expected_losses(of: Spring, steps: int) -> tuple[float, float]:
    """E[loss] of w1 and w2 after a run with noisy gradients from (1, 1), exactly: E[ssᵀ] moves linearly, too."""
    c, totals = of.coupling(), [0.0, 0.0]
    for curvature in CURVATURES:
        m = matrix(of, LR, curvature)
        kick = LR * NOISE * torch.tensor([c.p, c.q], dtype=torch.float64)
        step = torch.eye(5, dtype=torch.float64)  # on (E[ssᵀ] as a row of four, 1)
        step[:4, :4] = torch.kron(m, m)
        step[:4, 4] = torch.outer(kick, kick).reshape(4)
        moments = torch.linalg.matrix_power(step, steps) @ torch.ones(5, dtype=torch.float64)
        for i, second in enumerate((moments[0], moments[3])):
            totals[i] += curvature / 2 * float(second)
    return totals[0], totals[1]


# Real runs -----------------------------------------------------------------------------------------------------------


def belayed_paths(springs: Sequence[Spring], steps: int, tick: Tick) -> Tensor:
    """The same paths of w2 through `Belay` around torch's SGD: (springs, MARKS + 1, 2)."""
    lanes = [Lane(Arm(f"{i}", "SGD", one), TIME / steps) for i, one in enumerate(springs)]
    race = Race([QUADRATIC], torch.ones(1, 1, 2, dtype=torch.float64), lanes)
    seen = [race.w2()[:, 0, 0]]
    for t in range(1, steps + 1):
        race.step()
        if t % (steps // MARKS) == 0:
            seen.append(race.w2()[:, 0, 0])
            tick(steps // MARKS)
    return torch.stack(seen, dim=1)


def belayed_losses(
    springs: Sequence[Spring], steps: int, rows: int, generator: torch.Generator, tick: Tick
) -> list[tuple[float, float]]:
    """The mean loss of w2 over many noisy runs through `Belay`, and its standard error, for each spring."""

    def noisy(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        shape = (2, 1, *x.shape[1:])  # the same noise for every spring
        noise = NOISE * torch.randn(shape, generator=generator, dtype=torch.float64)
        return CURVATURES[0] * x + noise[0], CURVATURES[1] * y + noise[1]

    noisily = Function("noisy quadratic", QUADRATIC.formula, QUADRATIC.value, noisy, None, 1.0)
    lanes = [Lane(Arm(f"{i}", "SGD", one), LR) for i, one in enumerate(springs)]
    race = Race([noisily], torch.ones(1, rows, 2, dtype=torch.float64), lanes)
    for t in range(1, steps + 1):
        race.step()
        if t % 100 == 0:
            tick(100)
    losses = race.losses(race.w2())[:, 0]
    return [(float(loss.mean()), float(loss.std()) / math.sqrt(rows)) for loss in losses]


# The part ------------------------------------------------------------------------------------------------------------


def _size(settings: Settings) -> tuple[tuple[int, ...], int]:
    """Lengths that are really run, and rows of noisy runs."""
    return (LENGTHS[:1], 200) if settings.quick else (LENGTHS[:2], 2000)


def plan(settings: Settings) -> tuple[int, str]:
    """Units of work, and one line that says what would be run."""
    lengths, rows = _size(settings)
    real = " and ".join(f"{length:,}" for length in lengths)
    line = f"a quadratic for {LENGTHS[0]:,} to {LENGTHS[-1]:,} steps with and without k(T); through Belay {real} steps"
    return sum(lengths) + LENGTHS[0], f"{line}, and {rows:,} noisy runs"


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Both ways to train longer, by matrices, and as far as it goes through `Belay`."""
    lengths, rows = _size(settings)
    records: list[Record] = []
    for steps in LENGTHS:
        made: list[tuple[Record, Spring]] = []
        for masses in (PAPER, HEAVY):
            for rule in masses.rules:
                record: Record = {"masses": masses.name, "m1": masses.m1, "m2": masses.m2, "k0": 1.0, "T0": T0}
                record |= {"rule": rule, "steps": steps}
                try:
                    made.append((record, spring(masses, rule, steps)))
                except ValueError as refusal:
                    records.append({"kind": "refused", **record, "why": str(refusal)})
        springs = [one for _, one in made]
        real = belayed_paths(springs, steps, tick) if steps in lengths else None
        for i, (record, one) in enumerate(made):
            records.append(_path_record(record, one, None if real is None else real[i]))
        if steps == LENGTHS[0]:
            generator = torch.Generator().manual_seed(settings.seed)
            simulated = belayed_losses(springs, steps, rows, generator, tick)
        for i, (record, one) in enumerate(made):
            records.append(_noise_record(record, one, rows, simulated[i] if steps == LENGTHS[0] else None))
    return records


def _path_record(record: Record, one: Spring, real: Tensor | None) -> Record:
    steps = record["steps"]
    found = path(one, TIME / steps, steps)
    limit = flow(PAPER if record["masses"] == PAPER.name else HEAVY)
    return {
        "kind": "path",
        **record,
        **_about(one),
        "lr": TIME / steps,
        "path": [float(f"{value:.6g}") for value in found[:, 1]],  # of y, the slower direction
        "end": [float(value) for value in found[-1]],
        "distance_from_flow": float((found - limit).abs().max()),
        "deviation_of_belay": None if real is None else float((real - found).abs().max()),
    }


def _noise_record(record: Record, one: Spring, rows: int, simulated: tuple[float, float] | None) -> Record:
    w1, w2 = expected_losses(one, record["steps"])
    mean, error = simulated or (None, None)
    said = {"simulated_w2": mean, "standard_error": error, "runs": rows if simulated else None}
    return {"kind": "noise", **record, **_about(one), "lr": LR, "noise": NOISE, "loss_w1": w1, "loss_w2": w2, **said}


def _about(one: Spring) -> Record:
    return {"k": one.k, "kappa1": one.kappa1, "kappa2": one.kappa2, "effective_lr_scale": one.effective_lr_scale}


def chosen(records: Sequence[Record], kind: str, masses: str, rule: str) -> list[Record]:
    """The records of a kind, a setting and a rule, from short runs to long ones."""
    found = [r for r in records if (r["kind"], r["masses"], r["rule"]) == (kind, masses, rule)]
    return sorted(found, key=lambda r: r["steps"])


def spread(records: Sequence[Record]) -> float:
    """How far apart paths are at most, at any share of the run, as a share of the start's distance."""
    return float(max(max(values) - min(values) for values in zip(*(r["path"] for r in records), strict=True)))


# Figures -------------------------------------------------------------------------------------------------------------

_HUES = {
    "printed": style.BELAY_COLOUR,
    "exact": style.MATCHED_COLOUR,
    "k of 1,000,000": style.PLAIN_COLOUR,
    "k of 1,000": style.EMA_COLOUR,
}
_SAID = {
    "printed": "the rule, as printed",
    "exact": "the rule, exact",
    "k of 1,000,000": "the longest run's k for all",
    "k of 1,000": "the shortest run's k for all",
}
_MARKS = {"printed": "o", "exact": "D", "k of 1,000,000": "s", "k of 1,000": "^"}
_LENGTHS_HUES = ("#9ecae1", "#4292c6", "#2171b5", "#08306b")  # light to dark: short to long
_DASHES = ("-", (0, (5, 2)), (0, (2, 2)), (0, (1, 3)))


def _power(steps: int) -> str:
    return "10" + "⁰¹²³⁴⁵⁶⁷⁸⁹"[round(math.log10(steps))]


def _draw_paths(records: Sequence[Record]) -> Figure:
    fig = style.figure(8.6, 3.6)
    axes = fig.subplots(1, 3, sharex=True, sharey=True)
    for ax, rule in zip(axes, ("printed", "k of 1,000,000", "k of 1,000"), strict=True):
        for r, hue, dashes in zip(chosen(records, "path", HEAVY.name, rule), _LENGTHS_HUES, _DASHES, strict=True):
            share = [i / MARKS for i in range(MARKS + 1)]
            width = 2.4 if dashes == "-" else 1.8
            ax.plot(share, r["path"], color=hue, ls=dashes, lw=width, label=f"T = {_power(r['steps'])}")
        ax.set(xlabel="share of the run", xlim=(0, 1), ylim=(0, 1.03))
        ax.set_xticks([0, 0.5, 1], ["0", "½", "1"])
        ax.set_title(_SAID[rule] if rule != "printed" else "with the rule")
    axes[0].set_ylabel("w2, its start being 1")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=4)
    return fig


def _curve(ax: Axes, x: Sequence[float], y: Sequence[float], rule: str) -> None:
    size = 9 if rule == "printed" else 6  # the printed rule and the exact one nearly coincide
    ax.plot(x, y, _MARKS[rule], ls="-", color=_HUES[rule], lw=1.2, ms=size, label=_SAID[rule])


def _draw_lengths(records: Sequence[Record]) -> Figure:
    fig = style.figure(8.6, 3.9)
    axes = fig.subplots(1, 3)
    for ax, masses in zip(axes[:2], (HEAVY, PAPER), strict=True):
        for rule in masses.rules:
            rows = chosen(records, "path", masses.name, rule)
            _curve(ax, [r["steps"] for r in rows], [r["distance_from_flow"] for r in rows], rule)
        ax.set(ylim=(1e-7, 3))
        ax.set_title(f"same time, {masses.name} masses" if masses is PAPER else "same time")
    for r in (r for r in records if r["kind"] == "refused"):
        at, hue = (r["steps"], 4e-7), _HUES[r["rule"]]
        axes[1].plot(*at, "x", color=hue, ms=7, mew=2)
        axes[1].annotate("refused", at, xytext=(6, 0), textcoords="offset points", va="center", color=hue, fontsize=8.5)
    axes[0].set_ylabel("distance of w2's path from the flow")
    for rule in HEAVY.rules:
        rows = chosen(records, "noise", HEAVY.name, rule)
        _curve(axes[2], [r["steps"] for r in rows], [r["loss_w2"] for r in rows], rule)
    for r in (r for r in records if r["kind"] == "noise" and r["masses"] == HEAVY.name and r["runs"]):
        axes[2].plot(r["steps"], r["simulated_w2"], "+", color="black", ms=9, zorder=4)
    axes[2].set_title("same learning rate, noise")
    axes[2].set_ylabel("expected loss of w2")
    for ax in axes:
        ax.set(xscale="log", yscale="log", xlabel="steps T", xticks=LENGTHS)
        ax.minorticks_off()
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=4)
    return fig


def draw(records: Sequence[Record]) -> list[Plate]:
    """Paths against the share of the run, and what is left of the differences at each length."""
    with style.house():
        return [
            Plate(
                "invariance-paths",
                "With k = C/T the average takes the same path in a run of any length",
                _caption_of_paths(records),
                _draw_paths(records),
            ),
            Plate(
                "invariance-lengths",
                "What the rule keeps, and what it cannot",
                _caption_of_lengths(records),
                _draw_lengths(records),
            ),
        ]


def _caption_of_paths(records: Sequence[Record]) -> str:
    apart = {rule: spread(chosen(records, "path", HEAVY.name, rule)) for rule in HEAVY.rules}
    real = [r for r in records if r["kind"] == "path" and r["deviation_of_belay"] is not None]
    lengths = " and ".join(f"{steps:,}" for steps in sorted({r["steps"] for r in real}))
    return (
        f"SGD on {QUADRATIC.formula} from (1, 1) at learning rate {TIME:g}/T: the same flow in finer steps. Drawn is "
        f"the slower coordinate of the average w2, for the spring k = 1 at T = {T0:,}, m1 = {HEAVY.m1:,.0f}, m2 = "
        f"{HEAVY.m2:,.0f}: a hundred times the paper's MNIST masses, so that the average remembers 8% of the run. The "
        f"paths are at most {apart['printed']:.2%} of the start's distance apart with the rule, "
        f"{apart['k of 1,000,000']:.0%} with the longest run's k for all, {apart['k of 1,000']:.0%} with the shortest "
        f"one's. Lines are powers of a matrix; real runs through Belay, of {lengths} steps, are within "
        f"{max(r['deviation_of_belay'] for r in real):.0e} of them."
    )


def _caption_of_lengths(records: Sequence[Record]) -> str:
    refused = sorted({r["steps"] for r in records if r["kind"] == "refused"})
    at = " and ".join(f"{steps:,}" for steps in refused) or "none of these numbers of"
    noise = chosen(records, "noise", HEAVY.name, "printed")
    exact = chosen(records, "path", PAPER.name, "exact")
    runs = next((r["runs"] for r in noise if r["runs"]), 0)
    return (
        "Left and middle: how far the path of w2 is from its limit for many steps, at the same training time "
        f"{TIME:g}. With the rule the difference is that of any discretisation, about 1/T. With the paper's own MNIST "
        f"masses ({PAPER.m1:g}, {PAPER.m2:g}) the printed rule makes no average for {at} steps and is refused (✕). The "
        "exact rule always makes one, but where it has to be stiff it costs learning rate: of the nominal one "
        f"{exact[0]['effective_lr_scale']:.3f} is left at {exact[0]['steps']:,} steps and "
        f"{exact[-1]['effective_lr_scale']:.3f} at {exact[-1]['steps']:,}. Right: another way to train longer, at the "
        f"same learning rate ({LR:g}), gradients with noise of standard deviation {NOISE:g}; exact expectations, and "
        f"the mean of {runs:,} runs through Belay (+). Here the result is not independent of T: with the rule the loss "
        f"falls from {noise[0]['loss_w2']:.1e} to {noise[-1]['loss_w2']:.1e}, because the average then is over more "
        "steps. That is what one trains longer for, and no k that is kept for all lengths has it at both ends."
    )
