"""Parts in processes of their own: what comes back from them, and what is left of them."""

import multiprocessing
import os
import signal
import struct
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from helpers.golden_records import QUICK, quick
from torchbelay.lab.part import Settings
from torchbelay.lab.plane import fig1
from torchbelay.lab.records import without_times
from torchbelay.lab.workers import Done, Event, Failed, Progress, _receive, work


def events(*names: str, alone: tuple[str, ...] = (), jobs: int = 1) -> list[Event]:
    found = list(work(names, alone, QUICK, jobs))
    assert multiprocessing.active_children() == []
    return found


def test_a_part_brings_back_the_records_that_it_gives_here() -> None:
    *progress, done = events("fig1")
    assert isinstance(done, Done)
    assert done.part == "fig1"
    assert [without_times(r) for r in done.records] == [without_times(r) for r in quick(fig1)]
    assert done.wall_s > 0
    assert all(isinstance(event, Progress) for event in progress)


def test_a_part_that_fails_says_why_in_a_line_and_all_that_is_known() -> None:
    (failed,) = events("no such part")
    assert isinstance(failed, Failed)
    assert (failed.part, failed.why) == ("no such part", "KeyError: 'no such part'")
    assert failed.details.startswith("Traceback")
    assert "workers.py" in failed.details


def test_a_failure_does_not_keep_others_from_their_end() -> None:
    ends = {event.part: type(event) for event in events("fig1", "b", "c", jobs=3) if not isinstance(event, Progress)}
    assert ends == {"fig1": Done, "b": Failed, "c": Failed}


def test_the_last_part_begins_first_and_those_that_want_to_be_alone_end_last() -> None:
    assert [event.part for event in events("a", "b", "c", "d", alone=("a", "c"))] == ["d", "b", "a", "c"]


def test_parts_that_want_to_be_alone_are() -> None:
    at_once: list[int] = []
    running = work(("a", "b", "c", "d", "e"), ("b", "e"), QUICK, 3)
    for event in running:
        at_once.append(len(multiprocessing.active_children()))
        if event.part in ("b", "e"):
            assert at_once[-1] <= 1
    assert len(at_once) == 5


@pytest.fixture
def begun() -> Iterator[tuple[Iterator[Event], Event]]:
    """A part in the middle of its work."""
    running = work(["fig3"], (), Settings(quick=True), 1)
    yield running, next(running)
    running.close()


def test_leaving_early_ends_the_processes(begun: tuple[Iterator[Event], Event]) -> None:
    running, first = begun
    assert isinstance(first, Progress)
    assert (first.part, first.units > 0) == ("fig3", True)
    (process,) = multiprocessing.active_children()
    running.close()
    assert not process.is_alive()
    assert multiprocessing.active_children() == []


def test_a_killed_process_is_a_failure(begun: tuple[Iterator[Event], Event]) -> None:
    running, _ = begun
    (process,) = multiprocessing.active_children()
    os.kill(process.pid, signal.SIGKILL)
    *_, last = running
    assert last == Failed("fig3", "its process ended with status -9", "")


def test_a_process_is_deaf_to_ctrl_c(begun: tuple[Iterator[Event], Event]) -> None:
    running, _ = begun
    (process,) = multiprocessing.active_children()
    os.kill(process.pid, signal.SIGINT)
    later = [next(running) for _ in range(3)]  # they come a tenth of a second apart: it had the time to hear
    assert not [event for event in later if isinstance(event, Failed)]


def test_starting_processes_leaves_ones_own_hearing_as_it_was() -> None:
    before = signal.getsignal(signal.SIGINT)
    events("no such part")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("sent", [b"", struct.pack("!i", 100), struct.pack("!i", 100) + b"half of it"])
def test_a_message_that_breaks_off_is_a_failure(sent: bytes) -> None:
    class Gone:
        exitcode = -9

        def join(self) -> None:
            """It has ended."""

    read, write = os.pipe()
    os.write(write, sent)
    os.close(write)
    with Connection(read) as pipe:
        assert _receive(pipe, "fig1", Gone()) == Failed("fig1", "its process ended with status -9", "")
