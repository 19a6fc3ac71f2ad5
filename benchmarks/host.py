"""Time the host's share of an optimizer step: what Python does before the device can begin.

    python benchmarks/host.py                              # this version
    python benchmarks/host.py --beside /path/to/other/src  # and another version of the package, in turns with it

Tensors are tiny, so that the arithmetic hardly counts. On a GPU the device is idle before each step, and the time ends
when the call returns. Without a GPU the kernels' host part is timed too, on tensors of the CPU and in processor time:
everything is done but the launches themselves. For torch's own optimizer the time is that of Belay's two hooks alone;
for torchbelay's, which takes the averages along, it is that of the whole step. Medians in milliseconds; compare them
within one run only.

The same code in two processes may differ by a third, by where its memory and its core happen to be. So every round
starts fresh processes, and all of them run on one core, in turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

COUNTS = (510, 2_000)
STEPS, WARM = 30, 10
TURNS = 2  # of each version in a round


class Timed:
    """A step that is ready to be taken, and how long the host took for it."""

    def __init__(self, count: int, optimizer: str, method: Any, impl: str = "auto") -> None:
        import torch

        import torchbelay as tb

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._now = time.perf_counter if device == "cuda" else time.thread_time  # which other programs hardly disturb
        self.model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(32, device=device)) for _ in range(count)])
        kind = torch.optim.AdamW if optimizer == "torch" else tb.optim.AdamW
        self.optimizer = kind(self.model.parameters(), lr=1e-3, fused=True)
        self.only_hooks = optimizer == "torch" and method is not None
        self.stamps: list[float] = []  # before and after Belay's first hook, before and after its second
        self._stamp_hooks()
        self.belay = None if method is None else tb.Belay(self.model, self.optimizer, method, impl=impl)
        self._stamp_hooks()

    def _stamp_hooks(self) -> None:
        """Hooks run in the order in which they were registered."""
        self.optimizer.register_step_pre_hook(lambda *_: self.stamps.append(self._now()))
        self.optimizer.register_step_post_hook(lambda *_: self.stamps.append(self._now()))

    def new_gradients(self) -> None:
        """Allocate gradients anew, as a backward pass does."""
        import torch

        for p in self.model:
            p.grad = torch.zeros_like(p)

    def step(self) -> float:
        """Take a step, and return milliseconds."""
        self.stamps.clear()
        begin = self._now()
        self.optimizer.step()
        whole = self._now() - begin
        first, second, third, fourth = self.stamps
        return 1e3 * (second - first + fourth - third if self.only_hooks else whole)


def cases(count: int) -> dict[str, Timed]:
    """The steps that are timed, by name."""
    import torch

    import torchbelay as tb

    methods = {"EMA": tb.Spring.ema(decay=0.999), "BELAY": tb.Spring(k=1.0, m1=2000.0, m2=500.0)}
    found = {"torch AdamW, the whole step, no average": Timed(count, "torch", None)}
    on_gpu = torch.cuda.is_available()
    for impl in ("triton",) if on_gpu else ("foreach", "triton"):
        how = "" if on_gpu else ", foreach" if impl == "foreach" else ", no launches"
        for name, method in methods.items():
            found[f"torch AdamW, Belay's hooks, {name}{how}"] = Timed(count, "torch", method, impl)
            if impl == "triton":
                found[f"torchbelay AdamW, the whole step, {name}{how}"] = Timed(count, "ours", method, impl)
    return found


def leave_launches_out() -> None:
    """Let kernels be launched by nothing at all."""
    from torchbelay.ops.triton import launch

    launch.launch = lambda *args: None


def work() -> None:
    """Time every case once per line on standard input, and answer with a line of JSON."""
    import torch

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    if not torch.cuda.is_available():
        leave_launches_out()
    torch.set_num_threads(1)
    steps = {count: cases(count) for count in COUNTS}
    for _ in sys.stdin:
        found: dict[str, list[float]] = {}
        for count, each in steps.items():
            for name, timed in each.items():
                times = []
                for _ in range(WARM + STEPS):
                    timed.new_gradients()
                    wait()
                    times.append(timed.step())
                found[f"{name}, {count:,} tensors"] = times[WARM:]
        print(json.dumps(found), flush=True)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


class Worker:
    """A process that times one version of the package, whenever it is asked."""

    def __init__(self, source: Path | None) -> None:
        environment = os.environ | ({} if source is None else {"PYTHONPATH": str(source.resolve())})
        if not has_gpu():
            environment["TRITON_INTERPRET"] = "1"  # so that the backend for GPUs takes tensors of the CPU
        line = [sys.executable, __file__, "--work"]
        self._process = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self) -> dict[str, list[float]]:
        """Return the milliseconds of every case."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write("go\n")
        stdin.flush()
        answer: dict[str, list[float]] = json.loads(stdout.readline())
        return answer

    def stop(self) -> None:
        self._process.communicate()


def measure(sources: dict[str, Path | None], rounds: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of every case, for every version."""
    times: dict[str, dict[str, list[float]]] = {version: {} for version in sources}
    for turn in range(rounds):
        order = list(sources) if turn % 2 == 0 else list(sources)[::-1]
        workers = {version: Worker(sources[version]) for version in order}
        for version in order * TURNS:
            for name, some in workers[version].ask().items():
                times[version].setdefault(name, []).extend(some)
        for worker in workers.values():
            worker.stop()
    return {version: {name: statistics.median(some) for name, some in each.items()} for version, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, metavar="SRC", help="the folder that holds another version's torchbelay")
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help="fresh processes per version (default: 6)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the medians as JSON, too")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work()
        return
    medians = measure({"here": None} | ({} if args.beside is None else {"beside": args.beside}), args.rounds)
    ratio = "" if args.beside is None else f"{'ratio':>10}"
    print(f"{'ms on the host, per step':60}" + "".join(f"{version:>10}" for version in medians) + ratio)
    for name, here in medians["here"].items():
        ratio = "" if args.beside is None else f"{here / medians['beside'][name]:10.2f}"
        print(f"{name:60}" + "".join(f"{each[name]:10.3f}" for each in medians.values()) + ratio)
    if args.out:
        args.out.write_text(json.dumps(medians, indent=1) + "\n")


if __name__ == "__main__":
    main()
