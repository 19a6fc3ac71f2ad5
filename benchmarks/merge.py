"""Time a merge beside copying the same files, in turns.

    python benchmarks/merge.py                                      # 3 checkpoints of 0.5 GB, in /tmp
    python benchmarks/merge.py --gigabytes 2 --folder /scratch --out benchmarks/results/merge.json
    python benchmarks/merge.py --layout torch                       # or dcp

Both end when their bytes are on the disk (fsync). `cold` lets the system forget the inputs before each turn, so that
they come from the disk; `warm` reads them from memory, as far as they fit, and the writes count. A copy of N
checkpoints writes N of them and a merge one, so there is also `one`: read all and copy one, the least that a merge must
do. For folders of torch.distributed.checkpoint, `torch` is the time in which torch itself loads all and saves one.
`CPU` is the time that the process spent computing, in all of its threads. Ratios are medians over the rounds.
Compare numbers within one run only: other work on the machine changes them.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from torchbelay.snapshots import merge
from torchbelay.snapshots.checkpoint import TensorInfo
from torchbelay.snapshots.layouts.safetensors import SafetensorsWriter

SHAPE = (2048, 2048)

Turns = dict[str, list[tuple[float, float]]]  # by way: seconds on the clock and seconds of computing, per round


def make(path: Path, dtype: torch.dtype, size: float, seed: int, layout: str = "safetensors") -> Path:
    """Write a checkpoint of random weights."""
    generator = torch.Generator().manual_seed(seed)
    count = max(1, round(size / (SHAPE[0] * SHAPE[1] * dtype.itemsize)))
    infos = {f"layers.{number}.weight": TensorInfo(dtype, SHAPE) for number in range(count)}
    if layout != "safetensors":
        state = {name: torch.randn(SHAPE, generator=generator).to(dtype) for name in infos}
        torch.save(state, path) if layout == "torch" else dcp.save(state, checkpoint_id=path, no_dist=True)
        settle(path)
        return path
    with SafetensorsWriter(path, infos, {"format": "pt"}) as file:
        for name in infos:
            file.write(name, torch.randn(SHAPE, generator=generator).to(dtype))
    settle(path)
    return path


def files(path: Path) -> list[Path]:
    return [path] if path.is_file() else list(path.iterdir())


def settle(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    for file in files(path):
        handle = os.open(file, os.O_RDWR)
        os.fsync(handle)
        os.close(handle)


def forget(path: Path) -> None:
    """Let the system drop a file or folder from its memory."""
    for file in files(path):
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def read(path: Path) -> None:
    """Read a file or folder, and do nothing with it."""
    block = bytearray(1 << 20)
    for each in files(path):
        with open(each, "rb", buffering=0) as file:
            while file.readinto(block):
                pass


def copy(path: Path, target: Path) -> None:
    shutil.copytree(path, target) if path.is_dir() else shutil.copyfile(path, target)
    settle(target)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that a function takes on the clock, and those that it computes."""
    began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    work()
    seconds, now = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return seconds, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def measure(inputs: list[Path], folder: Path, kind: str, rounds: int, threads: int | None) -> Turns:
    """Merge and copy in turns."""

    def least() -> None:
        for path in inputs[1:]:
            read(path)
        copy(inputs[0], folder / "least")

    def by_torch() -> None:
        metadata = dcp.FileSystemReader(inputs[0]).read_metadata().state_dict_metadata
        state = {name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in metadata.items()}
        for path in inputs:
            dcp.load(state, checkpoint_id=path, no_dist=True)
        dcp.save(state, checkpoint_id=folder / "torch", no_dist=True)

    ways: dict[str, Callable[[], object]] = {
        "merge": lambda: merge(inputs, folder / f"out{inputs[0].suffix}", threads=threads),
        "copy": lambda: [copy(path, folder / f"copy{k}") for k, path in enumerate(inputs)],
        "one": least,
    }
    if inputs[0].is_dir():
        ways["torch"] = by_torch
    turns: Turns = {way: [] for way in ways}
    for _ in range(rounds):
        for way, work in ways.items():
            for path in inputs:
                forget(path) if kind == "cold" else read(path)
            turns[way].append(timed(work))
            for path in folder.iterdir():
                if path not in inputs:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return turns


def summary(turns: Turns) -> dict[str, float]:
    """Return medians: seconds, ratios of the rounds, and the seconds of computing in a merge."""
    found = {way: statistics.median(seconds for seconds, _ in listed) for way, listed in turns.items()}
    for way in turns.keys() - {"merge"}:
        pairs = zip(turns["merge"], turns[way], strict=True)
        found[f"merge/{way}"] = statistics.median(merged[0] / other[0] for merged, other in pairs)
    return found | {"CPU": statistics.median(used for _, used in turns["merge"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk in question"
    )
    parser.add_argument("--gigabytes", type=float, default=0.5, help="size of one checkpoint")
    parser.add_argument("--checkpoints", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--layout", choices=["safetensors", "torch", "dcp"], default="safetensors")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    results: dict[str, Any] = {"checkpoints": args.checkpoints, "gigabytes": args.gigabytes, "rounds": args.rounds}
    results |= {"cores": len(os.sched_getaffinity(0)), "load before": os.getloadavg()[0], "turns": {}}
    print(f"{args.checkpoints} checkpoints of {args.gigabytes:g} GB, {args.rounds} rounds, medians")
    print(f"{'':15}{'merge':>9}{'copy':>9}{'one':>9}{'merge/copy':>12}{'merge/one':>11}{'CPU':>9}")
    for dtype in args.dtypes:
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            size, folder = args.gigabytes * 1e9, Path(name)
            ending = {"safetensors": ".safetensors", "torch": ".pt", "dcp": ""}[args.layout]
            inputs = [
                make(folder / f"{k}{ending}", getattr(torch, dtype), size, k, args.layout)
                for k in range(args.checkpoints)
            ]
            for kind in ("cold", "warm"):
                turns = results["turns"][f"{dtype} {kind}"] = measure(inputs, folder, kind, args.rounds, args.threads)
                s = summary(turns)
                print(
                    f"{dtype + ' ' + kind:15}{s['merge']:8.2f}s{s['copy']:8.2f}s{s['one']:8.2f}s"
                    f"{s['merge/copy']:12.2f}{s['merge/one']:11.2f}{s['CPU']:8.2f}s"
                    + (f"   torch {s['torch']:.2f}s, merge/torch {s['merge/torch']:.2f}" if "torch" in s else "")
                )
    results["load after"] = os.getloadavg()[0]
    if args.out:
        args.out.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
