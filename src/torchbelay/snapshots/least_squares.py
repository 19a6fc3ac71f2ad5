"""The best combination of snapshots: least squares over the profiles of the snapshots and of a target.

A profile may have a million numbers, but it is simple between two snapshots: there, the profile of every later snapshot
of an average is a combination of the same few functions, the responses of that average's filter and the constant 1.
So each stretch is reduced to a small triangle by a QR decomposition. That is exact, costs one pass over the steps, and
does not square the condition number, as normal equations would.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .profiles import Filter, respond

Norm = Literal["updates", "profile"]

_SINGULAR = 1e-13  # a direction whose singular value is smaller, relative to the largest, holds rounding errors alone


@dataclass(frozen=True, eq=False)
class Life:
    """An average from its birth on: the steps before it, and the filter of those after it."""

    filter: Filter
    born: int


class Column(NamedTuple):
    """The profile of an average at a step; without a life, of the weights themselves."""

    life: Life | None
    step: int
    state: int = 0


def matrix(columns: Sequence[Column], norm: Norm = "updates") -> Tensor:
    """Return a matrix whose columns have the inner products of the columns' profiles, in a few rows per stretch.

    "updates": inner products of P, over updates. "profile": of the weights of the points w_init, w1(1), …

    >>> from torchbelay.physics.methods import swa
    >>> from torchbelay.snapshots.profiles import filter_of, profile
    >>> f = filter_of(swa(), 100)
    >>> found = matrix([Column(Life(f, 0), 80), Column(Life(f, 0), 100)])
    >>> short, long = profile(f, 0, 80), profile(f, 0, 100)
    >>> torch.allclose((found.T @ found)[0, 1], short @ long[:80])
    True
    """
    lives = list({id(c.life): c.life for c in columns if c.life is not None}.values())
    place = {id(life): i for i, life in enumerate(lives)}
    ending: defaultdict[int, list[int]] = defaultdict(list)  # the columns of each step
    for i, column in enumerate(columns):
        ending[column.step].append(i)
    last = max((c.step for c in columns), default=0)
    marks = sorted({0, *(c.step for c in columns), *(life.born for life in lives if life.born < last)})
    steps = torch.tensor([c.step for c in columns])
    # what each column reads of the state of its average: 0 before its step, looking back
    reads = [torch.zeros(life.filter.size, len(columns), dtype=torch.float64) for life in lives]
    rows: list[Tensor] = []
    after = torch.zeros(len(columns), dtype=torch.float64)  # P of the first update after a stretch
    for low, high in reversed(list(pairwise(marks))):
        for i in ending[high]:
            life, _, state = columns[i]
            if life is not None:
                reads[place[id(life)]][state, i] = 1.0
        functions = [torch.ones(high - low, 1, dtype=torch.float64)]
        weights = [(steps >= high).to(torch.float64)[None]]
        for i, life in enumerate(lives):
            if life.born <= low and bool(reads[i].any()):
                response, carried = respond(life.filter.part(low - life.born, high - life.born))
                functions.append(response)
                weights.append(reads[i])
                reads[i] = carried.T @ reads[i]
        basis, weight = torch.cat(functions, 1), torch.cat(weights)
        if norm == "updates":
            rows.append(_triangle(basis) @ weight)
        else:
            rows += [_triangle(basis[:-1] - basis[1:]) @ weight, basis[-1:] @ weight - after]
        after = basis[0] @ weight
    if norm == "profile":
        rows.append((1 - after)[None])
    return torch.cat(rows) if rows else torch.zeros(0, len(columns), dtype=torch.float64)


def _triangle(basis: Tensor) -> Tensor:
    """Return R of a QR decomposition: it has the inner products of the columns, in as many rows as columns."""
    return basis if len(basis) <= basis.shape[1] else torch.linalg.qr(basis, mode="r").R


class Combination(NamedTuple):
    """The weights of the snapshots, and the condition number of what was solved."""

    weights: Tensor
    condition: float


def combine(snapshots: Tensor, target: Tensor) -> Combination:
    """Return the weights x, Σx = 1, that bring `snapshots` @ x closest to `target`.

    All snapshots began at the same w_init, and so did the target: only if Σx = 1 is what remains of it the same.
    """
    count = snapshots.shape[1]
    ones = torch.ones(count, 1, dtype=torch.float64)
    across = torch.linalg.qr(ones, mode="complete").Q[:, 1:]  # an orthonormal basis of all x with Σx = 0
    even = ones[:, 0] / count
    # If all profiles are equal, only rounding errors are left of their differences: so the profiles are the measure.
    best, condition = _solve(snapshots @ across, target - snapshots @ even, float(torch.linalg.norm(snapshots)))
    return Combination(even + across @ best, condition)


def combine_profiles(snapshots: Tensor, target: Tensor) -> Combination:
    """Return the weights that bring `snapshots` @ x closest to `target`, divided by their sum (as EDM2 does)."""
    return _normalised(*_solve(snapshots, target))


def combine_powers(snapshots: Sequence[tuple[float, float]], target: tuple[float, float]) -> Combination:
    """Return EDM2's weights for power functions, each told by its time and its exponent γ.

    A power function has the weight p(τ) = (γ+1)·τ^γ/t^(γ+1) up to its time t, so that with s the smaller time

        ∫ p_a·p_b dτ = (γ_a+1)(γ_b+1)/(γ_a+γ_b+1) · (s/t_a)^γ_a · (s/t_b)^γ_b · s/(t_a·t_b)

    Reference: Karras et al., "Analyzing and improving the training dynamics of diffusion models", 2024, Eq. 151 and
    Algorithm 3, and their program, which divides the weights by their sum.
    """
    t, gamma = torch.tensor([*snapshots, target], dtype=torch.float64).unbind(1)
    least = torch.minimum(t[:, None], t)
    products = (gamma[:, None] + 1) * (gamma + 1) / (gamma[:, None] + gamma + 1)
    products = products * (least / t[:, None]) ** gamma[:, None] * (least / t) ** gamma * least / (t[:, None] * t)
    size = products.diagonal()[:-1].sqrt()  # as columns of length 1 the system is better conditioned
    found, condition = _solve(products[:-1, :-1] / size[:, None] / size, products[:-1, -1] / size)
    return _normalised(found / size, condition)


def _normalised(found: Tensor, condition: float) -> Combination:
    total = float(found.sum())
    if abs(total) < 0.1:
        raise ValueError(
            f"the weights of norm='profile' have the sum {total:.3g}, and that of an average is 1: these snapshots do "
            "not cover the target; use norm='updates', or other snapshots"
        )
    return Combination(found / total, condition)


def _solve(a: Tensor, b: Tensor, size: float = 0.0) -> tuple[Tensor, float]:
    """Return the shortest x that minimises ‖a·x − b‖, and the condition number of a.

    `size` is that of the numbers from which a was computed, if it is larger than a itself.
    """
    none = torch.zeros(a.shape[1], dtype=torch.float64)
    if a.shape[1] == 0:
        return none, 1.0
    u, s, v = torch.linalg.svd(a, full_matrices=False)
    kept = s > _SINGULAR * max(float(s[0]), size)
    if not bool(kept.any()):
        return none, 1.0
    x = v[kept].T @ ((u[:, kept].T @ b) / s[kept])
    return x, float(s[0] / s[kept][-1])
