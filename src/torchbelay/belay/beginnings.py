"""Initial weights in a checkpoint: w0 of each parameter once, in the first average that has the parameter."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .average import Average, Entry
from .checks import fits, same_names
from .initial import Initial
from .shard import local, part_for

Averages = Mapping[str, Average]
Saved = Mapping[str, Mapping[str, Any]]  # by the name of an average: what a checkpoint has of it


def add(found: Mapping[str, dict[str, Any]], own: Averages, averages: Averages) -> None:
    """Add w0 to what a checkpoint has of the averages: our own, or, if they have not begun, as they would begin now."""
    initial = _store(own)
    for name, entries in _firsts(own, averages):
        # Copies: torch.distributed.checkpoint reads into every tensor of a state, each for itself.
        found[name]["initial"] = {e.name: initial.of(e.w1) if initial.knows(e.w1) else e.value.clone() for e in entries}


def check(own: Averages, found: Saved, expected: Averages) -> None:
    """Refuse w0 of a state that does not fit the averages that are expected; changes nothing."""
    for name, entries in _firsts(own, expected):
        kept, what = found[name].get("initial", {}), f"initial weights of average {name!r}"
        same_names(what, kept, [e.name for e in entries])
        for e in entries:
            here = torch.empty(e.w2.shape, dtype=e.dtype, device="meta")
            fits(f"{e.name!r} in the {what}", kept[e.name], here, spread=e.spread)


def load(own: Averages, found: Saved) -> None:
    """Take w0 from a checked state."""
    for name, entries in _firsts(own, own):
        for e in entries:
            w0 = _store(own).of(e.w1)
            local(w0).copy_(part_for(found[name]["initial"][e.name], w0))


def _store(own: Averages) -> Initial:
    """Return what all averages of a Belay share."""
    return next(iter(own.values())).initial


def _firsts(own: Averages, averages: Averages) -> Iterator[tuple[str, list[Entry]]]:
    """Yield averages with their entries of parameters that no average before has; none at all if w0 is not kept."""
    seen: set[int] = set()
    for name, average in averages.items() if _store(own).kept else ():
        yield name, [e for e in average.entries.values() if id(e.w1) not in seen]
        seen |= {id(e.w1) for e in average.entries.values()}
