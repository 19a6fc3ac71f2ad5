"""Numbers that change with the step: what may stand in place of a decay, a θ, a rate or a β.

A schedule is any function of the step, which counts from 1 since the average began. `cosine` and `linear` are small
dataclasses, which a checkpoint holds as a whole. Of a bare function it holds the couplings of some steps, and whoever
loads it is warned that the function may differ at the others.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from . import arguments
from .method import uncalled

Schedule = Callable[[int], float]

__all__ = ["cosine", "linear"]


@dataclass(frozen=True)
class _Ramp:
    """The part that all ramps share: `start` at step 1, `end` at step `steps` and ever after."""

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            arguments.keep(self, name, low=-math.inf)
        arguments.whole("steps", self.steps, low=2)

    def __call__(self, step: int) -> float:
        """Return the number of this step."""
        if step >= self.steps:
            return self.end
        if step <= 1:
            return self.start
        return self.end + (self.start - self.end) * self._left((step - 1) / (self.steps - 1))

    def _left(self, progress: float) -> float:
        """Return the share of the way that is left, 1 at progress 0 and 0 at progress 1."""
        raise NotImplementedError


@dataclass(frozen=True)
class cosine(_Ramp):
    """Half a cosine: `start` at step 1, `end` at step `steps` and ever after, flat at both ends.

        end + (start − end)·(1 + cos(π·(t − 1)/(steps − 1)))/2

    When to use it: for a teacher that follows ever more slowly, as DINO's and BYOL's. Theirs reach `end` one step after
    the run: for a run of N steps, `cosine(0.996, 1.0, N + 1)` is theirs.

    >>> momentum = cosine(0.996, 1.0, steps=101)
    >>> momentum(1), round(momentum(51), 12), momentum(101), momentum(1000)
    (0.996, 0.998, 1.0, 1.0)
    """

    def _left(self, progress: float) -> float:
        return (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class linear(_Ramp):
    """A straight line: `start` at step 1, `end` at step `steps` and ever after.

        end + (start − end)·(steps − t)/(steps − 1)

    When to use it: for a warm-up or a fade of anything, for instance of `ema_nesterov`'s β.

    >>> [linear(0.0, 0.9, steps=4)(t) for t in (1, 4, 5)], round(linear(0.0, 0.9, steps=4)(2), 12)
    ([0.0, 0.9, 0.9], 0.3)
    """

    def _left(self, progress: float) -> float:
        return 1 - progress


class Bounds(NamedTuple):
    """The range that a number and every number of a schedule must be in."""

    low: float
    high: float = math.inf
    open_low: bool = True
    open_high: bool = True


def check(name: str, given: float | Schedule, bounds: Bounds) -> float | Schedule:
    """Return a number as a float, or a schedule; refuse one out of range at its first or its last step."""
    if not callable(given):
        return arguments.number(name, given, **bounds._asdict())
    if (maker := uncalled(given)) is not None:
        raise TypeError(f"{name}={maker} was not called; give the schedule that it makes, as {maker}(...)")
    for step in sorted({1, max(1, horizon(given))}):
        at(name, given, step, bounds)
    return given


def keep(owner: object, name: str, bounds: Bounds) -> None:
    """Check a field of a frozen dataclass as `check` does, and store a number there as a plain float."""
    object.__setattr__(owner, name, check(name, getattr(owner, name), bounds))


def at(name: str, given: float | Schedule, step: int, bounds: Bounds) -> float:
    """Return a number, or what a schedule returns for this step if that is in range, else raise.

    >>> unit = Bounds(0, 1)
    >>> at("decay", 0.5, 7, unit), at("decay", linear(0.0, 1.0, 11), 6, unit)
    (0.5, 0.5)
    """
    if not callable(given):
        return given
    try:
        return arguments.number(name, given(step), **bounds._asdict())
    except (TypeError, ValueError) as problem:
        raise type(problem)(f"{name}={given!r} at step {step}: {problem}") from problem


def horizon(*given: object) -> int:
    """Return the last step at which any of these changes, as far as they say by an attribute `steps`; else 0.

    >>> horizon(0.5, linear(0.0, 1.0, 11), lambda step: 0.1), horizon(0.5)
    (11, 0)
    """
    found = [getattr(each, "steps", 0) for each in given if callable(each)]
    return max([steps for steps in found if isinstance(steps, int)], default=0)
