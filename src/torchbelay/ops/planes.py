"""Averages of 24 bits: the upper 24 bits of float32 numbers in two planes, rounded at random so that the mean is right.

    high    bfloat16    sign, exponent and the first 7 bits of the mantissa
    low     uint8       the next 8 bits of the mantissa

A step computes in float32 and drops the last 8 bits of every number. It adds a random byte to them before, as if bits
were an integer: so a number is rounded away from 0 with the probability that keeps its mean, whatever its sign, also if
it is subnormal. Numbers above the largest one of 24 bits become that one, inf stays inf, and a nan stays a nan.

The byte of an element depends on the name of its parameter, its index in the whole parameter and the number of the
step, and on nothing else: not on devices, ranks, memory layouts or the code that computes it. `random_bytes` defines
it; `triton/kernels/planes.py` has the same function.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from math import isclose, prod
from typing import NamedTuple

import torch
from torch import Tensor

from . import arithmetic
from .place import Place, name_key
from .step import Motion, Piece, Swing, TensorGroup, Tensors

DROPPED = 8  # bits of a float32 that are not kept
LARGEST, INFINITE, QUIET = 0x7F7FFF00, 0x7F800000, 0x00400000  # bits of numbers of 24 bits, and of any nan
CACHED = 1 << 17  # elements whose scratch buffers stay in the cache of a CPU
M1, M2 = 0x7FEB352D, -0x7B935975  # odd factors that mix well, as 32-bit integers with a sign

MoveGroup = Callable[[TensorGroup, Motion, "Tensors | None", "Tensor | None"], None]


# The format -----------------------------------------------------------------------------------------------------------


def joined(high: Tensor, low: Tensor) -> Tensor:
    """Return the float32 numbers that two planes hold, exactly.

    >>> joined(torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([128], dtype=torch.uint8)).item() - 1
    0.00390625
    """
    bits = high.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.bitwise_or_(low.to(torch.int32).bitwise_left_shift_(8)).view(torch.float32)


def split(x: Tensor, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return float32 numbers in two planes, rounded by random bytes (int32, 0 to 255); without those to the nearest.

    >>> high, low = split(torch.tensor([1.0, -1.0]) * (1 + 2**-9))
    >>> joined(high, low)
    tensor([ 1.0020, -1.0020])
    """
    bits = x.view(torch.int32)
    size = bits & 0x7FFFFFFF
    nearest = random is None
    if random is None:
        random = (bits >> DROPPED).bitwise_and_(1).add_(0x7F)  # a tie goes to the even neighbour
    kept = torch.where(size < LARGEST, random, 0).add_(bits)
    if nearest:  # A nan that nothing has computed may have only bits that are dropped: it gets another one.
        kept.bitwise_or_(torch.where((size > INFINITE) & (size <= INFINITE + 0xFF), QUIET, 0))
    low = (kept >> DROPPED).to(torch.uint8)
    return kept.bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16), low


def copy_(to: Tensors, high: Tensors, low: Tensors) -> None:
    """Overwrite `to` with the numbers of planes, on any device, rounded to its dtype; with a bounded scratch buffer."""
    most = arithmetic.SCRATCH // 2
    if to and to[0].device.type == "cpu":
        most = min(most, CACHED)
    for targets, some, rest in arithmetic.pieces(to, high, low, most=most):
        arithmetic.copy_(targets, list(map(joined, some, rest)))


# Random bytes ---------------------------------------------------------------------------------------------------------


def random_bytes(places: Sequence[Place], step: Tensor) -> Tensor:
    """Return the random bytes of all elements of some tensors at a step, one tensor after the other, as int32.

    `step` is a 0-dim int64 tensor. Integers are 32 bits wide and wrap.
    """
    about = _about(tuple(places), step.device)
    key0 = _mixed(_mixed(_mixed(step.to(torch.int32)) ^ (step >> 32).to(torch.int32)) ^ about.names.to(torch.int32))
    key1 = _mixed(key0 + (about.names >> 32).to(torch.int32))
    x = about.indices()
    x ^= about.spread(key0)
    x *= M1
    x ^= _shifted(x, 15)
    x += about.spread(key1)
    x *= M2
    x ^= _shifted(x, 16)
    x *= M1
    return _shifted(x, 24)


