"""Couplings in place on lists of tensors, on any device: a handful of launches for a whole model.

Lists are aligned: w1[i], w2[i], … belong together and have one shape. Weights and average may differ in dtype; the
arithmetic is then done in the wider one, through a scratch buffer of bounded size, and rounded once. Tensors may be
empty or non-contiguous. Nothing here waits for the device.

`keep`, where given, is a 0-dim tensor: 1 for a step that took place, 0 for one that mixed-precision training skipped.
It stays on the device, so that asking costs no synchronisation.
"""

from collections.abc import Iterator
from functools import reduce
from math import isclose
from typing import NamedTuple

import torch
from torch import Tensor

SCRATCH = 1 << 24  # elements that may be in a scratch buffer at a time (64 MiB of float32)

Tensors = list[Tensor]


def lerp_(w: Tensors, end: Tensors, weight: float, keep: Tensor | None = None) -> None:
    """Move every w by `weight` of its way to `end`.

    For equal dtypes and no `keep` this is torch's own foreach lerp, bit for bit what its EMA does.

    >>> w = [torch.tensor([0.0, 1.0])]
    >>> lerp_(w, [torch.tensor([4.0, 1.0])], 0.25)
    >>> w
    [tensor([1., 1.])]
    """
    if weight == 0 or not w:
        return
    if keep is None and _one_dtype(w, end):
        torch._foreach_lerp_(w, end, weight)
        return
    for some, ends in _pieces(w, end):
        wide, ends = _widened(some, ends)
        if keep is None:
            torch._foreach_lerp_(wide, ends, weight)
        else:
            away = torch._foreach_sub(ends, wide)
            _mask_(away, keep)
            torch._foreach_add_(wide, away, alpha=weight)
        _write_back(some, wide)


def pull_together_(w1: Tensors, w2: Tensors, pull: float, follow: float, keep: Tensor | None = None) -> None:
    """Move, at once, w1 by `pull` of its way to w2 and w2 by `follow` of its way to w1.

    >>> w1, w2 = [torch.tensor([0.0])], [torch.tensor([8.0])]
    >>> pull_together_(w1, w2, pull=0.25, follow=0.5)
    >>> w1, w2
    ([tensor([2.])], [tensor([4.])])
    """
    if pull == 0:
        lerp_(w2, w1, follow, keep)
    elif follow == 0:
        lerp_(w1, w2, pull, keep)
    elif isclose(pull + follow, 1, rel_tol=1e-15) and keep is None:  # they meet: a sync leaves not a bit between them
        lerp_(w2, w1, follow)
        torch._foreach_copy_(w1, w2)
    else:
        for some1, some2 in _pieces(w1, w2):
            wide1, wide2 = _widened(some1, some2)
            away = torch._foreach_sub(wide2, wide1)
            if keep is not None:
                _mask_(away, keep)
            torch._foreach_add_(wide1, away, alpha=pull)
            torch._foreach_add_(wide2, away, alpha=-follow)
            _write_back(some1, wide1)
            _write_back(some2, wide2)


class Swing(NamedTuple):
    """Velocities v of a mass and the numbers that move them.

    position += carry·v, then v' = keep·v + pull·(other − own) + push·u, everything on the right as before the step.
    """

    v: Tensors
    carry: float
    keep: float
    pull: float
    push: float


def couple_(
    w1: Tensors,
    w2: Tensors,
    before: Tensors,
    numbers: tuple[float, float, float, float],
    keep: Tensor | None = None,
    *,
    swing1: Swing | None = None,
    swing2: Swing | None = None,
) -> None:
    """Apply a whole coupling (a, b, p, q) after the optimizer's step; `before` holds w1 from before it.

        w1' = before + a·(w2 − before) + p·(w1* − before) + carry1·v1
        w2' = w2 + b·(before − w2) + q·(w1* − before) + carry2·v2

    A mass that swings brings its velocities, which move with it.

    >>> w1, w2 = [torch.tensor([1.0])], [torch.tensor([8.0])]
    >>> couple_(w1, w2, [torch.tensor([0.0])], (0.25, 0.5, 0.75, 0.0))
    >>> w1, w2
    ([tensor([2.7500])], [tensor([4.])])
    """
    a, b, p, q = numbers
    if swing1 is None and swing2 is None and q == 0 and isclose(p, 1 - a, rel_tol=1e-15):
        lerp_(w1, w2, a, keep)  # Algorithm 1, velocity-free: two interpolations
        lerp_(w2, before, b, keep)
        return
    moving = [w1, w2] + [swing.v for swing in (swing1, swing2) if swing is not None]
    for x0, *xs in _pieces(before, *moving):
        y0, *ys = _widened(x0, *xs)
        update, away = torch._foreach_sub(ys[0], y0), torch._foreach_sub(ys[1], y0)
        velocities = iter(ys[2:])
        # increments, all from what was before the step
        changes = [_sum((a, away), (p - 1, update)), _sum((-b, away), (q, update))]  # w1* holds one u already
        for i, swing, sign in ((0, swing1, 1.0), (1, swing2, -1.0)):
            if swing is not None:
                v = next(velocities)
                torch._foreach_add_(changes[i], v, alpha=swing.carry)
                changes.append(_sum((swing.keep - 1, v), (sign * swing.pull, away), (swing.push, update)))
        for x, y, change in zip(xs, ys, changes, strict=True):
            if keep is not None:
                _mask_(change, keep)
            torch._foreach_add_(y, change)
            _write_back(x, y)


