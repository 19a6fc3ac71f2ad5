"""Time a merge beside copying the same files, in turns.

    python benchmarks/merge.py                                      # 3 checkpoints of 0.5 GB in bfloat16, in /tmp
    python benchmarks/merge.py --gigabytes 2 --dtype float32 --folder /scratch --out merge.json

Both end when their bytes are on the disk (fsync). `cold` lets the system forget the inputs before each turn, so that
they come from the disk; `warm` reads them from memory, as far as they fit, and the writes count. A copy of N
checkpoints writes N of them and a merge one, so there is also `one`: read all and copy one, the least that a merge must
do. `CPU` is the time that the process spent computing, in all of its threads. Compare numbers within one run only: other
work on the machine changes them.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from torchbelay.snapshots import merge
from torchbelay.snapshots.checkpoint import TensorInfo
from torchbelay.snapshots.layouts.safetensors import SafetensorsWriter

SHAPE = (2048, 2048)


def make(path: Path, dtype: torch.dtype, size: float, seed: int) -> Path:
    """Write a checkpoint of random weights."""
    generator = torch.Generator().manual_seed(seed)
    count = max(1, round(size / (SHAPE[0] * SHAPE[1] * dtype.itemsize)))
    infos = {f"layers.{number}.weight": TensorInfo(dtype, SHAPE) for number in range(count)}
    with SafetensorsWriter(path, infos, {"format": "pt"}) as file:
        for name in infos:
            file.write(name, torch.randn(SHAPE, generator=generator).to(dtype))
    settle(path)
    return path


def settle(path: Path) -> None:
    """Wait until a file is on the disk."""
    handle = os.open(path, os.O_RDWR)
    os.fsync(handle)
    os.close(handle)


def forget(path: Path) -> None:
    """Let the system drop a file from its memory."""
    handle = os.open(path, os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def read(path: Path) -> None:
    """Read a file, and do nothing with it."""
    block = bytearray(1 << 20)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(block):
            pass


def copy(path: Path, target: Path) -> None:
    shutil.copyfile(path, target)
    settle(target)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that a function takes on the clock, and those that it computes."""
    began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    work()
    seconds, now = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return seconds, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk in question"
    )
    parser.add_argument("--gigabytes", type=float, default=0.5, help="size of one checkpoint")
    parser.add_argument("--checkpoints", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32", "float64"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        dtype = getattr(torch, args.dtype)
        inputs = [make(folder / f"{k}.safetensors", dtype, args.gigabytes * 1e9, k) for k in range(args.checkpoints)]

        def least() -> None:
            for path in inputs[1:]:
                read(path)
            copy(inputs[0], folder / "least")

        ways: dict[str, Callable[[], object]] = {
            "merge": lambda: merge(inputs, folder / "out.safetensors", threads=args.threads),
            "copy": lambda: [copy(path, folder / f"copy{k}") for k, path in enumerate(inputs)],
            "one": least,
        }
        found: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for kind in ("cold", "warm"):
            found[kind] = {way: [] for way in ways}
            for _ in range(args.rounds):
                for way, work in ways.items():
                    for path in inputs:
                        forget(path) if kind == "cold" else read(path)
                    found[kind][way].append(timed(work))
                    for path in folder.iterdir():
                        if path not in inputs:
                            path.unlink()
    report(args, found)


def report(args: argparse.Namespace, found: dict[str, dict[str, list[tuple[float, float]]]]) -> None:
    print(f"{args.checkpoints} checkpoints of {args.gigabytes:g} GB, {args.dtype}, {args.rounds} rounds; medians")
    print(f"{'':6}{'merge':>9}{'copy':>9}{'one':>9}{'merge/copy':>12}{'merge/one':>11}{'CPU of merge':>14}")
    for kind, ways in found.items():
        clock = {way: statistics.median(seconds for seconds, _ in turns) for way, turns in ways.items()}
        ratios = [
            statistics.median(m[0] / o[0] for m, o in zip(ways["merge"], ways[way], strict=True))
            for way in ("copy", "one")
        ]
        cpu = statistics.median(used for _, used in ways["merge"])
        print(
            f"{kind:6}{clock['merge']:8.2f}s{clock['copy']:8.2f}s{clock['one']:8.2f}s"
            f"{ratios[0]:12.2f}{ratios[1]:11.2f}{cpu:13.2f}s"
        )
    if args.out:
        about = {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}
        about |= {"dtype": args.dtype, "checkpoints": args.checkpoints, "gigabytes": args.gigabytes}
        args.out.write_text(json.dumps(about | {"seconds, CPU seconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
