"""The theorems of docs/theory.md beside simulations: stable range, noise against speed, and the floor of θ.

Formulas come from `physics`. What stands beside them is measured without them: ranges and floors by steps of the four
numbers that grow or not, noise by runs of `Belay` around torch's SGD with noisy gradients.
"""

from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from torch import Tensor

from torchbelay.belay import Belay
from torchbelay.physics import critical, methods
from torchbelay.physics.inner_momentum import stable_range, theta_floor
from torchbelay.physics.methods import centred

from .hypotheses import GPA
from .part import Plate, Record, Settings, Tick
from .records import rounded, select
from .report import style

NAME, TITLE = "theory", "The theorems, and simulations beside them"

BETAS = (0.0, 0.5, 0.9)  # of the optimizer's momentum
RATE = 0.05  # the averaging rate of the stable ranges
PUSH = 0.05  # η·h of the noise
THETAS = (-0.5, 0.25, 2.0)  # beside EMA and critical damping: a spring that repels, and two of BELAY's
FLOOR_BETAS = (0.5, 0.8, 0.9, 0.95, 0.99)
_COLOURS = ("#56B4E9", "#0072B2", "#D55E00", "#CC79A7", "#000000")
_CHUNK = 50  # steps between two looks at the size of a state


def _sizes(settings: Settings) -> tuple[int, int, int]:
    """Return the steps of a state, the weights of a noisy run, and its steps."""
    return (1_000, 500, 400) if settings.quick else (2_000, 4_000, 1_200)


def plan(settings: Settings) -> tuple[int, str]:
    """Return the units of work, and one line that says what would run."""
    steps, weights, run = _sizes(settings)
    runs = len(_noise_settings())
    line = f"stable ranges and floors by {steps:,} steps, and {runs} noisy runs of {weights:,} weights, {run:,} steps"
    return len(BETAS) + len(FLOOR_BETAS) + runs, line


# Ranges and floors ---------------------------------------------------------------------------------------------------


def _grows(theta: Tensor, c: Tensor, beta: float, x: Tensor, steps: int) -> Tensor:
    """Whether steps of `centred(θ, c)` around SGD with momentum grow on a quadratic, for each θ, c and ηh = x."""
    b = c / (1 + theta)
    w1, w2, m = (torch.full_like(x, value) for value in (1.0, 0.3, -0.4))
    sizes = [torch.zeros_like(x)]  # logarithms, one per chunk
    for t in range(steps):
        m = beta * m + (1 - beta) * x * w1
        w1, w2 = (
            w1 + theta * b * (w2 - w1) - (1 + theta * (1 - c)) * m,
            w2 + b * (w1 - w2) - c * m,
        )
        if t % _CHUNK == _CHUNK - 1:  # keep the numbers moderate, and their size apart
            norm = (w1.square() + w2.square() + m.square()).sqrt()
            sizes.append(sizes[-1] + norm.log())
            w1, w2, m = w1 / norm, w2 / norm, m / norm
    quarter = len(sizes) // 4  # means over quarters: a pair that swings slowly has large and small moments
    late, early = (torch.stack(part).mean(0) for part in (sizes[-quarter:], sizes[quarter : 2 * quarter]))
    return late > early


def _first(grid: Tensor, grows: Tensor) -> list[float]:
    """Return the number of the grid, (numbers) or (cases, numbers), from which on each case grows."""
    at = grows.int().argmax(dim=1)  # the first that grows
    rows = torch.arange(len(grows))
    ends = grid.expand(grows.shape)
    found: list[float] = ((ends[rows, at] + ends[rows, (at - 1).clamp(min=0)]) / 2).tolist()
    return found


def _range_records(beta: float, steps: int) -> list[Record]:
    thetas = torch.linspace(-0.95, 1.0, 14, dtype=torch.float64)
    pushes = torch.logspace(-2.8, 1.9, 470, dtype=torch.float64) * (1 + beta) / (1 - beta)
    theta = thetas[:, None].expand(-1, len(pushes))
    grows = _grows(theta, torch.full_like(theta, RATE), beta, pushes.expand(theta.shape), steps)
    return [
        {"kind": "range", "beta": beta, "rate": RATE, "theta": rounded(theta), "measured": rounded(value)}
        | {"limit": rounded(stable_range(centred(theta, RATE).coupling(1, 0.1), beta))}
        for theta, value in zip(thetas.tolist(), _first(pushes, grows), strict=True)
    ]


