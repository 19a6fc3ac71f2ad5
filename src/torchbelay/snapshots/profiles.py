"""Impulse responses: how much of each update of the optimizer an average holds.

Every average of the family is linear in the updates u_s of the optimizer:

    w2(T) = w_init + Σ_s P(s, T)·u_s

P is its profile. A filter says how w2 is left behind by z = w_init + Σu, which has the profile 1 and is the weights
themselves if nothing pulls them. With y = w2 − z

    y' = F·y + g·u        P − 1 is the impulse response

For an average that only watches, F = 1 − b and g = q − 1. If an average pulls, the weights and it are a pair, with two
numbers in the state, and with velocities up to four; an average that watches such weights has that pair in its state.
No weight is read here.
"""

import math
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from torchbelay.belay.cohort import compounded, inertias, varies
from torchbelay.physics.coupling import Coupling, Inertia
from torchbelay.physics.method import Law, Method, Remembers

Swings = tuple[Inertia | None, Inertia | None]

_STILL = Inertia(carry=0.0, stay=0.0, pull=0.0, push=0.0)  # of a mass without a velocity
_REST = (0.0, 0.0, 1.0, 0.0)


class Filter(NamedTuple):
    """y' = F·y + g·u for the steps after a birth; the first number of y is the average, `own` the weights beside it.

    `own` is -1 if these weights are z.
    """

    transition: Tensor  # F: (steps, n, n)
    gain: Tensor  # g: (steps, n)
    own: int = -1

    @property
    def size(self) -> int:
        """The length of the state y."""
        return self.gain.shape[1]

    def part(self, start: int, stop: int) -> "Filter":
        """Return the filter of the steps from the age start + 1 to the age stop."""
        return Filter(self.transition[start:stop], self.gain[start:stop], self.own)


# The four numbers of every step -------------------------------------------------------------------------------------


def couplings(method: Method, steps: int, *, every: int = 1) -> Tensor:
    """Return (a, b, p, q) of the steps 1 to `steps` of a method that does not need learning rates: (steps, 4).

    >>> from torchbelay.physics.methods import ema, swa
    >>> couplings(ema(0.75), 3)[:, 1].tolist(), couplings(swa(), 4)[:, 1].tolist()
    ([0.25, 0.25, 0.25], [1.0, 0.5, 0.333..., 0.25])
    """
    changes = varies(method)
    if changes == "never":
        return _every_nth(compounded(method, every, 0.0, every), steps, every)
    if changes != "step":
        raise ValueError(
            f"the couplings of {method!r} depend on the learning rate of every step, so that its profile is known only "
            "for a run that was recorded with it; choose a method that does not need the learning rate"
        )
    law: Law | None = getattr(method, "law", None)
    if law is not None and every == 1:
        return _lawful(law, steps)
    period = min(getattr(method, "period", None) or steps, steps) if every == 1 else steps
    asked = method.fresh() if isinstance(method, Remembers) else copy(method)
    rows = [
        _REST if age % every else _numbers(compounded(asked, age, 0.0, every)) for age in range(1, max(period, 1) + 1)
    ]
    found = torch.tensor(rows, dtype=torch.float64)
    return found[torch.arange(steps) % len(rows)]


def _numbers(coupling: Coupling) -> tuple[float, float, float, float]:
    return coupling.a, coupling.b, coupling.p, coupling.q


def _every_nth(coupling: Coupling, steps: int, every: int) -> Tensor:
    """Return the same coupling at every N-th step, and rest between."""
    found = torch.tensor(_numbers(coupling), dtype=torch.float64).expand(steps, 4)
    if every == 1:
        return found
    found = torch.tensor(_REST, dtype=torch.float64).repeat(steps, 1)
    found[every - 1 :: every] = torch.tensor(_numbers(coupling), dtype=torch.float64)
    return found


