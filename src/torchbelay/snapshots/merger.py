"""Merge checkpoints that exist already: their weighted mean, written like the last of them."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Self

import torch

from torchbelay._version import __version__
from torchbelay.belay.checks import some
from torchbelay.belay.files import TORCH_ENDINGS, destination, replacing
from torchbelay.belay.files import sync as sync_file
from torchbelay.physics import arguments
from torchbelay.physics.warnings import warn

from .checkpoint import Checkpoint, Output
from .differences import Findings, examine
from .files import replacing_folder, sync
from .layouts.safetensors import SafetensorsCheckpoint
from .mean import Part, Source, Workspace, mean
from .opening import holds_weights, left_behind, open_checkpoint, strangers
from .stream import Progress, stream, usual_threads
from .weights import merge_weights

Precision = Literal["float32", "float64"]

_PART = 1 << 18  # elements: several tensors of this size fit into the cache of a core


@dataclass(frozen=True)
class Merged:
    """What a merge did."""

    path: Path
    weights: tuple[float, ...]
    tensors: int
    bytes_read: int
    bytes_written: int
    seconds: float
    notes: tuple[str, ...]


def merge(
    paths: Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    weights: str | Sequence[float] = "uniform",
    *,
    normalize: bool = False,
    key: str | None = None,
    precision: Precision = "float32",
    overwrite: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Merged:
    """Write the weighted mean of checkpoints, given from the oldest to the newest, in the layout of the last one.

    `paths` and `key` are those of `open_checkpoint`, `weights` and `normalize` those of `merge_weights`. Files beside
    the last checkpoint's weights (configuration, tokenizer) are copied, so that the merge loads with `from_pretrained`.
    Tensors are streamed in parts by several `threads`; sums are float32, or `precision`, and float64 for float64
    tensors. Dtypes stay. `progress(done, total)` is called with bytes.

    Differences between the checkpoints are refused, or reported as warnings before anything is written. If anything
    fails, or the process is killed, `out` is what it was before.

    >>> import tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> for step in (1, 2, 3):
    ...     torch.save({"w": torch.full((2,), float(step))}, f"{folder}/{step}.pt")
    >>> merged = merge([f"{folder}/{step}.pt" for step in (1, 2, 3)], f"{folder}/mean.pt")
    >>> torch.load(f"{folder}/mean.pt"), merged.tensors
    ({'w': tensor([2., 2.])}, 1)
    """
    with Merge(paths, weights, normalize=normalize, key=key, precision=precision) as prepared:
        prepared.check(out, overwrite=overwrite)
        for note in prepared.notes:
            warn(note)
        return prepared.write(out, overwrite=overwrite, threads=threads, progress=progress)


class Merge:
    """A merge that was looked at and not written yet: `notes` say what is special about it."""

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        weights: str | Sequence[float] = "uniform",
        *,
        normalize: bool = False,
        key: str | None = None,
        precision: Precision = "float32",
    ) -> None:
        if isinstance(paths, str | os.PathLike) or not (paths := list(paths)):
            raise ValueError(f"paths={paths!r} is not a list of checkpoints; give them from the oldest to the newest")
        arguments.one_of("precision", precision, ("float32", "float64"))
        self.precision = getattr(torch, precision)
        self.weights = merge_weights(weights, len(paths), normalize=normalize)
        with ExitStack() as stack:
            self.inputs: list[Checkpoint] = [stack.enter_context(open_checkpoint(path, key=key)) for path in paths]
            self.last = self.inputs[-1]
            self.found: Findings = examine(self.inputs)
            self.open = stack.pop_all()
        self.notes = [*self._notes(), *self.found.notes]
        self.sources = {name: self._sources(name) for name in self.last.tensors}

    def _sources(self, name: str) -> list[Source]:
        """Return where the values of a tensor come from."""
        if name in self.found.kept:
            return [Source(self.last, name, 1.0)]
        return [
            Source(checkpoint, self.found.name_in(number, name), weight)
            for number, (checkpoint, weight) in enumerate(zip(self.inputs, self.weights, strict=True))
            if weight
        ]

    def _notes(self) -> Iterator[str]:
        names = [str(checkpoint.path) for checkpoint in self.inputs]
        if len(names) == 1:
            yield f"{names[0]} is the only checkpoint: the merge is a copy"
        if len({*map(os.path.realpath, names)}) < len(names):
            yield "a checkpoint is given twice; its weights add up"
        if max(self.weights) - min(self.weights) > 1e-9 and _disordered(names):
            yield f"the checkpoints are not in the order of their numbers: {', '.join(map(os.path.basename, names))}"
        if unused := [name for name, weight in zip(names, self.weights, strict=True) if not weight]:
            yield f"{', '.join(unused)}: the weight is 0"
        if min(self.weights) < 0:
            yield "some weights are negative: the merge is not between the checkpoints"
        if self.last.beside:
            listed = ", ".join(sorted({*self.last.beside})[:8])
            yield f"entries beside the weights are those of {self.last.path}: {listed}"
        if self.last.path.is_dir() and (left := left_behind(self.last)):
            yield f"not carried along from {self.last.path}: {', '.join(left[:8])}"

    def check(self, out: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Refuse a place that cannot be written to, or that holds something."""
        path = Path(os.path.realpath(out))
        for checkpoint in self.inputs:
            given = Path(os.path.realpath(checkpoint.path))
            if given.is_relative_to(path):
                raise ValueError(f"out={os.fspath(out)!r} is or holds the checkpoint {given}; give another place")
        self._check_lost(path, os.fspath(out), overwrite=overwrite)
        if self.last.path.is_dir():
            if not path.parent.is_dir():
                raise FileNotFoundError(f"out={os.fspath(out)!r}: there is no folder {path.parent}; make it first")
        else:
            path = destination(out, argument="out")
            self._check_name(os.fspath(out))
        needed = self.last.nbytes
        free = shutil.disk_usage(path.parent).free
        if needed > free:
            raise OSError(
                f"out={os.fspath(out)!r} needs {size(needed)}, and the disk has {size(free)} left; make room, or give "
                "a place on another disk"
            )

    def _check_lost(self, path: Path, out: str, *, overwrite: bool) -> None:
        """Refuse a place where something is that would be lost."""
        empty = path.is_dir() and not any(path.iterdir())
        if path.exists() and not empty and not overwrite:
            raise FileExistsError(f"out={out!r} exists; give another name, or overwrite=True (--overwrite)")
        if self.last.path.is_dir() and path.is_file():
            raise NotADirectoryError(f"out={out!r} is a file, and the last checkpoint is a folder")
        if self.last.path.is_dir() and path.is_dir():
            self._check_old(path, out)

    def _check_name(self, out: str) -> None:
        """Refuse a name that says another layout than the file will have: what reads it would trust the name."""
        is_safetensors = isinstance(self.last, SafetensorsCheckpoint)
        if out.endswith(TORCH_ENDINGS if is_safetensors else ".safetensors"):
            raise ValueError(
                f"out={out!r} would be {self.last.layout}, as {self.last.path} is; give a name that ends in "
                f"{'.safetensors' if is_safetensors else '.pt'}, or a last checkpoint of the other layout"
            )

    def _check_old(self, path: Path, out: str) -> None:
        """Refuse to replace a folder that is not a checkpoint and nothing else."""
        if any(path.iterdir()) and not holds_weights(path):
            raise FileExistsError(f"out={out!r} holds files and no weights, and is not overwritten; give another name")
        if lost := strangers(path, self._names()):
            raise FileExistsError(
                f"out={out!r} also holds {some(lost)}, which would be lost; move that to another place, or give "
                "another name"
            )

    def _names(self) -> list[Path]:
        """Return the names of the files that the merge will have, if it is a folder."""
        return [*self.last.companions, *(file.relative_to(self.last.path) for file in self.last.files)]

    def write(
        self,
        out: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> Merged:
        """Write the merge, all of it or nothing."""
        self.check(out, overwrite=overwrite)
        if threads is not None:
            arguments.whole("threads", threads, low=1)
        began = time.perf_counter()
        tasks = list(self._tasks())
        about = {"torchbelay_merge": json.dumps(self._about())}
        folder = self.last.path.is_dir()
        with replacing_folder(out) if folder else replacing(out) as temporary:
            with self.last.output(temporary, about, self.found.apart) as output:
                begin = partial(self._worker, output)
                stream(tasks, begin, threads=threads or self._usual_threads(), progress=progress)
            for file in self.last.companions if folder else ():
                (temporary / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.last.path / file, temporary / file)
            (sync if folder else sync_file)(temporary)  # now, so that little time is left after the next line
            self._check_lost(Path(os.path.realpath(out)), os.fspath(out), overwrite=overwrite)  # others write there too
        seconds = time.perf_counter() - began
        read = sum(count for _, count in tasks)
        count = len(self.last.tensors)
        return Merged(Path(out), self.weights, count, read, self.last.nbytes, seconds, tuple(self.notes))

    def _about(self) -> dict[str, object]:
        names = [checkpoint.path.name for checkpoint in self.inputs]
        return {"checkpoints": names, "weights": self.weights, "version": __version__}

    def _tasks(self) -> Iterator[tuple[Part, int]]:
        """Yield the parts of all tensors, in the order of the last checkpoint's files, and the bytes to read."""
        for name, info in self.last.tensors.items():
            sources = self.sources[name]
            whole = not all(source.checkpoint.sliceable for source in sources)
            step = info.numel if whole else _PART
            width = sum(source.checkpoint.dtype(source.name).itemsize for source in sources)
            for start in range(0, info.numel, step or 1):
                count = min(step, info.numel - start)
                yield Part(name, start, count), count * width

    def _usual_threads(self) -> int:
        """Return how many threads to use; few if each of them holds whole tensors."""
        return usual_threads() if all(checkpoint.sliceable for checkpoint in self.inputs) else 2

    def _worker(self, output: Output) -> Callable[[Part], None]:
        """Return a function that computes and writes a part, with memory of its own."""
        workspace = Workspace()

        def work(part: Part) -> None:
            sources = self.sources[part.name]
            dtype = self.last.dtype(part.name)
            if part.name in self.found.kept:
                values = workspace.get("kept", part.length, dtype)
                self.last.read_into(part.name, part.start, values)
            else:
                dtypes = {self.precision, *(s.checkpoint.dtype(s.name) for s in sources)}
                wide = torch.float64 if dtypes & {torch.float64, torch.complex128} else torch.float32
                values = mean(sources, part, workspace, wide=wide, dtype=dtype)
            output.write(part.name, values, part.start)

        return work

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.open.close()


def _disordered(names: Sequence[str]) -> bool:
    """Return whether names differ in their last number only, and these numbers do not grow.

    >>> _disordered(["run/step-9", "run/step-10"]), _disordered(["run/step-10", "run/step-9"])
    (False, True)
    """
    split = [re.fullmatch(r"(.*?)(\d+)(\D*)", name, re.S) for name in names]
    if not all(split) or len({(match[1], match[3]) for match in split if match}) > 1:
        return False
    numbers = [int(match[2]) for match in split if match]
    return numbers != sorted(numbers)


def size(count: int) -> str:
    """Return a number of bytes in words.

    >>> size(999), size(12_345_678_901)
    ('999 bytes', '12.3 GB')
    """
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
