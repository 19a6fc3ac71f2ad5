"""Exceptions at every line of some files, one line after the other, by Python's own tracing.

    for line in every_line(lambda: function(), inside=[folder]):   # counts the lines of an undisturbed call first
        with raising_at(line, inside=[folder]) as place, pytest.raises(Interruption):
            function()
        ...                                                         # what must hold, wherever it was interrupted

A line that runs twice counts twice. Tracing ends with the first exception: what runs after it, to put things in order,
is not interrupted a second time.
"""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torchbelay
from torchbelay.belay.company import Member

EVERY = int(os.environ.get("TORCHBELAY_LINES", "4"))
SOURCE = Path(torchbelay.__file__).parent
STEP = (SOURCE / "belay" / "stepper.py", SOURCE / "belay" / "hooks.py")
# The kernels are Python only in Triton's interpreter; on a GPU nothing interrupts them.
ROOMS = (SOURCE / "belay", SOURCE / "ops")
KERNELS = SOURCE / "ops" / "triton" / "kernels"


class Interruption(BaseException):
    """What is raised; no handler for ordinary errors catches it."""


class Place:
    """The line at which the exception was raised."""

    def __init__(self) -> None:
        self.lines = 0  # that have begun so far
        self.name = "nowhere"

    def __repr__(self) -> str:
        return self.name


@cache
def _is_inside(file: str, folders: tuple[Path, ...]) -> bool:
    places = (Path(file), *Path(file).parents)
    return KERNELS not in places and any(folder in places for folder in folders)


def lines_of(function: Callable[[], Any], inside: Sequence[Path] = ROOMS) -> int:
    """Return how many lines of these files, and of files in these folders, a call of the function runs."""
    gc.collect()  # what other tests left behind may be walked over, and must not vanish between two calls
    with raising_at(None, inside) as place:
        function()
    return place.lines


def every_line(function: Callable[[], Any], inside: Sequence[Path] = ROOMS) -> Iterator[int]:
    """Yield the number of each such line, or of every N-th; the function is called once, undisturbed, to count them.

    `make soak` takes every line. That takes minutes, so other runs take every fourth.
    """
    return iter(range(0, lines_of(function, inside), EVERY))


@contextmanager
def raising_at(line: int | None, inside: Sequence[Path] = ROOMS) -> Iterator[Place]:
    """Raise an Interruption in the block when this line, counted from 0, is about to run; None: only count."""

    def interrupt(place: Place) -> None:
        raise Interruption(place.name)

    with calling_at(line, interrupt, inside) as place:
        yield place


@contextmanager
def signalling_at(line: int | None, number: int, inside: Sequence[Path] = ROOMS) -> Iterator[Place]:
    """Send this process a signal when this line is about to run; its handler raises an Interruption."""

    def interrupt(place: Place) -> None:
        sys.settrace(None)  # the handler, and what runs after it, is not traced
        os.kill(os.getpid(), number)

    def handler(number: int, frame: FrameType | None) -> None:
        raise Interruption(place.name)

    before = signal.signal(number, handler)
    try:
        with calling_at(line, interrupt, inside) as place:
            yield place
    finally:
        signal.signal(number, before)


@contextmanager
def calling_at(line: int | None, call: Callable[[Place], None], inside: Sequence[Path]) -> Iterator[Place]:
    """Call a function with the place when this line, counted from 0, is about to run."""
    place = Place()

    def in_frame(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            place.lines += 1
            if place.lines - 1 == line:
                place.name = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
                call(place)
        return in_frame

    def of_call(frame: FrameType, event: str, argument: Any) -> Any:
        return in_frame if _is_inside(frame.f_code.co_filename, tuple(inside)) else None

    before = sys.gettrace()
    sys.settrace(of_call)
    try:
        yield place
    finally:
        sys.settrace(before)
        # On leaving a block, Python comes to the line of its `with` once more. A tracer that raises there keeps it from
        # calling `__exit__`, which no signal can do. Other threads of later tests would wait for the lock for ever.
        while Member.lock._is_owned():  # type: ignore[attr-defined]
            Member.lock.release()
