"""One step of SGD with momentum and a coupling on a quadratic, written down from the definitions with numpy."""

import numpy as np
from numpy.typing import NDArray

from torchbelay import Coupling
from torchbelay.physics.matrices import Matrix, solve

Array = NDArray[np.float64]


def step_matrix(coupling: Coupling, x: float, beta: float = 0.0) -> Array:
    """Return the matrix of a step on (w1, w2, m) at ηh = x; m is η times the mean gradient."""
    mean = np.array([(1 - beta) * x, 0.0, beta])  # m' = β·m + (1 − β)·x·w1, and u = −m'
    w1 = np.array([1 - coupling.a, coupling.a, 0.0]) - coupling.p * mean
    w2 = np.array([coupling.b, 1 - coupling.b, 0.0]) - coupling.q * mean
    return np.array([w1, w2, mean])


def kick(coupling: Coupling, beta: float = 0.0) -> Array:
    """Return what η·ξ = 1 of one step adds to (w1, w2, m)."""
    return (1 - beta) * np.array([-coupling.p, -coupling.q, 1.0])


def radius(matrix: Array) -> float:
    """Return the spectral radius."""
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def covariance(coupling: Coupling, x: float, beta: float = 0.0) -> Array:
    """Return the covariance of (w1, w2, m) in the long run for ησ = 1: Σ = M·Σ·Mᵀ + N, as 9 equations."""
    m, noise = step_matrix(coupling, x, beta), kick(coupling, beta)
    return np.linalg.solve(np.eye(9) - np.kron(m, m), np.outer(noise, noise).ravel()).reshape(3, 3)


def lyapunov(m: Matrix, q: Matrix) -> Matrix:
    """Return the symmetric S with S = M·S·Mᵀ + Q: the second moments in the long run of steps M with noise Q."""
    n = len(m)
    pairs = [(i, j) for i in range(n) for j in range(i, n)]
    rows = []
    for i, j in pairs:
        # (M·S·Mᵀ)ᵢⱼ = Σ Mᵢₖ·Sₖₒ·Mⱼₒ, and S is symmetric
        row = [m[i][k] * m[j][k] if k == o else m[i][k] * m[j][o] + m[i][o] * m[j][k] for k, o in pairs]
        rows.append([float((i, j) == pair) - x for pair, x in zip(pairs, row, strict=True)])
    found = dict(zip(pairs, solve(rows, [q[i][j] for i, j in pairs]), strict=True))
    return tuple(tuple(found[min(i, j), max(i, j)] for j in range(n)) for i in range(n))
