"""The weights at which averages began, for readouts that need them."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .average import Average, Entry
from .checkpoint import fits, same_names
from .shard import local, part_for


class Initial:
    """w0: copies of the weights at which their averages began, one per parameter, whatever the number of averages.

    They have the dtype of the averages and are on their devices. Only a new beginning changes them. If they are not
    `kept`, there are none, and all of this does nothing.
    """

    def __init__(self, *, kept: bool) -> None:
        self.kept = kept
        self._each: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of w1: w1, and w0

    @torch.inference_mode(False)
    @torch.no_grad()
    def renew(self, entries: Iterable[Entry]) -> None:
        """Take the averages, which have begun just now, for the initial weights."""
        self.follow(entries := list(entries))
        for e in entries if self.kept else ():
            local(self._each[id(e.w1)][1]).copy_(local(e.w2))

    @torch.inference_mode(False)
    @torch.no_grad()
    def follow(self, entries: Iterable[Entry]) -> None:
        """Take in parameters whose averages have begun just now, forget those that left, and go where averages went."""
        if self.kept:
            self._each = {id(e.w1): (e.w1, self._beside(e)) for e in entries}

    def _beside(self, entry: Entry) -> Tensor:
        """Return w0 of a parameter, on the device of its average; a copy of the average if it has none that fits."""
        _, w0 = self._each.get(id(entry.w1), (None, None))
        if w0 is None or w0.dtype != entry.w2.dtype or local(w0).shape != local(entry.w2).shape:
            return entry.w2.detach().clone()
        there = local(entry.w2).device
        return w0 if local(w0).device == there else w0.to(there)

    def of(self, entry: Entry) -> Tensor:
        """Return w0 of a parameter."""
        return self._each[id(entry.w1)][1]

    def saved(self, entries: Iterable[Entry], averages: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint has of w0: nothing if none is kept; before they begin, the weights as they are."""
        if not self.kept:
            return {}
        found = {e.name: self.of(e) for e in entries}
        blank = {name: w for average in averages.values() for name, w in average["weights"].items()}
        # copies: torch.distributed.checkpoint reads into every tensor of a state, each for itself
        return {"initial": found or {name: w.clone() for name, w in blank.items()}}

    def check(self, state: Mapping[str, Any], expected: Mapping[str, Average]) -> None:
        """Refuse a state whose w0 does not fit the averages."""
        entries = {e.name: e for average in expected.values() for e in average.entries.values()}
        if self.kept:
            same_names("initial weights", state.get("initial"), entries)
        for name, e in entries.items() if self.kept else ():
            fits(f"{name!r} in the initial weights", state["initial"][name], e.w2, spread=e.w1)

    def load(self, entries: Iterable[Entry], state: Mapping[str, Any]) -> None:
        """Take w0 from a checked state."""
        self.follow(entries := list(entries))
        for e in entries if self.kept else ():
            own = self.of(e)
            local(own).copy_(part_for(state["initial"][e.name], own))
