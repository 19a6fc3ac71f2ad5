"""Compare averages on a CPU, side by side: `python benchmarks/cpu.py --help`.

Times are processor time on one thread, so that other programs hardly matter. Ratios alone are reported: those of two
candidates in one round, in which they run in random order. Every candidate is made several times, because its
place in memory matters as much as a small overhead. Nothing is reported while a candidate disagrees with float64. The
result is written as JSON for `benchmarks/report.py`.
"""

import argparse
import gc
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from averaging import checked, versions
from candidates import ALONE, CHOICES, Candidate, Make
from measure import new_gradients, tensors
from shapes import MODELS, Shapes

RESULT = Path(__file__).parent / "results" / "cpu.json"
CPU_MODELS = ("few", "laptop", "many")
PLACES = 4  # in memory, of every candidate
BASES = {False: "torch AveragedModel", True: "torch AdamW(fused=True), no average"}  # what others are divided by
SAME = "torchbelay EMA (foreach)"  # on a CPU there is nothing faster that could be chosen


def ratios(candidates: Sequence[Candidate], rounds: int, *, gradients: bool) -> dict[str, list[float]]:
    """Times of every candidate divided by those of the first one, round by round."""
    seen: dict[str, list[float]] = {c.name: [] for c in candidates}
    for number in range(rounds + 2):
        for c in random.sample(candidates, len(candidates)):
            if gradients:
                new_gradients(c.model)
            begin = time.process_time()
            c.run()
            spent = time.process_time() - begin
            if number > 1:  # the first two warm up
                seen[c.name].append(spent)
    base = seen[candidates[0].name]
    return {name: [t / b for t, b in zip(times, base, strict=True)] for name, times in seen.items()}


def compared(makes: list[Make], shapes: Shapes, rounds: int, *, gradients: bool) -> dict[str, dict[str, float]]:
    """Return medians and quartiles of the ratios, over all places in memory."""
    seen: dict[str, list[float]] = {}
    for place in range(PLACES):
        shared = None if gradients else tensors(shapes, "cpu")
        found = [make(tensors(shapes, "cpu") if shared is None else shared) for make in makes[:: 1 - 2 * (place % 2)]]
        candidates = [c for c in found if c.name != SAME]
        first = min(candidates, key=lambda c: c.name != BASES[gradients])
        candidates = [first, *(c for c in candidates if c is not first)]
        for name, some in ratios(candidates, rounds, gradients=gradients).items():
            seen.setdefault(name, []).extend(some)
        del found, candidates, first, shared
        gc.collect()
    return {
        name: dict(zip(("low", "ratio", "high"), statistics.quantiles(some, n=4), strict=True))
        for name, some in seen.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="turns per place in memory (default: 12)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", default=RESULT, help="write JSON here (default: %(default)s)"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": platform.machine(),
        "versions": versions(),
        "rounds": PLACES * args.rounds,
        "models": {},
    }
    for name in CPU_MODELS:
        shapes = MODELS[name]()
        weights = sum(torch.Size(shape).numel() for shape in shapes)
        found: dict[str, Any] = {"weights": weights, "tensors": len(shapes)}
        for part, makes in (("average", ALONE), ("step", CHOICES)):
            usable, result["missing"] = checked(makes, shapes, "cpu", steps=part == "step")
            found[part] = compared(usable, shapes, args.rounds, gradients=part == "step")
            title = f"{part}, {weights:,} weights in {len(shapes):,} tensors"
            print(f"\n{title:50}{'ratio':>10}{'quartiles':>18}", flush=True)
            for each, row in found[part].items():
                print(f"{each:50}{row['ratio']:10.2f}{row['low']:10.2f} – {row['high']:.2f}")
        result["models"][name] = found
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
