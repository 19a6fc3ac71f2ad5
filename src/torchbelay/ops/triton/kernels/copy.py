"""The kernels `exchange`, which lets weights and averages trade places, and `copy`, which copies w1 before a step."""

import triton
import triton.language as tl

from torchbelay.ops.triton.layout import ALIGNED, COPY, FIRST, HEAD, KIND, SIZE, W1, W2, WAYS


@triton.jit
def exchange(table, blocks, COLUMNS: tl.constexpr, KINDS: tl.constexpr, BLOCK: tl.constexpr):
    """Let w1 and the first average, of one dtype, trade contents: every bit, whatever it means."""
    block = tl.program_id(0)
    row = table + tl.load(blocks + block).to(tl.int64) * COLUMNS
    start = (block - tl.load(row + FIRST)) * BLOCK
    size = tl.load(row + SIZE)
    whole = (tl.load(row + ALIGNED) != 0) & (start + BLOCK <= size)
    one, other = tl.load(row + W1), tl.load(row + HEAD + W2)
    if KINDS == 1:
        _trade(one, other, start, size, whole, tl.int32, BLOCK)
    elif KINDS & 1 == 0:
        _trade(one, other, start, size, whole, tl.int16, BLOCK)
    elif tl.load(row + KIND) == 0:
        _trade(one, other, start, size, whole, tl.int32, BLOCK)
    else:
        _trade(one, other, start, size, whole, tl.int16, BLOCK)


@triton.jit
def _trade(one, other, start, size, whole, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    x = one.to(tl.pointer_type(DTYPE)) + start
    y = other.to(tl.pointer_type(DTYPE)) + start
    if whole:
        x = tl.multiple_of(x, 16)
        y = tl.multiple_of(y, 16)
        held = tl.load(x + lane)
        tl.store(x + lane, tl.load(y + lane))
        tl.store(y + lane, held)
    else:
        mask = lane < size - start
        held = tl.load(x + lane, mask)
        tl.store(x + lane, tl.load(y + lane, mask), mask)
        tl.store(y + lane, held, mask)


@triton.jit
def copy(table, blocks, copies, COLUMNS: tl.constexpr, KINDS: tl.constexpr, BLOCK: tl.constexpr):
    """Copy w1 into one flat buffer, each tensor at its own place."""
    block = tl.program_id(0)
    row = table + tl.load(blocks + block).to(tl.int64) * COLUMNS
    start = (block - tl.load(row + FIRST)) * BLOCK
    size = tl.load(row + SIZE)
    whole = (tl.load(row + ALIGNED) != 0) & (start + BLOCK <= size)
    source, to = tl.load(row + W1), tl.load(row + COPY) + copies
    if KINDS & 0b1111 == KINDS:
        _copy(source, to, start, size, whole, tl.int32, BLOCK)
    elif KINDS & 0b1111 == 0:
        _copy(source, to, start, size, whole, tl.int16, BLOCK)
    elif tl.load(row + KIND) < WAYS:
        _copy(source, to, start, size, whole, tl.int32, BLOCK)
    else:
        _copy(source, to, start, size, whole, tl.int16, BLOCK)


@triton.jit
def _copy(source, to, start, size, whole, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    x = source.to(tl.pointer_type(DTYPE)) + start
    y = to.to(tl.pointer_type(DTYPE)) + start
    if whole:
        tl.store(tl.multiple_of(y, 16) + lane, tl.load(tl.multiple_of(x, 16) + lane))
    else:
        mask = lane < size - start
        tl.store(y + lane, tl.load(x + lane, mask), mask)
