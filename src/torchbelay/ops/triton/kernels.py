"""The kernels: `look` finds the numbers of a step, `move` applies them, `exchange` lets two lists trade places.

A program handles BLOCK elements of one tensor. Which one, the block map says; where its memory is, the tensor's row in
a table of addresses. Blocks that are whole and aligned to 16 bytes take wide loads, the others masked ones. Arithmetic
is float32, rounded once on writing; addresses and offsets are 64 bits wide.

Nothing passes through a coefficient of 0, not even a nan.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# Columns of a tensor's row; SLOT more for every average that follows the tensor.
SIZE, FIRST, KIND, ALIGNED, W1, COPY, STATE1, STATE2, GROUP, STEP, HEAD = map(tl.constexpr, range(11))
W2, V1, V2, COHORT, SLOT = map(tl.constexpr, range(5))

# The numbers of a cohort.
A, B, P, Q, CARRY1, STAY1, PULL1, PUSH1, CARRY2, STAY2, PULL2, PUSH2 = map(tl.constexpr, range(12))
MEET, RELAX1, RELAX2, ACTIVE, NUMBERS = map(tl.constexpr, range(12, 17))

# How a cohort's numbers are found: in a row of a period, or by a law.
FIRST_ROW, PERIOD, BORN, LAW, PLAN = map(tl.constexpr, range(5))
FLOOR, SCALE, SHIFT, EXPONENT, EVERY, TERMS = map(tl.constexpr, range(6))
TABLE, POWER, RELATIVE = map(tl.constexpr, range(3))

# How w1 came to where it is: somebody else stepped, with or without a copy from before, or the step is ours.
STEPPED, COPIED, ADAM, ADAMW, SGD, MOMENTUM, NESTEROV = map(tl.constexpr, range(7))

# A group of the optimizer: its learning rate, betas and their logarithms (SGD: momentum, dampening), eps, weight decay.
# And what a tensor makes of them, which `look` leaves for `move`.
LR, BETA1, LOG1, BETA2, LOG2, EPS, DECAY, HYPER = map(tl.constexpr, range(8))
SHARE = tl.constexpr(8)


@triton.jit
def look(
    count, plans, laws, rows, current,
    table, tensors, hyper, lr, shares, keep, grads,
    COHORTS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, RULE: tl.constexpr, KEEP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Find what the coming step does: program 0 for every cohort, the others for TILE tensors each (their step sizes).

    `count` holds the steps taken so far. Where the step is ours it is counted here; elsewhere it may yet raise.
    """
    if tl.program_id(0) == 0:
        _look_for_cohorts(count, plans, laws, rows, current, COHORTS, WIDTH)
        if RULE >= ADAM:
            if KEEP:
                tl.store(count, tl.load(count) + tl.where(tl.load(keep) != 0, 1, 0))
            else:
                tl.store(count, tl.load(count) + 1)
    elif RULE >= ADAM:
        tile = tl.program_id(0) - 1
        _look_for_tensors(tile, table, tensors, hyper, lr, shares, keep, grads, COLUMNS, RULE, KEEP, TILE)


@triton.jit
def _look_for_cohorts(count, plans, laws, rows, current, COHORTS: tl.constexpr, WIDTH: tl.constexpr):
    each = tl.arange(0, WIDTH)
    there = each < COHORTS
    plan = plans + each * PLAN
    age = tl.load(count) + 1 - tl.load(plan + BORN, there, 0)
    period = tl.load(plan + PERIOD, there, 1)
    row = tl.load(plan + FIRST_ROW, there, 0) + (age - 1) % period
    number = tl.arange(0, NUMBERS)
    found = tl.load(rows + row[:, None] * NUMBERS + number[None, :], there[:, None], 0.0)
    law = tl.load(plan + LAW, there, 0)
    rate = _rate(laws + each * TERMS, there, law, age)
    due = rate > 0
    watching = tl.where((number == B) | (number == Q), rate[:, None].to(tl.float32), 0.0)
    ones = (number == P) | (number == RELAX1) | (number == RELAX2)
    watching = tl.where(ones | ((number == ACTIVE) & due[:, None]), 1.0, watching)
    found = tl.where((law != TABLE)[:, None], watching, found)
    tl.store(current + each[:, None] * NUMBERS + number[None, :], found, there[:, None])


