"""Safetensors: one file, or the shards that an index of Hugging Face names.

A file is the length of its header (8 bytes, little-endian), the header in JSON (for every tensor dtype, shape and the
range of its bytes), and the bytes. Nothing more is needed, so this needs no package.
"""

import json
import os
import struct
import sys
import threading
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchbelay.snapshots.checkpoint import Checkpoint, Output, TensorInfo
from torchbelay.snapshots.files import Handles, buffer, read_bytes, write_bytes

_LONGEST_HEADER = 100_000_000  # bytes, as the format has it

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Header(NamedTuple):
    """What a file says before its bytes: the tensors in the order of their bytes, where each begins, and texts."""

    tensors: dict[str, TensorInfo]
    starts: dict[str, int]  # positions in the file
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Read the header of a safetensors file; refuse a file that is damaged or of another format."""
    if sys.byteorder != "little":
        raise NotImplementedError("safetensors files are little-endian, and this machine is not; use another machine")
    size = path.stat().st_size
    with open(path, "rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else _LONGEST_HEADER + 1
        if length > min(_LONGEST_HEADER, size - 8):
            kind = "a safetensors file" if path.suffix == ".safetensors" else "a file of safetensors or torch.save"
            raise ValueError(f"{path} is not {kind}, or only the beginning of one; write or copy it again")
        text = file.read(length)
    try:
        fields = json.loads(text)
        metadata = fields.pop("__metadata__", None) or {}
        listed = sorted((_entry(path, name, field) for name, field in fields.items()), key=lambda entry: entry[2])
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        if str(problem).startswith(str(path)):
            raise
        raise ValueError(f"{path} has a header that is not of safetensors ({problem}); write it again") from problem
    position = 0
    for name, info, start, end in listed:
        if start != position or end - start != info.nbytes:
            raise ValueError(f"{path}: the bytes of {name!r} are not where its shape puts them; write the file again")
        position = end
    if 8 + length + position != size:
        raise ValueError(
            f"{path} has {size:,} bytes instead of {8 + length + position:,}; it is damaged: copy it again"
        )
    tensors = {name: info for name, info, _, _ in listed}
    return Header(tensors, {name: 8 + length + start for name, _, start, _ in listed}, metadata)


def _entry(path: Path, name: str, field: Any) -> tuple[str, TensorInfo, int, int]:
    if field["dtype"] not in _DTYPES:
        raise ValueError(
            f"{path}: {name!r} has the dtype {field['dtype']}, which torch cannot average; convert it first"
        )
    shape = tuple(field["shape"])
    if not all(isinstance(length, int) and length >= 0 for length in shape):
        raise ValueError(f"shape {shape} of {name!r}")
    start, end = field["data_offsets"]
    return name, TensorInfo(_DTYPES[field["dtype"]], shape), int(start), int(end)


def make_header(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return the bytes of a header, and the positions in the file at which the tensors begin."""
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    starts = {}
    for name, info in tensors.items():
        if info.dtype not in _NAMES:
            raise ValueError(f"{name!r} is {info.dtype}, which safetensors cannot hold; use a file of torch.save")
        starts[name] = position
        offsets = [position, position := position + info.nbytes]
        fields[name] = {"dtype": _NAMES[info.dtype], "shape": list(info.shape), "data_offsets": offsets}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return struct.pack("<Q", len(text)) + text, {name: 8 + len(text) + start for name, start in starts.items()}


