"""Lanczos' method: a few products with a symmetric matrix say where its eigenvalues are, and how many.

k products from a random start give k Ritz values. The largest of them approaches the largest eigenvalue from below. All
of them, with the squared shares that the start has in their vectors, are a Gauss quadrature of the spectrum: n times a
share is about the number of eigenvalues, out of n, that a Ritz value stands for.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ASYMMETRY = 0.05  # of the largest eigenvalue: a matrix that is further from symmetric is not a Hessian

Vector = list[Tensor]  # one tensor per weight
Product = Callable[[Vector], Vector]


class MeasurementError(ValueError):
    """At these weights the second derivatives cannot be measured: they are not finite, or not symmetric."""


def lanczos(
    product: Product, vector: Vector, count: int, progress: Callable[[int, int], object]
) -> tuple[Sequence[float], Sequence[float]]:
    """Return the Ritz values of at most `count` products, and the start's squared share in the vector of each.

    Every vector is made orthogonal to all before it, twice: in float32 those of the three-term recurrence are not. What
    it had in common with them, apart from the two neighbours, shows whether the product is symmetric.
    """
    basis: list[Vector] = []
    diagonal, beside, uneven = list[float](), list[float](), 0.0
    rest = _norm(vector)
    for done in range(1, count + 1):
        vector = [x / rest for x in vector]
        basis.append(vector)
        vector = product(vector)
        norm = _norm(vector)
        if not math.isfinite(norm):
            raise MeasurementError(
                "the second derivatives of the loss are not finite; begin at other weights, or in float32"
            )
        common = _orthogonalise(vector, basis)
        _orthogonalise(vector, basis)
        expected = [0.0] * (done - 2) + beside[-1:]
        uneven = max([uneven, *(abs(x - y) for x, y in zip(common, expected, strict=False))])
        diagonal.append(common[-1])
        progress(done, count)
        rest = _norm(vector)
        if done == count or rest <= max(torch.finfo(x.dtype).eps for x in vector) * norm:
            break
        beside.append(rest)
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for i, x in enumerate(beside):
        matrix[i, i + 1] = matrix[i + 1, i] = x
    values, vectors = torch.linalg.eigh(matrix)
    if uneven > ASYMMETRY * float(values.abs().max()):
        raise MeasurementError(
            "the second derivatives of the loss are not symmetric, so that some are wrong: torch cannot differentiate "
            "the backward of an operation, as of weight_norm or another library's kernel; use plain operations instead"
        )
    return values.tolist(), vectors[0].square().tolist()


def _orthogonalise(vector: Vector, basis: list[Vector]) -> list[float]:
    """Subtract from a vector, in place, what it has in common with each of the basis; return how much that was."""
    found = []
    for other in basis:
        common = _dot(vector, other)
        for x, y in zip(vector, other, strict=True):
            x.sub_(y, alpha=common)
        found.append(common)
    return found


def _dot(a: Vector, b: Vector) -> float:
    """Return the inner product, summed in float64 if the device has it; the weights may be on several devices."""
    home = a[0].device
    wide = torch.float32 if home.type == "mps" else torch.float64  # mps has no float64
    sums = [torch.sum(x * y, dtype=wide).to(home) for x, y in zip(a, b, strict=True)]
    return float(torch.stack(sums).sum())


def _norm(vector: Vector) -> float:
    return math.sqrt(_dot(vector, vector))
