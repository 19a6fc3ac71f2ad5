"""Folders of torch.distributed.checkpoint.

Their metadata are pickled, and reading a pickle may run code: open only folders that you trust.
"""

import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from torchbelay.snapshots.checkpoint import Checkpoint, Output, TensorInfo

from .scratch import Scratch
from .torchfile import find_state


class DcpCheckpoint(Checkpoint):
    """The weights in a folder of torch.distributed.checkpoint, whatever number of ranks wrote it."""

    sliceable = False  # a shard is read as a whole

    def __init__(self, path: Path, key: str | None, companions: Iterable[Path] = ()) -> None:
        self.path = path
        self.layout = "a folder of torch.distributed.checkpoint"
        self.files = tuple(path.glob("*.distcp"))
        self.metadata: dict[str, str] = {}
        self.reader = FileSystemReader(path)
        self.about = self.reader.read_metadata()
        self.reader.set_up_storage_reader(self.about, is_coordinator=True)
        entries = self.about.state_dict_metadata
        planned = self.about.planner_data or {}
        self.paths = {entry: tuple(planned.get(entry, (entry,))) for entry in entries}
        leaves = {entry: _leaf(about) for entry, about in entries.items()}
        state, self.beside = find_state(nest(leaves, self.paths), key, str(path))
        by_identity = {id(leaf): entry for entry, leaf in leaves.items() if isinstance(leaf, Tensor)}
        self.entries = {name: by_identity[id(leaf)] for name, leaf in state.items() if isinstance(leaf, Tensor)}
        self.beside += [name for name in state if name not in self.entries]
        self.tensors = {name: TensorInfo(state[name].dtype, tuple(state[name].shape)) for name in self.entries}
        self.companions = tuple(companions)

    def read(self, name: str) -> Tensor:
        """Read a tensor into new memory of the host."""
        tensor = torch.empty(self.shape(name), dtype=self.dtype(name), device="cpu")
        self.fetch({self.entries[name]: tensor})
        return tensor

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Read elements of a tensor into a flat tensor; if they are not all of it, the whole is read meanwhile."""
        if out.numel() == self.tensors[name].numel:
            self.fetch({self.entries[name]: out.view(self.shape(name))})
        else:
            out.copy_(self.read(name).view(-1)[start : start + out.numel()])

    def fetch(self, state: dict[str, Any]) -> None:
        """Read entries into the tensors of `state`, and put those that are not tensors in their places there."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, self.about, is_coordinator=True)
        self.reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()

    def output(self, destination: Path, about: Mapping[str, str], apart: Collection[str] = ()) -> Output:
        """Begin a folder of the same entries, written as by one rank."""
        return _Folder(self, destination)

    def scratch_bytes(self) -> int:
        """Return the bytes of all tensors: the writer wants them at once, so they wait in files."""
        return sum(info.nbytes for info in _infos(self).values())


def _leaf(about: object) -> Any:
    """Return a tensor without memory for a tensor, and the metadata themselves for anything else."""
    if isinstance(about, TensorStorageMetadata):
        return torch.empty(about.size, dtype=about.properties.dtype, device="meta")
    return about


def _infos(checkpoint: DcpCheckpoint) -> dict[str, TensorInfo]:
    """Return all tensors of a folder by entry, whether weights or not."""
    entries = checkpoint.about.state_dict_metadata.items()
    return {
        entry: TensorInfo(about.properties.dtype, tuple(about.size))
        for entry, about in entries
        if isinstance(about, TensorStorageMetadata)
    }


def nest(flat: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]]) -> dict[str, Any]:
    """Return nested dicts and lists with the values of `flat` at their paths.

    >>> nest({"a": 1, "b": 2, "c": 3}, {"a": ("m", "x"), "b": ("o", 0, "lr"), "c": ("o", 1, "lr")})
    {'m': {'x': 1}, 'o': [{'lr': 2}, {'lr': 3}]}
    """
    root: dict[str | int, Any] = {}
    for entry, value in flat.items():
        place = root
        *way, last = paths[entry]
        for part in way:
            place = place.setdefault(part, {})
        place[last] = value
    return _with_lists(root)  # type: ignore[no-any-return]


def _with_lists(value: Any) -> Any:
    """Turn dicts with the keys 0, 1, 2, … into lists: a path has a whole number at a place in a list."""
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(item) for key, item in value.items()}
    if inner and sorted(map(str, inner)) == sorted(map(str, range(len(inner)))) and all(type(k) is int for k in inner):
        return [inner[number] for number in range(len(inner))]
    return inner


class _Folder(Output):
    """A folder like that of another checkpoint; entries that are not weights are those of the other one."""

    def __init__(self, like: DcpCheckpoint, destination: Path) -> None:
        self.like = like
        self.destination = destination
        self.scratch = Scratch(_infos(like), destination)

    def write(self, name: str, values: Tensor, start: int = 0) -> None:
        """Write elements of a tensor."""
        self.scratch.write(self.like.entries[name], values, start)

    def finish(self) -> None:
        """Fetch the other entries, and write the folder."""
        weights = {*self.like.entries.values()}
        state: dict[str, Any] = dict(self.scratch.tensors)
        for entry, about in self.like.about.state_dict_metadata.items():
            if entry not in weights:
                other = {entry: self.scratch.tensors.get(entry, about)}
                self.like.fetch(other)
                state[entry] = other[entry]
                self.scratch.missing.pop(entry, None)
        self.scratch.finish()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            save(nest(state, self.like.paths), checkpoint_id=self.destination, no_dist=True)

    def close(self) -> None:
        """Free the scratch files."""
        self.scratch.close()
