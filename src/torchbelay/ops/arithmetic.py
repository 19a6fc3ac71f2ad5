"""Couplings in place on lists of tensors, on any device: a handful of launches for a whole model.

Lists are aligned: w1[i], w2[i], … belong together and have one shape. Weights and average may differ in dtype; the
arithmetic is then done in the wider one, and never below float32, through a scratch buffer of bounded size, and rounded
once. Tensors may be empty or non-contiguous. Nothing passes through a coefficient of 0, not even a nan: an average that
only watches cannot spoil the weights. Nothing here waits for the device.

`keep`, where given, is a 0-dim tensor: 1 for a step that took place, 0 for one that mixed-precision training skipped.
0 leaves every bit as it was, whatever the tensors hold. It stays on the device, so that asking costs no
synchronisation.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from math import inf, isclose
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from .step import Swing, Tensors

SCRATCH = 1 << 24  # elements that may be in a scratch buffer at a time (64 MiB of float32)
CACHED = 1 << 18  # the same on a CPU, per thread: 1 MiB of float32 stays in the cache, and is not new memory every time

_NARROW, _ORDINARY = {torch.bfloat16, torch.float16}, {Tensor, torch.nn.Parameter}
_dtype = attrgetter("dtype")


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
    if keep is None and list(map(_dtype, w)) == list(map(_dtype, end)):
        torch._foreach_lerp_(w, end, weight)
        return
    for some, ends in pieces(w, end):
        wide, ends = _widened(some, ends)
        if keep is None:
            torch._foreach_lerp_(wide, ends, weight)
            write_(some, wide)
        else:
            write_(some, torch._foreach_lerp(wide, ends, weight), keep)


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
    elif isclose(pull + follow, 1, rel_tol=1e-15):  # they meet: a sync leaves not a bit between them
        lerp_(w2, w1, follow, keep)
        for some1, some2 in pieces(w1, w2):
            write_(some1, some2, keep)
    else:
        for some1, some2 in pieces(w1, w2):
            wide1, wide2 = _widened(some1, some2)
            away = torch._foreach_sub(wide2, wide1)
            _move_(some1, wide1, away, pull, keep)
            _move_(some2, wide2, away, -follow, keep)


def couple_(
    w1: Tensors,
    w2: Tensors,
    before: Tensors,
    numbers: tuple[float, float, float, float],
    keep: Tensor | None = None,
    *,
    swing1: Swing | None = None,
    swing2: Swing | None = None,
    meets: bool = False,
) -> None:
    """Apply a whole coupling (a, b, p, q) after the optimizer's step; `before` holds w1 from before it.

        w1' = before + a·(w2 − before) + p·(w1* − before) + carry1·v1
        w2' = w2 + b·(before − w2) + q·(w1* − before) + carry2·v2

    A mass that swings brings its velocities, which move with it. If they meet, w1' is a copy of w2'.

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
    for x0, *xs in pieces(before, *moving):
        y0, *ys = _widened(x0, *xs)
        update, away = torch._foreach_sub(ys[0], y0), torch._foreach_sub(ys[1], y0)
        velocities = iter(ys[2:])
        # w1* holds one u already
        terms: list[list[tuple[float, Tensors]]] = [[(a, away), (p - 1, update)], [(-b, away), (q, update)]]
        for i, swing, sign in ((0, swing1, 1.0), (1, swing2, -1.0)):
            if swing is not None:
                v = next(velocities)
                carry, stay, pull, push = swing.inertia
                terms[i].append((carry, v))
                terms.append([(stay - 1, v), (sign * pull, away), (push, update)])
        changes = [_sum(*each) for each in terms]  # all of them before anything moves
        for x, y, change in zip(xs[meets:], ys[meets:], changes[meets:], strict=True):
            if change is not None:
                _move_(x, y, change, 1.0, keep)
        if meets:  # a sync leaves not a bit between them
            write_(xs[0], xs[1], keep)
        del update, away, terms, changes, change  # before the next piece needs as much again


def copy_(to: Tensors, source: Tensors) -> None:
    """Overwrite `to` with `source`, rounding to its dtype."""
    if to:
        torch._foreach_copy_(to, source)


def mix_(to: Tensors, *terms: tuple[float, Tensors]) -> None:
    """Overwrite `to`, on one device, with Σ share·tensors, on any; the shares have the sum 1. Rounded once.

    Computed from the tensors of the largest share, by their differences to the others. So a share of 1 beside zeros is
    a copy, and tensors that are all equal stay what they are, bit for bit. `to` must not overlap any of the others.

    >>> to = [torch.zeros(2)]
    >>> mix_(to, (0.75, [torch.tensor([0.0, 0.1])]), (0.25, [torch.tensor([4.0, 0.1])]))
    >>> to
    [tensor([1.0000, 0.1000])]
    """
    (_, largest), *others = sorted((term for term in terms if term[0]), key=lambda term: -abs(term[0]))
    if not others:
        copy_(to, largest)
        return
    for targets, *some in pieces(to, largest, *(tensors for _, tensors in others)):
        here = [[t.to(target.device) for t, target in zip(each, targets, strict=True)] for each in some]
        start, first, *more = _widened(*here)
        total = torch._foreach_sub(first, start)
        torch._foreach_mul_(total, others[0][0])
        for (share, _), each in zip(others[1:], more, strict=True):
            torch._foreach_add_(total, torch._foreach_sub(each, start), alpha=share)
        torch._foreach_add_(total, start)
        torch._foreach_copy_(targets, total)


