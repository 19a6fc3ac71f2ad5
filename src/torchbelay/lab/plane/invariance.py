"""The rule k(T) of §3.3: the same problem trained for 1,000 to 1,000,000 steps, with the rule and without.

There are two ways to train longer. In the first, the training time lr·T is the same for every T: gradient descent
follows the same flow in finer steps, and with the rule the average should follow the same path, too. In the second, the
learning rate is constant and gradients are noisy, as in practice.

On a quadratic loss both are linear: a run of any length is a power of a matrix (`quadratic`). The shorter runs are also
run through `Belay`.
"""

import math
from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from torchbelay.lab.arms import Arm, Lane
from torchbelay.lab.part import Plate, Record, Settings, Tick
from torchbelay.lab.records import rounded, select
from torchbelay.lab.report import style
from torchbelay.lab.report.words import listed
from torchbelay.physics.spring import Spring

from .functions import Function
from .quadratic import (
    CURVATURES,
    HEAVY,
    LENGTHS,
    LR,
    MARKS,
    NOISE,
    PAPER,
    QUADRATIC,
    T0,
    TIME,
    exact_path,
    expected_losses,
    flow_path,
    make_spring,
)
from .race import Race

NAME = "invariance"
TITLE = "The rule k(T): one setting for runs of every length"

# Real runs -----------------------------------------------------------------------------------------------------------


