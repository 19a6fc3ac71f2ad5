"""Checks of a trainer on two real processes of gloo (or more), which a script runs and a test reads.

CHECKS = {"name": function, …}                      # in the script: each gets a folder that both processes share
main(CHECKS, limit=600.0)                           # writes FOLDER/said.json, for `python SCRIPT FOLDER`

said = results(SCRIPT, base, worker_id, limit=600)  # in the test: null for a check that holds, or an error
"""

import faulthandler
import json
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from filelock import FileLock

import torchbelay as tb
from helpers.ranks import finish_twice_if_needed

WORLD = 2
Check = Callable[[Path], None]
Results = dict[str, str | None]


def main(checks: Mapping[str, Check], *, limit: float, world: int = WORLD) -> None:
    """Fork all processes; the folder is the script's argument. Results are added to those of worlds before."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder = Path(sys.argv[1])
    store = folder / f"store{world}"
    finish_twice_if_needed(_run, world, world, folder, checks, limit, limit=limit, store=store)


def _run(rank: int, world: int, folder: Path, checks: Mapping[str, Check], limit: float) -> None:
    """Run all checks in one process."""
    faulthandler.dump_traceback_later(limit - 10)
    torch.set_num_threads(1)
    warnings.simplefilter("error", category=tb.BelayWarning)
    warnings.filterwarnings("ignore", message=".* is momentum twice", category=tb.BelayWarning)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "ACCELERATE_USE_CPU": "yes",
    }
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    known = folder / "said.json"
    said: Results = json.loads(known.read_text()) if known.exists() else {}
    dist.barrier()  # the first process writes there soon
    for name, each in checks.items():
        mine = None
        try:
            torch.manual_seed(0)
            each(folder / name)
        except BaseException:  # torch's CheckpointException is no Exception
            mine = f"process {rank}:\n{traceback.format_exc()}"
            sys.stderr.write(f"{name}: {mine}")  # in the log, if the others wait now in vain
        everybody: list[str | None] = [None] * world
        try:
            dist.all_gather_object(everybody, mine)
        except Exception:  # another process is somewhere else
            said[name] = mine or traceback.format_exc()
            break
        finally:
            if rank == 0:
                said.setdefault(name, next(filter(None, everybody), mine))
                known.write_text(json.dumps(said))
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def results(script: str, base: Path, worker_id: str, *, limit: float) -> Results:
    """Return what every check said; the script runs once, whatever number of workers pytest has."""
    shared = base if worker_id == "master" else base.parent
    folder = shared / Path(script).stem
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            _start(script, folder, limit)
    assert (folder / "said.json").exists(), (folder / "log").read_text()
    found: Results = json.loads((folder / "said.json").read_text())
    return found


def _start(script: str, folder: Path, limit: float) -> None:
    paths = [*sys.path, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with (folder / "log").open("w") as log:
        subprocess.run(
            [sys.executable, script, str(folder)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=3 * limit,  # two attempts, and the imports
            check=False,
        )
