"""Time the host's share of an optimizer step: what Python does before the device can begin.

    python benchmarks/host.py                              # this version
    python benchmarks/host.py --beside /path/to/other/src  # and another version of the package, in turns with it

Tensors are tiny, so that the arithmetic hardly counts. On a GPU the device is idle before each step, and the time ends
when the call returns. Times are medians in milliseconds; compare them within one run only.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COUNTS = (300, 2_000)
STEPS, WARM = 30, 10
PLAIN = "torch AdamW, no average"


def cases(count: int) -> dict[str, Callable[[], object]]:
    """Steps that are ready to be taken, by name."""
    import torch

    import torchbelay as tb

    device = "cuda" if torch.cuda.is_available() else "cpu"
    methods = {"EMA": tb.Spring.ema(decay=0.999), "BELAY": tb.Spring(k=1.0, m1=2000.0, m2=500.0)}

    def ready(optimizer: type[torch.optim.Optimizer], method: Any) -> Callable[[], object]:
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(32, device=device)) for _ in range(count)])
        for p in model:
            p.grad = torch.randn_like(p)
        chosen = optimizer(model.parameters(), lr=1e-3, fused=True)  # type: ignore[call-arg]
        if method is not None:
            model.belay = tb.Belay(model, chosen, method)  # type: ignore[assignment]  # kept alive with the model
        return chosen.step

    found = {PLAIN: ready(torch.optim.AdamW, None)}
    found |= {f"torch AdamW, Belay {name}": ready(torch.optim.AdamW, method) for name, method in methods.items()}
    if device == "cuda":
        found |= {f"torchbelay AdamW, {name}": ready(tb.optim.AdamW, method) for name, method in methods.items()}
    return found


def work() -> None:
    """Time every case once per line on standard input, and answer with a line of JSON."""
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    torch.set_num_threads(1)
    steps = {count: cases(count) for count in COUNTS}
    for _ in sys.stdin:
        found: dict[str, list[float]] = {}
        for count, each in steps.items():
            for name, step in each.items():
                times = []
                for i in range(WARM + STEPS):
                    wait()
                    begin = time.perf_counter()
                    step()
                    if i >= WARM:
                        times.append(1e3 * (time.perf_counter() - begin))
                found[f"{name}, {count:,} tensors"] = times
        print(json.dumps(found), flush=True)


def start(source: str | None) -> "subprocess.Popen[str]":
    environment = os.environ | ({} if source is None else {"PYTHONPATH": source})
    line = [sys.executable, __file__, "--work"]
    return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ask(process: "subprocess.Popen[str]") -> dict[str, list[float]]:
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None
    stdin.write("go\n")
    stdin.flush()
    answer: dict[str, list[float]] = json.loads(stdout.readline())
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, metavar="SRC", help="the folder that holds another version's torchbelay")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="turns of each version (default: 7)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the medians as JSON, too")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work()
        return
    versions = {"here": start(None)} | ({} if args.beside is None else {"beside": start(str(args.beside.resolve()))})
    times: dict[str, dict[str, list[float]]] = {version: {} for version in versions}
    for _ in range(args.rounds):
        for version, process in versions.items():
            for name, some in ask(process).items():
                times[version].setdefault(name, []).extend(some)
    for process in versions.values():
        process.communicate()
    medians = {
        version: {name: statistics.median(some) for name, some in each.items()} for version, each in times.items()
    }
    print(f"{'ms on the host, per step':44}" + "".join(f"{version:>10}" for version in medians))
    for name in medians["here"]:
        print(f"{name:44}" + "".join(f"{each[name]:10.3f}" for each in medians.values()))
        plain = name.replace(name.rpartition(", ")[0], PLAIN)
        if "Belay" in name:
            print(
                f"{'    the average alone':44}"
                + "".join(f"{each[name] - each[plain]:10.3f}" for each in medians.values())
            )
    if args.out:
        args.out.write_text(json.dumps(medians, indent=1) + "\n")


if __name__ == "__main__":
    main()
