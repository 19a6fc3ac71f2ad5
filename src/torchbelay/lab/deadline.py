"""A time at which a study stops by itself, so that it fits into the minutes that a GPU is lent for."""

import time
from collections.abc import Callable


class OutOfTimeError(Exception):
    """The next unit of work would not be finished in time."""


class Deadline:
    """Counts down; without a number of seconds there is no end.

    >>> now = [0.0]
    >>> deadline = Deadline(10.0, clock=lambda: now[0])
    >>> deadline.check()
    >>> deadline.spent(6.0)  # a unit took 6 s, so the next one will
    >>> now[0] = 5.0
    >>> deadline.check()
    Traceback (most recent call last):
    torchbelay.lab.deadline.OutOfTimeError: the next unit takes about 6 s, and 5 s are left
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end = clock, None if seconds is None else clock() + seconds
        self._latest = 0.0

    def spent(self, seconds: float) -> None:
        """Note how long a unit took: the next one is taken to be as long."""
        self._latest = seconds

    def check(self) -> None:
        """Raise OutOfTimeError if the next unit would end too late."""
        if self._end is None:
            return
        left = self._end - self._clock()
        if left <= self._latest:
            raise OutOfTimeError(f"the next unit takes about {self._latest:.0f} s, and {max(0.0, left):.0f} s are left")
