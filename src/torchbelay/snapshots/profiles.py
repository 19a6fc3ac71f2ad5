"""Impulse responses: how much of each update of the weights an average holds.

An update d_s is what the weights moved by in step s (if the average pulls them, its pull included). Every average of
the family is linear in the updates:

    w2(T) = w_init + Σ_s P(s, T)·d_s

P is its profile. The weights themselves have P = 1. The distance y = w2 − w1 obeys y' = F·y + g·d, from 0 at the birth
of the average on, so that P − 1 is the impulse response of this filter. With the coupling (a, b, p, q) of the step,
d = a·y + p·u, and therefore

    F = 1 − b − a·q/p        g = q/p − 1

A spring with velocities adds them to the state. No weight is read here.
"""

import math
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from torchbelay.belay.cohort import compounded, inertias, varies
from torchbelay.physics.coupling import Coupling, Inertia
from torchbelay.physics.method import Law, Method, Remembers

_STILL = Inertia(carry=0.0, stay=0.0, pull=0.0, push=0.0)  # of a mass without a velocity
_REST = (0.0, 0.0, 1.0, 0.0)


class Filter(NamedTuple):
    """y' = F·y + g·d for each step after the birth of an average; the first number of y is w2 − w1.

    `own` is the number of y that is the weights beside this average, less those of the run; -1 if these are the same.
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


def recorded(numbers: Tensor, swings: tuple[Inertia | None, Inertia | None] = (None, None)) -> Filter:
    """Return the filter of an average that was part of the run, by the couplings (steps, 4) of its steps.

    The updates of the run contain its pull, if it pulls.
    """
    a, b, p, q = numbers.unbind(1)
    if bool((p == 0).any()):
        raise ValueError("a coupling with p = 0 ignores the updates: the profile of its average is not defined")
    if swings == (None, None):
        return Filter((1 - b - a * q / p)[:, None, None], (q / p - 1)[:, None])
    one, two = (each or _STILL for each in swings)
    # u = (d − a·y − carry1·v1)/p; the state is (y, v1, v2)
    zero = torch.zeros_like(a)
    by_y, by_v1, by_d = -a / p, -one.carry / p, 1 / p
    rows = [
        [1 - b + q * by_y, q * by_v1, zero + two.carry],
        [one.pull + one.push * by_y, one.stay + one.push * by_v1, zero],
        [-two.pull + two.push * by_y, two.push * by_v1, zero + two.stay],
    ]
    gain = [q * by_d - 1, one.push * by_d, two.push * by_d]
    return Filter(torch.stack([torch.stack(row, 1) for row in rows], 1), torch.stack(gain, 1))


def imagined(numbers: Tensor, swings: tuple[Inertia | None, Inertia | None] = (None, None)) -> Filter:
    """Return the filter of a pair of weights and average that gets the updates of a run which it was not part of.

    Both are told by their distance from the weights of the run: the state is (w2 − w1 of the run, w1 − w1 of the run),
    then the velocities. If the average only watches, its own weights are those of the run.
    """
    a, b, p, q = numbers.unbind(1)
    if swings == (None, None) and bool((a == 0).all() and (p == 1).all()):
        return recorded(numbers)
    one, two = (each or _STILL for each in swings)
    zero = torch.zeros_like(a)
    rows = [
        [1 - b, b, zero, zero + two.carry],
        [a, 1 - a, zero + one.carry, zero],
        [zero + one.pull, zero - one.pull, zero + one.stay, zero],
        [zero - two.pull, zero + two.pull, zero, zero + two.stay],
    ]
    gain = [q - 1, p - 1, zero + one.push, zero + two.push]
    n = 2 if swings == (None, None) else 4
    return Filter(torch.stack([torch.stack(row[:n], 1) for row in rows[:n]], 1), torch.stack(gain[:n], 1), own=1)


def filter_of(method: Method, steps: int, *, every: int = 1, part_of_run: bool = True) -> Filter:
    """Return the filter of the first steps of a method that does not need learning rates.

    >>> from torchbelay.physics.methods import ema
    >>> watching = filter_of(ema(0.75), 2)
    >>> watching.transition.flatten().tolist(), watching.gain.flatten().tolist()
    ([0.75, 0.75], [-0.75, -0.75])
    """
    make = recorded if part_of_run else imagined
    return make(couplings(method, steps, every=every), inertias(method))


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
    """Return P(s) for s = 1 … step, of an average that was born after step `born`; None is the weights themselves.

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
