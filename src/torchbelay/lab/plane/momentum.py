"""Momentum and every averaging method as one spring: the coupling table run live, and the paper's §3.1.

Each method of the table runs through `Belay` around torch's SGD, and beside it as an independent program
(`programs`). BELAY itself also runs in its two other forms: an average of its centre of mass, and a momentum method.
Then come the two limits of the paper: gradients of an average (erratum E12), and an infinite m1 (E6).
"""

import copy
import math
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from torchbelay.lab.arms import PAPER_SPRING, Arm, Lane
from torchbelay.lab.part import Plate, Record, Settings, Tick
from torchbelay.physics.identity import describe
from torchbelay.physics.spring import Spring

from . import momentum_figures
from .functions import ROSENBROCK, Function
from .programs import DECAY, LR, Program, Row, centre_of_mass, gradient, quasi_hyperbolic, table, torch_ema
from .race import Race, random_starts

NAME = "momentum"
TITLE = "One spring: momentum and every average"

STARTS = 16

# Its minimum is not the origin, so its gradient is affine and not linear: erratum E12 is about this difference.
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
    """Train every lane from every start through `Belay`, and return the points after every step."""
    race = Race([function], starts[None], lanes)
    w1, w2 = [], []
    for _ in range(steps):
        race.step()
        w1.append(race.w[:, 0].clone())
        w2.append(race.w2()[:, 0])
        tick(1)
    return torch.stack(w1), torch.stack(w2)


def deviation(mine: Paths, lane: int, program: Program, starts: Tensor) -> float:
    """Return the largest difference from a program at any step, from any start, relative to the largest weight."""
    furthest, largest = 0.0, 0.0
    for t, theirs in enumerate(islice(program(starts), len(mine[0]))):
        for ours, other in zip(mine, theirs, strict=True):
            if other is not None:
                furthest = max(furthest, float((ours[t, lane] - other).abs().max()))
                largest = max(largest, float(other.abs().max()))
    return furthest / largest


def _method_record(row: Row, steps: int, found: float) -> Record:
    coupling = copy.copy(row.method).coupling(steps, LR)  # a copy, because some methods keep state between calls
    return {
        "kind": "method",
        "name": row.name,
        "method": describe(row.method),
        "against": row.against,
        "a": coupling.a,
        "b": coupling.b,
        "p": coupling.p,
        "q": coupling.q,
        "theta": coupling.theta,
        "deviation": found,
    }


def _form_records(mine: Paths, lane: int, starts: Tensor) -> list[Record]:
    """Compare BELAY with its two other forms; the numbers of each form follow from k, m1 and m2 alone."""
    k, m1, m2 = PAPER_SPRING.k, PAPER_SPRING.m1, PAPER_SPRING.m2
    rate, theta = k / 2 * (1 / m1 + 1 / m2), m2 / m1
    share = (1 - k / (2 * m1)) * m1 / (m1 + m2)
    beta, nu = 1 - rate, -theta / (1 - rate)
    momentum = quasi_hyperbolic(beta, nu, share * LR)
    return [
        {
            "kind": "form",
            "name": "average of the centre of mass",
            "method": describe(PAPER_SPRING),
            "theta": theta,
            "rate": rate,
            "lr_share": share,
            "deviation": deviation(mine, lane, centre_of_mass(k, m1, m2), starts),
        },
        {
            "kind": "form",
            "name": "momentum",
            "method": describe(PAPER_SPRING),
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
    """Compare BELAY at m1 = ∞ with torch's EMA: at the same step, and one step later."""
    torchs = torch.stack([w2 for _, w2 in islice(torch_ema()(starts), len(mine[1])) if w2 is not None])
    scale = float(torchs.abs().max())

    def distance(x: Tensor, y: Tensor) -> float:
        return float((x - y).abs().max()) / scale

    delayed = torch.cat([starts[None], torchs[:-1]])  # before its first step the average is the start
    return {
        "kind": "ema",
        "method": describe(HEAVY),
        "decay": DECAY,
        "deviation_one_step_later": distance(mine[1][:, heavy], delayed),
        "deviation_same_step": distance(mine[1][:, heavy], torchs),
        "deviation_follow_after": distance(mine[1][:, after], torchs),
    }


# Gradients of an average ---------------------------------------------------------------------------------------------

LEARNING_RATES = tuple(10 ** (n / 2) for n in range(-16, -9))  # 1e-8 … 1e-5
BOWL_RATES = (1e-4, 1e-3, 1e-2, 1e-1)


def _gradient_record(function: Function, lr: float, w1: Tensor, w2: Tensor, start: Tensor) -> Record:
    """Compare the gradient at the EMA with the EMA of the gradients, over one lane's path (steps, starts, 2)."""
    mean = gradient(start, function)  # both averages start as copies
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
    """Compare them as printed, with weights that sum to less than 1, and with the difference that E12 predicts."""
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
    return 60 if settings.quick else 300  # multiples of Lookahead's 6 and Switch EMA's 10: the last step is a sync


def plan(settings: Settings) -> tuple[int, str]:
    """Return the units of work, and one line that says what would run."""
    steps = _steps(settings)
    line = f"{len(table())} methods beside independent programs, {steps} steps from {STARTS} starts, and two limits"
    return 3 * steps, line


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Run all methods, their programs and the two limits, and compare."""
    steps, rows = _steps(settings), table()
    starts = random_starts(ROSENBROCK, STARTS, torch.Generator().manual_seed(settings.seed))
    common = {"steps": steps, "starts": STARTS}

    limits = [HEAVY, Spring.ema(decay=DECAY), *(Spring(k=1.0, m1=m1, m2=10.0) for m1 in MASSES)]
    tested = [row.method for row in rows] + limits
    mine = train([Lane(Arm(f"{i}", "SGD", method), LR) for i, method in enumerate(tested)], starts, steps, tick)
    records = [_method_record(row, steps, deviation(mine, lane, row.program, starts)) for lane, row in enumerate(rows)]
    records += _form_records(mine, 0, starts)
    heavy = len(rows)
    records.append(_ema_record(mine, heavy, heavy + 1, starts))
    ema, scale = mine[1][:, heavy], float(mine[1][:, heavy].abs().max())
    for lane, m1 in enumerate(MASSES, heavy + 2):
        difference = float((mine[1][:, lane] - ema).abs().max()) / scale
        records.append({"kind": "limit", "k": 1.0, "m1": m1, "m2": 10.0, "difference": difference})
    records = [record | common | {"function": ROSENBROCK.name, "lr": LR} for record in records]

    for function, rates in ((BOWL, BOWL_RATES), (ROSENBROCK, LEARNING_RATES)):
        begin = random_starts(function, STARTS, torch.Generator().manual_seed(settings.seed))
        lanes = [Lane(Arm(f"{lr}", "SGD", Spring.ema(decay=DECAY)), lr) for lr in rates]
        w1, w2 = train(lanes, begin, steps, tick, function)
        for lane, lr in enumerate(rates):
            records.append(_gradient_record(function, lr, w1[:, lane], w2[:, lane], begin) | common)
        if function is BOWL:
            records.append(_printed_record(function, BOWL_RATES[-1], w1[:, -1]) | common)
    return records


def draw(records: Sequence[Record]) -> list[Plate]:
    """Draw the figures, from the records alone."""
    return momentum_figures.draw_plates(records)
