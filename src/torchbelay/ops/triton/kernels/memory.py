"""What every kernel does with memory: load, round and store a block of a tensor of any dtype; and exact arithmetic."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def pointer(address, KIND: tl.constexpr):
    if KIND == 0:
        return address.to(tl.pointer_type(tl.float32))
    elif KIND == 1:
        return address.to(tl.pointer_type(tl.bfloat16))
    else:
        return address.to(tl.pointer_type(tl.float16))


@triton.jit
def load(address, start, lane, mask, KIND: tl.constexpr, WHOLE: tl.constexpr):
    at = pointer(address, KIND) + start
    if WHOLE:
        x = tl.load(tl.multiple_of(at, 16) + lane)
    else:
        x = tl.load(at + lane, mask, 0.0)
    return x.to(tl.float32)


@triton.jit
def narrow(x, KIND: tl.constexpr):
    """Round to nearest, into the dtype of its memory."""
    if KIND == 1:
        if INTERPRETED:  # Triton's interpreter cuts the bits off
            bits = x.to(tl.int32, bitcast=True)
            nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
            x = tl.where((bits & 0x7F800000) != 0x7F800000, nearest, x)
        x = x.to(tl.bfloat16)
    elif KIND == 2:
        x = x.to(tl.float16)
    return x


@triton.jit
def store(address, start, lane, mask, x, KIND: tl.constexpr, WHOLE: tl.constexpr):
    at = pointer(address, KIND) + start
    x = narrow(x, KIND)
    if WHOLE:
        tl.store(tl.multiple_of(at, 16) + lane, x)
    else:
        tl.store(at + lane, x, mask)


@triton.jit
def round_stochastically(x, count, start, tensor, lane):
    """Round to bfloat16 up or down with the probabilities that keep the mean; the same step draws the same bits."""
    noise = tl.randint(count * 4294967296 + tensor, start + lane) & 0xFFFF
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + noise.to(tl.int32)) & -0x10000).to(tl.float32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, rounded, x)


@triton.jit
def lerp(x, end, weight):
    """As torch's: exact at both ends, and not even a nan of `end` gets through a weight of 0."""
    moved = tl.where(weight < 0.5, x + weight * (end - x), end - (end - x) * (1 - weight))
    return tl.where(weight == 0, x, moved)


@triton.jit
def times(factor, x):
    return tl.where(factor == 0, 0.0, factor * x)
