"""Run parts in processes of their own, one thread each, several at a time."""

import multiprocessing
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .part import Record, Settings


@dataclass(frozen=True)
class Progress:
    """The units of a part that were done since the last report."""

    part: str
    units: int


@dataclass(frozen=True)
class Result:
    """The records of a part that ran to its end."""

    part: str
    records: list[Record]
    wall_s: float


@dataclass(frozen=True)
class Failure:
    """Why a part did not run to its end: one line, and all details."""

    part: str
    why: str
    details: str


Event = Progress | Result | Failure


def work(names: Sequence[str], exclusive: Sequence[str], settings: Settings, jobs: int) -> Iterator[Event]:
    """Run parts, at most `jobs` at a time, the last one first; those in `exclusive` run last, one by one.

    Leaving the loop early, for example by Ctrl-C, ends the processes.
    """
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        # torch is then imported once and not by every process; a first optimizer would also import torch._dynamo
        context.set_forkserver_preload([f"{__package__}.registry", "torch._dynamo"])
        resource_tracker.ensure_running()  # ensure_running() below would start it, too, and unblock all signals
        with _blocked_interrupts():
            forkserver.ensure_running()
    shared = [name for name in names if name not in exclusive]
    waiting = [name for name in names if name in exclusive][::-1] + shared  # taken from the end
    running: dict[Connection, tuple[str, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < (1 if waiting[-1] in exclusive else jobs):
                name = waiting.pop()
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_run_part, args=(theirs, name, settings), daemon=True)
                process.start()
                theirs.close()
                running[mine] = (name, process)
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                name, process = running[ready]
                event = _receive(ready, name, process)
                yield event
                if not isinstance(event, Progress):
                    process.join()
                    del running[ready]
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()


@contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """Block Ctrl-C inside a block; processes that start in the block ignore Ctrl-C for good.

    Ctrl-C reaches all processes of a terminal, but only the main process shall act on it. It does at the end of the
    block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _receive(pipe: Connection, name: str, process: Any) -> Event:
    """Return the next event of a part; a process that ended without a last event has failed."""
    try:
        event = pipe.recv()
        assert isinstance(event, Progress | Result | Failure)
        return event
    except (EOFError, OSError):  # no message, or half of one: the process was killed, or ran out of memory
        process.join()
        return Failure(name, f"its process ended with status {process.exitcode}", "")


def _run_part(pipe: Connection, name: str, settings: Settings) -> None:
    """Run a part in this process, and send its events."""
    from .registry import PARTS

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for processes that do not come from the fork server
    torch.set_num_threads(1)
    last, pending = time.monotonic(), 0

    def tick(units: int) -> None:
        nonlocal last, pending
        pending += units
        if time.monotonic() - last > 0.1:
            pipe.send(Progress(name, pending))
            last, pending = time.monotonic(), 0

    start = time.monotonic()
    try:
        records = PARTS[name].run(settings, tick)
        pipe.send(Result(name, records, time.monotonic() - start))
    except BrokenPipeError:  # the main process has ended
        return
    except Exception as error:
        pipe.send(Failure(name, f"{type(error).__name__}: {error}", traceback.format_exc()))
