"""Modes of a small linear step, in plain Python: what a spring with velocities needs and no closed form gives.

A step moves a state x, whose first entry is w1, by x' = x + D·x + e·u. Everything follows from two polynomials in
ζ = λ − 1 (ζ rather than λ, because slow modes crowd around λ = 1 and would lose their digits there):

    p0(ζ) = det(ζI − D)            its roots are the modes of free motion
    p1(ζ) = first row of adj(ζI − D), times e

Under gradient descent on curvature h, u = −ηh·w1, the modes are the roots of p0 + ηh·p1. Under a constant u, w1
drifts by p1(0)/p0'(0) a step.
"""

import cmath
import math
from collections.abc import Sequence
from dataclasses import dataclass

Polynomial = tuple[float, ...]  # highest power first


@dataclass(frozen=True)
class Modes:
    """The two polynomials of a step.

    Free motion is translation-invariant, p0(0) = 0, unless the weights hang on an `anchored`, immovable average.

    >>> sgd = Modes.of([[0.0]], [1.0])  # w1' = w1 + u
    >>> sgd.first_crossing()
    2.0
    """

    p0: Polynomial
    p1: Polynomial
    anchored: bool = False

    @classmethod
    def of(cls, d: Sequence[Sequence[float]], e: Sequence[float], *, anchored: bool = False) -> "Modes":
        """Both polynomials at once by the recursion of Faddeev and LeVerrier."""
        size = len(d)
        p0, p1 = [1.0], []
        adjugate = [[float(i == j) for j in range(size)] for i in range(size)]
        for power in range(1, size + 1):
            p1.append(math.fsum(adjugate[0][j] * e[j] for j in range(size)))
            product = [
                [math.fsum(d[i][m] * adjugate[m][j] for m in range(size)) for j in range(size)] for i in range(size)
            ]
            p0.append(-math.fsum(product[i][i] for i in range(size)) / power)
            adjugate = [[product[i][j] + p0[-1] * (i == j) for j in range(size)] for i in range(size)]
        if not anchored:
            p0[-1] = 0.0  # translation: exactly a mode, whatever the rounding says
        return cls(tuple(p0), tuple(p1), anchored)

    def free(self) -> list[complex]:
        """Eigenvalues λ of the free motion, without the 1 of translation."""
        return [1 + zeta for zeta in roots(self.p0 if self.anchored else self.p0[:-1])]

    def drift(self) -> float:
        """Steps of w1 under a constant unit u, in the long run; infinite where nothing brakes it."""
        if self.anchored:
            return 0.0
        slope = self.p0[-2]
        return math.inf if slope == 0 else self.p1[-1] / slope

    def spectral_radius(self, push: float) -> float:
        """Largest |λ| under u = −push·w1."""
        offset = len(self.p0) - len(self.p1)
        total = [c + push * (self.p1[i - offset] if i >= offset else 0.0) for i, c in enumerate(self.p0)]
        return max(abs(1 + zeta) for zeta in roots(total))

    def first_crossing(self) -> float:
        """Smallest push = ηh > 0 at which a mode of u = −push·w1 leaves the unit circle.

        On the circle λ = e^{iφ}, push = −p0/p1 must be real. That is Im(p0·conj p1) = 0, a sine series in φ, which
        divided by sin φ is a polynomial in cos φ; λ = ±1 are the two remaining candidates.
        """
        a, b = shift(self.p0)[::-1], shift(self.p1)[::-1]
        b = b + (0.0,) * (len(a) - len(b))
        size = len(a)
        sines = [
            math.fsum(a[k + d] * b[k] - a[k] * b[k + d] for k in range(size - d)) for d in range(1, size)
        ]  # Σ sines[d−1]·sin(dφ)
        cosines = [z.real for z in roots(_second_chebyshev(sines)) if abs(z.imag) < 1e-6 and abs(z.real) < 1]
        pushes = []
        for cosine in [-1.0, *cosines]:
            zeta = complex(cosine - 1, math.sqrt(max(0.0, 1 - cosine * cosine)))
            bottom = horner(self.p1, zeta)
            if bottom != 0:
                pushes.append((-horner(self.p0, zeta) / bottom).real)
        return next((x for x in sorted(pushes) if x > 0 and self.spectral_radius(x * (1 + 1e-6)) > 1), math.inf)


def horner(coefficients: Sequence[float], at: complex) -> complex:
    """Value of a polynomial."""
    value = 0j
    for c in coefficients:
        value = value * at + c
    return value


def shift(coefficients: Polynomial) -> Polynomial:
    """Coefficients in λ of a polynomial given in ζ = λ − 1.

    >>> shift((1.0, 0.0, 0.0))  # ζ² = λ² − 2λ + 1
    (1.0, -2.0, 1.0)
    """
    rest, out = list(coefficients), []
    while rest:
        for i in range(1, len(rest)):  # synthetic division by λ − (−1), in ζ's own variable
            rest[i] -= rest[i - 1]
        out.append(rest.pop())
    return tuple(reversed(out))


def _second_chebyshev(series: Sequence[float]) -> Polynomial:
    """Σ series[d]·U_d(x) as a polynomial in x, where sin((d+1)φ) = sin φ·U_d(cos φ)."""
    total = [0.0] * len(series)  # lowest power first
    previous, current = [0.0], [1.0]
    for weight in series:
        for power, c in enumerate(current):
            total[power] += weight * c
        doubled = [0.0, *(2 * c for c in current)]
        following = [c - (previous[i] if i < len(previous) else 0.0) for i, c in enumerate(doubled)]
        previous, current = current, following
    return tuple(reversed(total))


def roots(coefficients: Sequence[float]) -> list[complex]:
    """All roots of a real polynomial of low degree (Aberth's simultaneous Newton iteration).

    >>> sorted(round(z.real, 9) for z in roots([1, -6, 11, -6]))
    [1.0, 2.0, 3.0]
    """
    largest = max((abs(c) for c in coefficients), default=0.0)
    terms = list(coefficients)
    while terms and abs(terms[0]) <= 1e-14 * largest:  # a vanishing leading term puts that root at infinity
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
