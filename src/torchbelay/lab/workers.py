"""Parts at work in processes of their own, one thread each, as many at a time as there are cores."""

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
    """So many units of a part have been done since the last word of it."""

    part: str
    units: int


@dataclass(frozen=True)
class Done:
    """A part has come to its end."""

    part: str
    records: list[Record]
    wall_s: float


@dataclass(frozen=True)
class Failed:
    """A part has not: why in a line, and all that is known."""

    part: str
    why: str
    details: str


Event = Progress | Done | Failed


def work(names: Sequence[str], alone: Sequence[str], settings: Settings, jobs: int) -> Iterator[Event]:
    """Run parts side by side, the last one first, and those in `alone` after all others, one by one.

    Leaving the loop early, as by Ctrl-C, ends the processes.
    """
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        # so that torch is imported once, not by every process; its first optimizer would import torch._dynamo
        context.set_forkserver_preload([f"{__package__}.parts", "torch._dynamo"])
        resource_tracker.ensure_running()  # which the next line would do, but it ends all deafness
        with _deaf():
            forkserver.ensure_running()
    shared = [name for name in names if name not in alone]
    waiting = [name for name in names if name in alone][::-1] + shared  # taken from the end
    running: dict[Connection, tuple[str, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < (1 if waiting[-1] in alone else jobs):
                name = waiting.pop()
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_serve, args=(theirs, name, settings), daemon=True)
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
def _deaf() -> Iterator[None]:
    """Processes begun in here do not hear Ctrl-C: it reaches all of them, but the one who asked for them decides.

    That one hears it at the end of the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _receive(pipe: Connection, name: str, process: Any) -> Event:
    try:
        event = pipe.recv()
        assert isinstance(event, Progress | Done | Failed)
        return event
    except (EOFError, OSError):  # it can no longer say what became of it, or not to the end: killed, or out of memory
        process.join()
        return Failed(name, f"its process ended with status {process.exitcode}", "")


def _serve(pipe: Connection, name: str, settings: Settings) -> None:
    """What a process does."""
    from .registry import PARTS

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in _deaf, for processes that nobody forks
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
        pipe.send(Done(name, records, time.monotonic() - start))
    except BrokenPipeError:  # nobody listens any more
        return
    except Exception as error:
        pipe.send(Failed(name, f"{type(error).__name__}: {error}", traceback.format_exc()))
