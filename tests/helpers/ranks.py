"""Several real processes on gloo: one start for each number of ranks, and every check in it.

    python ranks.py FOLDER

imports everything once and then forks, so that nine ranks cost the time of one import. For each number of ranks it
writes the result of every check to FOLDER/<ranks>.json: null, or the error of the first rank that failed.
"""

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

WORLDS = (2, 1, 3, 4)  # 2 first: it saves what the others load
LIMIT = 600.0  # seconds for the checks of one number of ranks; they take a few, and many on a busy machine
PATIENCE = 180.0  # seconds in which one rank waits for the others


def run(rank: int, world: int, folder: Path) -> None:
    """Run all checks of one rank. Ranks that disagree stop, because later checks would wait for each other in vain."""
    import torch
    import torch.distributed as dist

    import torchbelay as tb
    from helpers import rank_checks

    faulthandler.dump_traceback_later(LIMIT - 10)  # what it was waiting for, if it was
    torch.set_num_threads(1)
    warnings.simplefilter("error", category=tb.BelayWarning)
    warnings.filterwarnings("ignore", message=".* is momentum twice", category=tb.BelayWarning)  # the sums are tested
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store{world}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=PATIENCE),
    )
    said: dict[str, str | None] = {}
    for name, check in rank_checks.for_ranks(world).items():
        try:
            torch.manual_seed(0)
            check(folder)
            mine = None
        except BaseException:  # torch's CheckpointException is no Exception
            mine = f"rank {rank} of {world}:\n{traceback.format_exc()}"
        everybody: list[str | None] = [None] * world
        try:
            dist.all_gather_object(everybody, mine)
        except Exception:  # another rank is somewhere else
            everybody = [mine or traceback.format_exc()]
        said[name] = next(filter(None, everybody), None)
        if rank == 0:
            (folder / f"{world}.json").write_text(json.dumps(said))
        if mine is not None and len(everybody) == 1:
            break
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def finish(target: Callable[..., None], world: int, *arguments: object, limit: float) -> list[int | None]:
    """Run `target(rank, *arguments)` in a fork for each rank, and return the exit statuses.

    After `limit` seconds, those that still run are killed.
    """
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=target, args=(rank, *arguments)) for rank in range(world)]
    end = time.monotonic() + limit
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def finish_twice_if_needed(
    target: Callable[..., None], world: int, *arguments: object, limit: float, store: Path
) -> None:
    """Do `finish`, and once more if a process crashed.

    Seen once in six runs with 3 ranks: glibc ended a forked rank ("double free"). Such a run says nothing of the checks
    after it. A check that fails ends no process.
    """
    for attempt in (1, 2):
        store.unlink(missing_ok=True)
        statuses = finish(target, world, *arguments, limit=limit)
        crashed = [-status for status in statuses if status in (-signal.SIGABRT, -signal.SIGSEGV)]
        if not crashed:
            return
        sys.stderr.write(f"attempt {attempt} with {world} ranks: ended by signal {crashed[0]}\n")


def main(folder: Path) -> None:
    """Fork the ranks of each world, one world after the other."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    from helpers import rank_checks  # noqa: F401  # the imports, once for all

    for world in WORLDS:
        finish_twice_if_needed(run, world, world, folder, limit=LIMIT, store=folder / f"store{world}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
