"""The settings with the least expected loss on a noisy quadratic, by a search over θ and both rates.

A coarse grid finds where to begin, because there is more than one valley: a short memory at a low learning rate, and a
long one at a high rate. From the best points of the grid a simplex goes down.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from .coupling import watch
from .inner_momentum import stable_range, theta_floor
from .methods.centred import centred
from .methods.schedule_free import schedule_free
from .quadratics import Quadratic, Split
from .region import Region
from .simplex import Point, minimise

LONGEST = 10**9  # steps: the search takes averaging rates down to 1/LONGEST
CLEAR = 0.75  # θ stays above this share of the floor
AROUND = 1.15  # a learning rate is judged by the rates this many times smaller and larger too: no knife's edge
SLOW = 3.0  # a learning rate of this over steps and curvature leaves e⁻³ of a distance: the lowest that is tried first
WITHIN = 1.1  # the range of learning rates: those whose loss is at most this many times that of the best
_THETAS = (-0.85, -0.6, -0.4, -0.2, 0.3)  # of the grids, beside 0
HIGHEST = 2.0  # θ, as with the paper's m1 = 10 and m2 = 20
_SEARCHED = 16  # curvatures that the search looks at; more are merged
_STARTS = 4  # places from which the search goes down
_FREE_BETA = 0.9  # of schedule-free averaging
_STRIDE = 1.06  # between learning rates that are looked at for the range: errors that swing make it narrow
_END = 1.02  # a learning rate within this factor of an end is at it


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

    def below(self, limit: float) -> "Setting":
        """Return the same with another limit, above which no learning rate is told."""
        low, high = self.lrs
        return replace(self, limit=limit, lrs=(min(low, limit), min(high, limit)))


class _Landscape:
    """The losses of a region, over the logarithms of 1 + θ, of the averaging rate and of the learning rate.

    A place outside the region stands for the nearest setting inside, so that a search can go along the edges.
    """

    def __init__(self, problem: Quadratic, steps: int, beta: float, region: Region) -> None:
        self.problem, self.steps, self.beta, self.region = problem, steps, beta, region
        self.slow = SLOW / (steps * problem.largest)

    def setting(self, at: Point) -> tuple[float, float, float]:
        """Return θ, the averaging rate and the learning rate of a place; without a third coordinate θ is 0."""
        *shift, c, lr = (math.exp(min(x, 700.0)) for x in at)
        low, high = self.region.rates
        c = min(max(c, 1.01 * max(low, 1 / LONGEST)), high / 1.01)
        if self.region.lrs:
            lr = min(max(lr, self.region.lrs[0]), self.region.lrs[1])
        theta = max(shift[0] - 1, CLEAR * theta_floor(self.beta, c)) if shift else 0.0
        return min(theta, self.region.highest_theta, HIGHEST), c, lr

    def loss(self, at: Point) -> float:
        """Return the mean loss at learning rates around that of a place."""
        theta, c, lr = self.setting(at)
        coupling = centred(theta, c).coupling(1, lr)
        return _around(lambda each: self.problem.loss(coupling, each, self.steps, self.beta).total, lr)

    def grid(self, theta: float, count: int) -> list[Point]:
        """Return the places of a coarse grid at one θ, the best first; empty if θ is too near the floor everywhere."""
        low, high = max(self.region.rates[0], 0.3 / self.steps), min(self.region.rates[1], 0.95)
        places = []
        for c in _spread(min(low, high), high, count):
            if theta >= CLEAR * theta_floor(self.beta, c):
                limit = stable_range(centred(theta, c).coupling(1, 0.1), self.beta) / self.problem.largest
                lowest = min(0.002 * limit, self.slow)
                lrs = _spread(*(self.region.lrs or (lowest, 0.8 * limit)), count)
                places += [_place(theta, c, lr) for lr in lrs]
        return sorted(places, key=self.loss)


def _place(theta: float, rate: float, lr: float) -> Point:
    """Return the place of a setting; without a first coordinate θ is 0."""
    return (*((math.log1p(theta),) if theta else ()), math.log(rate), math.log(lr))


def search(problem: Quadratic, steps: int, beta: float, region: Region) -> dict[float, Setting]:
    """Return the best settings of a region that were found, by their θ; 0 is always among them."""
    land = _Landscape(problem.merged(_SEARCHED), steps, beta, region)
    ema = min((_go_down(land, at) for at in _apart(land.grid(0.0, 10), _STARTS)), key=land.loss)
    grids = [land.grid(theta, 6)[:1] for theta in _THETAS if theta <= region.highest_theta]
    begins = sorted((at for some in grids for at in some), key=land.loss)[: _STARTS - 1]
    begins.append((math.log(0.9), *ema))  # θ a little below that of the EMA
    lowest = min((_go_down(land, at) for at in begins), key=land.loss)
    found = (land.setting(at) for at in (lowest, ema))
    return {theta: _describe(problem, theta, rate, lr, steps, beta) for theta, rate, lr in found}


def is_out_of_reach(setting: Setting) -> bool:
    """Whether a learning rate by which the setting is judged diverges: the search found no way to it."""
    return setting.lr * AROUND >= setting.limit


def falls_beyond(problem: Quadratic, setting: Setting, steps: int, beta: float, region: Region) -> bool:
    """Whether a setting lies at an end of a region's learning rates, and the way down goes on beyond that end."""
    assert region.lrs is not None
    assert isinstance(setting.method, centred)
    low, high = region.lrs
    if low * _END < setting.lr < high / _END:
        return False
    land = _Landscape(problem.merged(_SEARCHED), steps, beta, replace(region, lrs=None))
    theta, rate = setting.method.theta, setting.method.rate
    assert isinstance(theta, float)
    assert isinstance(rate, float)
    lr = land.setting(_go_down(land, _place(theta, rate, setting.lr)))[2]
    return not low / _END <= lr <= high * _END


