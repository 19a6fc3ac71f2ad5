"""Numbers of an average that are worth logging."""

import torch

from torchbelay.ops import arithmetic

from . import company, shard
from .average import MAIN, Entry
from .parts import Parts
from .swap import Swap


def stats(parts: Parts) -> dict[str, float | int | str]:
    """Return step, tension, its ratio to the weights, effective learning rates, and the kind of motion."""
    average, swap = parts.averages[MAIN], parts.member.swap
    if swap is None:
        average.refuse_other_shapes()
    entries = list(average.entries.values())
    tension, size = _norms(entries, swap)
    return {
        "step": parts.step,
        "tension": tension,
        "tension_ratio": tension / size if size else 0.0,
        **{f"effective_lr/{group}" if group else "effective_lr": rate for group, rate in parts.effective_lrs()},
        "regime": ", ".join(sorted({cohort.regime for cohort in average.cohorts})),
    }


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
