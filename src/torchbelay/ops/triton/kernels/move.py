"""The kernel `move`: one pass over weights, averages and, if the step is the kernel's own, the optimizer's state.

A program handles BLOCK elements of one tensor. The block map says which tensor; the tensor's row in a table says where
its memory is. Whole blocks that are aligned to 16 bytes take wide loads, the others masked ones. Arithmetic is float32,
rounded once on writing; addresses and offsets are 64 bits wide. Nothing passes through a coefficient of 0, not even a
nan.
"""

import triton
import triton.language as tl

from torchbelay.ops.triton.layout import *  # the names of all columns

from .memory import lerp, load, round_stochastically, store, times
from .planes import load_average, random_bytes, store_average


@triton.jit
def move(
    table, blocks, current, copies, grads, shares, keep, scale, count,
    COLUMNS: tl.constexpr, KINDS: tl.constexpr, AVERAGES: tl.constexpr, RULE: tl.constexpr, PULLS: tl.constexpr,
    SWING1: tl.constexpr, SWING2: tl.constexpr, RESTS: tl.constexpr, KEEP: tl.constexpr, SCALED: tl.constexpr,
    HOLES: tl.constexpr, STOCHASTIC: tl.constexpr, MAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move a block of w1 and of every average that follows it.

    KINDS has a bit for every pair of dtypes in the table; each is a branch of its own, taken by whole programs.
    """
    if KEEP:
        if tl.load(keep) == 0:
            return
    block = tl.program_id(0)
    tensor = tl.load(blocks + block)
    row = table + tensor.to(tl.int64) * COLUMNS
    start = (block - tl.load(row + FIRST)) * BLOCK  # 64 bits: the table is
    size = tl.load(row + SIZE)
    whole = (tl.load(row + ALIGNED) != 0) & (start + BLOCK <= size)
    if RULE >= ADAM:
        whole = whole & (tl.load(grads + tensor) % 16 == 0)
    kind = tl.load(row + KIND)
    for k in tl.static_range(12):  # WAYS ways to keep averages, for each of three dtypes of weights
        if (KINDS >> k) & 1:
            if kind == k:
                if whole:
                    _move(
                        row, start, size, tensor, current, copies, grads, shares, scale, count, AVERAGES, RULE, PULLS,
                        SWING1, SWING2, RESTS, SCALED, HOLES, STOCHASTIC, MAPPED, k // 4, k % 4, True, BLOCK,
                    )  # fmt: skip
                else:
                    _move(
                        row, start, size, tensor, current, copies, grads, shares, scale, count, AVERAGES, RULE, PULLS,
                        SWING1, SWING2, RESTS, SCALED, HOLES, STOCHASTIC, MAPPED, k // 4, k % 4, False, BLOCK,
                    )  # fmt: skip


@triton.jit
def _move(
    row, start, size, tensor, current, copies, grads, shares, scale, count,
    AVERAGES: tl.constexpr, RULE: tl.constexpr, PULLS: tl.constexpr, SWING1: tl.constexpr, SWING2: tl.constexpr,
    RESTS: tl.constexpr, SCALED: tl.constexpr, HOLES: tl.constexpr, STOCHASTIC: tl.constexpr,
    MAPPED: tl.constexpr, KIND1: tl.constexpr, KIND2: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The arithmetic of one step, all of it: old is w1 before the optimizer's step, new after it, u between them."""
    lane = tl.arange(0, BLOCK)
    mask = lane < size - start
    new = load(tl.load(row + W1), start, lane, mask, KIND1, WHOLE)
    w2 = load_average(row + HEAD, start, lane, mask, KIND2, WHOLE)  # on its way while the optimizer computes
    old = new
    if RULE >= ADAM:
        gradient = tl.load(grads + tensor)
        u = tl.zeros([BLOCK], tl.float32)
        if HOLES:
            if gradient != 0:
                u = _update(row, gradient, start, lane, mask, tensor, old, shares, scale, RULE, SCALED, KIND1, WHOLE)
        else:
            u = _update(row, gradient, start, lane, mask, tensor, old, shares, scale, RULE, SCALED, KIND1, WHOLE)
        new = old + u
    elif RULE == COPIED:
        old = load(tl.load(row + COPY) + copies, start, lane, mask, KIND1, WHOLE)
        u = new - old
    else:
        u = old  # not used
    random = lane  # not used
    if KIND2 == PLANES:
        ahead = 0 if RULE >= ADAM else 1  # `look` has counted a step of the kernel's own
        random = random_bytes(row, start, lane, tl.load(count) + ahead, MAPPED)
    for j in tl.static_range(AVERAGES):
        slot = row + HEAD + j * SLOT
        numbers = current + tl.load(slot + COHORT) * NUMBERS
        if j > 0:
            w2 = load_average(slot, start, lane, mask, KIND2, WHOLE)
        if RESTS:
            if tl.load(numbers + ACTIVE) != 0:
                new = _couple(
                    slot, numbers, start, lane, mask, old, new, u, w2, random,
                    RULE, PULLS, SWING1, SWING2, KIND2, WHOLE, j,
                )  # fmt: skip
        else:
            new = _couple(
                slot, numbers, start, lane, mask, old, new, u, w2, random, RULE, PULLS, SWING1, SWING2, KIND2, WHOLE, j
            )
        if PULLS and j == 0:
            u = new - old  # what the other averages see
    if RULE >= ADAM or PULLS:
        if STOCHASTIC and KIND1 == 1:
            new = round_stochastically(new, tl.load(count), start, tensor, lane)
        store(tl.load(row + W1), start, lane, mask, new, KIND1, WHOLE)


@triton.jit
def _couple(
    slot, numbers, start, lane, mask, old, new, u, w2, random,
    RULE: tl.constexpr, PULLS: tl.constexpr, SWING1: tl.constexpr, SWING2: tl.constexpr, KIND2: tl.constexpr,
    WHOLE: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """w1' = w1 + a·(w2 − w1) + p·u, w2' = w2 + b·(w1 − w2) + q·u; as interpolations where they are."""
    b = tl.load(numbers + B)
    if RULE == STEPPED:
        w2_new = lerp(w2, new, b)
    else:
        q = tl.load(numbers + Q)
        follows = tl.load(numbers + RELAX2) != 0  # q = b: w2 moves towards where w1 arrived
        w2_new = tl.where(follows, lerp(w2, new, b), lerp(w2, old, b) + times(q, u))
    w1_new = new
    if PULLS and J == 0:  # only the first may
        a = tl.load(numbers + A)
        if RULE == STEPPED:
            w1_new = lerp(new, w2, a)
        else:
            p = tl.load(numbers + P)
            relaxes = tl.load(numbers + RELAX1) != 0  # p = 1 − a
            w1_new = tl.where(relaxes, lerp(new, w2, a), old + times(a, w2 - old) + times(p, u))
    swing_kind: tl.constexpr = FLOAT if KIND2 == PLANES else KIND2
    if SWING1 and J == 0:
        v1 = load(tl.load(slot + V1), start, lane, mask, swing_kind, WHOLE)
        w1_new += times(tl.load(numbers + CARRY1), v1)
        v1_new = times(tl.load(numbers + STAY1), v1) + times(tl.load(numbers + PULL1), w2 - old)
        store(tl.load(slot + V1), start, lane, mask, v1_new + times(tl.load(numbers + PUSH1), u), swing_kind, WHOLE)
    if SWING2:
        v2 = load(tl.load(slot + V2), start, lane, mask, swing_kind, WHOLE)
        w2_new += times(tl.load(numbers + CARRY2), v2)
        v2_new = times(tl.load(numbers + STAY2), v2) + times(tl.load(numbers + PULL2), old - w2)
        store(tl.load(slot + V2), start, lane, mask, v2_new + times(tl.load(numbers + PUSH2), u), swing_kind, WHOLE)
    stored = store_average(slot, start, lane, mask, w2_new, random, KIND2, WHOLE)
    if PULLS and J == 0:
        # they meet: a sync leaves not a bit between them
        w1_new = tl.where(tl.load(numbers + MEET) != 0, stored, w1_new)
    return w1_new


@triton.jit
def _update(
    row, gradient, start, lane, mask, tensor, w1, shares, scale,
    RULE: tl.constexpr, SCALED: tl.constexpr, KIND: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """What the optimizer adds to w1, and its own state moved."""
    g = load(gradient, start, lane, mask, KIND, WHOLE)
    share = shares + tensor * SHARE
    if RULE == ADAM or RULE == ADAMW:
        m = load(tl.load(row + STATE1), start, lane, mask, KIND, WHOLE)
        v = load(tl.load(row + STATE2), start, lane, mask, KIND, WHOLE)
        step_size = tl.load(share + STEP_SIZE)
        root = tl.load(share + ROOT)
        decay = tl.load(share + SHRINK)
        if SCALED:
            g = tl.div_rn(g, tl.load(scale))
        if RULE == ADAM:
            g += times(decay, w1)
        # towards the gradient by 1 − β, which float32 holds far better than β: (1 + 1e-8)¹⁰⁰⁰ would show
        m += tl.load(share + NEW1) * (g - m)
        v += tl.load(share + NEW2) * (g * g - v)
        store(tl.load(row + STATE1), start, lane, mask, m, KIND, WHOLE)
        store(tl.load(row + STATE2), start, lane, mask, v, KIND, WHOLE)
        u = -step_size * m / (tl.sqrt(v) * root + tl.load(share + EPSILON))
        if RULE == ADAMW:
            u -= times(decay, w1)
    else:
        if SCALED:
            g = tl.div_rn(g, tl.load(scale))
        g += times(tl.load(share + SHRINK), w1)
        if RULE == MOMENTUM or RULE == NESTEROV:
            momentum = tl.load(share + INERTIA)
            buffer = load(tl.load(row + STATE1), start, lane, mask, KIND, WHOLE)
            buffer = momentum * buffer + tl.load(share + NEW2) * g
            store(tl.load(row + STATE1), start, lane, mask, buffer, KIND, WHOLE)
            g = g + momentum * buffer if RULE == NESTEROV else buffer
        u = -tl.load(share + STEP_SIZE) * g
    return u
