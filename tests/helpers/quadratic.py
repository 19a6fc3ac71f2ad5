"""One step of SGD with momentum and a coupling on a quadratic, written down from the definitions with numpy."""

import numpy as np
from numpy.typing import NDArray

from torchbelay import Coupling

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
