"""SIGINT and SIGTERM during a training."""

import signal
import threading
from types import FrameType
from typing import Any


class StopSignal:
    """Notes SIGINT and SIGTERM, so that training stops after the current step.

    With `once`, a second signal ends the process at once. Under torchrun it must not: torchrun may pass a signal on
    twice, and itself ends processes that do not stop in time.
    """

    def __init__(self, *, once: bool) -> None:
        self.signal: int | None = None
        self._once = once
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for which in (signal.SIGINT, signal.SIGTERM):
                self._before[which] = signal.signal(which, self._notice)
        return self

    def _notice(self, which: int, frame: FrameType | None) -> None:
        self.signal = which
        if self._once:
            self._restore()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def __exit__(self, *exception: object) -> None:
        self._restore()
