"""The states that a stepper can be in: idle, under way, skipped, or ahead after a step that raised.

    Idle ── before() ──► UnderWay ── after() ──► Idle
                            └─ the optimizer raises, before() again ──► UnderWay, told what has moved already
    Idle ── before(), and GradScaler skips the step ──► Skipped ── after() ──► Idle

`moved` is 1 if the averages have moved for a step that has not ended, else 0 or None. It may live on a device.
"""

from dataclasses import dataclass

from torch import Tensor

from .plan import Work


@dataclass(frozen=True)
class Idle:
    """No step is under way, and weights and averages belong to the same step."""

    moved: None = None


@dataclass(frozen=True)
class Ahead:
    """No step is under way, but the averages have moved for one that raised: the next must not move them again."""

    moved: Tensor


@dataclass(frozen=True)
class UnderWay:
    """`before()` has been called, `after()` not yet. If the optimizer raises, this state stays until the next step."""

    work: Work
    moved: Tensor | None = None


@dataclass(frozen=True)
class Skipped:
    """A step is under way that mixed-precision training skips: nothing moves in it."""

    moved: Tensor | None


State = Idle | Ahead | UnderWay | Skipped