def _floor_records(beta: float, steps: int) -> list[Record]:
    """Find the θ from which on the range is that of a root at −1: just below that rate, no complex pair grows."""
    rates = torch.logspace(-2.5, -0.1, 9, dtype=torch.float64)
    thetas = torch.linspace(-0.002, -0.998, 250, dtype=torch.float64)
    c, theta = rates[:, None].expand(-1, len(thetas)), thetas.expand(len(rates), -1)
    flip = (1 + beta) / (1 - beta) * 2 * (2 - c) / (2 * (1 + theta) - c * (1 + 2 * theta))
    grows = _grows(theta, c, beta, 0.97 * flip, steps)
    return [
        {"kind": "floor", "beta": beta, "rate": rounded(c), "floor": rounded(theta_floor(beta, c))}
        | {"measured": rounded(value)}
        for c, value in zip(rates.tolist(), _first(thetas, grows), strict=True)
    ]


# Noise against speed -------------------------------------------------------------------------------------------------


def _noise_settings() -> list[tuple[str, float, float]]:
    """Return a name, θ and c of each run."""
    found = [("EMA", 0.0, c) for c in (0.004, 0.01, 0.025, 0.05)]
    found += [(f"θ = {theta:g}", theta, c) for theta in THETAS for c in (0.01, 0.03)]
    for mu in (0.005, 0.01, 0.02, 0.035):
        method = critical(1.0, PUSH, mu)
        assert isinstance(method.theta, float)
        assert isinstance(method.rate, float)
        found.append(("critical", method.theta, method.rate))
    return found


def _noise_record(name: str, theta: float, c: float) -> Record:
    """Return speed and noise by the formulas; the noise over that of the weights of plain SGD."""
    coupling = centred(theta, c).coupling(1, PUSH)
    plain = methods.ema(0.5).coupling(1, PUSH).stationary_variance(1.0, PUSH).w1
    return {
        "kind": "noise",
        "name": name,
        "theta": rounded(theta, 9),
        "rate": rounded(c, 9),
        "push": PUSH,
        "speed": rounded(1 - coupling.convergence_rate((1.0, 1.0), PUSH)),
        "noise": rounded(coupling.stationary_variance(1.0, PUSH).w2 / plain),
    }


def _noisy_run(theta: float, c: float, weights: int, steps: int, generator: torch.Generator) -> float:
    """Return the variance of the average after a run of `Belay` around torch's SGD, over that of plain SGD."""
    w = torch.nn.Parameter(torch.zeros(weights, dtype=torch.float64))
    module = torch.nn.Module()
    module.w = w
    optimizer = torch.optim.SGD([w], lr=PUSH)
    belay = Belay(module, optimizer, centred(theta, c))
    for _ in range(steps):
        with torch.no_grad():
            w.grad = w + torch.randn(weights, generator=generator, dtype=torch.float64)
        optimizer.step()
    found = float(belay.average_state_dict()["w"].square().mean())
    belay.detach()
    return found / (PUSH / (2 - PUSH))


