"""Modes of a spring with velocities, for the quantities that have no closed form.

Eliminate the velocities from Algorithm 1, with δi = ci·Δt/(2·mi), d = w1 − w2, the force scale s, and ζ for one step's
difference. A mode λ has ζ = λ − 1; in λ itself slow modes, which crowd around 1, would lose their digits.

    ζ(ζ + 2δ1)·w1 = −κ1(ζ + 2)·d + (α(ζ + 2δ1) + (1 − δ1)·s)·u
    ζ(ζ + 2δ2)·w2 = +κ2(ζ + 2)·d

A velocity-free mass has δ = 1, and ζ + 2 drops out. Write A1·w1 = −B1·d + F·u and A2·w2 = B2·d. Then everything
follows from two polynomials in ζ, whose terms do not cancel:

    p0 = A1(A2 + B2) + A2·B1       its roots are the modes of free motion
    p1 = F(A2 + B2)

Under gradient descent on curvature h, u = −ηh·w1, the modes are the roots of p0 + ηh·p1. Under a constant u, w1
drifts by p1(0)/p0'(0) per step.
"""

import cmath
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

Polynomial = tuple[float, ...]  # highest power first


@dataclass(frozen=True)
class Modes:
    """The two polynomials of a step, p0 and p1.

    Free motion is translation-invariant, p0(0) = 0, unless the average is immovable (`anchored`).

    >>> sgd = Modes(p0=(1.0, 0.0), p1=(1.0,))  # w1' = w1 + u
    >>> sgd.first_crossing(), sgd.drift()
    (2.0, 1.0)
    """

    p0: Polynomial
    p1: Polynomial
    anchored: bool = False

    @classmethod
    def of(
        cls, kappa: tuple[float, float], delta: tuple[float, float], scale: float, *, anchored: bool = False
    ) -> "Modes":
        """Return the modes of two masses with these κ and δ; an update u adds `scale`·u to the first velocity.

        >>> [1 + zeta for zeta in Modes.of((0.25, 0.5), (1.0, 1.0), scale=0.0).free()]  # velocity-free: 1 − κ1 − κ2
        [(0.25+0j)]
        """
        parts: list[tuple[Polynomial, Polynomial]] = [
            ((1.0, 0.0), (k,)) if d == 1 else ((1.0, 2 * d, 0.0), (k, 2 * k)) for k, d in zip(kappa, delta, strict=True)
        ]
        if anchored:  # w2 has no motion of its own
            parts[1] = (1.0,), (0.0,)
        (a1, b1), (a2, b2) = parts
        alpha = 1 - kappa[0]
        force = (alpha,) if delta[0] == 1 else (alpha, 2 * alpha * delta[0] + (1 - delta[0]) * scale)
        second = add(a2, b2)
        return cls(add(multiply(a1, second), multiply(a2, b1)), multiply(force, second), anchored)

    def with_momentum(self, beta: float) -> "Modes":
        """Return the modes if the optimizer averages its gradients, m' = β·m + (1−β)·gradient, and steps by m'.

        The update is then (1−β)·λ/(λ − β) times that of plain SGD.

        >>> sgd = Modes(p0=(1.0, 0.0), p1=(1.0,))
        >>> round(sgd.with_momentum(0.5).first_crossing(), 12)  # 2(1+β)/(1−β)
        6.0
        """
        new = 1 - beta
        return Modes(multiply(self.p0, (1.0, new)), multiply(self.p1, (new, new)), self.anchored)

    def free(self) -> list[complex]:
        """Return ζ = λ − 1 of every mode of free motion, without the 0 of translation."""
        return roots(self._relative)

    @property
    def _relative(self) -> Polynomial:
        return self.p0 if self.anchored else self.p0[:-1]

    def comes_to_rest(self, push: float = 0.0) -> bool:
        """Whether every mode under u = −push·w1 lies inside the unit circle; with push = 0, except translation."""
        f = self._relative if push == 0 else add(self.p0, [push * c for c in self.p1])
        return _hurwitz(open_circle(f, len(f) - 1))

    def drift(self) -> float:
        """Return the long-run motion of w1 per step under a constant u = 1; infinite without any damping."""
        if self.anchored:
            return 0.0
        slope = self.p0[-2]
        return math.inf if slope == 0 else self.p1[-1] / slope

    def first_crossing(self) -> float:
        """Return the smallest push = ηh > 0 at which a mode of u = −push·w1 leaves the unit circle.

        At that push, −p0/p1 = push is real. On the opened circle σ = iτ (see `open_circle`), p0 and p1 have the form
        E(τ²) + iτ·O(τ²), so that E0·O1 = E1·O0, a polynomial in τ². The other candidate is λ = −1, at τ = ∞; λ = 1 has
        push = 0.
        """
        bottom = evaluate(self.p1, -2)
        negligible = 1e-12 * evaluate([abs(c) for c in self.p1], 2)
        pushes = [-evaluate(self.p0, -2) / bottom] if abs(bottom) > negligible else []
        degree = len(self.p0) - 1
        (e0, o0), (e1, o1) = (even_odd(open_circle(p, degree)) for p in (self.p0, self.p1))
        for z in roots(add(multiply(e0, o1), [-c for c in multiply(e1, o0)])):
            if z.real > 0 and abs(z.imag) <= 1e-8 * z.real:
                e, o = evaluate(e1, z.real), evaluate(o1, z.real)
                if e or o:
                    pushes.append(
                        -(evaluate(e0, z.real) * e + z.real * evaluate(o0, z.real) * o) / (e * e + z.real * o * o)
                    )
        # No mode crosses between two candidates. A candidate that only touches the circle, or seems to by rounding, is
        # skipped: the modes just after it are still inside.
        pushes = sorted(x for x in pushes if x > 0)
        pairs = pairwise([*pushes, *(2 * x for x in pushes[-1:])])
        return next((x for x, following in pairs if not self.comes_to_rest((x + following) / 2)), math.inf)