def _lawful(law: Law, steps: int) -> Tensor:
    """Return the couplings of a law, as `physics.method.Law` defines them."""
    t = torch.arange(1, steps + 1, dtype=torch.float64)
    if law.kind == "power":
        rate = law.scale * (t + law.shift).pow(-law.exponent)
    else:
        rate = -torch.expm1(law.exponent * torch.log1p(-1 / t))
    rate = rate.clamp(min=law.floor)
    rate = torch.where(t % law.every == 0, rate, 0.0)
    return torch.stack([torch.zeros_like(t), rate, torch.ones_like(t), rate], 1)


# Filters ------------------------------------------------------------------------------------------------------------


def watching(numbers: Tensor) -> Filter:
    """Return the filter of an average of weights that nothing pulls, by the couplings (steps, 4) of its steps."""
    _, b, _, q = numbers.unbind(1)
    return Filter((1 - b)[:, None, None], (q - 1)[:, None])


def pair(numbers: Tensor, swings: Swings = (None, None)) -> Filter:
    """Return the filter of an average and the weights that it pulls: the state is (w2, w1, v1, v2), less z."""
    a, b, p, q = numbers.unbind(1)
    one, two = (each or _STILL for each in swings)
    zero = torch.zeros_like(a)
    moves = 1.0 - (numbers == numbers.new_tensor(_REST)).all(1).double()  # at rest, velocities stand still
    meets = _meeting(numbers).double() * (swings[0] is None)
    rows = [
        [1 - b, b, zero, moves * two.carry],
        [a, 1 - a, moves * one.carry, meets * two.carry],
        [moves * one.pull, -moves * one.pull, 1 - moves * (1 - one.stay), zero],
        [-moves * two.pull, moves * two.pull, zero, 1 - moves * (1 - two.stay)],
    ]
    gain = [q - 1, p - 1, moves * one.push, moves * two.push]
    n = 2 if swings == (None, None) else 4
    return Filter(torch.stack([torch.stack(row[:n], 1) for row in rows[:n]], 1), torch.stack(gain[:n], 1), own=1)


def pulls(numbers: Tensor, swings: Swings = (None, None)) -> bool:
    """Whether an average with these couplings changes the weights."""
    if swings[0] is not None or (swings[1] is not None and bool(_meeting(numbers).any())):
        return True
    return bool((numbers[:, 0] != 0).any() or (numbers[:, 2] != 1).any())


def _meeting(numbers: Tensor) -> Tensor:
    """Return at which steps weights and average end in one place, as `Coupling.meets` has it."""
    a, b, p, q = numbers.unbind(1)
    alike = [torch.isclose(x, y, rtol=1e-14, atol=1e-15) for x, y in ((a + b, torch.ones_like(a)), (p, 1 - a), (q, b))]
    return alike[0] & alike[1] & alike[2]


def following(numbers: Tensor, born: int, run: Filter) -> Filter:
    """Return the filter, from step 1 on, of an average that watches weights which a `run` of pairs pulls.

    The state is (average, w1, and the rest of the run's). Until its birth the average is w1. Then, with the update
    d = w1' − w1 of the weights, w' = w + b·(w1 − w) + q·d.
    """
    steps, n = run.gain.shape
    _, b, _, q = torch.cat([torch.zeros(born, 4, dtype=torch.float64), numbers])[:steps].unbind(1)
    order = [run.own, *(i for i in range(n) if i != run.own)]
    inner, gain = run.transition[:, order][:, :, order], run.gain[:, order]
    whole = torch.zeros(steps, n + 1, n + 1, dtype=torch.float64)
    whole[:, 1:, 1:] = inner
    whole[:, 0, 0] = 1 - b
    whole[:, 0, 1:] = q[:, None] * inner[:, 0]
    whole[:, 0, 1] += b - q
    first = q * gain[:, 0] + q - 1
    whole[:born, 0, 0], whole[:born, 0, 1:], first[:born] = 0.0, inner[:born, 0], gain[:born, 0]
    return Filter(whole, torch.cat([first[:, None], gain], 1), own=1)


