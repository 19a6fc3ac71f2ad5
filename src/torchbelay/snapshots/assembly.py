"""Put a state dict together: tensors that are combinations of snapshots, and those that are taken as they are."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torchbelay.belay.files import replacing

from .checkpoint import Checkpoint, Output, TensorInfo
from .files import Handles
from .folder import Snapshot
from .layouts.safetensors import SafetensorsCheckpoint, SafetensorsWriter
from .mean import Part, Source, Workspace, mean
from .opening import open_checkpoint
from .solution import Solution
from .stream import Progress, stream, usual_threads

_PIECE = 1 << 20  # elements that are read at a time


class _Entry(NamedTuple):
    """Where the values of a tensor come from; one source alone is copied."""

    sources: tuple[Source, ...]
    info: TensorInfo


class Assembly:
    """The tensors of a synthesis, read from open snapshots; several threads may read."""

    def __init__(self, solutions: Sequence[Solution], copied: Mapping[str, Snapshot], rest: Sequence[Path]) -> None:
        self._stack = ExitStack()
        self._open: dict[Path, Checkpoint] = {}
        self._handles = Handles("rb")  # shared: a thread has one file open, not one per snapshot
        self.entries: dict[str, _Entry] = {}
        with self._stack:
            for solution in solutions:
                self._add_combined(solution)
            for name, snapshot in copied.items():
                self._add_copied(name, self._file(snapshot.path))
            tied, order = solutions[0].snapshots[-1].tied, solutions[0].snapshots[-1].order
            for others in map(self._file, rest):
                for name in others.names if not order else [name for name in others.names if name in order]:
                    if name not in self.entries and tied.get(name) not in self.entries:
                        self._add_copied(name, others)
            self.further: dict[str, list[str]] = {}
            for name, first in tied.items():
                if first in self.entries and name not in self.entries:
                    self.further.setdefault(first, []).append(name)
            self._stack = self._stack.pop_all()

    def _file(self, path: Path) -> Checkpoint:
        if path not in self._open:
            file = self._stack.enter_context(open_checkpoint(path))
            if isinstance(file, SafetensorsCheckpoint):
                file.handles = self._handles
            self._open[path] = file
        return self._open[path]

    def _add_combined(self, solution: Solution) -> None:
        last = solution.snapshots[-1]
        pairs = list(zip(solution.snapshots, solution.weights.tolist(), strict=True))
        for name in solution.names:
            sources = tuple(Source(self._file(each.path), name, weight) for each, weight in pairs)
            stored = sources[-1].checkpoint.tensors[name]
            dtype = getattr(torch, last.dtypes[name]) if name in last.dtypes else stored.dtype
            self.entries[name] = _Entry(sources, TensorInfo(dtype, stored.shape))

    def _add_copied(self, name: str, file: Checkpoint) -> None:
        self.entries[name] = _Entry((Source(file, name, 1.0),), file.tensors[name])

    @property
    def infos(self) -> dict[str, TensorInfo]:
        """The names, dtypes and shapes of all tensors."""
        found = {name: entry.info for name, entry in self.entries.items()}
        return found | {name: found[first] for first, names in self.further.items() for name in names}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield one tensor after the other; what is tied is one tensor."""
        workspace = Workspace()
        for name, entry in self.entries.items():
            tensor = torch.empty(entry.info.numel, dtype=entry.info.dtype, device="cpu")
            for piece in self._pieces(name):
                tensor[piece.start : piece.start + piece.length] = self._values(piece, workspace)
            for each in (name, *self.further.get(name, ())):
                yield each, tensor.view(entry.info.shape)

    def write(self, path: Path, about: Mapping[str, str], progress: Progress | None = None) -> None:
        """Write all tensors to a safetensors file, whole or not at all, with several threads that read."""
        pieces = [piece for name in self.entries for piece in self._pieces(name)]
        with replacing(path) as temporary, SafetensorsWriter(temporary, self.infos, {"format": "pt", **about}) as out:
            tasks = [(piece, self._size(piece)) for piece in pieces]
            stream(tasks, lambda: _Worker(self, out), threads=usual_threads(), progress=progress)

    def _pieces(self, name: str) -> Iterator[Part]:
        sources, info = self.entries[name]
        whole = not all(source.checkpoint.sliceable for source in sources)
        size = max(1, info.numel if whole else _PIECE)
        return (Part(name, start, min(size, info.numel - start)) for start in range(0, info.numel, size))

    def _size(self, piece: Part) -> int:
        """Return the bytes that are read for a piece."""
        sources, _ = self.entries[piece.name]
        return piece.length * sum(source.checkpoint.dtype(source.name).itemsize for source in sources)

    def _values(self, piece: Part, workspace: Workspace) -> Tensor:
        sources, info = self.entries[piece.name]
        if len(sources) == 1:
            values = workspace.get("copy", piece.length, sources[0].checkpoint.dtype(piece.name))
            sources[0].checkpoint.read_into(piece.name, piece.start, values)
            return values.to(info.dtype)
        return mean(sources, piece, workspace, wide=torch.float64, dtype=info.dtype)

    def close(self) -> None:
        """Let go of the snapshots."""
        self._stack.close()
        self._handles.close()

    def __enter__(self) -> "Assembly":
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


class _Worker:
    """Makes pieces in a thread of its own, with memory of its own."""

    def __init__(self, assembly: Assembly, out: Output) -> None:
        self.assembly, self.out, self.workspace = assembly, out, Workspace()

    def __call__(self, piece: Part) -> None:
        """Read a piece, and write it under all names of its tensor."""
        values = self.assembly._values(piece, self.workspace)
        for name in (piece.name, *self.assembly.further.get(piece.name, ())):
            self.out.write(name, values, piece.start)
