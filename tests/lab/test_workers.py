"""Parts in processes of their own: the events they send, and that no process is left over."""

import importlib
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
from torchbelay.lab.workers import Event, Failure, Progress, Result, _receive, work


def events(*names: str, exclusive: tuple[str, ...] = (), jobs: int = 1) -> list[Event]:
    found = list(work(names, exclusive, QUICK, jobs))
    assert multiprocessing.active_children() == []
    return found


def test_a_part_returns_the_records_that_it_gives_in_this_process() -> None:
    *progress, done = events("fig1")
    assert isinstance(done, Result)
    assert done.part == "fig1"
    assert [without_times(r) for r in done.records] == [without_times(r) for r in quick(fig1)]
    assert done.wall_s > 0
    assert all(isinstance(event, Progress) for event in progress)


def test_a_part_that_fails_gives_one_line_and_a_traceback() -> None:
    (failed,) = events("no such part")
    assert isinstance(failed, Failure)
    assert (failed.part, failed.why) == ("no such part", "KeyError: 'no such part'")
    assert failed.details.startswith("Traceback")
    assert "workers.py" in failed.details


def test_a_failure_does_not_stop_the_others() -> None:
    ends = {event.part: type(event) for event in events("fig1", "b", "c", jobs=3) if not isinstance(event, Progress)}
    assert ends == {"fig1": Result, "b": Failure, "c": Failure}


def test_the_last_part_starts_first_and_exclusive_parts_run_last() -> None:
    assert [event.part for event in events("a", "b", "c", "d", exclusive=("a", "c"))] == ["d", "b", "a", "c"]


def test_exclusive_parts_run_alone() -> None:
    at_once: list[int] = []
    running = work(("a", "b", "c", "d", "e"), ("b", "e"), QUICK, 3)
    for event in running:
        at_once.append(len(multiprocessing.active_children()))
        if event.part in ("b", "e"):
            assert at_once[-1] <= 1
    assert len(at_once) == 5


@pytest.fixture
def begun() -> Iterator[tuple[Iterator[Event], Event]]:
    """Start a part, and return its events and the first of them."""
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
    assert last == Failure("fig3", "its process ended with status -9", "")


def test_a_process_ignores_ctrl_c(begun: tuple[Iterator[Event], Event]) -> None:
    running, _ = begun
    (process,) = multiprocessing.active_children()
    os.kill(process.pid, signal.SIGINT)
    later = [next(running) for _ in range(3)]  # they come a tenth of a second apart: enough time for the signal
    assert not [event for event in later if isinstance(event, Failure)]


def test_starting_processes_leaves_the_signal_handler_as_it_was() -> None:
    before = signal.getsignal(signal.SIGINT)
    events("no such part")
    assert signal.getsignal(signal.SIGINT) is before


def test_the_fork_server_loads_the_parts_once_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context("forkserver")
    preloaded: list[str] = []
    monkeypatch.setattr(type(context), "set_forkserver_preload", lambda _, names: preloaded.extend(names))
    events("no such part")
    assert preloaded[0] == "torchbelay.lab.registry"
    for name in preloaded:
        importlib.import_module(name)  # the server ignores a name that it cannot import


@pytest.mark.parametrize("sent", [b"", struct.pack("!i", 100), struct.pack("!i", 100) + b"half of it"])
def test_a_message_that_breaks_off_is_a_failure(sent: bytes) -> None:
    class Gone:
        exitcode = -9

        def join(self) -> None:
            """Return at once: the process has ended."""

    read, write = os.pipe()
    os.write(write, sent)
    os.close(write)
    with Connection(read) as pipe:
        assert _receive(pipe, "fig1", Gone()) == Failure("fig1", "its process ended with status -9", "")
