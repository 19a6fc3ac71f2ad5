"""The layout of what kernels read: the columns of each table, by name. Host code and kernels share these numbers."""

import triton.language as tl

# A tensor's row: its size, first block, pair of dtypes, alignment, addresses, optimizer group. SLOT columns more for
# every average that follows the tensor.
SIZE, FIRST, KIND, ALIGNED, W1, COPY, STATE1, STATE2, GROUP, STEP = map(tl.constexpr, range(10))
# For averages of 24 bits: the parameter's name as a number, and the index of each element in the whole parameter. INNER
# is 0 if they follow each other in memory; else it and MIDDLE are sizes, and the strides are those of the whole.
NAME, INDEX, INNER, INNER_STRIDE, MIDDLE, MIDDLE_STRIDE, OUTER_STRIDE, HEAD = map(tl.constexpr, range(10, 18))
W2, LOW, V1, V2, COHORT, SLOT = map(tl.constexpr, range(6))

# How a tensor is kept: as float32, bfloat16 or float16, or in the two planes of 24 bits. A pair of those is one number.
FLOAT, PLANES, WAYS = tl.constexpr(0), tl.constexpr(3), tl.constexpr(4)

# A cohort's numbers: the four of the coupling, the inertias of both masses, and which shortcuts apply.
A, B, P, Q, CARRY1, STAY1, PULL1, PUSH1, CARRY2, STAY2, PULL2, PUSH2 = map(tl.constexpr, range(12))
MEET, RELAX1, RELAX2, ACTIVE, NUMBERS = map(tl.constexpr, range(12, 17))

# How a cohort's numbers are found: in a row of a period, or by a law.
FIRST_ROW, PERIOD, BORN, LAW, PLAN = map(tl.constexpr, range(5))
FLOOR, SCALE, SHIFT, EXPONENT, EVERY, TERMS = map(tl.constexpr, range(6))
TABLE, POWER, RELATIVE = map(tl.constexpr, range(3))

# How w1 came to where it is: another program stepped, without or with a copy from before, or the kernel itself steps.
STEPPED, COPIED, ADAM, ADAMW, SGD, MOMENTUM, NESTEROV = map(tl.constexpr, range(7))

# An optimizer group: learning rate, betas and their logarithms (SGD: momentum and dampening), eps, weight decay.
LR, BETA1, LOG1, BETA2, LOG2, EPS, DECAY, HYPER = map(tl.constexpr, range(8))

# What a tensor makes of its group's numbers at this step; `look` writes them, `move` reads them. NEW1 and NEW2 are the
# weights of the new gradient: 1 − β1 and 1 − β2, or 1 − dampening. ROOT is 1/√(1 − β2ᵗ).
STEP_SIZE, ROOT, SHRINK, NEW1, NEW2, EPSILON, INERTIA = map(tl.constexpr, range(7))
SHARE = tl.constexpr(8)
