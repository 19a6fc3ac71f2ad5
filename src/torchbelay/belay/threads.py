"""Exports beside other threads."""

from collections.abc import Iterator
from contextlib import contextmanager

from torchbelay.physics.warnings import warn

from .company import Member


class Exports:
    """Lets no block of another thread begin or end during an export, and warns, once, if another thread trains then.

    An export lets the model hold other tensors for a moment, in which a thread that trains may be in a forward pass.
    """

    def __init__(self, member: Member) -> None:
        self._member, self._warned = member, False

    @contextmanager
    def one(self, what: str) -> Iterator[None]:
        """Export inside this block."""
        with self._member.lock:
            self._member.settled_swap()  # which may end a step
            before = self._steps()
            yield
        if self._steps() != before and not self._warned:
            self._warned = True
            warn(
                f"{what}() while another thread trains: the model holds the average for a moment, and a forward pass "
                "in that moment would use it. Call it in the thread that trains, and write what it returns in this one"
            )

    def _steps(self) -> int:
        """Return how many steps were seen so far."""
        return sum(stepper.steps_seen for stepper in self._member.steppers())
