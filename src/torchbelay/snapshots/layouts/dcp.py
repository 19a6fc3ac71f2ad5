"""Folders of torch.distributed.checkpoint.

Their metadata are pickled, and reading a pickle may run code: open only folders that you trust.
"""

import pickle
import threading
import warnings
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from torchbelay.snapshots.checkpoint import Checkpoint, Output, TensorInfo
from torchbelay.snapshots.files import FilePart, Handles, buffer, read_bytes, write_bytes

from .checksums import data_position, renew_checksums
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
        self.about = _metadata(path, self.reader)
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
        found = {name: _place(path, self.about, entry) for name, entry in self.entries.items()}
        self.places = {name: place for name, place in found.items() if place is not None}
        self.sliceable = len(self.places) == len(self.tensors)

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
            place = self.places[name]
            read_bytes(self.handles.at(place.path, place.position + start * out.element_size()), buffer(out))
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


def _metadata(folder: Path, reader: FileSystemReader) -> Metadata:
    """Return what a folder says of itself; refuse one that was not written or copied whole."""
    try:
        found: Metadata = reader.read_metadata()
    except (pickle.UnpicklingError, EOFError, ValueError, AttributeError, ImportError) as problem:
        why = f"{type(problem).__name__}: {problem}"
        raise ValueError(f"{folder / '.metadata'} cannot be read ({why}); write or copy the folder again") from problem
    ends: dict[str, int] = {}
    for stored in (found.storage_data or {}).values():
        ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
    for name, end in ends.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{file}, which .metadata names, does not exist; write or copy the folder again")
        if (size := file.stat().st_size) < end:
            raise ValueError(f"{file} has {size:,} bytes instead of {end:,}; it is damaged: copy the folder again")
    return found


class _Place(NamedTuple):
    """Where all elements of a tensor lie, row by row."""

    path: Path
    position: int
    part: tuple[int, int]  # where the zip file begins that holds them, and its size


def _place(folder: Path, about: Metadata, entry: str) -> _Place | None:
    """Return where in the files of a folder a tensor lies, or None if it is not in one piece, or not as it is."""
    found = about.state_dict_metadata[entry]
    if not isinstance(found, TensorStorageMetadata) or not found.size.numel() or found.chunks[0].sizes != found.size:
        return None
    stored = (about.storage_data or {}).get(MetadataIndex(entry, found.chunks[0].offsets))
    if stored is None or getattr(stored, "transform_descriptors", None):  # compressed, for instance
        return None
    path = folder / stored.relative_path
    with open(path, "rb") as file:
        part: Any = FilePart(file, stored.offset, stored.length)
        try:
            tensor = torch.load(part, map_location="meta", weights_only=True)  # reads no elements
            with zipfile.ZipFile(part) as archive:
                records = [each for each in archive.infolist() if each.filename.endswith("/data/0")]
        except (RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile):
            return None  # another format than that of torch.save
        size = found.size.numel() * found.properties.dtype.itemsize
        if [(each.file_size, each.compress_type) for each in records] != [(size, zipfile.ZIP_STORED)]:
            return None
        if (tensor.dtype, tensor.shape, tensor.is_contiguous()) != (found.properties.dtype, found.size, True):
            return None
        return _Place(path, stored.offset + data_position(part, records[0]), (stored.offset, stored.length))


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


def _tensors_in_one_memory(infos: Mapping[str, TensorInfo]) -> dict[str, Tensor]:
    """Return tensors that all lie in the same memory: their content does not matter, and memory costs time."""
    memory = bytearray(max((info.nbytes for info in infos.values()), default=0))
    return {
        entry: torch.frombuffer(memory, dtype=info.dtype, count=info.numel).view(info.shape)
        if info.numel
        else torch.empty(info.shape, dtype=info.dtype, device="cpu")
        for entry, info in infos.items()
    }


class _Folder(Output):
    """A folder like that of another checkpoint; entries that are not weights are those of the other one.

    The folder is saved with tensors of arbitrary content, and then the tensors are written in parts, in place.
    """

    def __init__(self, like: DcpCheckpoint, destination: Path) -> None:
        self.like = like
        infos = _infos(like)
        self.missing = {name: info.numel for name, info in like.tensors.items()}
        self.counting = threading.Lock()
        self.handles = Handles("r+b")
        state: dict[str, Any] = _tensors_in_one_memory(infos)
        for entry in like.about.state_dict_metadata:
            if entry not in infos:
                like.fetch(state := {**state, entry: None})
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            writer = FileSystemWriter(destination, sync_files=False)  # all of it is synced when it is complete
            save(nest(state, like.paths), storage_writer=writer, no_dist=True)
        about = FileSystemReader(destination).read_metadata()
        self.places = {entry: _place(destination, about, entry) for entry in infos}
        for entry in infos.keys() - like.entries.values():
            other = torch.empty(infos[entry].shape, dtype=infos[entry].dtype, device="cpu")
            like.fetch({entry: other})
            self._write(entry, other, 0)

    def write(self, name: str, values: Tensor, start: int = 0) -> None:
        """Write elements of a tensor."""
        self._write(self.like.entries[name], values, start)
        with self.counting:
            self.missing[name] -= values.numel()

    def _write(self, entry: str, values: Tensor, start: int) -> None:
        place = self.places[entry]
        if place is not None:  # else it has no elements
            file = self.handles.at(place.path, place.position + start * values.element_size())
            write_bytes(file, buffer(values.contiguous()))

    def finish(self) -> None:
        """Complete the files."""
        if missing := [name for name, count in self.missing.items() if count]:
            raise ValueError(f"not written whole: {', '.join(missing[:3])}; write every element once")
        self.handles.close()
        for place in filter(None, self.places.values()):
            renew_checksums(place.path, *place.part)

    def close(self) -> None:
        """Close the file of this thread."""
        self.handles.close()