def lives_of_pair(lives: Sequence[tuple[int, Filter]], steps: int) -> Filter:
    """Return the filter of a pair, from step 1 on, that began after each of some steps as a copy of the weights.

    >>> from torchbelay.physics.methods import lookahead
    >>> run = lives_of_pair([(2, pair(couplings(lookahead(k=2), 4)))], steps=6)
    >>> [profile(run, 0, t, state=1).tolist() for t in (2, 6)]  # of the weights
    [[1.0, 1.0], [1.0, 1.0, 0.5, 0.5, 0.5, 0.5]]
    """
    n = lives[0][1].size
    transition = torch.eye(n, dtype=torch.float64).repeat(steps, 1, 1)
    gain = torch.zeros(steps, n, dtype=torch.float64)
    for born, life in lives:
        stop = min(steps, born + len(life.gain))
        transition[born:stop], gain[born:stop] = life.transition[: stop - born], life.gain[: stop - born]
        if 0 < born <= steps:  # at the end of that step the average is the weights, and velocities are 0
            transition[born - 1, 0], gain[born - 1, 0] = transition[born - 1, 1], gain[born - 1, 1]
            transition[born - 1, 2:], gain[born - 1, 2:] = 0.0, 0.0
    return Filter(transition, gain, own=1)


def filter_of(method: Method, steps: int, *, every: int = 1) -> Filter:
    """Return the filter of the first steps of a method that does not need learning rates, with weights of its own.

    >>> from torchbelay.physics.methods import ema
    >>> f = filter_of(ema(0.75), 2)
    >>> f.transition.flatten().tolist(), f.gain.flatten().tolist()
    ([0.75, 0.75], [-0.75, -0.75])
    """
    numbers, swings = couplings(method, steps, every=every), inertias(method)
    return pair(numbers, swings) if pulls(numbers, swings) or any(swings) else watching(numbers)


# Responses ----------------------------------------------------------------------------------------------------------


def respond(f: Filter) -> tuple[Tensor, Tensor]:
    """Return what the state at the end holds of each update, (steps, n), and of the state at the beginning, (n, n).

    Products of matrices are formed in blocks of about √steps steps, all blocks at once.
    """
    steps, n = f.gain.shape
    if n == 1:
        products = f.transition.flatten().flip(0).cumprod(0).flip(0)  # of this step and all later ones
        later = torch.cat([products[1:], products.new_ones(1)])
        return (later * f.gain.flatten())[:, None], products[:1, None]
    unit = torch.eye(n, dtype=torch.float64)
    width = max(1, math.isqrt(steps))
    missing = -steps % width  # steps put before the first ones, which do nothing
    transition = torch.cat([unit.expand(missing, n, n), f.transition]).view(-1, width, n, n)
    gain = torch.cat([torch.zeros(missing, n, dtype=torch.float64), f.gain]).view(-1, width, n)
    blocks = transition.shape[0]
    tail, within = unit.expand(blocks, n, n), torch.empty_like(gain)
    for i in reversed(range(width)):
        within[:, i] = (tail @ gain[:, i, :, None])[..., 0]
        tail = tail @ transition[:, i]
    later = unit
    for block in reversed(range(blocks)):
        within[block] = within[block] @ later.T
        later = later @ tail[block]
    return within.view(-1, n)[missing:], later


def profile(f: Filter | None, born: int, step: int, state: int = 0) -> Tensor:
    """Return P(s) for s = 1 … step, of an average that was born after step `born`; None is z.

    >>> from torchbelay.physics.methods import swa
    >>> profile(filter_of(swa(), 4), 0, 4).tolist()  # the mean of w1(1) … w1(4)
    [1.0, 0.75, 0.5, 0.25]
    """
    found = torch.ones(step, dtype=torch.float64)
    if f is not None and step > born:
        found[born:] += respond(f.part(0, step - born))[0][:, state]
    return found


def point_weights(found: Tensor) -> Tensor:
    """Return the weight of each point w_init, w1(1), … in an average of this profile: (steps + 1).

    >>> point_weights(torch.tensor([1.0, 0.75, 0.5, 0.25], dtype=torch.float64)).tolist()
    [0.0, 0.25, 0.25, 0.25, 0.25]
    """
    edges = torch.cat([found.new_ones(1), found, found.new_zeros(1)])
    return edges[:-1] - edges[1:]
