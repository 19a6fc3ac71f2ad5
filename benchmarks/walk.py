"""Count the way of one optimizer step through the package: calls, files, and changes from one file to another.

    python benchmarks/walk.py            # foreach, triton (in Triton's interpreter if there is no GPU) and one pass
    python benchmarks/walk.py --show     # and every call, in order

A long way is hard to read, and it is time that the host spends on every step. Kernels are not counted.
"""

import argparse
import os
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import FrameType

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import torchbelay as tb

PACKAGE = str(Path(tb.__file__).parent)
KERNELS = ("kernels", "interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BELAY = tb.Spring(k=1.0, m1=2000.0, m2=500.0)

Walk = list[tuple[str, str]]  # file and function of every call, in order


def walk(step: Callable[[], object]) -> Walk:
    """The calls of functions of the package during a step."""
    seen: Walk = []

    def notice(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        ours = file.startswith(PACKAGE) and not any(name in file for name in KERNELS)
        if event == "call" and ours and not frame.f_code.co_name.startswith("<"):  # not a comprehension
            seen.append((str(Path(file).relative_to(PACKAGE)), frame.f_code.co_qualname))

    sys.setprofile(notice)
    try:
        step()
    finally:
        sys.setprofile(None)
    return seen


def changes(seen: Walk) -> int:
    """How often a call is in another file than the call before it; the first one counts."""
    return sum(1 for _ in groupby(file for file, _ in seen))


def training(optimizer: type[torch.optim.Optimizer], method: tb.Method, impl: str) -> Callable[[], object]:
    """A step of a small network, ready to be taken: its first steps are behind it."""
    model = torch.nn.Linear(8, 1).to(DEVICE)
    chosen = optimizer(model.parameters(), lr=1e-3)  # type: ignore[call-arg]
    belay = tb.Belay(model, chosen, method, impl=impl)
    model(torch.ones(4, 8, device=DEVICE)).square().mean().backward()
    for _ in range(3):
        chosen.step()
    assert belay.step == 3
    return chosen.step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="print every call")
    show = parser.parse_args().show
    ways = {
        "foreach": (torch.optim.AdamW, "foreach"),
        "triton": (torch.optim.AdamW, "triton"),
        "one pass (tb.optim.AdamW)": (tb.optim.AdamW, "triton"),
    }
    methods = {"BELAY": BELAY, "EMA": tb.Spring.ema(decay=0.999)}
    print(f"{'':34}{'calls':>7}{'files':>7}{'changes of file':>17}")
    for way, (optimizer, impl) in ways.items():
        for name, method in methods.items():
            seen = walk(training(optimizer, method, impl))
            print(f"{way + ', ' + name:34}{len(seen):7}{len({file for file, _ in seen}):7}{changes(seen):17}")
            if show:
                print("\n".join(f"    {file:28} {function}" for file, function in seen))


if __name__ == "__main__":
    main()
