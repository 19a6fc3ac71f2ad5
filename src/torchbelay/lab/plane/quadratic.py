"""A quadratic loss on which a run of any length is a power of a matrix, and the springs by the rule k(T)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchbelay.physics.spring import Spring

from .functions import Function

LENGTHS = (1_000, 10_000, 100_000, 1_000_000)
T0 = 1_000_000  # the length that the setting is made for
MARKS = 100  # points of a path that are recorded, evenly over the run
CURVATURES = (4.0, 1.0)  # along x and y
TIME = 4.0  # lr·T, when the training time is the same for every T
LR, NOISE = 0.05, 1.0  # when the learning rate is: its value, and the standard deviation of a gradient's components

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
    """A setting (k0 = 1) that is made for runs of T0 steps."""

    name: str
    m1: float
    m2: float
    rules: "tuple[Rule, ...]"


Rule = Literal["printed", "exact", "k of 1,000,000", "k of 1,000"]

# With the paper's masses an average remembers 1/1250 of the run: good for training, but too little to see, and too
# stiff for the shortest runs. With a hundred times the mass it remembers 8% of the run.
PAPER = Masses("MNIST", 2000.0, 500.0, ("printed", "exact", "k of 1,000,000"))
HEAVY = Masses("100 × MNIST", 200_000.0, 50_000.0, ("printed", "exact", "k of 1,000,000", "k of 1,000"))


def make_spring(masses: Masses, rule: Rule, steps: int) -> Spring:
    """Return the spring of a run of `steps` steps; raise ValueError if the rule makes none."""
    m1, m2 = masses.m1, masses.m2
    if rule == "printed" or rule == "exact":
        return Spring.for_steps(steps, m1=m1, m2=m2, T0=T0, rule=rule)
    if rule == "k of 1,000,000":
        return Spring(k=1.0, m1=m1, m2=m2)
    return Spring(k=T0 / LENGTHS[0], m1=m1, m2=m2)


# Powers of a matrix -------------------------------------------------------------------------------------------------


def step_matrix(spring: Spring, lr: float, curvature: float) -> Tensor:
    """Return M of one step of SGD with a spring on a curvature: (w1, w2)' = M·(w1, w2)."""
    c, pull = spring.coupling(), lr * curvature
    rows = [[1 - c.a - c.p * pull, c.a], [c.b - c.q * pull, 1 - c.b]]
    return torch.tensor(rows, dtype=torch.float64)


def _walk(strides: Sequence[Tensor]) -> Tensor:
    """Return w2 at the marks of a run from (1, 1), (MARKS + 1, 2); a stride leads a coordinate to its next mark."""
    columns = []
    for stride in strides:
        state, seen = torch.ones(2, dtype=torch.float64), [1.0]
        for _ in range(MARKS):
            state = stride @ state
            seen.append(float(state[1]))
        columns.append(torch.tensor(seen, dtype=torch.float64))
    return torch.stack(columns, dim=1)


def exact_path(spring: Spring, lr: float, steps: int) -> Tensor:
    """Return the path of w2 in a run of `steps` steps, a multiple of MARKS."""
    return _walk([torch.linalg.matrix_power(step_matrix(spring, lr, h), steps // MARKS) for h in CURVATURES])


def flow_path(masses: Masses) -> Tensor:
    """Return the limit of the paths with the rule for many steps: gradient flow with a spring in continuous time."""
    pull1, pull2 = (T0 / (2 * m) for m in (masses.m1, masses.m2))  # κ·T, which the rule keeps
    drifts = [[[-pull1 - TIME * h, pull1], [pull2, -pull2]] for h in CURVATURES]
    return _walk([torch.linalg.matrix_exp(torch.tensor(drift, dtype=torch.float64) / MARKS) for drift in drifts])


def expected_losses(spring: Spring, steps: int) -> tuple[float, float]:
    """Return E[loss] of w1 and w2 after a run with noisy gradients from (1, 1), exactly: E[ssᵀ] is linear, too."""
    c, totals = spring.coupling(), [0.0, 0.0]
    for curvature in CURVATURES:
        m = step_matrix(spring, LR, curvature)
        kick = LR * NOISE * torch.tensor([c.p, c.q], dtype=torch.float64)
        step = torch.eye(5, dtype=torch.float64)  # on (E[ssᵀ] as a row of four, 1)
        step[:4, :4] = torch.kron(m, m)
        step[:4, 4] = torch.outer(kick, kick).reshape(4)
        moments = torch.linalg.matrix_power(step, steps) @ torch.ones(5, dtype=torch.float64)
        for i, second in enumerate((moments[0], moments[3])):
            totals[i] += curvature / 2 * float(second)
    return totals[0], totals[1]