@triton.jit
def _look_for_tensors(
    tile, table, tensors, hyper, lr, shares, keep, grads,
    COLUMNS: tl.constexpr, RULE: tl.constexpr, KEEP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    each = tile * TILE + tl.arange(0, TILE)
    there = each < tensors
    row = table + each.to(tl.int64) * COLUMNS
    group = tl.load(row + GROUP, there, 0)
    own = hyper + group * HYPER
    rate = tl.load(own + LR, there, 0.0)
    address = tl.load(lr + group, there, 0)
    rate = tl.where(
        address != 0,
        tl.load(address.to(tl.pointer_type(tl.float32)), there & (address != 0), 0.0).to(tl.float64),
        rate,
    )
    beta1 = tl.load(own + BETA1, there, 0.0)
    beta2 = tl.load(own + BETA2, there, 0.0)
    eps = tl.load(own + EPS, there, 0.0)
    decay = tl.load(own + DECAY, there, 0.0)
    share = shares + each * SHARE
    if RULE == ADAM or RULE == ADAMW:
        moves = there & (tl.load(grads + each, there, 0) != 0)
        if KEEP:
            moves = moves & (tl.zeros([TILE], tl.float32) + tl.load(keep) != 0)
        counter = tl.load(row + STEP, there, 0).to(tl.pointer_type(tl.float32))
        step = tl.load(counter, moves, 0.0) + 1
        tl.store(counter, step, moves)
        # 1 − βᵗ in float64: near the start it has few digits to lose
        correction1 = 1 - tl.exp(step.to(tl.float64) * tl.load(own + LOG1, there, 0.0))
        correction2 = 1 - tl.exp(step.to(tl.float64) * tl.load(own + LOG2, there, 0.0))
        tl.store(share, (rate / tl.where(there, correction1, 1.0)).to(tl.float32), there)
        tl.store(share + 1, (1 / tl.sqrt(tl.where(there, correction2, 1.0))).to(tl.float32), there)
        tl.store(share + 2, (decay * rate if RULE == ADAMW else decay).to(tl.float32), there)
        tl.store(share + 3, (1 - beta1).to(tl.float32), there)
        tl.store(share + 4, (1 - beta2).to(tl.float32), there)
        tl.store(share + 5, eps.to(tl.float32), there)
    else:
        tl.store(share, rate.to(tl.float32), there)
        tl.store(share + 1, beta1.to(tl.float32), there)
        tl.store(share + 2, (1 - beta2).to(tl.float32), there)
        tl.store(share + 3, decay.to(tl.float32), there)


@triton.jit
def _rate(term, there, law, age):
    """b of a method that only watches, by its law, in float64; 0 where the step is not one of its own."""
    t = age.to(tl.float64)
    floor = tl.load(term + FLOOR, there, 0.0)
    scale = tl.load(term + SCALE, there, 0.0)
    shift = tl.load(term + SHIFT, there, 0.0)
    exponent = tl.load(term + EXPONENT, there, 0.0)
    every = tl.load(term + EVERY, there, 1.0).to(tl.int64)
    power = scale * tl.exp(-exponent * tl.log(t + shift))
    # −expm1(x) of a small x by hand, x = exponent·log(1 − 1/t): two more terms than float32 has digits for
    x = exponent * tl.log(1 - 1 / tl.maximum(t, 2.0))
    series = -x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5))))
    relative = tl.where(t < 2, 1.0, tl.where(x > -0.01, series, 1 - tl.exp(x)))
    rate = tl.maximum(floor, tl.where(law == POWER, power, relative))
    return tl.where(age % every == 0, rate, 0.0)


