"""The kernel `look`: find the numbers of a step for every cohort, and for every tensor if the kernel takes the step."""

import triton
import triton.language as tl

from torchbelay.ops.triton.layout import *  # the names of all columns


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
        tl.store(share + STEP_SIZE, (rate / tl.where(there, correction1, 1.0)).to(tl.float32), there)
        tl.store(share + ROOT, (1 / tl.sqrt(tl.where(there, correction2, 1.0))).to(tl.float32), there)
        tl.store(share + SHRINK, (decay * rate if RULE == ADAMW else decay).to(tl.float32), there)
        tl.store(share + NEW1, (1 - beta1).to(tl.float32), there)
        tl.store(share + NEW2, (1 - beta2).to(tl.float32), there)
        tl.store(share + EPSILON, eps.to(tl.float32), there)
    else:
        tl.store(share + STEP_SIZE, rate.to(tl.float32), there)
        tl.store(share + INERTIA, beta1.to(tl.float32), there)
        tl.store(share + NEW2, (1 - beta2).to(tl.float32), there)
        tl.store(share + SHRINK, decay.to(tl.float32), there)


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
