"""What kernels do with averages of 24 bits: load, round at random and store two planes.

`torchbelay.ops.planes` says what the planes are, and has the same random bytes in torch's operations.
"""

import triton
import triton.language as tl

from torchbelay.ops.triton.layout import (
    INDEX,
    INNER,
    INNER_STRIDE,
    LOW,
    MIDDLE,
    MIDDLE_STRIDE,
    NAME,
    OUTER_STRIDE,
    PLANES,
    W2,
)

from .memory import load, narrow, store

LARGEST = tl.constexpr(0x7F7FFF00)
M1, M2 = tl.constexpr(0x7FEB352D), tl.constexpr(0x846CA68B)


@triton.jit
def load_average(slot, start, lane, mask, KIND: tl.constexpr, WHOLE: tl.constexpr):
    """Return a block of an average, of any kind."""
    if KIND == PLANES:
        high = tl.load(slot + W2).to(tl.pointer_type(tl.int16)) + start
        low = tl.load(slot + LOW).to(tl.pointer_type(tl.uint8)) + start
        if WHOLE:
            upper = tl.load(tl.multiple_of(high, 8) + lane)
            lower = tl.load(tl.multiple_of(low, 4) + lane)
        else:
            upper = tl.load(high + lane, mask, 0)
            lower = tl.load(low + lane, mask, 0)
        bits = (upper.to(tl.int32) << 16) | (lower.to(tl.int32) << 8)
        return bits.to(tl.float32, bitcast=True)
    else:
        return load(tl.load(slot + W2), start, lane, mask, KIND, WHOLE)


@triton.jit
def store_average(slot, start, lane, mask, x, random, KIND: tl.constexpr, WHOLE: tl.constexpr):
    """Round a block of an average of any kind and store it; return what is stored."""
    if KIND == PLANES:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        bits += tl.where(size < LARGEST, random, 0)  # not to inf, nor from it; a nan of arithmetic keeps its first bit
        high = tl.load(slot + W2).to(tl.pointer_type(tl.int16)) + start
        low = tl.load(slot + LOW).to(tl.pointer_type(tl.uint8)) + start
        upper = (bits >> 16).to(tl.int16)
        lower = ((bits >> 8) & 0xFF).to(tl.uint8)
        if WHOLE:
            tl.store(tl.multiple_of(high, 8) + lane, upper)
            tl.store(tl.multiple_of(low, 4) + lane, lower)
        else:
            tl.store(high + lane, upper, mask)
            tl.store(low + lane, lower, mask)
        return (bits & -0x100).to(tl.float32, bitcast=True)
    else:
        store(tl.load(slot + W2), start, lane, mask, x, KIND, WHOLE)
        return narrow(x, KIND).to(tl.float32)


@triton.jit
def random_bytes(row, start, lane, step, MAPPED: tl.constexpr):
    """Return the random bytes of a block at a step. MAPPED: memory may have another order than the whole parameter."""
    name = tl.load(row + NAME)
    key0 = _mixed(_mixed(_mixed(step.to(tl.uint32)) ^ (step >> 32).to(tl.uint32)) ^ name.to(tl.uint32))
    key1 = _mixed(key0 + (name >> 32).to(tl.uint32))
    x = _indices(tl.load(row + INDEX) + start, lane)
    if MAPPED:
        if tl.load(row + INNER) != 0:
            x = _mapped_indices(row, start, lane)
    x = (x ^ key0) * M1
    x ^= x >> 15
    x = (x + key1) * M2
    x ^= x >> 16
    x *= M1
    return (x >> 24).to(tl.int32)


@triton.jit
def _indices(first, lane):
    """Return indices that follow each other in 32 bits: the lower ones, with the upper ones mixed in."""
    lower = first.to(tl.uint32) + lane.to(tl.uint32)
    upper = (first >> 32).to(tl.uint32)
    return lower ^ tl.where(lower < first.to(tl.uint32), _mixed(upper + 1), _mixed(upper))  # the sum may wrap


@triton.jit
def _mapped_indices(row, start, lane):
    """Return the indices of what memory has in another order, as `_indices` does."""
    at = (start + lane).to(tl.uint32)
    size = tl.load(row + INNER).to(tl.uint32)
    index = tl.load(row + INDEX) + (at % size).to(tl.int64) * tl.load(row + INNER_STRIDE)
    at = at // size
    size = tl.load(row + MIDDLE).to(tl.uint32)
    index += (at % size).to(tl.int64) * tl.load(row + MIDDLE_STRIDE)
    index += (at // size).to(tl.int64) * tl.load(row + OUTER_STRIDE)
    return index.to(tl.uint32) ^ _mixed((index >> 32).to(tl.uint32))


@triton.jit
def _mixed(x):
    x ^= x >> 16
    x *= M1
    x ^= x >> 15
    x *= M2
    return x ^ (x >> 16)
