"""What is not trained: written with a snapshot if it is not what was written last.

A frozen backbone is large and stays as it is; a codebook or a momentum encoder changes at every step. Writes through
`.data` leave no trace, so every snapshot reads these tensors once and compares their fingerprints.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .content import Content, Source, events, host_copy
from .fingerprints import fingerprints
from .folder import Snapshot, rest_name
from .session import Session


class Rest:
    """Takes those tensors that are not trained and are not what the folder has of them."""

    def __init__(self, source: Source, group: Any = None) -> None:
        self._source, self._group = source, group  # the ranks that write a sharded model
        self._written: dict[str, str] = {}  # the fingerprints of what was written last
        self._latest: Snapshot | None = None  # what was taken last
        self.lost = False  # whether something that was taken could not be written

    def begin(self, files: Iterable[Snapshot]) -> None:
        """Begin a session for which these files count, given from the oldest to the newest."""
        self._written = {name: value for each in files for name, value in each.values.items()}
        self._latest = None

    def take(self, step: int, sessions: tuple[Session, ...], *, copy: bool = True) -> list[Content]:
        """Return what has changed, if anything has; with a sharded model, every rank must call.

        Without a `copy` it is the tensors themselves, for one who writes them at once: a backbone is large.
        """
        tensors = self._source.rest()
        values = self._values(tensors)
        changed = self._changed(values)
        if not changed:
            return []
        if self._latest is not None and self._latest.step == step:  # that file will be replaced
            changed |= self._latest.values.keys() & values.keys()
        chosen = {name: tensor for name, tensor in tensors.items() if name in changed}
        path = Path(rest_name(step, sessions[-1], sharded=self._group is not None))
        told = {name: values[name] for name in chosen}
        self._latest = Snapshot(path, step, None, sessions, copied=frozenset(chosen), values=told)
        self._written |= told
        if not copy:
            return [Content(chosen, self._latest)]
        return [Content({name: host_copy(t) for name, t in chosen.items()}, self._latest, events(chosen))]

    def _changed(self, values: Mapping[str, str]) -> set[str]:
        """Return the names of those tensors that are not what was written last, as any rank knows it."""
        flags = torch.tensor([int(self._written.get(name) != value) for name, value in values.items()], device="cpu")
        if self._group is not None and values:
            torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, group=self._group)
        return {name for name, flag in zip(values, flags.tolist(), strict=True) if flag}

    def _values(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Return the dtypes, shapes and fingerprints of tensors, the same on all ranks."""
        if not tensors:
            return {}
        rank = 0 if self._group is None else torch.distributed.get_rank(self._group)
        own = fingerprints(list(tensors.values()), rank)
        found = torch.cat([own, torch.tensor([int(self.lost)], device="cpu")])
        if self._group is not None:
            torch.distributed.all_reduce(found, group=self._group)
        *numbers, lost = found.tolist()
        if lost:  # on any rank
            self._written, self.lost = {}, False
        pairs = zip(tensors.items(), numbers, strict=True)
        return {name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)} {number}" for (name, t), number in pairs}
