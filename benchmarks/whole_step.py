"""Time a whole training step of GPT-2 small, with and without an average: `python benchmarks/whole_step.py --help`.

124M weights, 8 sequences of 512 tokens, bfloat16 autocast, compiled: forward, backward, AdamW and the average. All
candidates train one model, in turns, each with an optimizer of its own; a turn is several steps, and a ratio is that of
two turns of one round. `graph` replays the whole step as a CUDA graph; averages of other libraries, which ask the host,
follow after each replay. Memory is the peak of a step of one candidate alone. Nothing is reported while an average is
not the EMA of the weights that its candidate has trained. On a GPU the result is written as JSON for
`benchmarks/report.py`, in under four minutes; `--quick` tries a tiny model on a CPU, not compiled.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from averaging import versions
from candidates import DECAY, EMA, timm_class
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchbelay as tb

RESULT = Path(__file__).parent / "results" / "whole_step.json"
NONE = "torch AdamW(fused=True), no average"


@dataclass(frozen=True)
class Size:
    """A GPT-2, and the tokens of a step."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary: int = 50257
    batch: int = 8
    length: int = 512


SMALL, TINY = Size(), Size(layers=2, heads=2, width=32, vocabulary=97, batch=2, length=16)


class Block(nn.Module):
    """Attention, then two layers, each with a norm before it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        d, self.heads = size.width, size.heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.wide, self.narrow = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(seen)
        return x + self.narrow(functional.gelu(self.wide(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """A language model whose loss is its output; the embedding is also the last layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(1024, size.width)
        self.blocks = nn.ModuleList([Block(size) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens[:, :-1]) + self.places.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@dataclass
class Candidate:
    """An optimizer, and how its average follows if the optimizer does not take it along."""

    name: str
    optimizer: torch.optim.Optimizer
    average: Callable[[], list[Tensor]]  # as it is now, in the order of the parameters; empty: there is none
    follow: Callable[[], object] | None = None
    bits: int = 32
    graph: Any = None
    keep: list[Any] = field(default_factory=list)


Make = Callable[[GPT2], Candidate]


def adamw(model: GPT2, kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    on_gpu = model.tokens.weight.is_cuda
    return kind(model.parameters(), lr=1e-5, fused=True, capturable=on_gpu)  # type: ignore[no-any-return]


def alone(name: str) -> Make:
    return lambda model: Candidate(name, adamw(model), list)


def with_torch(model: GPT2) -> Candidate:
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    averaged.update_parameters(model)
    return Candidate(
        "torch AdamW, then AveragedModel (EMA)", adamw(model), lambda: list(averaged.parameters()),
        lambda: averaged.update_parameters(model),
    )  # fmt: skip


def with_timm(model: GPT2) -> Candidate:
    ema = timm_class()(model, decay=DECAY)
    return Candidate(
        "torch AdamW, then timm ModelEmaV3", adamw(model), lambda: list(ema.module.parameters()),
        lambda: ema.update(model),
    )  # fmt: skip


def with_belay(name: str, kind: Any, **options: Any) -> Make:
    def make(model: GPT2) -> Candidate:
        optimizer = adamw(model, kind)
        belay = tb.Belay(model, optimizer, EMA, **options)

        def average() -> list[Tensor]:
            exported = belay.average_state_dict()
            return [exported[name] for name, _ in model.named_parameters()]

        return Candidate(name, optimizer, average, bits=options.get("bits", 32), keep=[belay])

    return make


def makes() -> list[Make]:
    found = [
        alone(NONE),
        alone("the same once more: what two equal candidates differ by"),
        with_torch,
        with_timm,
        with_belay("torch AdamW, torchbelay EMA", torch.optim.AdamW),
        with_belay("torchbelay AdamW with EMA, one pass", tb.optim.AdamW),
    ]
    if "bits" in tb.options.Options.__dataclass_fields__:
        found.append(with_belay("torchbelay AdamW with EMA of 24 bits, one pass", tb.optim.AdamW, bits=24))
    return found


class Training:
    """One model and its batch; a candidate's step by calls, or by the replay of a graph."""

    def __init__(self, size: Size, device: str, *, compiled: bool) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = GPT2(size).to(device)
        self.tokens = torch.randint(size.vocabulary, (size.batch, size.length + 1), device=device)
        self._loss = torch.compile(self.model) if compiled else self.model

    def forward_and_backward(self) -> None:
        with torch.autocast(self.device, dtype=torch.bfloat16, cache_enabled=False):
            loss = self._loss(self.tokens)
        loss.backward()

    def step(self, candidate: Candidate) -> None:
        candidate.optimizer.zero_grad(set_to_none=True)
        self.forward_and_backward()
        candidate.optimizer.step()
        if candidate.follow is not None:
            candidate.follow()

    def replay(self, candidate: Candidate) -> None:
        candidate.graph.replay()
        if candidate.follow is not None:
            candidate.follow()

    def capture(self, candidate: Candidate) -> None:
        """Capture forward, backward and the optimizer's step, after a few steps on a stream beside."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step(candidate)
        torch.cuda.current_stream().wait_stream(side)
        candidate.optimizer.zero_grad(set_to_none=True)
        candidate.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(candidate.graph):
            self.forward_and_backward()
            candidate.optimizer.step()

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak(training: Training, make: Make) -> int:
    """The most bytes that a step of this candidate needs, with everything that it keeps; 0 on a CPU."""
    candidate = make(training.model)
    training.step(candidate)
    if training.device != "cuda":
        return 0
    training.step(candidate)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    training.step(candidate)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def check(training: Training, candidate: Candidate, take: Callable[[Candidate], None]) -> None:
    """Stop if three steps do not move the average as an EMA moves."""
    if not candidate.average():
        return
    weights = list(training.model.parameters())
    expected = [t.detach().double() for t in candidate.average()]
    for _ in range(3):
        take(candidate)
        for e, w in zip(expected, weights, strict=True):
            e.lerp_(w.detach().double(), 1 - DECAY)
    close = 1e-6 if candidate.bits == 32 else 2e-4
    for e, found in zip(expected, candidate.average(), strict=True):
        if not torch.allclose(found.double(), e, rtol=close, atol=close * float(e.abs().max())):
            sys.exit(f"{candidate.name}: its average is not the EMA of its weights; nothing is reported")


def rounds_of(
    training: Training, candidates: Sequence[Candidate], take: Callable[[Candidate], None], rounds: int, steps: int
) -> dict[str, Any]:
    """Milliseconds per step of every candidate, and ratios to the first one, turn by turn in every round."""
    seen: dict[str, list[float]] = {c.name: [] for c in candidates}
    for number in range(rounds + 1):
        shift = number % len(candidates)
        for c in (*candidates[shift:], *candidates[:shift]):
            training.wait()
            begin = time.perf_counter()
            for _ in range(steps):
                take(c)
            training.wait()
            if number:  # the first round warms up
                seen[c.name].append(1e3 * (time.perf_counter() - begin) / steps)
    base = seen[candidates[0].name]
    found = {}
    for name, times in seen.items():
        low, middle, high = statistics.quantiles([t / b for t, b in zip(times, base, strict=True)], n=4)
        found[name] = {"ms": statistics.median(times), "ratio": middle, "low": low, "high": high}
    return found


def show(title: str, found: dict[str, Any]) -> None:
    print(f"\n{title:58}{'ms':>9}{'ratio':>8}{'quartiles':>18}")
    for name, row in found.items():
        print(f"{name:58}{row['ms']:9.3f}{row['ratio']:8.3f}{row['low']:10.3f} – {row['high']:.3f}")
    sys.stdout.flush()


def measure(size: Size, device: str, *, compiled: bool, rounds: int, steps: int) -> dict[str, Any]:
    """Return memory, and the times by mode."""
    training = Training(size, device, compiled=compiled)
    usable, missing, memory = [], {}, {}
    for make in makes():
        try:
            name = make(training.model).name
        except ImportError as problem:
            missing[make.__name__] = str(problem)
            continue
        usable.append(make)
        clean()
        memory[name] = peak(training, make)
        clean()
    candidates = [make(training.model) for make in usable]
    modes: dict[str, Any] = {}
    for c in candidates:
        training.step(c)
        check(training, c, training.step)
    modes["calls"] = rounds_of(training, candidates, training.step, rounds, steps)
    show("by calls", modes["calls"])
    if device == "cuda":
        for c in candidates:
            training.capture(c)
            check(training, c, training.replay)
        modes["graph"] = rounds_of(training, candidates, training.replay, rounds, steps)
        show("as a CUDA graph", modes["graph"])
        print("\nGiB at the peak:", {name: round(nbytes / 2**30, 3) for name, nbytes in memory.items()})
    weights = sum(p.numel() for p in training.model.parameters())
    return {
        "weights": weights, "tensors": len(list(training.model.parameters())), "batch": size.batch,
        "length": size.length, "compiled": compiled, "memory": memory, "modes": modes, "missing": missing,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, metavar="N", help="turns of every candidate (default: 40)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="steps of a turn (default: 10)")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"write JSON here (on a GPU: {RESULT.name})")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few turns, not compiled")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.quick:
        parser.error("GPT-2 small is for a GPU; give --quick to try a tiny model on this CPU")
    torch.set_float32_matmul_precision("high")
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "versions": versions(),
    }
    if args.quick:
        result |= measure(TINY, device, compiled=False, rounds=3, steps=2)
    else:
        result |= measure(SMALL, device, compiled=True, rounds=args.rounds, steps=args.steps)
    print("not there:", result["missing"] or "nothing")
    out = args.out or (RESULT if device == "cuda" and not args.quick else None)
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
