"""Numbers of an average that are worth logging, and the kind and strength of its motion."""

from typing import TypeVar

import torch

from torchbelay.ops import arithmetic
from torchbelay.physics.method import Method

from . import company, shard
from .average import MAIN, Entry
from .averages import Averages
from .cohort import decay, regime
from .swap import Swap

T = TypeVar("T")


def stats(averages: Averages, swap: Swap | None, step: int) -> dict[str, float | int]:
    """Return step, tension, its ratio to the weights, and effective learning rates."""
    average = averages.each[MAIN]
    if swap is None:
        average.refuse_other_shapes()
    entries = list(average.entries.values())
    tension, size = _norms(entries, swap)
    rates = averages.effective_lrs(average)
    return {
        "step": step,
        "tension": tension,
        "tension_ratio": tension / size if size else 0.0,
        **{f"effective_lr/{group}" if group else "effective_lr": rate for group, rate in rates.items()},
    }


def regimes(averages: Averages) -> str | dict[str, str]:
    """Return the kind of motion, or the kinds by the parameters' names if they differ."""
    return _one_or_all({name: regime(method) for name, method, _, _ in _moved(averages, 0)})


def decays(averages: Averages, step: int) -> float | dict[str, float]:
    """Return the decay of the last coupling, or the decays by the parameters' names if they differ."""
    found: dict[tuple[int, int, int], float] = {}  # many parameters share a method
    every = averages.each[MAIN].every
    values: dict[str, float] = {}
    for name, method, group, born in _moved(averages, step):
        key = (id(method), group, born)
        if key not in found:
            found[key] = decay(method, step - born, averages.parameters.lr(group) or 0.0, every)
        values[name] = found[key]
    return _one_or_all(values)


def _moved(averages: Averages, step: int) -> list[tuple[str, Method, int, int]]:
    """Return name, method, group and first step of each parameter; before the averages begin, those it will have."""
    if averages.began:
        return [(e.name, e.method, e.group, e.born) for e in averages.each[MAIN].entries.values()]
    return [(w.name, w.method, w.group, step) for w in averages.wanted()[MAIN]]


def _one_or_all(values: dict[str, T]) -> T | dict[str, T]:
    different = set(values.values())
    return different.pop() if len(different) == 1 else values


def _norms(entries: list[Entry], swap: Swap | None) -> list[float]:
    """Return ‖w2 − w1‖ and ‖w1‖ over all ranks, wherever weights and average are at present."""
    alike: dict[object, list[Entry]] = {}
    for e in entries:
        alike.setdefault(shard.spread_like(e.w1), []).append(e)
    own = company.own_tensors()
    squares = torch.zeros(2, dtype=torch.float64, device="cpu")
    for some in alike.values():
        w1 = [shard.local(own.get(id(e.w1), e.w1)) for e in some]
        w2 = [shard.local(e.w2 if swap is None else swap.value(e, MAIN)) for e in some]
        here = torch.stack([arithmetic.distance(w1, w2), arithmetic.norm(w1)]).square()
        squares += shard.summed(here, some[0].w1).cpu()
    return squares.sqrt().tolist()
