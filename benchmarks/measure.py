"""Times, bandwidth and memory, and the check without which nothing is reported."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from candidates import Candidate, Make
from shapes import Shapes
from torch import nn

from torchbelay.ops import reference


def tensors(shapes: Shapes, device: str, seed: int = 0) -> nn.ParameterList:
    generator = torch.Generator(device).manual_seed(seed)
    return nn.ParameterList([nn.Parameter(torch.randn(s, generator=generator, device=device)) for s in shapes])


def new_gradients(model: nn.ParameterList, seed: int | None = None) -> None:
    """Set gradients to None, as training loops do, and allocate them anew."""
    for p in model:
        p.grad = None
    generator = None if seed is None else torch.Generator(model[0].device).manual_seed(seed)
    for p in model:
        p.grad = (
            torch.empty_like(p).fill_(1e-3)
            if generator is None
            else torch.randn(p.shape, generator=generator, device=p.device)
        )


def agrees(make: Make, shapes: Shapes, device: str, *, steps: bool) -> bool:
    """Whether a few runs equal the coupling in float64 around the same optimizer."""
    candidate = make(tensors(shapes, device))
    exact = tensors(shapes, device).double()
    optimizer = torch.optim.AdamW(exact.parameters(), lr=1e-3) if steps else None
    w2 = [p.detach().clone() for p in exact]
    for step in range(3):
        if not steps:
            with torch.no_grad():  # somebody trains: the weights of both move alike
                for p, q in zip(exact, candidate.model, strict=True):
                    q.add_(torch.randn_like(q), alpha=0.1)
                    p.copy_(q)
        new_gradients(candidate.model, seed=step)
        before = [p.detach().clone() for p in exact]
        if optimizer is not None:
            for p, q in zip(exact, candidate.model, strict=True):
                p.grad = q.grad.double()
            optimizer.step()
        candidate.run()
        if candidate.numbers is not None:
            c = candidate.numbers
            with torch.no_grad():
                for i, (p, old) in enumerate(zip(exact, before, strict=True)):
                    new1, w2[i] = reference.couple(old, w2[i], p - old, a=c.a, b=c.b, p=c.p, q=c.q)
                    p.copy_(new1)
    averages = candidate.averages if candidate.read is None else candidate.read()
    pairs = [(x, y, 1e-5) for x, y in zip(candidate.model, exact, strict=True)]
    pairs += [(x, y, candidate.rounding) for x, y in zip(averages, w2 if averages else [], strict=True)]
    return all(torch.allclose(x.double(), y, rtol=rtol, atol=1e-5) for x, y, rtol in pairs)


class Clock:
    """Three ways to look at one call: until the host is free, until the device is done, and the device's own time.

    The device's own time is taken while it is still busy with something before, as it is after a backward pass.
    """

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def __call__(self, run: Callable[[], object], prepare: Callable[[], object]) -> dict[str, float]:
        prepare()
        self.sync()
        start = time.perf_counter()
        run()
        host = time.perf_counter() - start
        self.sync()
        times = {"host": host, "wall": time.perf_counter() - start}
        if self.cuda:
            prepare()
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(int(2e6 + 3e9 * host))  # cycles: longer than the host needs
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times["device"] = begin.elapsed_time(end) / 1e3
        return times


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, in milliseconds."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": 1e3 * middle, "low": 1e3 * low, "high": 1e3 * high}


def interleaved(
    candidates: Sequence[Candidate], device: str, repeats: int, *, gradients: bool
) -> dict[str, dict[str, dict[str, float]]]:
    """Times of every candidate, one after the other in every repeat, so that a slow moment hits all alike."""
    clock = Clock(device)
    seen: dict[str, dict[str, list[float]]] = {c.name: {} for c in candidates}
    for repeat in range(repeats + 3):
        for c in candidates:
            times = clock(c.run, (lambda c=c: new_gradients(c.model)) if gradients else (lambda: None))
            for p in c.model if gradients else ():
                p.grad = None
            if repeat >= 3:
                for kind, value in times.items():
                    seen[c.name].setdefault(kind, []).append(value)
    return {name: {kind: summary(values) for kind, values in kinds.items()} for name, kinds in seen.items()}


def copy_bandwidth(repeats: int = 20) -> float:
    """Bytes a second, read and written, of torch's copy of 4 GiB."""
    x = torch.randn(1 << 30, device="cuda")
    y = torch.empty_like(x)
    clock = Clock("cuda")
    times = [clock(lambda: y.copy_(x), lambda: None)["device"] for _ in range(repeats)]
    return 8 * (1 << 30) / statistics.median(times)


def memory(make: Make, shapes: Shapes) -> dict[str, float]:
    """Bytes a weight: held beside weights, gradients and the optimizer's state, and more at the peak of a step."""
    n = sum(torch.Size(s).numel() for s in shapes)
    model = tensors(shapes, "cuda")
    new_gradients(model)
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    candidate = make(model)
    for _ in range(2):
        candidate.run()
    optimizer: Any = getattr(candidate.run, "__self__", None)
    state = 8 * n if "AdamW" in candidate.name else 0
    steps = 512 * len(shapes) if state else 0  # a step count each, in blocks of the allocator
    held = torch.cuda.memory_allocated() - base - state - steps
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    candidate.run()
    torch.cuda.synchronize()
    del optimizer
    return {"held": held / n, "transient": (torch.cuda.max_memory_allocated() - before) / n}
