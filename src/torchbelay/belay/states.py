"""The states that a stepper can be in: idle, under way, or skipped.

    Idle ─── before() ─────────────────────────────► UnderWay ─── after() ───► Idle
    Idle ─── before(), the step is to be ignored ──► Skipped ──── after() ───► Idle

If the optimizer raises, `after()` is not called and the state stays. Nothing has moved then, and the step may be taken
again. But if `after()` itself was stopped in the middle, some averages have moved and others have not (`torn`).
"""

from dataclasses import dataclass

from .plan import Work


@dataclass(frozen=True)
class Idle:
    """No step is under way, and weights and averages belong to the same step."""

    torn: bool = False


@dataclass(frozen=True)
class UnderWay:
    """`before()` has been called, `after()` has not ended yet."""

    work: Work

    @property
    def torn(self) -> bool:
        """Whether weights or averages have begun to move, and not all have moved."""
        return self.work.begun


@dataclass(frozen=True)
class Skipped:
    """A step is under way that is not to count, as mixed-precision training skips it: nothing moves in it."""

    torn: bool = False


State = Idle | UnderWay | Skipped
