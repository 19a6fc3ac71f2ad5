"""The operations on lists of tensors: what each does, what the oracle says of each, and states to apply them to."""

from collections.abc import Callable
from math import nan
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from helpers.seams import Swing
from torchbelay.ops import arithmetic, reference

f64, f32, bf16, f16, c64 = torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64
DTYPES = [f64, f32, bf16, f16, c64]
PAIRS = [(bf16, f32), (f16, f32), (f32, bf16), (f32, f16), (bf16, f16), (bf16, bf16), (f16, f16), (f32, f64)]
SHAPES = [(), (0,), (1,), (7,), (3, 5, 2), (0, 4), (2, 3, 4, 5)]
LAYOUTS = ["contiguous", "transposed", "channels_last", "strided"]

State = dict[str, list[Tensor]]
NAMES = ("w1", "w2", "before", "v1", "v2")

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_pair = pytest.mark.parametrize("dtypes", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")


# The operations under test, and what the oracle says of each


class Operation(NamedTuple):
    """`apply` moves a state in place, `expect` says what one group of tensors becomes (itself if it must not move)."""

    apply: Callable[[State, Tensor | None], None]
    expect: Callable[..., tuple[Any, ...]]


def lerp(weight: float) -> Operation:
    def expect(w1, w2, before, v1, v2):
        return w1, reference.couple(w1, w2, 0, a=0, b=weight, p=0, q=0)[1], before, v1, v2

    return Operation(lambda s, keep: arithmetic.lerp_(s["w2"], s["w1"], weight, keep), expect)


def pull_together(pull: float, follow: float) -> Operation:
    def expect(w1, w2, before, v1, v2):
        new1, new2 = reference.couple(w1, w2, 0, a=pull, b=follow, p=0, q=0)
        return (new1 if pull else w1), (new2 if follow else w2), before, v1, v2

    return Operation(lambda s, keep: arithmetic.pull_together_(s["w1"], s["w2"], pull, follow, keep), expect)


def couple(numbers: tuple[float, ...], swing1: tuple[float, ...] = (), swing2: tuple[float, ...] = ()) -> Operation:
    a, b, p, q = numbers

    def apply(s, keep):
        swings = {
            name: Swing(s[v], swing) if swing else None
            for name, v, swing in (("swing1", "v1", swing1), ("swing2", "v2", swing2))
        }
        arithmetic.couple_(s["w1"], s["w2"], s["before"], numbers, keep, **swings)

    def expect(w1, w2, before, v1, v2):
        u = w1 - before
        new1, new2 = reference.couple(before, w2, u, a=a, b=b, p=p, q=q)
        new_v1, new_v2 = v1, v2
        if swing1:
            carry, keep, pull, push = swing1
            new1, new_v1 = new1 + carry * v1, keep * v1 + pull * (w2 - before) + push * u
        if swing2:
            carry, keep, pull, push = swing2
            new2, new_v2 = new2 + carry * v2, keep * v2 + pull * (before - w2) + push * u
        return new1, new2, before, new_v1, new_v2

    return Operation(apply, expect)


SWING1, SWING2 = (0.7, 0.4, -0.3, 1.9), (-0.6, 1.2, 0.35, 0.25)
FREE = (0.3, -0.2, 1.4, 0.6)  # numbers that no shorter way gives
OPERATIONS = {
    "lerp, first half": lerp(0.3),
    "lerp, second half": lerp(0.7),
    "lerp, all the way": lerp(1.0),
    "lerp, beyond the end": lerp(1.3),
    "lerp, away from it": lerp(-0.3),
    "pull together": pull_together(0.3, 0.1),
    "pull together, past each other": pull_together(0.8, 0.9),
    "pull together, w1 alone": pull_together(0.3, 0.0),
    "pull together, w2 alone": pull_together(0.0, 0.3),
    "meet": pull_together(0.25, 0.75),
    "couple, Algorithm 1": couple((0.05, 0.025, 0.95, 0.0)),
    "couple, four numbers": couple(FREE),
    "couple, w1 swings": couple(FREE, swing1=SWING1),
    "couple, w2 swings": couple(FREE, swing2=SWING2),
    "couple, both swing": couple(FREE, SWING1, SWING2),
}


def operations(*names: str):
    return pytest.mark.parametrize("operation", [OPERATIONS[name] for name in names], ids=names)


every_operation = operations(*OPERATIONS)


# States to apply them to


def embed(t: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Return the same values, in this layout, inside a larger buffer of nan; and that buffer."""
    fastest_first = list(reversed(range(t.dim())))
    if layout == "transposed" or (layout == "channels_last" and t.dim() != 4):
        fastest_first.reverse()
    elif layout == "channels_last":
        fastest_first = [1, 3, 2, 0]
    gap = 2 if layout == "strided" else 1
    strides, size = [0] * t.dim(), gap
    for d in fastest_first:
        strides[d] = size
        size *= max(1, t.shape[d]) * gap
    margin = 3
    buffer = torch.full((size + 2 * margin,), nan, dtype=t.dtype, device=t.device)
    inside = buffer.as_strided(t.shape, strides, margin)
    inside.copy_(t)
    return inside, buffer


def make_state(draw, dtypes: tuple[torch.dtype, torch.dtype], shapes=SHAPES) -> State:
    """Draw a state; weights have the first dtype, average and velocities the second."""
    of = {"w1": dtypes[0], "before": dtypes[0]}
    return {name: [draw.normal(shape, of.get(name, dtypes[1])) for shape in shapes] for name in NAMES}


def joined(*states: State) -> State:
    return {name: [t for state in states for t in state[name]] for name in NAMES}


def copied(state: State, dtype: torch.dtype | None = None) -> State:
    return {name: [t.to(dtype or t.dtype, copy=True) for t in state[name]] for name in NAMES}


def groups(state: State):
    """The aligned tensors, group by group."""
    return zip(*(state[name] for name in NAMES), strict=True)


def widest(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else f64


def assert_equals_the_oracle(operation: Operation, old: State, new: State, same_bits) -> None:
    """Compare with the oracle in double precision; what must not move has every bit as it was."""
    for before, after in zip(groups(old), groups(new), strict=True):
        doubled = [t.to(widest(t.dtype)) for t in before]
        for x, y, is_, was in zip(operation.expect(*doubled), doubled, after, before, strict=True):
            if x is y:
                assert same_bits([is_], [was])
            else:
                # a dozen roundings of numbers of up to about ten
                torch.testing.assert_close(is_, x.to(is_.dtype), rtol=0, atol=64 * torch.finfo(is_.dtype).eps)


def doubled(tensors: list[Tensor]) -> Tensor:
    """All of them in one vector in double precision."""
    return torch.cat([t.to(widest(t.dtype)).flatten() for t in tensors])