def add_(w: Tensors, change: Tensors, *, keep: Tensor | None = None) -> None:
    """Add changes of a dtype that is as wide or wider. Rounded once.

    >>> w = [torch.ones(1, dtype=torch.bfloat16)]
    >>> add_(w, [torch.tensor([0.5])])
    >>> w
    [tensor([1.5000], dtype=torch.bfloat16)]
    """
    _move_(w, [t.to(c.dtype) for t, c in zip(w, change, strict=True)], change, 1.0, keep)


def widest(*tensors: Tensor) -> torch.dtype:
    """Return the dtype in which tensors are computed with together: the widest of theirs, and at least float32."""
    return reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)


def overwrite_(to: Tensor, source: Tensor, keep: Tensor | None) -> None:
    """Copy one tensor of any dtype onto another, where the step took place."""
    to.copy_(source if keep is None else torch.where(_taken(keep, to.device), source, to))


def differ(x: Tensors, y: Tensors) -> list[bool]:
    """Whether the bits of each pair, of one dtype, shape and device, differ. The host waits for each device once.

    >>> differ([torch.zeros(2), torch.ones(2)], [-torch.zeros(2), torch.ones(2)])
    [True, False]
    """
    answers = [(bits(s) != bits(t)).any() for s, t in zip(x, y, strict=True)]
    found = [False] * len(answers)
    for device in {answer.device for answer in answers}:
        here = [i for i, answer in enumerate(answers) if answer.device == device]
        for i, answer in zip(here, torch.stack([answers[i] for i in here]).tolist(), strict=True):
            found[i] = answer
    return found


