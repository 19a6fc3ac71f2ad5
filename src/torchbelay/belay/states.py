"""The states that a stepper can be in: idle, under way, skipped, or ahead after a step that raised.

    Idle ─── before() ───────────────────► UnderWay ─── after() ───► Idle
    Idle ─── before(), GradScaler skips ─► Skipped ──── after() ───► Idle

If the optimizer raises, `after()` is not called, and the state stays `UnderWay`. The step may then be taken again:

    UnderWay ─ before() ───────────────────► UnderWay ─ after() ───► Idle
    UnderWay ─ before(), GradScaler skips ─► Skipped ── after() ───► Ahead

A checkpoint that was saved after such a step is resumed in `Ahead`. From there a step goes on as from `UnderWay`.

`led` says whether `lead()`, the work before the optimizer's step, is already done for a step that has not ended: 1 if
so, 0 or None if not. It is a tensor, because only the device may know.
"""

from dataclasses import dataclass

from torch import Tensor

from .plan import Work


@dataclass(frozen=True)
class Idle:
    """No step is under way, and weights and averages belong to the same step."""

    led: None = None


@dataclass(frozen=True)
class Ahead:
    """No step is under way, but `lead()` was done for one that raised: the next step must not do it again."""

    led: Tensor


@dataclass(frozen=True)
class UnderWay:
    """`before()` has been called, `after()` not yet. If the optimizer raises, this state stays until the next step."""

    work: Work
    led: Tensor | None = None


@dataclass(frozen=True)
class Skipped:
    """A step is under way that mixed-precision training skips: nothing moves in it."""

    led: Tensor | None


State = Idle | Ahead | UnderWay | Skipped