def horner(coefficients: Sequence[float], at: complex) -> complex:
    """Return the value of a polynomial."""
    value = 0j
    for c in coefficients:
        value = value * at + c
    return value


def evaluate(coefficients: Sequence[float], x: float) -> float:
    """Return the value of a polynomial at a real point."""
    return horner(coefficients, x).real


def add(x: Sequence[float], y: Sequence[float]) -> Polynomial:
    """Return the sum of two polynomials."""
    return tuple(c + d for c, d in zip_longest(reversed(x), reversed(y), fillvalue=0.0))[::-1]


def multiply(x: Sequence[float], y: Sequence[float]) -> Polynomial:
    """Return the product of two polynomials."""
    total = [0.0] * (len(x) + len(y) - 1)
    for i, c in enumerate(x):
        for j, d in enumerate(y):
            total[i + j] += c * d
    return tuple(total)


def open_circle(coefficients: Sequence[float], degree: int, rho: float = 1.0) -> Polynomial:
    """Return (1 − σ)ⁿ·f(ζ) as a polynomial in σ, for f in ζ, n = degree and 1 + ζ = ρ(1 + σ)/(1 − σ).

    It maps the circle |λ| = ρ to the imaginary axis and its inside to the left half-plane; slow modes have small σ.

    >>> open_circle((1.0, 2.0), 1)  # ζ + 2 = 2/(1 − σ): λ = −1 is now at infinity
    (0.0, 2.0)
    """
    slope, start = 1 + rho, rho - 1  # ζ = (slope·σ + start)/(1 − σ)
    total: Polynomial = (0.0,)
    rest: Polynomial = (1.0,)  # (1 − σ)ⁱ
    for c in [0.0] * (degree + 1 - len(coefficients)) + list(coefficients):
        total = add(multiply(total, (slope, start)), [c * x for x in rest])
        rest = multiply(rest, (-1.0, 1.0))
    return total[-degree - 1 :]


def even_odd(coefficients: Sequence[float]) -> tuple[Polynomial, Polynomial]:
    """Return E and O of f(iτ) = E(τ²) + iτ·O(τ²)."""
    low = coefficients[::-1]
    even, odd = ([c * (-1) ** i for i, c in enumerate(low[start::2])] for start in (0, 1))
    return tuple(even[::-1]), tuple(odd[::-1])


def _hurwitz(coefficients: Polynomial) -> bool:
    """Whether all roots have a negative real part, by Routh's array."""
    above, below = list(coefficients[0::2]), list(coefficients[1::2])
    while below:
        if 0 in (above[0], below[0]) or (above[0] > 0) != (below[0] > 0):
            return False
        ratio = above[0] / below[0]
        above, below = below, [x - ratio * y for x, y in zip_longest(above[1:], below[1:], fillvalue=0.0)]
    return True


def roots(coefficients: Sequence[float]) -> list[complex]:
    """Return all roots of a real polynomial of low degree (Aberth's simultaneous Newton iteration).

    >>> sorted(round(z.real, 9) for z in roots([1, -6, 11, -6]))
    [1.0, 2.0, 3.0]
    """
    largest = max((abs(c) for c in coefficients), default=0.0)
    terms = list(coefficients)
    while terms and abs(terms[0]) <= 1e-14 * largest:  # a leading term near 0 puts its root at infinity
        terms.pop(0)
    if len(terms) < 2:
        return []
    zeros = 0
    while terms[-1] == 0:
        terms.pop()
        zeros += 1
    monic = [c / terms[0] for c in terms]
    degree = len(monic) - 1
    slope = [c * (degree - i) for i, c in enumerate(monic[:-1])]
    radius = 2 * max((abs(c) ** (1 / i) for i, c in enumerate(monic[1:], 1)), default=0.0)
    found = [radius * cmath.exp(1j * (2 * math.pi * i / max(1, degree) + 0.4)) for i in range(degree)]
    for _ in range(200):
        moved = 0.0
        for i, z in enumerate(found):
            bottom = horner(slope, z)
            ratio = horner(monic, z) / bottom if bottom != 0 else 0j
            crowd = sum(1 / (z - other) for j, other in enumerate(found) if j != i and z != other)
            delta = ratio / (1 - ratio * crowd) if ratio * crowd != 1 else ratio
            found[i] = z - delta
            moved = max(moved, abs(delta) / (abs(found[i]) or 1.0))
        if moved < 1e-15:
            break
    tidy = [complex(z.real, 0.0) if abs(z.imag) <= 1e-13 * abs(z) else z for z in found]
    return tidy + [0j] * zeros