def finite(x: Tensors) -> Tensor:
    """1 if every number of every tensor is finite, else 0, as a 0-dim float32 tensor. The host does not wait for it.

    One pass, and no scratch: the largest absolute value of a tensor is as finite as all of it.

    >>> finite([torch.zeros(2), torch.tensor([1.0, float("nan")])])
    tensor(0.)
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for t in (torch.view_as_real(t) if t.is_complex() else t for t in x):
        if t.numel():
            alike.setdefault((t.device, t.dtype), []).append(t)
    answers = [torch.stack(torch._foreach_norm(some, inf)).isfinite().all() for some in alike.values()]
    if not answers:
        return torch.ones((), dtype=torch.float32, device="cpu")
    home = answers[0].device
    found = torch.stack([answer.to(home, non_blocking=home.type != "cpu") for answer in answers]).all()
    return found.to(torch.float32)


def norm(x: Tensors) -> Tensor:
    """‖x‖ over all tensors, accumulated in float64, as a 0-dim tensor. The host does not wait for it."""
    return _root_of_squares([n for (some,) in pieces(x) for n in _norms(some)])


def distance(x: Tensors, y: Tensors) -> Tensor:
    """‖x − y‖ over all tensors, as `norm`.

    >>> distance([torch.zeros(2)], [torch.tensor([3.0, 4.0])]).item()
    5.0
    """
    parts: list[Tensor] = []
    for some_x, some_y in pieces(x, y):
        here = [t.to(s.device) for s, t in zip(some_x, some_y, strict=True)]  # an average may be in host memory
        wide_x, wide_y = _widened(some_x, here)
        parts.extend(_norms(torch._foreach_sub(wide_x, wide_y)))
    return _root_of_squares(parts)


def _norms(x: Tensors) -> Tensors:
    """‖·‖ of each tensor, in float64 whatever its dtype."""
    return torch._foreach_norm([torch.view_as_real(t) if t.is_complex() else t for t in x], 2, dtype=torch.float64)


def _root_of_squares(norms: list[Tensor]) -> Tensor:
    if not norms:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    home = norms[0].device
    return torch.stack([n.to(home, torch.float64) for n in norms]).square().sum().sqrt()


def _sum(*terms: tuple[float, Tensors]) -> Tensors | None:
    """Σ factor·tensors, newly allocated; None where every factor is 0."""
    total: Tensors | None = None
    for factor, tensors in terms:
        if factor and total is None:
            total = torch._foreach_mul(tensors, factor)
        elif factor and total is not None:
            torch._foreach_add_(total, tensors, alpha=factor)
    return total


def _move_(own: Tensors, wide: Tensors, change: Tensors, factor: float, keep: Tensor | None) -> None:
    """Add factor·change to `wide`, which is `own` or a scratch copy of it, and round into `own`."""
    if keep is None:
        torch._foreach_add_(wide, change, alpha=factor)
        write_(own, wide)
    else:
        write_(own, torch._foreach_add(wide, change, alpha=factor), keep)


def _widened(*lists: Tensors) -> list[list[Tensor]]:
    """The lists with every aligned group in its widest dtype; tensors that have it already are passed through."""
    dtypes = {t.dtype for tensors in lists for t in tensors}
    if len(dtypes) == 1 and not dtypes & _NARROW:  # the usual case, and fast
        return [list(tensors) for tensors in lists]
    if lists[0][0].is_cuda and all(len(set(map(_dtype, tensors))) == 1 for tensors in lists):
        wide = widest(*(tensors[0] for tensors in lists))
        return [list(tensors) if tensors[0].dtype == wide else _converted(tensors, wide) for tensors in lists]
    groups = ((group, widest(*group)) for group in zip(*lists, strict=True))
    return [list(row) for row in zip(*([t.to(wide) for t in group] for group, wide in groups), strict=True)]


def _converted(tensors: Tensors, dtype: torch.dtype) -> list[Tensor]:
    """Return copies of tensors of a GPU in another dtype: three calls for many of them, and few launches."""
    whole = _ORDINARY.issuperset(map(type, tensors))  # to put DTensors together, all ranks would send their parts
    if not whole or not all(map(Tensor.numel, tensors)) or len({t.device for t in tensors}) > 1:
        return [t.to(dtype) for t in tensors]  # one by one empty ones too, whose shape torch does not keep
    flat = _flatten_dense_tensors(tensors).to(dtype)  # type: ignore[no-untyped-call]
    return list(_unflatten_dense_tensors(flat, tensors))  # type: ignore[no-untyped-call]


def write_(own: Tensors, new: Tensors, keep: Tensor | None = None) -> None:
    """Overwrite tensors with what was computed elsewhere, rounded to their dtypes; not where `keep` is 0."""
    pairs = [(o, n) for o, n in zip(own, new, strict=True) if o is not n]
    if keep is not None:
        _replace_([o for o, _ in pairs], [n.to(o.dtype) for o, n in pairs], keep)
    elif pairs:
        torch._foreach_copy_([o for o, _ in pairs], [n for _, n in pairs])


def _replace_(old: Tensors, new: Tensors, keep: Tensor) -> None:
    """Let `new` take the place of `old`, of the same dtype, if `keep` (on any device) is not 0.

    Done on their bits as integers: multiplied by 0 an inf would become a nan and a −0 a 0.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for pair in zip(map(bits, old), map(bits, new), strict=True):
        alike.setdefault((pair[0].device, pair[0].dtype), []).append(pair)
    for (device, dtype), pairs in alike.items():
        taken = _taken(keep, device).to(dtype)
        olds = [o for o, _ in pairs]
        torch._foreach_mul_(olds, 1 - taken)
        torch._foreach_add_(olds, torch._foreach_mul([n for _, n in pairs], taken))


def _taken(keep: Tensor, device: torch.device) -> Tensor:
    """Whether the step took place, on this device. The host alone has to wait for a number that is not yet there."""
    return (keep != 0).to(device, non_blocking=device.type != "cpu")


def bits(t: Tensor) -> Tensor:
    """Return the same memory as integers."""
    real = torch.view_as_real(t) if t.is_complex() else t
    return real.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[real.itemsize])


def pieces(*lists: Sequence[Any], most: int | None = None) -> Iterator[list[list[Any]]]:
    """Cut aligned lists into aligned runs of views of at most `most` elements each; None: of a scratch buffer's.

    The first list has tensors. The others may have anything that can be cut by `split(size, dim)` as tensors can.
    """
    if most is None:
        on_cpu = bool(lists[0]) and lists[0][0].device.type == "cpu"
        most = min(SCRATCH, CACHED * torch.get_num_threads()) if on_cpu else SCRATCH
    most = max(1, most)
    if lists[0] and len(set(map(len, lists))) == 1 and sum(map(Tensor.numel, lists[0])) <= most:  # the usual case
        yield list(map(list, lists))
        return
    run: list[tuple[Any, ...]] = []
    size = 0
    for group in zip(*lists, strict=True):
        for part in _cut(group, most):
            if run and size + part[0].numel() > most:
                yield [list(row) for row in zip(*run, strict=True)]
                run, size = [], 0
            run.append(part)
            size += part[0].numel()
    if run:
        yield [list(row) for row in zip(*run, strict=True)]


def _cut(group: tuple[Any, ...], most: int) -> Iterator[tuple[Any, ...]]:
    """Cut tensors of one shape into parts of at most `most` elements, which lie side by side as far as they can."""
    first = group[0]
    if first.numel() <= most:
        yield group
        return
    dim = max((d for d in range(first.dim()) if first.shape[d] > 1), key=first.stride)
    rows = max(1, most * first.shape[dim] // first.numel())
    for part in zip(*(t.split(rows, dim) for t in group), strict=True):
        yield from _cut(part, most)
