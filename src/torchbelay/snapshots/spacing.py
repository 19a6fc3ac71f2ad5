"""The steps at which snapshots are taken."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, get_args

from torchbelay.physics import arguments

Spacing = Literal["even", "log"]

PER_DOUBLING = 16  # snapshots of "log" while the number of steps doubles


@dataclass(frozen=True)
class Rhythm:
    """Every so many steps ("even"), or farther and farther apart ("log"), in multiples of `every`.

    >>> Rhythm(100).next(250), Rhythm(100, "log").next(10_000)
    (300, 10400)
    """

    every: int
    spacing: Spacing = "even"

    def __post_init__(self) -> None:
        arguments.whole("every", self.every, low=1)
        arguments.one_of("spacing", self.spacing, get_args(Spacing))

    def steps(self) -> Iterator[int]:
        """Yield all steps, without end."""
        due = self.every
        while True:
            yield due
            further = math.floor(due * 2 ** (1 / PER_DOUBLING) / self.every) * self.every
            due = max(due + self.every, further if self.spacing == "log" else 0)

    def next(self, step: int) -> int:
        """Return the first step after this one at which a snapshot is taken."""
        if self.spacing == "even":
            return (step // self.every + 1) * self.every
        return next(due for due in self.steps() if due > step)

    def count(self, steps: int) -> int:
        """Return how many snapshots a run of so many steps has, the one of its last step included."""
        if self.spacing == "even":
            return -(-steps // self.every)
        taken = list(takewhile(lambda due: due <= steps, self.steps()))
        return len(taken) + (not taken or taken[-1] < steps)

    def __str__(self) -> str:
        return f"every {self.every:,} steps" + (", farther apart later" if self.spacing == "log" else "")
