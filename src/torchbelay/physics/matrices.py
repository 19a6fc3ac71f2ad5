"""Arithmetic on matrices of two or three rows, in plain numbers: products, powers, equations."""

from collections.abc import Sequence

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
    columns = tuple(zip(*n, strict=True))
    return tuple(tuple(sum(x * y for x, y in zip(row, column, strict=True)) for column in columns) for row in m)


def congruence(m: Matrix, s: Matrix) -> Matrix:
    """Return M·S·Mᵀ: the second moments S after a step M."""
    return product(product(m, s), tuple(zip(*m, strict=True)))


def outer(v: Sequence[float]) -> Matrix:
    """Return v·vᵀ."""
    return tuple(tuple(x * y for y in v) for x in v)


def total(m: Matrix, n: Matrix, factor: float = 1.0) -> Matrix:
    """Return M + factor·N."""
    return tuple(tuple(x + factor * y for x, y in zip(a, b, strict=True)) for a, b in zip(m, n, strict=True))


def power(m: Matrix, n: int) -> Matrix:
    """Return Mⁿ by repeated squaring.

    >>> power(((1.0, 1.0), (0.0, 1.0)), 1000)
    ((1.0, 1000.0), (0.0, 1.0))
    """
    found: Matrix | None = None
    while True:
        if n & 1:
            found = m if found is None else product(m, found)
        n >>= 1
        if n == 0:
            break
        m = product(m, m)
    assert found is not None, "n is at least 1"
    return found


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


def lyapunov(m: Matrix, q: Matrix) -> Matrix:
    """Return the symmetric S with S = M·S·Mᵀ + Q: the second moments in the long run of steps M with noise Q.

    >>> lyapunov(((0.5, 0.0), (0.0, 0.0)), ((3.0, 0.0), (0.0, 1.0)))
    ((4.0, 0.0), (0.0, 1.0))
    """
    n = len(m)
    pairs = [(i, j) for i in range(n) for j in range(i, n)]
    rows = []
    for i, j in pairs:
        # (M·S·Mᵀ)ᵢⱼ = Σ Mᵢₖ·Sₖₒ·Mⱼₒ, and S is symmetric
        row = [m[i][k] * m[j][k] if k == o else m[i][k] * m[j][o] + m[i][o] * m[j][k] for k, o in pairs]
        rows.append([float((i, j) == pair) - x for pair, x in zip(pairs, row, strict=True)])
    found = dict(zip(pairs, solve(rows, [q[i][j] for i, j in pairs]), strict=True))
    return tuple(tuple(found[min(i, j), max(i, j)] for j in range(n)) for i in range(n))
