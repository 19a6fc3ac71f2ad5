"""Averaging side by side, in one run: `python benchmarks/averaging.py --help`.

Every candidate trains its own copy of the same tensors with gradients that are allocated anew for each step. Repeats
are interleaved, times are medians with quartiles. Nothing is reported while a candidate disagrees with float64.
On a GPU the result is written as JSON for `benchmarks/report.py`; on a CPU a small model is timed and shown.
"""

import argparse
import gc
import json
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from candidates import ALONE, EMA, STEPS, Candidate, Make, importable, step_naive
from measure import agrees, copy_bandwidth, interleaved, memory, tensors
from shapes import MODELS, Shapes, capped

import torchbelay as tb

GPU_MODELS = ("gpt", "unet", "small", "vit")


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def checked(makes: list[Make], shapes: Shapes, device: str, *, steps: bool) -> tuple[list[Make], dict[str, str]]:
    """The candidates that can be timed; stops where one is wrong."""
    found, missing = importable(makes, tensors([(3,)], device))
    for make in found:
        if not agrees(make, capped(shapes)[:600], device, steps=steps):
            name = make(tensors([(3,)], device)).name
            sys.exit(f"{name} disagrees with float64; nothing is reported")
    return found, missing


def timed(makes: list[Make], shapes: Shapes, device: str, repeats: int, *, gradients: bool) -> dict[str, Any]:
    clean()
    shared = None if gradients else tensors(shapes, device)
    candidates = [make(tensors(shapes, device) if shared is None else shared) for make in makes]
    times = interleaved(candidates, device, repeats, gradients=gradients)
    result = {c.name: {**times[c.name], "bytes": c.bytes} for c in candidates}
    del candidates
    clean()
    return result


def model_results(name: str, device: str, repeats: int) -> tuple[dict[str, Any], dict[str, str]]:
    shapes = MODELS[name]()
    # Six are what fits in 140 GB at once.
    makes = STEPS if name != "gpt" else [make for make in STEPS if make is not STEPS[2] and make is not step_naive]
    steps, missing = checked(makes, shapes, device, steps=True)
    alone, more = checked(ALONE, shapes, device, steps=False)
    result: dict[str, Any] = {
        "weights": sum(torch.Size(s).numel() for s in shapes),
        "tensors": len(shapes),
        "step": timed(steps, shapes, device, repeats, gradients=True),
        "average": timed(alone, shapes, device, repeats, gradients=False),
    }
    if device == "cuda" and name == "unet":
        result["memory"] = {}
        for make in steps:
            clean()
            label = make(tensors([(3,)], device)).name
            result["memory"][label] = memory(make, shapes)
    return result, missing | more


def several(count: int, *, together: bool) -> Make:
    """`count` EMAs of one model: in one Belay, or in as many."""

    def make(model: Any) -> Candidate:
        from candidates import _Still

        optimizer = _Still(model.parameters())
        springs = {f"{i}": tb.Spring.ema(decay=0.9 + 0.01 * i) for i in range(1, count)}
        if together:
            belays = [tb.Belay(model, optimizer, EMA, spectators=springs)]
        else:
            belays = [tb.Belay(model, optimizer, spring) for spring in (EMA, *springs.values())]
        name = f"{count} {'in one pass' if together else 'one after the other'}"
        return Candidate(name, model, optimizer.step, [], None, 0, belays)

    return make


def scaling(device: str, repeats: int) -> dict[str, Any]:
    """Cost against the number of weights, of tensors and of averages."""
    found: dict[str, Any] = {"weights": {}, "tensors": {}, "averages": {}}
    by_name = {make(tensors([(3,)], device)).name: make for make in importable(ALONE, tensors([(3,)], device))[0]}
    some = [by_name["torch AveragedModel"], by_name["torchbelay EMA"]]
    for n in (10**6, 10**7, 10**8, 10**9, 2 * 10**9):
        found["weights"][n] = timed(some, [(n // 100,)] * 100, device, repeats, gradients=False)
    for n in (1, 10, 100, 1000, 10_000):
        found["tensors"][n] = timed(some, [(16_000_000 // n,)] * n, device, repeats, gradients=False)
    for n in (1, 2, 4, 8):
        makes = [several(n, together=True), several(n, together=False)]
        found["averages"][n] = timed(makes, [(1 << 20,)] * 256, device, repeats, gradients=False)
    return found


def versions() -> dict[str, str]:
    found = {"torch": torch.__version__, "python": platform.python_version(), "torchbelay": tb.__version__}
    for package in ("triton", "timm", "ema-pytorch", "torch-ema", "diffusers", "torchvision"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not there"
    return found


def show(result: dict[str, Any], kind: str) -> None:
    base = next(iter(result.values()))[kind]["median"]
    print(f"{'':44}{'ms':>10}{'÷ first':>9}{'quartiles':>20}")
    for name, times in result.items():
        t = times[kind]
        print(f"{name:44}{t['median']:10.3f}{t['median'] / base:9.2f}{t['low'] / base:11.2f} – {t['high'] / base:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="interleaved repeats (default 20)")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: all for a GPU, or a laptop's")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write JSON here")
    parser.add_argument("--no-scaling", action="store_true", help="leave the curves out")
    args = parser.parse_args()
    if args.repeats < 2:
        parser.error("--repeats must be at least 2: one time has no spread")
    result: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "versions": versions(), "models": {}}
    missing: dict[str, str] = {}
    if args.device == "cuda":
        result["device"] = torch.cuda.get_device_name()
        result["copy_bandwidth"] = copy_bandwidth()
    else:
        result["device"] = platform.processor() or platform.machine()
    kind = "device" if args.device == "cuda" else "wall"
    for name in args.models or (GPU_MODELS if args.device == "cuda" else ("laptop",)):
        try:
            found, lacking = model_results(name, args.device, args.repeats)
        except ImportError as problem:
            missing[name] = str(problem)
            continue
        missing |= lacking
        result["models"][name] = found
        print(f"\n{name}: {found['weights']:,} weights in {found['tensors']} tensors, on {result['device']}")
        for part in ("step", "average"):
            print(f"\n{part}, {kind} time")
            show(found[part], kind)
        if args.device == "cuda":
            print("\nstep, wall time from idle")
            show(found["step"], "wall")
            print("\nhost ms:", {n: round(t["host"]["median"], 3) for n, t in found["step"].items()})
        print(found.get("memory", ""), flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    result["missing"] = missing
    if args.device == "cuda" and not args.no_scaling:
        result["scaling"] = scaling(args.device, args.repeats)
        for part, rows in result["scaling"].items():
            print(part, {n: {c: round(t["device"]["median"], 4) for c, t in row.items()} for n, row in rows.items()})
    print("not there:", missing or "nothing")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
