"""Holding signals back while tensors are half-way: their Python handlers run between any two lines, and may raise."""

# What the module `signal` wraps: it makes an enum of every number, which takes ten times as long as the rest.
import _signal  # type: ignore[import-not-found]
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from signal import NSIG
from types import FrameType
from typing import Any, ClassVar

Handlers = dict[int, Callable[[int, FrameType | None], Any]]
Held = list[tuple[int, FrameType | None]]

_NUMBERS = range(1, NSIG)


class _Last:
    """The handlers as last seen; they seldom change, and each step asks for all 64."""

    found: ClassVar[list[Any]] = []
    handlers: ClassVar[Handlers] = {}


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold back every signal that has a Python handler until the block is done; then deliver each, in order.

    Python runs handlers in the main thread alone, so there is nothing to hold back in others.
    """
    handlers, held = _handlers(), Held()
    try:
        try:
            for number in handlers:
                _signal.signal(number, lambda number, frame: held.append((number, frame)))
            yield
        finally:
            _restore(handlers)
    finally:
        _restore(handlers)  # again: a signal may have been delivered between two of them
        _deliver(held, handlers)


def _handlers() -> Handlers:
    """Return the Python handlers, by the number of their signal."""
    if threading.get_ident() != threading.main_thread().ident:
        return {}
    found = list(map(_signal.getsignal, _NUMBERS))
    if found != _Last.found:
        _Last.found, _Last.handlers = found, {n: handler for n, handler in enumerate(found, 1) if callable(handler)}
    return _Last.handlers


def _restore(handlers: Handlers) -> None:
    for number, handler in handlers.items():
        if _signal.getsignal(number) is not handler:
            _signal.signal(number, handler)


def _deliver(held: Held, handlers: Handlers) -> None:
    """Call the handler of every signal that was held back, whatever the others raise."""
    with ExitStack() as calls:  # which are made from the last to the first
        for number, frame in reversed(held):
            calls.callback(handlers[number], number, frame)
