"""Time whole steps of AdamW with an EMA, by what most users choose between: `python benchmarks/steps.py --help`.

The models have from few large tensors to many small ones. Times are those of `benchmarks/averaging.py`: from idle, and
the device alone. Candidates take turns, and nothing is reported while one of them disagrees with float64. On a GPU the
result is written as JSON for `benchmarks/report.py`, in about a minute; `--quick` tries everything on a CPU.
"""

import argparse
import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from averaging import checked, show, timed, versions
from candidates import CHOICES
from shapes import MODELS

RESULT = Path(__file__).parent / "results" / "steps.json"
GPU_MODELS = ("gpt", "medium", "unet", "small")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30, metavar="N", help="turns of each candidate (default: 30)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=GPU_MODELS, help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"write JSON here (on a GPU: {RESULT.name})")
    parser.add_argument("--quick", action="store_true", help="a small model, 3 turns, on a CPU if there is no GPU")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.quick:
        parser.error("these models are for a GPU; give --quick to try a small one on this CPU")
    models, repeats = (("laptop",), 3) if args.quick else (args.models, args.repeats)
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "versions": versions(),
        "repeats": repeats,
        "models": {},
    }
    out = args.out or (RESULT if device == "cuda" and not args.quick else None)
    for name in models:
        shapes = MODELS[name]()
        makes, result["missing"] = checked(CHOICES, shapes, device, steps=True)
        found = timed(makes, shapes, device, repeats, gradients=True)
        weights = sum(torch.Size(shape).numel() for shape in shapes)
        result["models"][name] = {"weights": weights, "tensors": len(shapes), "step": found}
        print(f"\n{name}: {weights:,} weights in {len(shapes)} tensors, on {result['device']}")
        for kind in ("wall", "device", "host") if device == "cuda" else ("wall",):
            print(f"\n{kind} time")
            show(found, kind)
        sys.stdout.flush()
        if out:
            out.write_text(json.dumps(result, indent=1) + "\n")
    print("not there:", result["missing"] or "nothing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
