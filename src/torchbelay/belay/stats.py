"""Numbers of an average that are worth logging, the kind and strength of its motion, and a Belay in a few words."""

from typing import TypeVar

import torch

from torchbelay.ops import arithmetic
from torchbelay.physics.method import Method

from . import company, planes, shard
from .average import MAIN, Entry
from .cohort import decay, regime
from .part import Part
from .parts import Parts
from .swap import Swap

T = TypeVar("T")


def stats(parts: Parts) -> dict[str, float | int]:
    """Return step, tension, its ratio to the weights, and effective learning rates."""
    average, swap = parts.averages[MAIN], parts.member.swap
    if swap is None:
        average.refuse_other_shapes()
    entries = list(average.entries.values())
    tension, size = norms(entries, swap)
    return {
        "step": parts.step,
        "tension": tension,
        "tension_ratio": tension / size if size else 0.0,
        **{f"effective_lr/{group}" if group else "effective_lr": rate for group, rate in parts.effective_lrs()},
    }


def regimes(parts: Parts) -> str | dict[str, str]:
    """Return the kind of motion, or the kinds by the parameters' names if they differ."""
    return _one_or_all({name: regime(method) for part in parts.each for name, method, _, _ in _moved(part)})


def decays(parts: Parts) -> float | dict[str, float]:
    """Return the decay of the last coupling, or the decays by the parameters' names if they differ."""
    found: dict[tuple[int, int, int], float] = {}  # many parameters share a method
    values: dict[str, float] = {}
    for part in parts.each:
        part.stepper.settle()
        for name, method, group, age in _moved(part):
            key = (id(method), group, age)
            if key not in found:
                lr = part.averages.parameters.lr(group) or 0.0
                found[key] = decay(method, age, lr, part.options.every, part.options.number_of_workers)
            values[name] = found[key]
    return _one_or_all(values)


def about(parts: Parts) -> list[str]:
    """Return what a reader wants to know, in a few words each."""
    entries = parts.averages[MAIN].entries.values()
    methods = list(dict.fromkeys(repr(e.method) for e in entries))
    found = [
        ", ".join(methods[:3]) + (", …" if len(methods) > 3 else ""),
        f"{len(entries)} tensors, {sum(e.w1.numel() for e in entries):,} weights",
        f"average {'/'.join(sorted({_storage(e) for e in entries}))}",
    ]
    if not entries:
        found = ["averages nothing" if parts.first.averages.began else f"begins after step {parts.first.options.start}"]
    if len(parts.averages) > 1:
        found.append(f"spectators {', '.join(list(parts.averages)[1:])}")
    if len(parts.each) > 1:
        found.append(f"{len(parts.each)} optimizers")
    if parts.saved_with_optimizer:
        found.append("saved with its optimizer")
    if parts.slices is not None:
        found.append(repr(parts.slices))
    if parts.first.optimizer is None:
        found.append("steps by hand")
    paths = dict.fromkeys(part.stepper.path() for part in parts.each)
    return [*found, f"impl={', '.join(paths)!r}", f"step {parts.step}"]


def _storage(e: Entry) -> str:
    """Return how the average of a parameter is kept, in a word."""
    return str(e.w2.dtype).removeprefix("torch.") if e.low is None else f"{planes.BITS} bits"


def _moved(part: Part) -> list[tuple[str, Method, int, int]]:
    """Return name, method, group and age of each parameter; before the averages begin, those that it will have."""
    if part.averages.began:
        step, entries = part.clock.count, part.averages.each[MAIN].entries.values()
        return [(e.name, e.method, e.group, step - e.born) for e in entries]
    return [(w.name, w.method, w.group, 0) for w in part.averages.wanted()[MAIN]]


def _one_or_all(values: dict[str, T]) -> T | dict[str, T]:
    different = set(values.values())
    return different.pop() if len(different) == 1 else values


def norms(entries: list[Entry], swap: Swap | None) -> list[float]:
    """Return ‖w2 − w1‖ and ‖w1‖ over all ranks, wherever weights and average are at present."""
    alike: dict[object, list[Entry]] = {}
    for e in entries:
        alike.setdefault(shard.spread_like(e.spread), []).append(e)
    own = company.own_tensors()
    squares = torch.zeros(2, dtype=torch.float64, device="cpu")
    for some in alike.values():
        w1 = [e.part_of(own.get(id(e.w1), e.w1)) for e in some]
        w2 = [shard.local(e.value if swap is None else swap.value(e, MAIN)) for e in some]
        here = torch.stack([arithmetic.distance(w1, w2), arithmetic.norm(w1)]).square()
        squares += shard.summed(here, some[0].spread).cpu()
    return squares.sqrt().tolist()
