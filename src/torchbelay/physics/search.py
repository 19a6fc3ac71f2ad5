"""The settings with the least expected loss on a noisy quadratic, by a search over θ and both rates."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from .coupling import watch
from .inner_momentum import stable_range, theta_floor
from .methods.centred import centred
from .methods.schedule_free import schedule_free
from .quadratics import Quadratic, Split
from .region import Region

LONGEST = 10**9  # steps: the search takes averaging rates down to 1/LONGEST
CLEAR = 0.75  # θ stays above this share of the floor
AROUND = 1.15  # a learning rate is judged by the rates this many times smaller and larger: no knife's edge
WITHIN = 1.1  # the range of learning rates: those whose loss is at most this many times that of the best
_THETAS = (-0.85, -0.6, -0.4, -0.2, 0.0, 0.3)  # where the search begins
_FREE_BETA = 0.9  # of schedule-free averaging
_FINEST = 1.04  # the search ends when neighbours differ by this factor


@dataclass(frozen=True)
class Setting:
    """A method at a learning rate, and its expected loss above the minimum after the run."""

    method: centred | schedule_free
    lr: float
    loss: Split
    lrs: tuple[float, float]  # the learning rates whose loss is at most 10% above this one's, all else equal
    limit: float  # the largest stable learning rate; for schedule-free, that of its first step

    @property
    def width(self) -> float:
        """How many times the largest of `lrs` is the least."""
        return self.lrs[1] / self.lrs[0]


def search(problem: Quadratic, steps: int, beta: float, region: Region) -> dict[float, Setting]:
    """Return the best settings of a region that were found, by their θ; 0 is always among them."""

    def loss(theta: float, c: float, lr: float) -> float:
        if not 1 / LONGEST < c < 1 or (c, lr) not in region or theta < CLEAR * theta_floor(beta, c):
            return math.inf
        coupling = centred(theta, c).coupling(1, lr)
        return sum(problem.loss(coupling, each, steps, beta).total for each in (lr * AROUND, lr / AROUND)) / 2

    found: dict[float, tuple[float, float, float]] = {}
    for theta in (each for each in _THETAS if each <= region.highest_theta):
        c = region.middle(min(0.5, 5 / steps))
        while theta < CLEAR * theta_floor(beta, c) and c / 2 > max(1e-8, region.rates[0]):
            c /= 2
        if theta < CLEAR * theta_floor(beta, c):
            continue
        limit = stable_range(centred(theta, c).coupling(1, 0.1), beta) / problem.largest
        lr = region.first_lr(0.2 * limit, 0.8 * limit / AROUND)
        rate, eta = _descend(lambda c, lr, theta=theta: loss(theta, c, lr), (c, lr))
        found[theta] = (loss(theta, rate, eta), rate, eta)
    theta = min(found, key=lambda each: found[each])
    if theta:
        _, rate, eta = found[theta]
        bound = region.highest_theta
        shift, rate, eta = _descend(
            lambda s, c, lr: loss(s - 1, c, lr) if s - 1 <= bound else math.inf, (1 + theta, rate, eta)
        )
        found[shift - 1] = (loss(shift - 1, rate, eta), rate, eta)
    return {theta: _describe(problem, theta, rate, eta, steps, beta) for theta, (_, rate, eta) in found.items()}


def _descend(loss: Callable[..., float], start: tuple[float, ...]) -> tuple[float, ...]:
    """Return positive numbers with the least loss, by trying neighbours that are a shrinking factor away."""
    at, least, factor = start, loss(*start), 3.0
    while factor > _FINEST:
        moves = [move for move in product((1 / factor, 1.0, factor), repeat=len(at)) if move.count(1.0) >= len(at) - 1]
        tried = [tuple(x * f for x, f in zip(at, move, strict=True)) for move in moves if set(move) != {1.0}]
        value, best = min((loss(*each), each) for each in tried)
        if value < least:
            at, least = best, value
        else:
            factor = math.sqrt(factor)
    return at


def _describe(problem: Quadratic, theta: float, rate: float, lr: float, steps: int, beta: float) -> Setting:
    method = centred(theta, rate)
    coupling = method.coupling(1, lr)
    lrs = _range(lambda lr: problem.loss(coupling, lr, steps, beta).total, lr)
    limit = stable_range(coupling, beta) / problem.largest
    return Setting(method, lr, problem.loss(coupling, lr, steps, beta), lrs, limit)


def tune_free(problem: Quadratic, steps: int) -> Setting:
    """Return schedule-free averaging at its best learning rate, around an optimizer without momentum."""

    def loss(lr: float) -> float:
        return problem.loss_free(_FREE_BETA, lr, steps).total

    (lr,) = _descend(lambda lr: loss(lr * AROUND) + loss(lr / AROUND), (1.0 / problem.largest,))
    limit = stable_range(watch(1.0), 0.0) / problem.largest  # of its first step, at which c = 1
    return Setting(schedule_free(_FREE_BETA), lr, problem.loss_free(_FREE_BETA, lr, steps), _range(loss, lr), limit)


def _range(loss: Callable[[float], float], best: float) -> tuple[float, float]:
    """Return the learning rates around the best one at which the loss is WITHIN times as large."""
    allowed = WITHIN * loss(best)

    def end(factor: float) -> float:
        inside, outside = best, best * factor
        while loss(outside) <= allowed and 1e-6 < outside / best < 1e6:
            inside, outside = outside, outside * factor
        for _ in range(5):
            middle = math.sqrt(inside * outside)
            inside, outside = (middle, outside) if loss(middle) <= allowed else (inside, middle)
        return inside

    return end(1 / 1.5), end(1.5)


def scaled(setting: Setting, scale: float) -> Setting:
    """Return the setting of a loss whose curvatures are 1/scale times as large: all its rates are scale times so."""
    low, high = setting.lrs
    return Setting(setting.method, scale * setting.lr, setting.loss, (scale * low, scale * high), scale * setting.limit)