def exchange_(x: Tensors, y: Tensors) -> None:
    """Let the two lists, of one dtype, trade their contents in place.

    >>> x, y = [torch.tensor([1.0])], [torch.tensor([2.0])]
    >>> exchange_(x, y)
    >>> x, y
    ([tensor([2.])], [tensor([1.])])
    """
    for some_x, some_y in _pieces(x, y):
        held = [t.clone() for t in some_x]
        torch._foreach_copy_(some_x, some_y)
        torch._foreach_copy_(some_y, held)


def copy_(to: Tensors, source: Tensors) -> None:
    """Overwrite `to` with `source`, rounding to its dtype."""
    if to:
        torch._foreach_copy_(to, source)


def _one_dtype(x: Tensors, y: Tensors) -> bool:
    return all(s.dtype == t.dtype for s, t in zip(x, y, strict=True))


def _sum(*terms: tuple[float, Tensors]) -> list[Tensor]:
    """Σ factor·tensors, newly allocated."""
    (factor, tensors), *rest = terms
    total = torch._foreach_mul(tensors, factor)
    for factor, tensors in rest:
        if factor:
            torch._foreach_add_(total, tensors, alpha=factor)
    return list(total)


def _mask_(tensors: Tensors, keep: Tensor) -> None:
    """Multiply by a 0-dim tensor of any device, without waiting for it."""
    if len({t.device for t in tensors}) == 1:
        torch._foreach_mul_(tensors, keep.to(tensors[0].device, non_blocking=True))
        return
    for t in tensors:
        t.mul_(keep.to(t.device, non_blocking=True))


def _widened(*lists: Tensors) -> list[list[Tensor]]:
    """The lists with every aligned group in its widest dtype; tensors that have it already are passed through."""
    columns = []
    for group in zip(*lists, strict=True):
        widest = reduce(torch.promote_types, (t.dtype for t in group))
        columns.append([t.to(widest) for t in group])
    return [list(row) for row in zip(*columns, strict=True)]


def _write_back(narrow: Tensors, wide: Tensors) -> None:
    """Round what was computed in a scratch copy into its own tensor."""
    pairs = [(n, w) for n, w in zip(narrow, wide, strict=True) if n is not w]
    if pairs:
        torch._foreach_copy_([n for n, _ in pairs], [w for _, w in pairs])


def _pieces(*lists: Tensors) -> Iterator[list[list[Tensor]]]:
    """Cut aligned lists into aligned runs of views of at most SCRATCH elements each."""
    run: list[tuple[Tensor, ...]] = []
    size = 0
    for group in zip(*lists, strict=True):
        for part in _cut(group):
            if run and size + part[0].numel() > SCRATCH:
                yield [list(row) for row in zip(*run, strict=True)]
                run, size = [], 0
            run.append(part)
            size += part[0].numel()
    if run:
        yield [list(row) for row in zip(*run, strict=True)]


def _cut(group: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors of one shape, along their longest dimension, until each part fits the scratch buffer."""
    size = group[0].numel()
    if size <= SCRATCH:
        yield group
        return
    shape = group[0].shape
    longest = max(range(len(shape)), key=lambda d: shape[d])
    rows = max(1, SCRATCH * shape[longest] // size)
    for part in zip(*(torch.split(t, rows, dim=longest) for t in group), strict=True):
        yield from _cut(part)