class SafetensorsWriter(Output):
    """A safetensors file written tensor by tensor, in any order, with the memory of one.

    Give names, dtypes and shapes first. Write into `replacing(path)`, so that the file appears whole or not at all.

    >>> import tempfile
    >>> from torchbelay.belay.files import replacing
    >>> from torchbelay.snapshots.opening import open_checkpoint
    >>> path = Path(tempfile.mkdtemp()) / "a.safetensors"
    >>> with (
    ...     replacing(path) as temporary,
    ...     SafetensorsWriter(temporary, {"w": TensorInfo(torch.float32, (2,))}, {"step": "9"}) as file,
    ... ):
    ...     file.write("w", torch.ones(2))
    >>> with open_checkpoint(path) as checkpoint:
    ...     checkpoint.names, checkpoint.read("w"), checkpoint.metadata
    (('w',), tensor([1., 1.]), {'step': '9'})
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, TensorInfo],
        metadata: Mapping[str, str] | None = None,
        handles: Handles | None = None,
    ) -> None:
        self.path = path
        self.tensors = dict(tensors)
        header, self.starts = make_header(tensors, metadata or {})
        self.missing = {name: info.numel for name, info in tensors.items()}
        self.counting = threading.Lock()
        path.write_bytes(header)
        os.truncate(path, len(header) + sum(info.nbytes for info in tensors.values()))
        self.handles = handles or Handles("r+b")

    def write(self, name: str, values: Tensor, start: int = 0) -> None:
        """Write elements of a tensor, in row-major order, beginning with the element number `start`."""
        info = self.tensors[name]
        if values.dtype != info.dtype or start + values.numel() > info.numel:
            raise ValueError(
                f"{name!r} is announced as {info.dtype} of {info.numel:,} elements; "
                f"got {values.dtype}, {values.numel():,} from element {start:,} on"
            )
        values = values.detach().cpu().contiguous()
        file = self.handles.at(self.path, self.starts[name] + start * info.dtype.itemsize)
        write_bytes(file, buffer(values))
        with self.counting:
            self.missing[name] -= values.numel()

    def finish(self) -> None:
        """Refuse if a tensor is not written whole."""
        if missing := [name for name, count in self.missing.items() if count]:
            raise ValueError(f"{self.path.name}: not written whole: {', '.join(missing[:3])}; write every element once")

    def close(self) -> None:
        """Close the file."""
        self.handles.close()


class SafetensorsCheckpoint(Checkpoint):
    """A safetensors file, or several in a folder."""

    def __init__(self, path: Path, files: Iterable[Path], companions: Iterable[Path] = ()) -> None:
        self.path = path
        self.files = tuple(files)
        self.layout = "a safetensors file" if len(self.files) == 1 else f"{len(self.files)} safetensors shards"
        self.headers = {file: read_header(file) for file in self.files}
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[str, str] = {}
        self.places: dict[str, tuple[Path, int]] = {}
        for file, header in self.headers.items():
            if twice := self.tensors.keys() & header.tensors.keys():
                raise ValueError(f"{path}: {min(twice)!r} is in two of its files; remove the stale one")
            self.tensors |= header.tensors
            self.metadata = {**header.metadata, **self.metadata}
            self.places |= {name: (file, start) for name, start in header.starts.items()}
        self.companions = tuple(companions)
        self.handles = Handles("rb")

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Read `out.numel()` elements of a tensor, in row-major order from number `start`, into a flat tensor."""
        file, position = self.places[name]
        read_bytes(self.handles.at(file, position + start * out.element_size()), buffer(out))

    def output(self, destination: Path, about: Mapping[str, str], apart: Collection[str] = ()) -> Output:
        """Begin files of the same names and contents in a folder, or one file."""
        return _Files(self, destination, about)

    def close(self) -> None:
        """Close the file of this thread."""
        self.handles.close()


class _Files(Output):
    """All files of a checkpoint that is like another one."""

    def __init__(self, like: SafetensorsCheckpoint, destination: Path, about: Mapping[str, str]) -> None:
        self.writers = []
        self.handles = Handles("r+b")  # one for all files: a thread has one file open, not hundreds
        self.place: dict[str, SafetensorsWriter] = {}
        for file, header in like.headers.items():
            path = destination / file.name if like.path.is_dir() else destination
            writer = SafetensorsWriter(path, header.tensors, {**header.metadata, **about}, self.handles)
            self.writers.append(writer)
            self.place |= dict.fromkeys(header.tensors, writer)

    def write(self, name: str, values: Tensor, start: int = 0) -> None:
        """Write elements of a tensor."""
        self.place[name].write(name, values, start)

    def finish(self) -> None:
        """Refuse if a tensor is not written whole."""
        for writer in self.writers:
            writer.finish()

    def close(self) -> None:
        """Close the file of this thread."""
        self.handles.close()