def simulate_paths(springs: Sequence[Spring], steps: int, tick: Tick) -> Tensor:
    """Return the same paths of w2 through `Belay` around torch's SGD: (springs, MARKS + 1, 2)."""
    lanes = [Lane(Arm(f"{i}", "SGD", one), TIME / steps) for i, one in enumerate(springs)]
    race = Race([QUADRATIC], torch.ones(1, 1, 2, dtype=torch.float64), lanes)
    seen = [race.w2()[:, 0, 0]]
    for t in range(1, steps + 1):
        race.step()
        if t % (steps // MARKS) == 0:
            seen.append(race.w2()[:, 0, 0])
            tick(steps // MARKS)
    return torch.stack(seen, dim=1)


def simulate_losses(
    springs: Sequence[Spring], steps: int, rows: int, generator: torch.Generator, tick: Tick
) -> list[tuple[float, float]]:
    """Return the mean loss of w2 over many noisy runs through `Belay`, and its standard error, per spring."""

    def noisy_gradient(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        shape = (2, 1, *x.shape[1:])  # the same noise for every spring
        noise = NOISE * torch.randn(shape, generator=generator, dtype=torch.float64)
        return CURVATURES[0] * x + noise[0], CURVATURES[1] * y + noise[1]

    noisy = Function("noisy quadratic", QUADRATIC.formula, QUADRATIC.value, noisy_gradient, None, 1.0)
    lanes = [Lane(Arm(f"{i}", "SGD", one), LR) for i, one in enumerate(springs)]
    race = Race([noisy], torch.ones(1, rows, 2, dtype=torch.float64), lanes)
    for t in range(1, steps + 1):
        race.step()
        if t % 100 == 0:
            tick(100)
    losses = race.losses(race.w2())[:, 0]
    return [(float(loss.mean()), float(loss.std()) / math.sqrt(rows)) for loss in losses]


# The part ------------------------------------------------------------------------------------------------------------


def _size(settings: Settings) -> tuple[tuple[int, ...], int]:
    """Return the lengths that run through `Belay`, and the number of noisy runs."""
    return (LENGTHS[:1], 200) if settings.quick else (LENGTHS[:2], 2000)


def plan(settings: Settings) -> tuple[int, str]:
    """Return the units of work, and one line that says what would run."""
    lengths, rows = _size(settings)
    real = listed([f"{length:,}" for length in lengths])
    line = f"a quadratic for {LENGTHS[0]:,} to {LENGTHS[-1]:,} steps with and without k(T); through Belay {real} steps"
    return sum(lengths) + LENGTHS[0], f"{line}, and {rows:,} noisy runs"


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Compute both ways to train longer by matrices, and run the shorter lengths through `Belay`."""
    lengths, rows = _size(settings)
    records: list[Record] = []
    for steps in LENGTHS:
        made: list[tuple[Record, Spring]] = []
        for masses in (PAPER, HEAVY):
            for rule in masses.rules:
                record: Record = {"masses": masses.name, "m1": masses.m1, "m2": masses.m2, "k0": 1.0, "T0": T0}
                record |= {"rule": rule, "steps": steps}
                try:
                    made.append((record, make_spring(masses, rule, steps)))
                except ValueError as refusal:
                    records.append({"kind": "refused", **record, "why": str(refusal)})
        springs = [one for _, one in made]
        real = simulate_paths(springs, steps, tick) if steps in lengths else None
        for i, (record, one) in enumerate(made):
            records.append(_path_record(record, one, None if real is None else real[i]))
        if steps == LENGTHS[0]:
            generator = torch.Generator().manual_seed(settings.seed)
            simulated = simulate_losses(springs, steps, rows, generator, tick)
        for i, (record, one) in enumerate(made):
            records.append(_noise_record(record, one, rows, simulated[i] if steps == LENGTHS[0] else None))
    return records


def _path_record(record: Record, one: Spring, real: Tensor | None) -> Record:
    steps = record["steps"]
    found = exact_path(one, TIME / steps, steps)
    limit = flow_path(PAPER if record["masses"] == PAPER.name else HEAVY)
    return {
        "kind": "path",
        **record,
        **_spring_fields(one),
        "lr": TIME / steps,
        "path": [rounded(value) for value in found[:, 1].tolist()],  # of y, the slower direction
        "end": [float(value) for value in found[-1]],
        "distance_from_flow": float((found - limit).abs().max()),
        "deviation_of_belay": None if real is None else float((real - found).abs().max()),
    }


def _noise_record(record: Record, one: Spring, rows: int, simulated: tuple[float, float] | None) -> Record:
    w1, w2 = expected_losses(one, record["steps"])
    mean, error = simulated or (None, None)
    computed = {"lr": LR, "noise": NOISE, "loss_w1": w1, "loss_w2": w2}
    simulation = {"simulated_w2": mean, "standard_error": error, "runs": rows if simulated else None}
    return {"kind": "noise", **record, **_spring_fields(one), **computed, **simulation}


def _spring_fields(one: Spring) -> Record:
    return {"k": one.k, "kappa1": one.kappa1, "kappa2": one.kappa2, "effective_lr_scale": one.effective_lr_scale}


def runs_by_length(records: Sequence[Record], kind: str, masses: str, rule: str) -> list[Record]:
    """Return the records of a kind, a setting and a rule, from short runs to long ones."""
    return sorted(select(records, kind, masses=masses, rule=rule), key=lambda r: r["steps"])


def spread(records: Sequence[Record]) -> float:
    """Return the largest distance between paths at any share of the run, relative to the start's distance."""
    return float(max(max(values) - min(values) for values in zip(*(r["path"] for r in records), strict=True)))


# Figures -------------------------------------------------------------------------------------------------------------

_HUES = {
    "printed": style.BELAY_COLOUR,
    "exact": style.MATCHED_COLOUR,
    "k of 1,000,000": style.PLAIN_COLOUR,
    "k of 1,000": style.EMA_COLOUR,
}
_LABELS = {
    "printed": "the rule, as printed",
    "exact": "the rule, exact",
    "k of 1,000,000": "the longest run's k for all",
    "k of 1,000": "the shortest run's k for all",
}
_MARKS = {"printed": "o", "exact": "D", "k of 1,000,000": "s", "k of 1,000": "^"}
_LENGTHS_HUES = ("#9ecae1", "#4292c6", "#2171b5", "#08306b")  # light to dark: short to long
_DASHES = ("-", (0, (5, 2)), (0, (2, 2)), (0, (1, 3)))


def _format_power(steps: int) -> str:
    return "10" + "⁰¹²³⁴⁵⁶⁷⁸⁹"[round(math.log10(steps))]


def _draw_paths(records: Sequence[Record]) -> Figure:
    fig = style.figure(8.6, 3.6)
    axes = fig.subplots(1, 3, sharex=True, sharey=True)
    for ax, rule in zip(axes, ("printed", "k of 1,000,000", "k of 1,000"), strict=True):
        for r, hue, dashes in zip(
            runs_by_length(records, "path", HEAVY.name, rule), _LENGTHS_HUES, _DASHES, strict=True
        ):
            share = [i / MARKS for i in range(MARKS + 1)]
            width = 2.4 if dashes == "-" else 1.8
            ax.plot(share, r["path"], color=hue, ls=dashes, lw=width, label=f"T = {_format_power(r['steps'])}")
        ax.set(xlabel="share of the run", xlim=(0, 1), ylim=(0, 1.03))
        ax.set_xticks([0, 0.5, 1], ["0", "½", "1"])
        ax.set_title(_LABELS[rule] if rule != "printed" else "with the rule")
    axes[0].set_ylabel("w2, its start being 1")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=4)
    return fig


def _draw_curve(ax: Axes, x: Sequence[float], y: Sequence[float], rule: str) -> None:
    size = 9 if rule == "printed" else 6  # the printed rule and the exact one nearly coincide
    ax.plot(x, y, _MARKS[rule], ls="-", color=_HUES[rule], lw=1.2, ms=size, label=_LABELS[rule])


def _draw_lengths(records: Sequence[Record]) -> Figure:
    fig = style.figure(8.6, 3.9)
    axes = fig.subplots(1, 3)
    for ax, masses in zip(axes[:2], (HEAVY, PAPER), strict=True):
        for rule in masses.rules:
            rows = runs_by_length(records, "path", masses.name, rule)
            _draw_curve(ax, [r["steps"] for r in rows], [r["distance_from_flow"] for r in rows], rule)
        ax.set(ylim=(1e-7, 3))
        ax.set_title(f"same time, {masses.name} masses" if masses is PAPER else "same time")
    for r in (r for r in records if r["kind"] == "refused"):
        at, hue = (r["steps"], 4e-7), _HUES[r["rule"]]
        axes[1].plot(*at, "x", color=hue, ms=7, mew=2)
        axes[1].annotate("refused", at, xytext=(6, 0), textcoords="offset points", va="center", color=hue, fontsize=8.5)
    axes[0].set_ylabel("distance of w2's path from the flow")
    for rule in HEAVY.rules:
        rows = runs_by_length(records, "noise", HEAVY.name, rule)
        _draw_curve(axes[2], [r["steps"] for r in rows], [r["loss_w2"] for r in rows], rule)
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
    """Draw paths against the share of the run, and the differences that are left at each length."""
    with style.house():
        return [_make_paths_plate(records), _make_lengths_plate(records)]


def _make_paths_plate(records: Sequence[Record]) -> Plate:
    apart = {rule: spread(runs_by_length(records, "path", HEAVY.name, rule)) for rule in HEAVY.rules}
    real = [r for r in select(records, "path") if r["deviation_of_belay"] is not None]
    lengths = listed([f"{steps:,}" for steps in sorted({r["steps"] for r in real})])
    caption = (
        f"The average of runs of {LENGTHS[0]:,} to {LENGTHS[-1]:,} steps; with the rule the paths differ by at most "
        f"{apart['printed']:.2%} of the start's distance. With one k for all lengths they differ by "
        f"{apart['k of 1,000,000']:.0%} (the longest run's) or {apart['k of 1,000']:.0%} (the shortest one's)."
    )
    notes = (
        f"SGD on {QUADRATIC.formula} from (1, 1) at learning rate {TIME:g}/T: the same flow in finer steps. The figure "
        "shows the slower coordinate of the average w2.",
        f"The spring has k = 1 at T = {T0:,}, m1 = {HEAVY.m1:,.0f}, m2 = {HEAVY.m2:,.0f}: a hundred times the paper's "
        "MNIST masses, so that the average remembers 8% of the run.",
        f"Lines are powers of a matrix. Real runs through Belay, of {lengths} steps, are within "
        f"{max(r['deviation_of_belay'] for r in real):.0e} of them.",
    )
    title = "With k = C/T the average takes the same path in a run of any length"
    return Plate("invariance-paths", title, caption, _draw_paths(records), notes)


def _make_lengths_plate(records: Sequence[Record]) -> Plate:
    refused = sorted({r["steps"] for r in select(records, "refused")})
    lengths = listed([f"{steps:,}" for steps in refused], none="none of these numbers of")
    noise = runs_by_length(records, "noise", HEAVY.name, "printed")
    exact = runs_by_length(records, "path", PAPER.name, "exact")
    runs = next((r["runs"] for r in noise if r["runs"]), 0)
    caption = (
        "Left and middle: at the same training time, w2's path with the rule tends to its limit, as any discretisation "
        "does, about as 1/T. Right: at a constant learning rate with noise the loss depends on T: from "
        f"{noise[0]['loss_w2']:.1e} to {noise[-1]['loss_w2']:.1e}."
    )
    notes = (
        f"Left and middle: the distance of w2's path from its limit for many steps, at training time {TIME:g}. With "
        f"the paper's own MNIST masses ({PAPER.m1:g}, {PAPER.m2:g}) the printed rule makes no average for {lengths} "
        "steps and is refused (✕).",
        "The exact rule always makes an average, but a stiff one costs learning rate: of the nominal rate "
        f"{exact[0]['effective_lr_scale']:.3f} is left at {exact[0]['steps']:,} steps and "
        f"{exact[-1]['effective_lr_scale']:.3f} at {exact[-1]['steps']:,}.",
        f"Right: learning rate {LR:g}, gradients with noise of standard deviation {NOISE:g}; exact expectations, and "
        f"the mean of {runs:,} runs through Belay (+). With the rule the average is over more steps in a longer run. "
        "No k that is the same for all lengths has the low loss at both ends.",
    )
    title = "What the rule keeps, and what it cannot"
    return Plate("invariance-lengths", title, caption, _draw_lengths(records), notes)
