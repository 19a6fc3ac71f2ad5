"""Noisy quadratics on which the expected loss of an average after a run is known exactly.

A direction of curvature h begins at a distance d from the minimum and has gradients h·w1 + ξ. The state of a step
(w1, w2 and, with momentum, the mean gradient) moves by a matrix, so that its mean and its covariance after any number
of steps are found by doubling.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from . import arguments
from .coupling import Coupling, watch
from .inner_momentum import stable_range
from .matrices import Matrix, apply, congruence, repeat, total
from .methods.centred import centred
from .variance import step


class Direction(NamedTuple):
    """Directions of one curvature: how many there are, and for each the squared start and the noise's variance."""

    curvature: float
    number: float
    start: float
    noise: float


class Split(NamedTuple):
    """An expected loss above the minimum: what is left of the start, and what noise has added."""

    bias: float
    noise: float

    @property
    def total(self) -> float:
        """The expected loss."""
        return self.bias + self.noise


@dataclass(frozen=True)
class Quadratic:
    """A quadratic loss with noisy gradients, as its directions.

    >>> problem = Quadratic.of([1.0, 0.1, 0.01], noise=0.01)
    >>> ema = Coupling(a=0.0, b=0.02, p=1.0, q=0.02)
    >>> left = problem.loss(ema, lr=0.5, steps=500)
    >>> round(left.bias, 6), round(left.noise, 6)
    (0.000105, 9.5e-05)
    """

    directions: tuple[Direction, ...]

    @classmethod
    def of(
        cls,
        curvatures: Sequence[float],
        *,
        counts: Sequence[float] | None = None,
        start: float = 1.0,
        noise: float = 1.0,
        batch: float = 1.0,
    ) -> "Quadratic":
        """Return the quadratic with these curvatures, at the same distance from the minimum in all directions.

        `start` is the loss above the minimum at the beginning. A gradient's noise has the variance noise·h/batch, as
        that of a log-likelihood with noise = 1. `counts` says how many directions have each curvature.
        """
        try:
            given = [] if isinstance(curvatures, str | bytes) else list(curvatures)
        except TypeError:  # one number, or nothing that can be counted
            given = []
        if not given:
            raise ValueError(f"curvatures={curvatures!r} has no curvature; give a list of at least one number")
        found = [arguments.number("curvatures", h, low=0) for h in given]
        many = [1.0] * len(found) if counts is None else [arguments.number("counts", n, low=0) for n in counts]
        if len(many) != len(found):
            raise ValueError(f"counts has {len(many)} numbers for {len(found)} curvatures; give one for each")
        begin = arguments.number("start", start, low=0, open_low=False)
        scale = arguments.number("noise", noise, low=0, open_low=False) / arguments.number("batch", batch, low=0)
        if begin == scale == 0:
            raise ValueError("start=0 and noise=0 leave nothing to average; give one of them")
        distance = 2 * begin / sum(n * h for n, h in zip(many, found, strict=True))
        return cls(tuple(Direction(h, n, distance, scale * h) for h, n in zip(found, many, strict=True)))

    @property
    def largest(self) -> float:
        """The largest curvature."""
        return max(each.curvature for each in self.directions)

    @property
    def start(self) -> float:
        """The loss above the minimum at the beginning."""
        return sum(each.number * each.curvature * each.start for each in self.directions) / 2

    def bounded(self, largest: float) -> "Quadratic":
        """Return the same with curvatures of at most `largest`; the loss at the start stays.

        >>> Quadratic.of([1.0, 0.1]).bounded(0.5).largest
        0.5
        """
        if self.largest <= largest:
            return self
        cut = (each._replace(curvature=min(each.curvature, largest)) for each in self.directions)
        starts = (each.start * max(1.0, each.curvature / largest) for each in self.directions)
        return Quadratic(tuple(each._replace(start=start) for each, start in zip(cut, starts, strict=True)))

    def merged(self, most: int) -> "Quadratic":
        """Return about the same quadratic with at most `most` curvatures: neighbours on a log scale become one.

        The loss at the beginning and the noise stay the same, and so do the largest curvature, which sets the stable
        range, and the smallest, whose start is left longest. `most` is at least 3.
        """
        if len(self.directions) <= most:
            return self
        first, *rest, last = sorted(self.directions, reverse=True)
        low, high = math.log(last.curvature), math.log(first.curvature)
        width = (high - low) / (most - 2) or 1.0
        bins: dict[int, list[Direction]] = {}
        for each in rest:
            bins.setdefault(min(most - 3, int((math.log(each.curvature) - low) / width)), []).append(each)
        found = [first, last]
        for group in bins.values():
            n = sum(each.number for each in group)
            h = sum(each.number * each.curvature for each in group) / n
            start = sum(each.number * each.curvature * each.start for each in group) / (n * h)
            noise = sum(each.number * each.curvature * each.noise for each in group) / (n * h)
            found.append(Direction(h, n, start, noise))
        return Quadratic(tuple(found))

    def loss(self, coupling: Coupling, lr: float, steps: int, momentum: float = 0.0) -> Split:
        """Return the expected loss of the average after a run that begins with w2 = w1; infinite if unstable."""
        count = _checked(lr, steps)
        if count == 0:
            return Split(self.start, 0.0)
        if lr * self.largest >= stable_range(coupling, momentum):
            return Split(math.inf, math.inf)
        bias = noise = 0.0
        for h, number, start, variance in self.directions:
            m, kick = step(coupling, lr * h, momentum)
            after, moments = repeat(m, kick, count)
            w2 = apply(after, (1.0, 1.0, 0.0)[: len(m)])[1]
            bias += number * h * start * w2 * w2 / 2
            noise += number * h * variance * lr * lr * moments[1][1] / 2
        return Split(bias, noise)

    def loss_free(self, beta: float, lr: float, steps: int) -> Split:
        """Return the expected loss of schedule-free averaging, c = 1/t, around SGD without momentum.

        It is infinite above the stable range of its first step, that of plain SGD. The range grows with the steps, and
        in the end errors shrink at 9 times this rate, too; but before that they grow by many powers of ten.

        From step 16 on, c is constant over spans in which t grows by an eighth, at the value that leaves as much of
        the earlier average as 1/t does.
        """
        if _checked(lr, steps) == 0:
            return Split(self.start, 0.0)
        if lr * self.largest >= stable_range(watch(1.0), 0.0):
            return Split(math.inf, math.inf)
        spans = [(centred(-beta, c).coupling(1, lr) if c < 1 else None, n) for c, n in _spans(steps)]
        bias = noise = 0.0
        for h, count, start, variance in self.directions:
            # after the first step, c = 1: z, x and y are the same point
            mean: Sequence[float] = (1 - lr * h,) * 2
            moments: Matrix = ((1.0, 1.0), (1.0, 1.0))
            for coupling, n in spans:
                if coupling is None:
                    continue
                m, kick = step(coupling, lr * h, 0.0)
                after, added = repeat(m, kick, n)
                mean, moments = apply(after, mean), total(congruence(after, moments), added)
            bias += count * h * start * mean[1] ** 2 / 2
            noise += count * h * variance * lr * lr * moments[1][1] / 2
        return Split(bias, noise) if math.isfinite(bias + noise) else Split(math.inf, math.inf)


