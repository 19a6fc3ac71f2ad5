"""Programs of the documentation under torchrun, on processes of gloo."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ATTEMPTS = 4
LIMIT = 600.0  # seconds, for one attempt


def torchrun(arguments: list[str], folder: Path) -> str:
    """Run `torchrun ARGUMENTS` in a folder, and return what the program printed.

    It is run again if a process was aborted: with torch 2.13 one in five programs that use DistributedDataParallel on
    gloo, and nothing else, ends with "terminate called without an active exception" after its last line.
    """
    paths = [*sys.path, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    said = ""
    for _ in range(ATTEMPTS):
        ran = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            printed, said = ran.communicate(timeout=LIMIT)
        finally:
            if ran.poll() is None:
                os.killpg(ran.pid, signal.SIGKILL)  # the processes that it started, too
        if ran.returncode == 0:
            return printed
        if "terminate called without an active exception" not in said:
            break
    raise AssertionError(said)
