"""Exports in another thread than the one that trains."""

from collections.abc import Iterable
from threading import Thread, current_thread
from weakref import ref

from torchbelay.physics.warnings import warn


class Elsewhere:
    """Warns, once, if the thread that trained the model last still runs while another one exports.

    An export lets the model hold other tensors for a moment, in which that thread may be in a forward pass.
    """

    def __init__(self) -> None:
        self._warned = False

    def look(self, trained: Iterable[ref[Thread] | None], what: str) -> None:
        """Look whether a thread that took the last step of an optimizer is another one, and still runs."""
        threads = [thread() for thread in trained if thread is not None]
        if self._warned or all(t is None or t is current_thread() or not t.is_alive() for t in threads):
            return
        self._warned = True
        warn(
            f"{what}() in another thread than the one that took the last step, which still runs: the model holds the "
            "average for a moment, and a forward pass in that moment would use it. If that can be, call it in the "
            "thread that trains, and write what it returns in this one"
        )
