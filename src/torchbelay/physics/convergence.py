"""How fast a coupling converges: exactly on quadratics, and by a proof on smooth functions.

On a quadratic with curvatures h in [μ, L] each direction has the characteristic polynomial, with x = ηh,

    χ(λ; x) = (λ − 1)(λ − 1 + c) + x·(p·λ − p + c·r)        times λ − β and λ·(1−β)·x with momentum

The error shrinks by the largest |λ| per step, in the long run. Jury's conditions for |λ| < ρ are linear in x, so that
the worst curvature is μ or L.

A smooth function with curvatures in [μ, L] behaves like a quadratic whose curvature changes at every step. If θ ≥ 0
and there is no momentum, the step is a symmetric matrix in suitable coordinates, and the rate of quadratics holds for
all functions: V = ‖z − w*‖²/r + θ·‖z − w2‖²/(r − q) shrinks by ρ² per step. For BELAY, V is the moment of inertia of
the two masses around the minimum. In all other cases the circle criterion decides: a quadratic V that shrinks by ρ²
exists if all roots of χ(·; ημ) are inside |λ| = ρ and Re χ(λ; ηL)·conj χ(λ; ημ) ≥ 0 on this circle.
"""

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from . import arguments
from .modes import roots

if TYPE_CHECKING:
    from .coupling import Coupling


def quadratic_rate(coupling: "Coupling", curvatures: tuple[float, float], lr: float, momentum: float = 0.0) -> float:
    """Return the largest |λ| over all curvatures between the two; `Coupling.convergence_rate` calls this."""
    return max(_radius(polynomial(coupling, x, momentum)) for x in _pushes(curvatures, lr, momentum))


def smooth_rate(coupling: "Coupling", curvatures: tuple[float, float], lr: float, momentum: float = 0.0) -> float:
    """Return the least rate that is proved for smooth functions; `Coupling.convergence_bound` calls this."""
    low, high = (polynomial(coupling, x, momentum) for x in _pushes(curvatures, lr, momentum))
    best = max(_radius(low), _radius(high))
    if best >= 1:
        return math.inf
    if momentum == 0 and _is_symmetric(coupling):
        return best
    bad, good = best, 1.0
    if _least_on_circle(low, high, good) < 0:
        return math.inf
    for _ in range(60):  # a rate that is proved is proved for every larger one, too
        middle = (bad + good) / 2
        bad, good = (bad, middle) if _least_on_circle(low, high, middle) >= 0 else (middle, good)
    return good if good < 1 else math.inf


def polynomial(coupling: "Coupling", x: float, momentum: float = 0.0) -> tuple[float, ...]:
    """Return the coefficients of χ in λ, the highest power first.

    >>> from torchbelay import Coupling
    >>> polynomial(Coupling(a=-0.9, b=1.0, p=1.0, q=0.0), 0.5)  # heavy ball: λ² − (1 + μ − x)·λ + μ
    (1.0, -1.4, 0.9)
    """
    c, p = coupling.rate, coupling.p
    later = p - (coupling.b * p + coupling.a * coupling.q)
    if not momentum:
        return 1.0, -(2 - c - p * x), 1 - c - x * later
    x *= 1 - momentum
    return (
        1.0,
        -(2 - c + momentum) + p * x,
        1 - c + momentum * (2 - c) - later * x,
        -momentum * (1 - c),
    )


def is_certified(low: Sequence[float], high: Sequence[float], rho: float) -> bool:
    """Whether the circle criterion proves the rate ρ, for the polynomials of the least and the largest curvature."""
    return _radius(low) <= rho and _least_on_circle(low, high, rho) >= 0


def _least_on_circle(low: Sequence[float], high: Sequence[float], rho: float) -> float:
    """Return the least Re low·conj high on |λ| = ρ; 0 if rounding alone makes it negative.

    With λ = ρ·exp(iω) it is a polynomial in t = cos ω, which is least at an end or at a zero of its slope.
    """
    degree = len(low) - 1
    cosines = [0.0] * (degree + 1)  # Re low·conj high = Σ cosines[k]·cos kω
    for i, u in enumerate(low):
        for j, v in enumerate(high):
            cosines[abs(i - j)] += u * v * rho ** (2 * degree - i - j)
    values = _chebyshev(cosines)
    slope = [k * value for k, value in enumerate(values)][1:]  # of degree 1 or 2
    inner = [t for t in _real_roots(*slope) if abs(t) < 1]
    least = min(sum(v * t**k for k, v in enumerate(values)) for t in (-1.0, 1.0, *inner))
    return 0.0 if abs(least) < 1e-15 * sum(map(abs, values)) else least


def _real_roots(n0: float, n1: float, n2: float = 0.0) -> list[float]:
    """Return the real roots of n0 + n1·t + n2·t².

    >>> _real_roots(-2.0, 1.0, 1.0), _real_roots(1.0, 2.0), _real_roots(1.0, 0.0, 1.0)
    ([-2.0, 1.0], [-0.5], [])
    """
    square = n1 * n1 - 4 * n2 * n0
    if square < 0:
        return []
    half = -(n1 + math.copysign(math.sqrt(square), n1)) / 2
    return [top / bottom for top, bottom in ((half, n2), (n0, half)) if bottom]


def _chebyshev(cosines: Sequence[float]) -> list[float]:
    """Return Σ cosines[k]·cos kω as a polynomial in cos ω, the lowest power first.

    >>> _chebyshev([1.0, 2.0, 3.0])  # 1 + 2t + 3(2t² − 1)
    [-2.0, 2.0, 6.0]
    """
    before, current = [1.0], [0.0, 1.0]
    total = [0.0] * len(cosines)
    for k, share in enumerate(cosines):
        term = before if k == 0 else current
        for i, v in enumerate(term):
            total[i] += share * v
        if k:
            doubled = [0.0, *(2 * v for v in current)]
            before, current = current, [u - v for u, v in zip_longest(doubled, before, fillvalue=0.0)]
    return total


def _is_symmetric(coupling: "Coupling") -> bool:
    """Whether the weights of V are not negative: θ ≥ 0 and r ≥ q, with r > 0."""
    if coupling.rate <= 0 or coupling.b <= 0:
        return False
    r = coupling.effective_lr_scale
    return r > 0 and coupling.theta >= 0 and r >= coupling.q


def _radius(coefficients: Sequence[float]) -> float:
    """Return the largest |root| of χ."""
    if len(coefficients) > 3:
        return max(map(abs, roots(coefficients)), default=0.0)
    _, b, c = coefficients
    square = b * b - 4 * c
    return math.sqrt(c) if square < 0 else (abs(b) + math.sqrt(square)) / 2


def _pushes(curvatures: tuple[float, float], lr: float, momentum: float) -> tuple[float, float]:
    """Return ηh of the least and the largest curvature."""
    if len(curvatures) != 2:
        raise ValueError(f"curvatures={curvatures!r} are not two; give the least and the largest")
    low, high = (arguments.number("curvatures", h, low=0) for h in curvatures)
    eta = arguments.number("lr", lr, low=0)
    arguments.number("momentum", momentum, low=0, high=1, open_low=False)
    if low > high:
        raise ValueError(f"curvatures={curvatures!r} are in the wrong order; give the least first")
    return eta * low, eta * high
