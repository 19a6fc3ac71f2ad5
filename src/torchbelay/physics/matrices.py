"""Arithmetic on matrices of two or three rows, in plain numbers: products, repeated steps, equations."""

from collections.abc import Sequence
from operator import add

Vector = tuple[float, ...]
Matrix = tuple[Vector, ...]  # rows


def apply(m: Matrix, v: Sequence[float]) -> Vector:
    """Return M·v."""
    return tuple(sum(x * y for x, y in zip(row, v, strict=True)) for row in m)


def product(m: Matrix, n: Matrix) -> Matrix:
    """Return M·N.

    >>> product(((1.0, 2.0), (0.0, 1.0)), ((1.0, 0.0), (3.0, 1.0)))
    ((7.0, 2.0), (3.0, 1.0))
    """
    if len(m) == 2:  # written out: loops take five times as long
        (a, b), (c, d) = m
        (e, f), (g, h) = n
        return (a * e + b * g, a * f + b * h), (c * e + d * g, c * f + d * h)
    (a, b, c), (d, e, f), (g, h, i) = m
    (x, y, z), (u, v, w), (r, s, t) = n
    return (
        (a * x + b * u + c * r, a * y + b * v + c * s, a * z + b * w + c * t),
        (d * x + e * u + f * r, d * y + e * v + f * s, d * z + e * w + f * t),
        (g * x + h * u + i * r, g * y + h * v + i * s, g * z + h * w + i * t),
    )


def congruence(m: Matrix, s: Matrix) -> Matrix:
    """Return M·S·Mᵀ: the second moments S after a step M."""
    return product(product(m, s), tuple(zip(*m, strict=True)))


def outer(v: Sequence[float]) -> Matrix:
    """Return v·vᵀ."""
    return tuple(tuple(x * y for y in v) for x in v)


def total(m: Matrix, n: Matrix) -> Matrix:
    """Return M + N."""
    return tuple(tuple(map(add, a, b)) for a, b in zip(m, n, strict=True))


def repeat(m: Matrix, q: Matrix, n: int) -> tuple[Matrix, Matrix]:
    """Return n steps of M with noise Q as one: Mⁿ and Σ Mʲ·Q·(Mʲ)ᵀ for j < n, by doubling.

    >>> repeat(((1.0, 1.0), (0.0, 1.0)), ((0.0, 0.0), (0.0, 1.0)), 3)
    (((1.0, 3.0), (0.0, 1.0)), ((5.0, 3.0), (3.0, 3.0)))
    """
    if len(m) == 2:
        return _repeat_two(m, q, n)
    power, noise = m, q
    for bit in f"{n:b}"[1:]:
        power, noise = product(power, power), _moved(power, noise, noise)
        if bit == "1":
            power, noise = product(m, power), _moved(m, noise, q)
    return power, noise


def _moved(m: Matrix, s: Matrix, q: Matrix) -> Matrix:
    """Return M·S·Mᵀ + Q for symmetric S and Q of three rows, written out."""
    (a, b, c), (d, e, f), (g, h, i) = m
    (s11, s12, s13), (_, s22, s23), (_, _, s33) = s
    (q11, q12, q13), (_, q22, q23), (_, _, q33) = q
    x, y, z = a * s11 + b * s12 + c * s13, a * s12 + b * s22 + c * s23, a * s13 + b * s23 + c * s33
    u, v, w = d * s11 + e * s12 + f * s13, d * s12 + e * s22 + f * s23, d * s13 + e * s23 + f * s33
    q11, q12, q13 = q11 + x * a + y * b + z * c, q12 + x * d + y * e + z * f, q13 + x * g + y * h + z * i
    q22, q23 = q22 + u * d + v * e + w * f, q23 + u * g + v * h + w * i
    x, y, z = g * s11 + h * s12 + i * s13, g * s12 + h * s22 + i * s23, g * s13 + h * s23 + i * s33
    q33 = q33 + x * g + y * h + z * i
    return (q11, q12, q13), (q12, q22, q23), (q13, q23, q33)


def _repeat_two(m: Matrix, q: Matrix, n: int) -> tuple[Matrix, Matrix]:
    """Return what `repeat` does for two rows, written out: searches call it ten thousands of times."""
    (m11, m12), (m21, m22) = (a, b), (c, d) = m
    (q11, q12), (_, q22) = (s, t), (_, u) = q
    for bit in f"{n:b}"[1:]:
        x, y, z, w = a * s + b * t, a * t + b * u, c * s + d * t, c * t + d * u
        s, t, u = s + x * a + y * b, t + x * c + y * d, u + z * c + w * d
        a, b, c, d = a * a + b * c, b * (a + d), c * (a + d), b * c + d * d
        if bit == "1":
            x, y, z, w = m11 * s + m12 * t, m11 * t + m12 * u, m21 * s + m22 * t, m21 * t + m22 * u
            s, t, u = q11 + x * m11 + y * m12, q12 + x * m21 + y * m22, q22 + z * m21 + w * m22
            a, b, c, d = m11 * a + m12 * c, m11 * b + m12 * d, m21 * a + m22 * c, m21 * b + m22 * d
    return ((a, b), (c, d)), ((s, t), (t, u))


def solve(rows: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Return x of rows·x = right, by elimination with the largest pivot.

    >>> solve([[0.0, 2.0], [1.0, 1.0]], [4.0, 5.0])
    [3.0, 2.0]
    """
    table = [[*row, value] for row, value in zip(rows, right, strict=True)]
    n = len(table)
    for i in range(n):
        best = max(range(i, n), key=lambda k: abs(table[k][i]))
        table[i], table[best] = table[best], table[i]
        pivot = table[i][i]
        for k in range(i + 1, n):
            if factor := table[k][i] / pivot:
                table[k] = [x - factor * y for x, y in zip(table[k], table[i], strict=True)]
    x = [0.0] * n
    for i in reversed(range(n)):
        x[i] = (table[i][n] - sum(table[i][k] * x[k] for k in range(i + 1, n))) / table[i][i]
    return x
