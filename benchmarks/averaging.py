"""What averaging adds to an optimizer step, side by side in one run: `python benchmarks/averaging.py --help`.

Every candidate trains its own copy of the same tensors with the same gradients. The repeats are interleaved, so that a
slow moment of the machine hits all alike, and times are reported as ratios to the optimizer alone. Nothing is reported
while a candidate disagrees with float64 arithmetic.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchbelay as tb
from torchbelay.ops import reference

DECAY, SPRING = 0.999, tb.Spring(k=1.0, m1=2000.0, m2=500.0)


@dataclass
class Candidate:
    """A way to step and average: `average()` returns the average as a list of tensors."""

    name: str
    model: nn.ParameterList
    step: Callable[[], object]
    average: Callable[[], list[torch.Tensor]] | None
    numbers: tb.Coupling | None


def alone(model: nn.ParameterList, optimizer: torch.optim.Optimizer) -> Candidate:
    return Candidate("AdamW alone", model, optimizer.step, None, None)


def torch_ema(model: nn.ParameterList, optimizer: torch.optim.Optimizer) -> Candidate:
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    averaged.update_parameters(model)

    def step() -> None:
        optimizer.step()
        averaged.update_parameters(model)

    numbers = tb.Spring.ema(decay=DECAY).coupling()
    return Candidate("torch AveragedModel, EMA", model, step, lambda: list(averaged.parameters()), numbers)


def belay(name: str, method: tb.Spring) -> Callable[[nn.ParameterList, torch.optim.Optimizer], Candidate]:
    def make(model: nn.ParameterList, optimizer: torch.optim.Optimizer) -> Candidate:
        attached = tb.Belay(model, optimizer, method)
        weights = attached.state_dict()["averages"]["average"]["weights"]
        return Candidate(name, model, optimizer.step, lambda: list(weights.values()), method.coupling())

    return make


def naive(model: nn.ParameterList, optimizer: torch.optim.Optimizer) -> Candidate:
    w2 = [p.detach().clone() for p in model]

    @torch.no_grad()
    def step() -> None:
        before = [p.clone() for p in model]
        optimizer.step()
        for p, average, old in zip(model, w2, before, strict=True):
            new1, new2 = reference.algorithm1(old, average, p - old, k=SPRING.k, m1=SPRING.m1, m2=SPRING.m2)
            p.copy_(new1)
            average.copy_(new2)

    return Candidate("Algorithm 1, tensor by tensor", model, step, lambda: w2, SPRING.coupling())


CANDIDATES = [
    alone,
    torch_ema,
    belay("torchbelay, EMA", tb.Spring.ema(decay=DECAY)),
    belay("torchbelay, BELAY", SPRING),
    naive,
]


def tensors(shapes: list[tuple[int, ...]], device: str) -> nn.ParameterList:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    model = nn.ParameterList([nn.Parameter(w) for w in drawn])
    for p in model:
        p.grad = torch.randn(p.shape, generator=generator).to(device)
    return model


def agrees(candidate: Candidate, shapes: list[tuple[int, ...]], device: str, steps: int = 3) -> bool:
    """Whether a few steps equal the coupling in float64 around the same optimizer."""
    exact = tensors(shapes, device).double()
    for p, q in zip(exact, candidate.model, strict=True):
        p.grad = q.grad.double()
    optimizer = torch.optim.AdamW(exact.parameters(), lr=1e-3)
    w2 = [p.detach().clone() for p in exact]
    for _ in range(steps):
        candidate.step()
        before = [p.detach().clone() for p in exact]
        optimizer.step()
        if candidate.numbers is not None:
            c = candidate.numbers
            with torch.no_grad():
                for i, (p, old) in enumerate(zip(exact, before, strict=True)):
                    new1, w2[i] = reference.couple(old, w2[i], p - old, a=c.a, b=c.b, p=c.p, q=c.q)
                    p.copy_(new1)
    found = [*candidate.model, *(candidate.average() if candidate.average else [])]
    expected = [*exact, *(w2 if candidate.average else [])]
    return all(torch.allclose(x.double(), y, rtol=1e-5, atol=1e-6) for x, y in zip(found, expected, strict=True))


def seconds(step: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=200, help="number of tensors (default 200)")
    parser.add_argument("--size", type=int, default=50_000, help="elements in each (default 50,000)")
    parser.add_argument("--repeats", type=int, default=30, help="interleaved repeats (default 30)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.repeats < 2:
        parser.error("--repeats must be at least 2: one time has no spread")
    shapes = [(args.size,)] * args.tensors
    candidates = []
    for make in CANDIDATES:
        model = tensors(shapes, args.device)
        candidates.append(make(model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)))
    wrong = [c.name for c in candidates if not agrees(c, shapes, args.device)]
    if wrong:
        print(f"disagree with float64, nothing is reported: {', '.join(wrong)}", file=sys.stderr)
        return 1
    times: dict[str, list[float]] = {c.name: [] for c in candidates}
    for _ in range(args.repeats):
        for c in candidates:
            times[c.name].append(seconds(c.step, args.device))
    base = statistics.median(times[candidates[0].name])
    print(f"{args.tensors} tensors of {args.size:,} float32 on {args.device}, torch {torch.__version__}; whole steps\n")
    print(f"{'':32}{'÷ AdamW':>9}{'spread':>16}")
    for c in candidates:
        low, middle, high = statistics.quantiles(times[c.name], n=4)
        print(f"{c.name:32}{middle / base:9.2f}{low / base:9.2f} – {high / base:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