class _About(NamedTuple):
    """What is known of the elements of some tensors, on a device: one number per tensor."""

    places: tuple[Place, ...]
    names: Tensor
    sizes: Tensor
    shifts: Tensor | None  # from the order of the elements to their indices; None if that is not all there is to it
    elements: int

    def spread(self, each: Tensor) -> Tensor:
        """Return a number of each tensor for each of its elements."""
        return each if len(self.places) == 1 else each.repeat_interleave(self.sizes, output_size=self.elements)

    def indices(self) -> Tensor:
        """Return the index of each element in its parameter: the lower 32 bits, with the upper ones mixed in."""
        if self.shifts is not None:
            return torch.arange(self.elements, dtype=torch.int32, device=self.names.device) + self.spread(self.shifts)
        pairs = [place.index(self.names.device) for place in self.places]
        return torch.cat([lower if upper is None else lower ^ _mixed(upper) for lower, upper in pairs])


@lru_cache(maxsize=1024)
def _about(places: tuple[Place, ...], device: torch.device) -> _About:
    """Return what is known of tensors. Made once: a copy to a GPU would wait, and no graph could capture it."""
    sizes = [prod(place.shape) for place in places]
    simple = sum(sizes) < 1 << 31 and all(place.is_run and prod(place.whole) < 1 << 31 for place in places)
    before = [0, *accumulate(sizes)]
    shifts = [place.first - first for place, first in zip(places, before, strict=False)]
    with torch.inference_mode(False):
        names = torch.tensor([name_key(place.name) for place in places], dtype=torch.int64, device=device)
        numbers = torch.tensor(sizes, dtype=torch.int64, device=device)
        moved = torch.tensor(shifts, dtype=torch.int32, device=device) if simple else None
    return _About(places, names, numbers, moved, sum(sizes))


def _mixed(x: Tensor) -> Tensor:
    """Return 32-bit integers that differ in about half of their bits if the given ones differ in any."""
    x = x ^ _shifted(x, 16)
    x = x * M1
    x = x ^ _shifted(x, 15)
    x = x * M2
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift to the right, and fill up with zeros."""
    return (x >> by).bitwise_and_((1 << 32 - by) - 1)


# A step ---------------------------------------------------------------------------------------------------------------


def move(
    by: MoveGroup, group: TensorGroup, motion: Motion, copy: Tensors | None, keep: Tensor | None, step: Tensor
) -> None:
    """Move a group whose averages are planes: piece by piece in float32 by a function, and then rounded.

    `step` is the number of the step, on the device of the averages. A step that did not take place (`keep` is 0) leaves
    every bit as it was: what needs no rounding is not changed by it.
    """
    v1, v2 = (None if swing is None else swing.v for swing in (motion.swing1, motion.swing2))
    columns = [each for each in (copy, v1, v2) if each is not None]
    most = arithmetic.SCRATCH // 8
    if step.device.type == "cpu":
        most = min(most, CACHED)
    for w1, high, low, places, *rest in arithmetic.pieces(
        group.w1, group.w2, group.low, group.places, *columns, most=most
    ):
        before = None if copy is None else rest.pop(0)
        swings = [
            None if swing is None else Swing(rest.pop(0), swing.inertia) for swing in (motion.swing1, motion.swing2)
        ]
        flat = joined(torch.cat([h.flatten() for h in high]), torch.cat([x.flatten() for x in low]))
        w2 = _like(flat, high)
        by(
            Piece(w1, w2, [], [], group.born),
            replace(motion, swing1=swings[0], swing2=swings[1]),
            before,
            keep,
        )
        planes = split(flat, random_bytes(places, step))
        for own, new in zip((high, low), planes, strict=True):
            # as integers: a GPU that copies many bfloat16 tensors at once gives every nan the same bits
            arithmetic.copy_(list(map(arithmetic.bits, own)), _like(arithmetic.bits(new), own))
        if _meets(motion):
            arithmetic.write_(w1, _like(joined(*planes), w1), keep)


def _like(flat: Tensor, tensors: Tensors) -> list[Tensor]:
    """Return views of a flat tensor in the shapes of these."""
    parts = torch.split(flat, [t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def _meets(motion: Motion) -> bool:
    """Whether weights and average are to be equal after the step, to the last bit."""
    if motion.meets and motion.swings:  # at a sync, where the average arrives with its velocity
        return True
    a, q = motion.coupling.a, motion.coupling.q
    return not motion.needs_copy and a != 0 and q != 0 and isclose(a + q, 1, rel_tol=1e-15)
