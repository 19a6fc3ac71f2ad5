"""Time the drop-ins of `torchbelay.compat` beside the classes they stand for: `python benchmarks/compat.py --help`.

Both average the same model, in turns, in one process. A time is the median of one update, until the device is done and
until the host is free; over the runs, the median of these. Nothing is reported while the two disagree. On a GPU the
device is busy before each update, as it is after a backward pass, so that a class that waits for it shows that in the
host's time. The numbers go to benchmarks/results/, from where `python benchmarks/report.py --no-figure` puts them into
docs/performance.md.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from averaging import versions
from shapes import MODELS, Shapes
from torch import nn
from torch.optim import swa_utils as torchs

from torchbelay.compat import diffusers, swa_utils, torch_ema

DECAY = 0.999
RESULTS = Path(__file__).parent / "results"
TIMED = {"cuda": ("unet", "small"), "cpu": ("laptop", "small", "unet")}
Make = Callable[[nn.Module], Any]
Row = dict[str, Any]


class Case(NamedTuple):
    name: str
    ours: Make
    theirs: Make
    update: Callable[[Any, nn.Module], None]


class Block(nn.Module):
    def __init__(self, shapes: Shapes, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape, device=device, dtype=dtype)))


def model(shapes: Shapes, device: str, dtype: torch.dtype) -> nn.Module:
    """The shapes as a model of blocks with three tensors each."""
    return nn.Sequential(*(Block(shapes[i : i + 3], device, dtype) for i in range(0, len(shapes), 3)))


def averaged_model(**functions: str) -> tuple[Make, Make]:
    """Ours and torch's, with the averaging function of that name of either module."""

    def make(module: Any) -> Make:
        chosen = {name: getattr(module, function)(DECAY) for name, function in functions.items()}
        return lambda net: module.AveragedModel(net, **chosen)

    return make(swa_utils), make(torchs)


def cases() -> list[Case]:
    def update_model(average: Any, net: nn.Module) -> None:
        average.update_parameters(net)

    found = [
        Case(
            "AveragedModel, EMA by `multi_avg_fn`", *averaged_model(multi_avg_fn="get_ema_multi_avg_fn"), update_model
        ),
        Case("AveragedModel, EMA by `avg_fn`", *averaged_model(avg_fn="get_ema_avg_fn"), update_model),
        Case("AveragedModel, SWA", *averaged_model(), update_model),
    ]
    if find_spec("diffusers"):
        from diffusers.training_utils import EMAModel

        for foreach in (False, True):

            def make(cls: Any, foreach: bool = foreach) -> Make:
                return lambda net: cls(net.parameters(), decay=DECAY, foreach=foreach)

            found.append(
                Case(
                    f"EMAModel, foreach={foreach}",
                    make(diffusers.EMAModel),
                    make(EMAModel),
                    lambda average, net: average.step(net.parameters()),
                )
            )
    if find_spec("torch_ema"):
        from torch_ema import ExponentialMovingAverage

        def make_ema(cls: Any) -> Make:
            return lambda net: cls(net.parameters(), decay=DECAY)

        found.append(
            Case(
                "ExponentialMovingAverage",
                make_ema(torch_ema.ExponentialMovingAverage),
                make_ema(ExponentialMovingAverage),
                lambda average, net: average.update(),
            )
        )
    return found


def values(average: Any) -> list[torch.Tensor]:
    return list(average.module.parameters()) if isinstance(average, nn.Module) else average.shadow_params


def agree(case: Case, device: str) -> bool:
    """Whether both give the same float32 average of a small model."""
    net = model([(7, 3), (5,), ()] * 4, device, torch.float32)
    pair = case.ours(net), case.theirs(net)
    for _ in range(5):
        with torch.no_grad():
            for p in net.parameters():
                p.add_(torch.randn_like(p))
        for average in pair:
            case.update(average, net)
    return all(torch.allclose(x, y, rtol=0, atol=1e-5) for x, y in zip(*map(values, pair), strict=True))


def timed(run: Callable[[], None], device: str) -> tuple[float, float]:
    """Milliseconds until the host is free, and until the device is done, of its own work alone."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return (1e3 * (time.perf_counter() - start),) * 2
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)  # about 10 ms
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    start = time.perf_counter()
    run()
    host = 1e3 * (time.perf_counter() - start)
    after.record()
    torch.cuda.synchronize()
    return host, before.elapsed_time(after)


def compare(
    case: Case, shapes: Shapes, device: str, dtype: torch.dtype, repeats: int
) -> dict[str, tuple[float, float]]:
    net = model(shapes, device, dtype)
    averages = {"ours": case.ours(net), "theirs": case.theirs(net)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in averages}
    for turn in range(repeats + 3):
        for name, average in averages.items() if turn % 2 else [*averages.items()][::-1]:
            result = timed(lambda average=average: case.update(average, net), device)
            if turn >= 3:  # the first turns copy and warm up
                found[name].append(result)
    return {name: tuple(map(statistics.median, zip(*times, strict=True))) for name, times in found.items()}


def measure(device: str, repeats: int) -> list[Row]:
    """Time every case once, and print it."""
    rows = []
    for case in cases():
        for name in TIMED[device]:
            for dtype in ("float32", "bfloat16"):
                times = compare(case, MODELS[name](), device, getattr(torch, dtype), repeats)
                row = {"class": case.name, "model": name, "dtype": dtype} | {
                    who: dict(zip(("host", "done"), some, strict=True)) for who, some in times.items()
                }
                rows.append(row)
                ours, theirs = row["ours"]["done"], row["theirs"]["done"]
                print(f"{case.name}, {name}, {dtype}: theirs {theirs:.2f} ms, ours {ours:.2f} ms", flush=True)
    return rows


def combine(runs: Sequence[Sequence[Row]]) -> list[Row]:
    """Take the median over runs of every time: on a shared host some seconds are slow, for whatever runs then."""
    return [
        same[0]
        | {
            who: {what: statistics.median(row[who][what] for row in same) for what in ("host", "done")}
            for who in ("ours", "theirs")
        }
        for same in zip(*runs, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=21, help="updates per run and class (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="runs through all classes (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write JSON here (default: a file in benchmarks/results)"
    )
    given = parser.parse_args()
    on_cpu = given.device == "cpu"
    if on_cpu:
        torch.set_num_threads(1)
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": platform.machine() if on_cpu else torch.cuda.get_device_name(),
        "versions": versions(),
        "repeats": given.repeats,
        "runs": given.runs,
    }
    for case in cases():
        if not agree(case, given.device):
            raise SystemExit(f"{case.name}: the two disagree; nothing is reported")
    result["rows"] = combine([measure(given.device, given.repeats) for _ in range(given.runs)])
    out = given.out or RESULTS / ("compat_cpu.json" if on_cpu else "compat.json")
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
