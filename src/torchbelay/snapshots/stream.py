"""Many small tasks on a few threads, with progress; the first error, or Ctrl-C, ends them all."""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

Progress = Callable[[int, int], None]  # done, total

Task = TypeVar("Task")

_LOOKS = 0.1  # seconds between two reports of progress


def stream(
    tasks: Iterable[tuple[Task, int]],
    begin: Callable[[], Callable[[Task], None]],
    *,
    threads: int,
    progress: Progress | None = None,
) -> None:
    """Do tasks, given with their sizes, in about their order. Each thread calls `begin()` for a worker of its own.

    Tasks should be too small to be worth several cores each: in these threads, torch uses one core per operation.
    """
    waiting = list(tasks)
    total = sum(count for _, count in waiting)
    done = 0
    taking = threading.Lock()
    stop = threading.Event()
    upcoming = iter(waiting)

    def work() -> None:
        nonlocal done
        torch.set_num_threads(1)
        worker = begin()
        while not stop.is_set():
            with taking:
                task = next(upcoming, None)
            if task is None:
                return
            worker(task[0])
            with taking:
                done += task[1]

    cores = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(max(1, min(threads, len(waiting))), "torchbelay") as pool:
            running = {pool.submit(work) for _ in range(threads)}
            try:
                while running:
                    ended, running = wait(running, _LOOKS, FIRST_EXCEPTION)
                    if progress is not None:
                        progress(done, total)
                    for future in ended:
                        future.result()
            finally:
                stop.set()
    finally:
        torch.set_num_threads(cores)  # for threads that begin later; those that exist have numbers of their own


def usual_threads() -> int:
    """Return how many threads keep a disk and the cores busy: reading waits, so more than there are cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(2 * cores, 16)