@triton.jit
def move(
    table, blocks, current, copies, grads, shares, keep, scale, count,
    COLUMNS: tl.constexpr, KINDS: tl.constexpr, AVERAGES: tl.constexpr, RULE: tl.constexpr, PULLS: tl.constexpr,
    SWING1: tl.constexpr, SWING2: tl.constexpr, RESTS: tl.constexpr, KEEP: tl.constexpr, SCALED: tl.constexpr,
    HOLES: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
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
    for k in tl.static_range(9):
        if (KINDS >> k) & 1:
            if kind == k:
                if whole:
                    _move(
                        row, start, size, tensor, current, copies, grads, shares, scale, count, AVERAGES, RULE, PULLS,
                        SWING1, SWING2, RESTS, SCALED, HOLES, STOCHASTIC, k // 3, k % 3, True, BLOCK,
                    )  # fmt: skip
                else:
                    _move(
                        row, start, size, tensor, current, copies, grads, shares, scale, count, AVERAGES, RULE, PULLS,
                        SWING1, SWING2, RESTS, SCALED, HOLES, STOCHASTIC, k // 3, k % 3, False, BLOCK,
                    )  # fmt: skip


@triton.jit
def _move(
    row, start, size, tensor, current, copies, grads, shares, scale, count,
    AVERAGES: tl.constexpr, RULE: tl.constexpr, PULLS: tl.constexpr, SWING1: tl.constexpr, SWING2: tl.constexpr,
    RESTS: tl.constexpr, SCALED: tl.constexpr, HOLES: tl.constexpr, STOCHASTIC: tl.constexpr, KIND1: tl.constexpr,
    KIND2: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The arithmetic of one step, all of it: old is w1 before the optimizer's step, new after it, u between them."""
    lane = tl.arange(0, BLOCK)
    mask = lane < size - start
    new = _load(tl.load(row + W1), start, lane, mask, KIND1, WHOLE)
    w2 = _load(tl.load(row + HEAD + W2), start, lane, mask, KIND2, WHOLE)  # on its way while the optimizer computes
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
        old = _load(tl.load(row + COPY) + copies, start, lane, mask, KIND1, WHOLE)
        u = new - old
    else:
        u = old  # nobody looks at it
    for j in tl.static_range(AVERAGES):
        slot = row + HEAD + j * SLOT
        numbers = current + tl.load(slot + COHORT) * NUMBERS
        if j > 0:
            w2 = _load(tl.load(slot + W2), start, lane, mask, KIND2, WHOLE)
        if RESTS:
            if tl.load(numbers + ACTIVE) != 0:
                new = _couple(
                    slot, numbers, start, lane, mask, old, new, u, w2, RULE, PULLS, SWING1, SWING2, KIND2, WHOLE, j
                )
        else:
            new = _couple(
                slot, numbers, start, lane, mask, old, new, u, w2, RULE, PULLS, SWING1, SWING2, KIND2, WHOLE, j
            )
        if PULLS and j == 0:
            u = new - old  # what the other averages see
    if RULE >= ADAM or PULLS:
        if STOCHASTIC and KIND1 == 1:
            new = _stochastic(new, tl.load(count), start, tensor, lane)
        _store(tl.load(row + W1), start, lane, mask, new, KIND1, WHOLE)


@triton.jit
def _couple(
    slot, numbers, start, lane, mask, old, new, u, w2,
    RULE: tl.constexpr, PULLS: tl.constexpr, SWING1: tl.constexpr, SWING2: tl.constexpr, KIND2: tl.constexpr,
    WHOLE: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """w1' = w1 + a·(w2 − w1) + p·u, w2' = w2 + b·(w1 − w2) + q·u; as interpolations where they are."""
    b = tl.load(numbers + B)
    if RULE == STEPPED:
        w2_new = _lerp(w2, new, b)
    else:
        q = tl.load(numbers + Q)
        follows = tl.load(numbers + RELAX2) != 0  # q = b: w2 moves towards where w1 arrived
        w2_new = tl.where(follows, _lerp(w2, new, b), _lerp(w2, old, b) + _times(q, u))
    w1_new = new
    if PULLS and J == 0:  # only the first may
        a = tl.load(numbers + A)
        if RULE == STEPPED:
            w1_new = _lerp(new, w2, a)
        else:
            p = tl.load(numbers + P)
            relaxes = tl.load(numbers + RELAX1) != 0  # p = 1 − a
            w1_new = tl.where(relaxes, _lerp(new, w2, a), old + _times(a, w2 - old) + _times(p, u))
    if SWING1 and J == 0:
        v1 = _load(tl.load(slot + V1), start, lane, mask, KIND2, WHOLE)
        w1_new += _times(tl.load(numbers + CARRY1), v1)
        v1_new = _times(tl.load(numbers + STAY1), v1) + _times(tl.load(numbers + PULL1), w2 - old)
        _store(tl.load(slot + V1), start, lane, mask, v1_new + _times(tl.load(numbers + PUSH1), u), KIND2, WHOLE)
    if SWING2:
        v2 = _load(tl.load(slot + V2), start, lane, mask, KIND2, WHOLE)
        w2_new += _times(tl.load(numbers + CARRY2), v2)
        v2_new = _times(tl.load(numbers + STAY2), v2) + _times(tl.load(numbers + PULL2), old - w2)
        _store(tl.load(slot + V2), start, lane, mask, v2_new + _times(tl.load(numbers + PUSH2), u), KIND2, WHOLE)
    _store(tl.load(slot + W2), start, lane, mask, w2_new, KIND2, WHOLE)
    if PULLS and J == 0:
        # they meet: a sync leaves not a bit between them
        w1_new = tl.where(tl.load(numbers + MEET) != 0, _narrow(w2_new, KIND2).to(tl.float32), w1_new)
    return w1_new


@triton.jit
def _update(
    row, gradient, start, lane, mask, tensor, w1, shares, scale,
    RULE: tl.constexpr, SCALED: tl.constexpr, KIND: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """What the optimizer adds to w1, and its own state moved."""
    g = _load(gradient, start, lane, mask, KIND, WHOLE)
    share = shares + tensor * SHARE
    if RULE == ADAM or RULE == ADAMW:
        m = _load(tl.load(row + STATE1), start, lane, mask, KIND, WHOLE)
        v = _load(tl.load(row + STATE2), start, lane, mask, KIND, WHOLE)
        step_size = tl.load(share)
        root = tl.load(share + 1)
        decay = tl.load(share + 2)
        if SCALED:
            g = tl.div_rn(g, tl.load(scale))
        if RULE == ADAM:
            g += _times(decay, w1)
        # towards the gradient by 1 − β, which float32 holds far better than β: (1 + 1e-8)¹⁰⁰⁰ would show
        m += tl.load(share + 3) * (g - m)
        v += tl.load(share + 4) * (g * g - v)
        _store(tl.load(row + STATE1), start, lane, mask, m, KIND, WHOLE)
        _store(tl.load(row + STATE2), start, lane, mask, v, KIND, WHOLE)
        u = -step_size * m / (tl.sqrt(v) * root + tl.load(share + 5))
        if RULE == ADAMW:
            u -= _times(decay, w1)
    else:
        if SCALED:
            g = tl.div_rn(g, tl.load(scale))
        g += _times(tl.load(share + 3), w1)
        if RULE == MOMENTUM or RULE == NESTEROV:
            momentum = tl.load(share + 1)
            buffer = _load(tl.load(row + STATE1), start, lane, mask, KIND, WHOLE)
            buffer = momentum * buffer + tl.load(share + 2) * g
            _store(tl.load(row + STATE1), start, lane, mask, buffer, KIND, WHOLE)
            g = g + momentum * buffer if RULE == NESTEROV else buffer
        u = -tl.load(share) * g
    return u


@triton.jit
def _lerp(x, end, weight):
    """As torch's: exact at both ends, and not even a nan of `end` gets through a weight of 0."""
    moved = tl.where(weight < 0.5, x + weight * (end - x), end - (end - x) * (1 - weight))
    return tl.where(weight == 0, x, moved)


@triton.jit
def _times(factor, x):
    return tl.where(factor == 0, 0.0, factor * x)


@triton.jit
def _pointer(address, KIND: tl.constexpr):
    if KIND == 0:
        return address.to(tl.pointer_type(tl.float32))
    elif KIND == 1:
        return address.to(tl.pointer_type(tl.bfloat16))
    else:
        return address.to(tl.pointer_type(tl.float16))


@triton.jit
def _load(address, start, lane, mask, KIND: tl.constexpr, WHOLE: tl.constexpr):
    pointer = _pointer(address, KIND) + start
    if WHOLE:
        x = tl.load(tl.multiple_of(pointer, 16) + lane)
    else:
        x = tl.load(pointer + lane, mask, 0.0)
    return x.to(tl.float32)


@triton.jit
def _narrow(x, KIND: tl.constexpr):
    """In the dtype of its memory, rounded to nearest."""
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
def _store(address, start, lane, mask, x, KIND: tl.constexpr, WHOLE: tl.constexpr):
    pointer = _pointer(address, KIND) + start
    x = _narrow(x, KIND)
    if WHOLE:
        tl.store(tl.multiple_of(pointer, 16) + lane, x)
    else:
        tl.store(pointer + lane, x, mask)


@triton.jit
def _stochastic(x, count, start, tensor, lane):
    """Round to bfloat16 up or down with the probabilities that keep the mean; the same step draws the same bits."""
    noise = tl.randint(count * 4294967296 + tensor, start + lane) & 0xFFFF
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + noise.to(tl.int32)) & -0x10000).to(tl.float32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, rounded, x)


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
    if KINDS & 0b111 == KINDS:
        _copy(source, to, start, size, whole, tl.int32, BLOCK)
    elif KINDS & 0b111 == 0:
        _copy(source, to, start, size, whole, tl.int16, BLOCK)
    elif tl.load(row + KIND) < 3:
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
