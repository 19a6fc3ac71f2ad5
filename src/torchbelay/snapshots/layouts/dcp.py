"""Folders of torch.distributed.checkpoint.

Their metadata are pickled, and reading a pickle may run code: open only folders that you trust.
"""

import io
import pickle
import warnings
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from torchbelay.snapshots.checkpoint import Checkpoint, Output, TensorInfo
from torchbelay.snapshots.files import Handles, buffer, read_bytes

from .checksums import data_position
from .scratch import Scratch
from .torchfile import find_state


class DcpCheckpoint(Checkpoint):
    """The weights in a folder of torch.distributed.checkpoint, whatever number of ranks wrote it.

    A tensor that lies in one piece in a file, as one rank writes it, is read from there. Others are read by torch's
    reader, each as a whole.
    """

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
        self.handles = Handles("rb")
        found = {name: self._place(entry) for name, entry in self.entries.items()}
        self.places = {name: place for name, place in found.items() if place is not None}
        self.sliceable = len(self.places) == len(self.tensors)

    def _place(self, entry: str) -> tuple[Path, int] | None:
        """Return the file and the position at which all elements of a tensor lie in rows, if there is such a place."""
        about = self.about.state_dict_metadata[entry]
        stored = [each for index, each in (self.about.storage_data or {}).items() if index.fqn == entry]
        if len(stored) != 1 or len(about.chunks) != 1 or about.chunks[0].sizes != about.size or not about.size.numel():
            return None
        if getattr(stored[0], "transform_descriptors", None):
            return None  # compressed, for instance
        path = self.path / stored[0].relative_path
        with open(path, "rb") as file:
            part = _Part(file, stored[0].offset, stored[0].length)
            try:
                tensor = torch.load(part, map_location="meta", weights_only=True)  # reads no elements
                with zipfile.ZipFile(part) as archive:
                    records = [each for each in archive.infolist() if each.filename.endswith("/data/0")]
            except (RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile):
                return None  # another format than that of torch.save
            expected = about.properties.dtype, about.size, about.size.numel() * about.properties.dtype.itemsize
            if len(records) != 1 or not isinstance(tensor, Tensor) or not tensor.is_contiguous():
                return None
            if (tensor.dtype, tensor.shape, records[0].file_size) != expected or records[0].compress_type:
                return None
            return path, stored[0].offset + data_position(cast(IO[bytes], part), records[0])

    def read(self, name: str) -> Tensor:
        """Read a tensor into new memory of the host."""
        if name in self.places:
            return super().read(name)
        tensor = torch.empty(self.shape(name), dtype=self.dtype(name), device="cpu")
        self.fetch({self.entries[name]: tensor})
        return tensor

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Read elements of a tensor into a flat tensor, of which torch's reader reads the whole meanwhile."""
        if name in self.places:
            path, position = self.places[name]
            read_bytes(self.handles.at(path, position + start * out.element_size()), buffer(out))
        elif out.numel() == self.tensors[name].numel:
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

    def close(self) -> None:
        """Close the file of this thread."""
        self.handles.close()

    def scratch_bytes(self) -> int:
        """Return the bytes of all tensors: the writer wants them at once, so they wait in files."""
        return sum(info.nbytes for info in _infos(self).values())


class _Part(io.RawIOBase):
    """A part of a file, to be read as if it were a file."""

    def __init__(self, file: IO[bytes], begin: int, size: int) -> None:
        self.file, self.begin, self.size, self.position = file, begin, size, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in the part."""
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position in the part."""
        self.position = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence] + offset
        return self.position

    def readinto(self, block: Any) -> int:
        """Fill memory from the part, as far as the part goes."""
        self.file.seek(self.begin + self.position)
        wanted = max(0, min(len(block), self.size - self.position))
        data = self.file.read(wanted)
        block[: len(data)] = data
        self.position += len(data)
        return len(data)


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