def _checked(lr: float, steps: int) -> int:
    """Return the number of steps; refuse one that is none, or a learning rate that is not a number of at least 0."""
    if type(lr) is not float or not lr >= 0:  # a search asks ten thousands of times
        arguments.number("lr", lr, low=0, open_low=False)
    return steps if type(steps) is int and steps >= 0 else arguments.whole("steps", steps, low=0)


def _spans(steps: int) -> Iterator[tuple[float, int]]:
    """Yield constant rates and for how many steps they last, in place of c = 1/t.

    >>> list(_spans(3)), sum(n for _, n in _spans(5000))
    ([(1.0, 1), (0.5, 1), (0.333..., 1)], 5000)
    """
    done = 0
    while done < steps:
        n = min(max(1, done // 8), steps - done) if done >= 16 else 1
        yield 1 - (done / (done + n)) ** (1 / n), n
        done += n


def typical(start: float = 1.0, noise: float = 1.0, batch: float = 128.0) -> Quadratic:
    """Return the quadratic that stands for an unknown loss: curvatures from 1 to 1e-4, more of them the smaller.

    The largest is 1, so that learning rates are in units of 1/(largest curvature).
    """
    curvatures = [10 ** (-i / 3) for i in range(13)]
    return Quadratic.of(curvatures, counts=[h**-0.5 for h in curvatures], start=start, noise=noise, batch=batch)