def _curves() -> list[Record]:
    """Return noise and speed along EMA, each θ, and critical damping."""
    speeds = torch.logspace(-3, 0, 80, dtype=torch.float64).tolist()
    found = [
        _noise_record("EMA" if theta == 0 else f"θ = {theta:g}", theta, c) | {"kind": "curve"}
        for theta in (0.0, *THETAS)
        for c in (PUSH * 3 * share for share in speeds)
        if c < 1
    ]
    for share in speeds:
        method = critical(1.0, PUSH, PUSH * share)
        assert isinstance(method.theta, float)
        assert isinstance(method.rate, float)
        found.append(_noise_record("critical", method.theta, method.rate) | {"kind": "curve"})
    return found


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Compute the curves, and measure points beside them."""
    steps, weights, length = _sizes(settings)
    records: list[Record] = [
        {"kind": "sizes", "steps": steps, "weights": weights, "run": length, "rate": RATE, "push": PUSH}
    ]
    for beta in BETAS:
        records += _range_records(beta, steps)
        tick(1)
    for beta in FLOOR_BETAS:
        records += _floor_records(beta, steps)
        tick(1)
    records += _curves()
    generator = torch.Generator().manual_seed(settings.seed)
    for name, theta, c in _noise_settings():
        measured = _noisy_run(theta, c, weights, length, generator)
        records.append(_noise_record(name, theta, c) | {"measured": rounded(measured)})
        tick(1)
    return records


# Drawing -------------------------------------------------------------------------------------------------------------


def draw(records: Sequence[Record]) -> list[Plate]:
    """Draw the three figures, from the records and the formulas."""
    with style.house():
        return [_draw_ranges(records), _draw_noise(records), _draw_floors(records)]


def _name(value: float) -> str:
    return f"{value:g}".replace("-", "−")


def _worst(records: Sequence[Record], expected: str) -> float:
    """Return the largest relative difference between what was measured and what was expected."""
    return float(max(abs(r["measured"] / r[expected] - 1) for r in records))


def _draw_ranges(records: Sequence[Record]) -> Plate:
    fig = style.figure(6.4, 4.0)
    ax = fig.subplots()
    fine = torch.linspace(-0.97, 1.0, 300).tolist()
    for beta, colour in zip(BETAS, ("#555555", "#0072B2", "#D55E00"), strict=True):
        line = [stable_range(centred(theta, RATE).coupling(1, 0.1), beta) for theta in fine]
        ax.plot(fine, line, color=colour)
        found = select(records, "range", beta=beta)
        ax.plot([r["theta"] for r in found], [r["measured"] for r in found], "o", ms=4, color=colour, mfc="white")
        label = f"β = {beta:g}" if beta else "β = 0, no momentum"
        offset = (-4, 6 if beta else -14)
        ax.annotate(label, (1.0, line[-1]), xytext=offset, textcoords="offset points", color=colour, ha="right")
        if beta:
            floor = theta_floor(beta, RATE)
            ax.axvline(floor, color=colour, lw=0.8, ls=":")
            text = f"floor {_name(round(floor, 2))}"
            ax.annotate(text, (floor, 0.12), xytext=(3, 0), textcoords="offset points", color=colour, fontsize=8)
    ax.axvline(0, color="#999999", lw=0.8)
    ax.set(yscale="log", ylim=(0.1, 400), xlim=(-1, 1), xlabel="θ    (repels ← 0 = EMA → attracts)")
    ax.set_title(f"largest stable learning rate × curvature, averaging rate {RATE:g}")
    found = select(records, "range")
    (sizes,) = select(records, "sizes")
    caption = (
        "A spring that repels widens the stable range, until θ falls below the floor that the optimizer's momentum β "
        "sets: there the range collapses. A spring that attracts narrows it, with every β."
    )
    notes = (
        f"Lines: theorem 2. Circles: the rate from which on {sizes['steps']:,} steps grow; they differ "
        f"by at most {_worst(found, 'limit'):.1%}.",
        f"A spring that repels has θ < 0. {GPA}",
    )
    return Plate("theory-range", "The stable range over θ and β", caption, fig, notes)


_NOISE_COLOURS = {
    "EMA": style.EMA_COLOUR,
    "critical": style.MATCHED_COLOUR,
    "θ = -0.5": style.MOMENTUM_COLOUR,
    "θ = 0.25": style.BELAY_COLOUR,
    "θ = 2": "#8C3D00",
}
_NOISE_NAMES = {"θ = 0.25": "BELAY, θ = 0.25", "θ = 2": "BELAY, θ = 2", "critical": "critical damping"}


def _draw_noise(records: Sequence[Record]) -> Plate:
    fig = style.figure(6.4, 4.3)
    ax = fig.subplots()
    for name, colour in _NOISE_COLOURS.items():
        curve = select(records, "curve", name=name)
        fastest = max(range(len(curve)), key=lambda i: curve[i]["speed"])  # a larger averaging rate only adds noise
        curve = curve[: fastest + 1]
        found = select(records, "noise", name=name)
        label = _NOISE_NAMES.get(name, name).replace("-", "−")
        ax.plot([r["speed"] / PUSH for r in curve], [r["noise"] for r in curve], color=colour, label=label)
        ax.plot(
            [r["speed"] / PUSH for r in found], [r["measured"] for r in found], "o", ms=4, color=colour, mfc="white"
        )
    _mark_dashes(ax)
    _mark_meeting(ax, select(records, "curve", name="critical"))
    ax.plot([], [], "o", ms=4, color="#777777", mfc="white", label="simulated")
    found = select(records, "noise")
    (sizes,) = select(records, "sizes")
    ax.set(xscale="log", yscale="log", xlim=(2e-3, 1.6), ylim=(3e-3, 1.3))
    ax.set_xlabel("speed ÷ that of SGD (speed: the share of the error that is lost per step)")
    ax.set_ylabel("variance of the average ÷ that of SGD's weights")
    ax.set_title(f"noise against speed, at learning rate × curvature x = {PUSH:g}")
    ax.legend(loc="upper left")
    caption = (
        "At every speed up to SGD's, critical damping leaves the average with the least noise: at slow speeds half of "
        "an EMA's. "
        "BELAY's springs are slower than an EMA of equal noise, and none is faster than SGD."
    )
    notes = (
        f"One direction of a quadratic at learning rate × curvature {PUSH:g}; each line is a sweep of the averaging "
        "rate. If it is large, the spring that repels (θ = −0.5) is faster than SGD.",
        f"Lines: formulas. Circles: {sizes['weights']:,} weights, {sizes['run']:,} noisy steps of Belay around torch's "
        f"SGD; they differ by at most {_worst(found, 'noise'):.0%}.",
        GPA,
    )
    return Plate("theory-noise", "Noise against speed", caption, fig, notes)


def _mark_dashes(ax: Axes) -> None:
    ax.axvline(1, color="#999999", lw=0.8, ls=":")
    ax.annotate("SGD", (1, 1), xytext=(3, 2), textcoords="offset points", color="#777777", fontsize=8)


def _mark_meeting(ax: Axes, critical_curve: Sequence[Record]) -> None:
    """Mark where the spring that repels is critically damped, which is the kink of its line."""
    theta = THETAS[0]
    speed = 1 - (-theta) ** 0.5  # theorem 3, to leading order
    point = min(critical_curve, key=lambda r: abs(r["speed"] / PUSH - speed))
    text = f"θ = {_name(theta)} is critically damped here:\nbeyond, its modes are a complex pair"
    arrow = {"arrowstyle": "->", "color": "#777777", "lw": 0.8}
    place = (point["speed"] / PUSH, point["noise"])
    ax.annotate(text, place, xytext=(0.055, 0.006), color="#555555", fontsize=8, arrowprops=arrow)


def _draw_floors(records: Sequence[Record]) -> Plate:
    fig = style.figure(6.4, 4.0)
    ax = fig.subplots()
    fine = torch.logspace(-3, 0, 200).tolist()
    for beta, colour in zip(FLOOR_BETAS, _COLOURS, strict=True):
        line = [theta_floor(beta, min(1.0, c)) for c in fine]
        ax.plot(fine, line, color=colour)
        found = select(records, "floor", beta=beta)
        ax.plot([r["rate"] for r in found], [r["measured"] for r in found], "o", ms=4, color=colour, mfc="white")
        style.label_end(ax, 1.0, line[-1], f"β = {beta:g}", colour)
    for c, theta, text in ((0.0895, -0.5, "CIFAR-10's setting"), (1 / 3, -0.9, "schedule-free, step 3")):
        ax.plot(c, theta, "*", ms=10, color="#333333", clip_on=False, zorder=5)
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
        ax.annotate(text, (c, theta), xytext=(-8, -3), textcoords="offset points", ha="right", fontsize=8, bbox=box)
    ax.set(xscale="log", xlim=(1e-3, 1), ylim=(-1.02, 0), xlabel="averaging rate c", ylabel="θ")
    ax.set_title("the floor of θ: keep above the line of your momentum β")
    (sizes,) = select(records, "sizes")
    caption = (
        "The shorter the average and the stronger the optimizer's momentum, the less a spring may repel. "
        "Schedule-free averaging begins at c = 1 and θ = −0.9, far below the floor of β = 0.9: it wants β1 = 0."
    )
    notes = (
        f"Lines: theorem 2. Circles: the θ from which on a complex pair grows before a root passes −1, in "
        f"{sizes['steps']:,} steps. They lie below the line: just below the floor the pair's limit is still the "
        "larger one.",
        "Stars: θ = −0.5 at c = 0.0895 with β = 0.9, which lost to EMA on CIFAR-10, and schedule-free's third step.",
        f"A spring that repels has θ < 0. {GPA}",
    )
    return Plate("theory-floor", "The floor of θ over the averaging rate", caption, fig, notes)
