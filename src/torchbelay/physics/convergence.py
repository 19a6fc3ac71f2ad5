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
from typing import TYPE_CHECKING

from . import arguments
from .modes import add, evaluate, even_odd, multiply, open_circle, roots

if TYPE_CHECKING:
    from .coupling import Coupling


def quadratic_rate(coupling: "Coupling", curvatures: tuple[float, float], lr: float, momentum: float = 0.0) -> float:
    """Return the largest |λ| over all curvatures between the two; `Coupling.convergence_rate` calls this."""
    return max(map(_radius, _ends(coupling, curvatures, lr, momentum)))


def smooth_rate(coupling: "Coupling", curvatures: tuple[float, float], lr: float, momentum: float = 0.0) -> float:
    """Return the least rate that is proved for smooth functions; `Coupling.convergence_bound` calls this."""
    low, high = _ends(coupling, curvatures, lr, momentum)
    best = max(_radius(low), _radius(high))
    if best >= 1:
        return math.inf
    if momentum == 0 and _is_symmetric(coupling):
        return best
    bad, good = best, 1.0
    if not _is_positive(low, high, good):
        return math.inf
    for _ in range(60):  # a rate that is proved is proved for every larger one, too
        middle = (bad + good) / 2
        bad, good = (bad, middle) if _is_positive(low, high, middle) else (middle, good)
    return good if good < 1 else math.inf


def polynomial(coupling: "Coupling", x: float, momentum: float = 0.0) -> tuple[float, ...]:
    """Return the coefficients of χ in ζ = λ − 1, the highest power first.

    In λ itself slow modes, which crowd around 1, would lose their digits.

    >>> from torchbelay import Coupling
    >>> polynomial(Coupling(a=-0.5, b=1.0, p=1.0, q=0.0), 0.5)  # heavy ball: λ² − (1 + μ − x)·λ + μ
    (1.0, 1.0, 0.5)
    """
    c, p = coupling.rate, coupling.p
    drift = coupling.b * p + coupling.a * coupling.q  # c·r
    if not momentum:
        return 1.0, c + p * x, drift * x
    new = 1 - momentum
    return 1.0, new + c + new * p * x, new * (c + (p + drift) * x), new * drift * x


def is_certified(low: Sequence[float], high: Sequence[float], rho: float) -> bool:
    """Whether the circle criterion proves the rate ρ, for the polynomials of the least and the largest curvature."""
    return _radius(low) <= rho and _is_positive(low, high, rho)


def _is_positive(low: Sequence[float], high: Sequence[float], rho: float) -> bool:
    """Whether Re low·conj high ≥ 0 on |λ| = ρ, up to rounding.

    On the opened circle σ = iτ it is a polynomial in τ² ≥ 0, which is least at an end or at a zero of its slope.
    """
    degree = len(low) - 1
    (e0, o0), (e1, o1) = (even_odd(open_circle(f, degree, rho)) for f in (low, high))
    values = add(multiply(e0, e1), (*multiply(o0, o1), 0.0))
    slope = [(len(values) - 1 - i) * value for i, value in enumerate(values[:-1])]  # of degree 1 or 2
    inner = [t for t in _real_roots(*slope[::-1]) if t > 0]
    sizes = [abs(value) for value in values]
    return values[0] >= 0 and all(evaluate(values, t) >= -1e-15 * evaluate(sizes, t) for t in (0.0, *inner))


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


def _is_symmetric(coupling: "Coupling") -> bool:
    """Whether the weights of V are not negative: θ ≥ 0 and r ≥ q, with r > 0."""
    if coupling.rate <= 0 or coupling.b <= 0:
        return False
    r = coupling.effective_lr_scale
    return r > 0 and coupling.theta >= 0 and r >= coupling.q


def _radius(coefficients: Sequence[float]) -> float:
    """Return the largest |λ| = |1 + ζ| of the roots ζ of χ."""
    if not all(map(math.isfinite, coefficients)):
        return math.inf
    if len(coefficients) == 3:
        _, b, c = coefficients
        square = b * b / 4 - c
        if square < 0:
            return math.sqrt(max(0.0, 1 - b + c))
        fast = -(b / 2 + math.copysign(math.sqrt(square), b))
        return max(abs(1 + fast), abs(1 + (c / fast if fast else 0.0)))
    unit = max(
        1.0, *(math.pow(abs(c), 1 / k) for k, c in enumerate(coefficients) if k)
    )  # ζ in this unit: χ stays monic
    _, a, b, c = coefficients
    return max(abs(1 + unit * zeta) for zeta in roots((1.0, a / unit, b / unit / unit, c / unit / unit / unit)))


def _ends(
    coupling: "Coupling", curvatures: tuple[float, float], lr: float, momentum: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return χ of the least and of the largest curvature."""
    try:
        given = tuple(curvatures)
    except TypeError:  # one number
        given = ()
    if len(given) != 2:
        raise ValueError(f"curvatures={curvatures!r} are not two; give the least and the largest")
    low, high = (arguments.number("curvatures", h, low=0) for h in given)
    eta = arguments.number("lr", lr, low=0)
    beta = arguments.number("momentum", momentum, low=0, high=1, open_low=False)
    if low > high:
        raise ValueError(f"curvatures={curvatures!r} are in the wrong order; give the least first")
    return polynomial(coupling, eta * low, beta), polynomial(coupling, eta * high, beta)