def _apart(places: Sequence[Point], count: int) -> list[Point]:
    """Return the first places that are apart from one another: each may lie in a valley of its own."""
    found: list[Point] = []
    for at in places:
        if all(max(abs(x - y) for x, y in zip(at, other, strict=True)) > 1.0 for other in found):
            found.append(at)
    return found[:count]


def _go_down(land: _Landscape, start: Point) -> Point:
    """Return the lowest place that is found from a start; a second simplex begins where the first one ends."""
    return minimise(land.loss, minimise(land.loss, start).at, size=0.15).at


def _spread(low: float, high: float, count: int) -> Iterator[float]:
    """Yield numbers from low to high, at equal ratios."""
    for i in range(count):
        yield low * (high / low) ** (i / (count - 1))


def _describe(problem: Quadratic, theta: float, rate: float, lr: float, steps: int, beta: float) -> Setting:
    method = centred(theta, rate)
    coupling = method.coupling(1, lr)
    lrs = _range(lambda lr: problem.loss(coupling, lr, steps, beta).total, lr)
    limit = stable_range(coupling, beta) / problem.largest
    return Setting(method, lr, problem.loss(coupling, lr, steps, beta), lrs, limit)


def tune_free(problem: Quadratic, steps: int) -> Setting:
    """Return schedule-free averaging at its best learning rate, around an optimizer without momentum."""
    small = problem.merged(_SEARCHED)

    def loss(lr: float) -> float:
        return small.loss_free(_FREE_BETA, lr, steps).total

    def around(at: Point) -> float:
        return _around(loss, math.exp(at[0]))

    shares = {min(0.003, SLOW / steps), 0.003, 0.03, 0.3, 1.5}
    ends = [minimise(around, (math.log(share / problem.largest),), end=0.2) for share in shares]
    lr = math.exp(minimise(around, min(ends).at, size=0.1).at[0])
    limit = stable_range(watch(1.0), 0.0) / problem.largest  # of its first step, at which c = 1
    lrs = _range(lambda each: problem.loss_free(_FREE_BETA, each, steps).total, lr)
    return Setting(schedule_free(_FREE_BETA), lr, problem.loss_free(_FREE_BETA, lr, steps), lrs, limit)


def _around(loss: Callable[[float], float], lr: float) -> float:
    """Return the mean loss at a learning rate and at both beside it: what lies between zeros of a swing counts too."""
    return (loss(lr / AROUND) + loss(lr) + loss(lr * AROUND)) / 3


def _range(loss: Callable[[float], float], best: float) -> tuple[float, float]:
    """Return the learning rates around the best one at which the loss is WITHIN times as large."""
    allowed = WITHIN * loss(best)

    def end(factor: float) -> float:
        inside, outside = best, best * factor
        while inside != outside and 1e-6 < outside / best < 1e6 and loss(outside) <= allowed:
            inside, outside = outside, outside * factor
        for _ in range(5):
            middle = math.sqrt(inside * outside)
            inside, outside = (middle, outside) if loss(middle) <= allowed else (inside, middle)
        return inside

    return end(1 / _STRIDE), end(_STRIDE)


def scaled(setting: Setting, scale: float) -> Setting:
    """Return the setting of a loss whose curvatures are 1/scale times as large: all its rates are scale times so."""
    low, high = setting.lrs
    return Setting(setting.method, scale * setting.lr, setting.loss, (scale * low, scale * high), scale * setting.limit)
