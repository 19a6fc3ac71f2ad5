"""The noise that stays: variances of weights and average in the long run, on a quadratic with noisy gradients.

Gradients are h·w1 + ξ with Var ξ = σ². With x = ηh, s² = η²σ² and, as in `coupling`, c = a + b and r the effective
learning rate, the step has the trace T = 2 − c − p·x and the determinant D = 1 − c − x·(p(1−b) − a·q), and

    Var(wi)/s² = ((1+D)(B0² + B1²) + 2·T·B0·B1) / ((1−D)·(c·r·x)·(1+D+T))
    w1: B0 = p, B1 = a·q − (1−b)·p        w2: B0 = q, B1 = b·p − (1−a)·q        B0 + B1 = c·r

With momentum β of the inner optimizer a third state, the mean gradient m, moves too. The variances are then the
solution of a linear equation, Σ = M·Σ·Mᵀ + N (Lyapunov's).
"""

import math
from typing import TYPE_CHECKING, NamedTuple

from . import arguments
from .inner_momentum import stable_range
from .matrices import Matrix, lyapunov, outer

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
    x, scale = eta * h, (eta * sigma) ** 2
    if x >= stable_range(coupling, beta):
        return Variances(math.inf, math.inf)
    first, second = _with_momentum(coupling, x, beta) if beta else _without_momentum(coupling, x)
    return Variances(scale * first, scale * second)


def _without_momentum(coupling: "Coupling", x: float) -> tuple[float, float]:
    """Return the variances for s² = 1 by the formula, written so that nothing cancels and c·r = 0 is allowed."""
    p, drift = coupling.p, coupling.b * coupling.p + coupling.a * coupling.q  # drift = c·r = B0 + B1
    trace, gap = 2 - coupling.rate - p * x, coupling.rate + x * (p - drift)  # gap = 1 − D
    below = gap * x * (2 - gap + trace)

    def variance(b0: float) -> float:
        return (x * (b0**2 + (drift - b0) ** 2) + trace * drift) / below

    return variance(p), variance(coupling.q)


def _with_momentum(coupling: "Coupling", x: float, beta: float) -> tuple[float, float]:
    """Return the variances for s² = 1 by Lyapunov's equation."""
    rows, noise = step(coupling, x, beta)
    if coupling.a == coupling.b == 0 or coupling.b == coupling.q == 0:  # w2 has no motion of its own
        alone = lyapunov(_without_w2(rows), _without_w2(noise))[0][0]
        return alone, alone * (coupling.q / coupling.p) ** 2 if coupling.p else 0.0
    found = lyapunov(rows, noise)
    return found[0][0], found[1][1]


def _without_w2(m: Matrix) -> Matrix:
    return tuple((row[0], row[2]) for row in (m[0], m[2]))


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
