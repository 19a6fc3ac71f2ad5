"""The noise that stays: variances of weights and average in the long run, on a quadratic with noisy gradients.

Gradients are h·w1 + ξ with Var ξ = σ². With x = ηh, s² = η²σ² and, as in `coupling`, c = a + b and r the effective
learning rate, the step has the trace T = 2 − c − p·x and the determinant D = 1 − c − x·(p(1−b) − a·q), and

    Var(wi)/s² = ((1+D)(B0² + B1²) + 2·T·B0·B1) / ((1−D)·(c·r·x)·(1+D+T))
    w1: B0 = p, B1 = a·q − (1−b)·p        w2: B0 = q, B1 = b·p − (1−a)·q        B0 + B1 = c·r

With momentum β of the inner optimizer a third state, the mean gradient m, moves too, and Σ = M·Σ·Mᵀ + N (Lyapunov's
equation) has the solution, with n = 1 − β, g = 1 − β(1−c) and o = 2p − c·r,

    Var(wi)/s² = (n·x·(n·(B0 − B1)²·(2c + o·x) + 2·F·(B0² + B1²)) + c·r·F·(4g − n·c·r·x)) / (8·x·E·F)
    E = c·g + x·(g·p − c·r)        F = 2(1+β)(2−c) − n·o·x

At the limit of the stable range E or F is 0. At β = 0 it is the formula above. No term cancels another, so that slow
modes keep their digits; an elimination of the equation loses them, and its variances may even be negative.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

from . import arguments
from .inner_momentum import stable_range
from .matrices import Matrix, outer

if TYPE_CHECKING:
    from .coupling import Coupling


class Variances(NamedTuple):
    """The variances of one weight and of its average."""

    w1: float
    w2: float


def stationary_variance(
    coupling: "Coupling", curvature: float, lr: float, noise: float = 1.0, momentum: float = 0.0
) -> Variances:
    """Return the variances of w1 and w2 in the long run; `Coupling.stationary_variance` calls this."""
    h = arguments.number("curvature", curvature, low=0)
    eta = arguments.number("lr", lr, low=0)
    sigma = arguments.number("noise", noise, low=0, open_low=False)
    beta = arguments.number("momentum", momentum, low=0, high=1, open_low=False)
    x = eta * h
    if x == 0:
        raise ValueError(f"curvature={curvature!r} times lr={lr!r} is too small to compute with; use moderate numbers")
    if x >= stable_range(coupling, beta):
        return Variances(math.inf, math.inf)
    root = sigma * (math.sqrt(eta) / math.sqrt(h))  # s/√x: neither s² nor 1/x may leave the range of floats
    first, second = (s if s in (0, math.inf) else root * s * root for s in _shares(coupling, x, beta))
    return Variances(first, second)


def _shares(coupling: "Coupling", x: float, beta: float) -> tuple[float, float]:
    """Return x·Var/s² of w1 and w2; infinite if rounding puts x on the limit."""
    c, p, new = coupling.rate, coupling.p, 1 - beta
    drift = coupling.b * p + coupling.a * coupling.q  # c·r = B0 + B1
    g, over = new + beta * c, 2 * p - drift
    turn, flip = c * g + x * (g * p - drift), 2 * (1 + beta) * (2 - c) - new * over * x
    if turn <= 0 or flip <= 0:
        return math.inf, math.inf

    def share(b0: float) -> float:
        b1 = drift - b0
        kicks = new * (b0 - b1) ** 2 * (2 * c + over * x) + 2 * flip * (b0**2 + b1**2)
        return (new * x * kicks + drift * flip * (4 * g - new * drift * x)) / (8 * turn * flip)

    return share(p), share(coupling.q)


def step(coupling: "Coupling", x: float, beta: float) -> tuple[Matrix, Matrix]:
    """Return the matrix of a step on (w1, w2, η·m) at ηh = x, and the second moments of its noise if ησ = 1.

    Without momentum the third state is left out.
    """
    a, b, p, q = coupling.a, coupling.b, coupling.p, coupling.q
    if not beta:
        return ((1 - a - p * x, a), (b - q * x, 1 - b)), outer((p, q))
    new = 1 - beta
    rows: Matrix = (
        (1 - a - p * new * x, a, -p * beta),
        (b - q * new * x, 1 - b, -q * beta),
        (new * x, 0.0, beta),
    )
    return rows, outer((-p * new, -q * new, new))
