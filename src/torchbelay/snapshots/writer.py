"""Write snapshots in the background, one after the other, each whole or not at all."""

import os
import shutil
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from torchbelay._version import __version__
from torchbelay.belay.files import replacing
from torchbelay.belay.slices import Slices

from .checkpoint import TensorInfo
from .content import Content
from .files import sync
from .folder import ABOUT, ABOUT_FILE, Folder, Snapshot
from .layouts.safetensors import SafetensorsWriter

TEMPORARY = ".tmp"  # how the name of what is not complete ends


class Background:
    """Does jobs one after the other in a thread, which lives only while there are jobs.

    The thread is no daemon: a program that ends writes what is waiting first.
    """

    def __init__(self) -> None:
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        self._lock = threading.Condition()
        self._busy = False
        self._problems: list[Exception] = []

    def add(self, job: Callable[[], None], nbytes: int) -> None:
        """Do a job, which holds so many bytes, when those before it are done; returns at once."""
        with self._lock:
            self._jobs.append((job, nbytes))
            if not self._busy:
                self._busy = True
                threading.Thread(target=self._work, name="torchbelay snapshots").start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._busy = False
                    self._lock.notify_all()
                    return
                job, _ = self._jobs[0]
            try:
                job()
            except Exception as problem:  # told to the training at its next snapshot, and by wait()
                with self._lock:
                    self._problems.append(problem)
            with self._lock:
                self._jobs.popleft()

    @property
    def waiting(self) -> list[int]:
        """The bytes of each job that is not done."""
        with self._lock:
            return [nbytes for _, nbytes in self._jobs]

    def wait(self) -> None:
        """Wait until all jobs are done."""
        with self._lock:
            while self._busy:
                self._lock.wait()

    def problems(self) -> list[Exception]:
        """Return what went wrong since the last call."""
        with self._lock:
            found, self._problems = self._problems, []
        return found


def write(folder: Path, content: Content) -> None:
    """Write a snapshot as a safetensors file."""
    content.wait()
    metadata = {**_readable(content.about), ABOUT: content.about.about()}
    write_tensors(folder / content.about.path.name, content.tensors, metadata)


def _readable(about: Snapshot) -> dict[str, str]:
    """Return what a person or another program finds in the metadata of a file."""
    methods = dict.fromkeys(story.method for story in about.told.stories)
    return {
        "average": about.average or f"none: {'what is not trained' if about.values else 'the weights themselves'}",
        "method": "; ".join(methods),
        "step": str(about.step),
        "torchbelay": __version__,
    }


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors, which may be on any device, as a safetensors file, one at a time."""
    infos = {name: TensorInfo(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    with replacing(path) as temporary, SafetensorsWriter(temporary, infos, {"format": "pt", **metadata}) as file:
        for name, tensor in tensors.items():
            file.write(name, tensor.detach().cpu().contiguous())


def write_sharded(folder: Path, content: Content, group: Any) -> None:
    """Write a snapshot of a sharded model by torch.distributed.checkpoint; every rank must call, in the same order."""
    content.wait()
    text = content.about.about()
    save_sharded(folder / content.about.path.name, content.tensors, group, {ABOUT_FILE: text})


def new_group(slices: Slices | None) -> Any:
    """Return another group of the ranks that hold parts of what is written: those that share an average, or all."""
    import torch.distributed as dist

    if slices is None:
        return dist.new_group(backend="gloo")
    ranks = dist.get_process_group_ranks(slices.group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)  # other ranks may not call this


def save_sharded(path: Path, tensors: Mapping[str, Tensor], group: Any, notes: Mapping[str, str]) -> None:
    """Write tensors, all ranks together, to a folder that appears when it is complete."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    # all ranks write below one name
    names: list[Any] = [f".{path.name}.{uuid.uuid4().hex[:8]}{TEMPORARY}"]
    dist.broadcast_object_list(names, group_src=0, group=group)
    temporary = path.with_name(names[0])
    save(dict(tensors), storage_writer=FileSystemWriter(temporary), process_group=group)
    if dist.get_rank(group) == 0:
        for name, text in notes.items():
            (temporary / name).write_text(text, encoding="utf-8")
        sync(temporary)
        discard(path)
        os.replace(temporary, path)


def discard(path: Path) -> None:
    """Remove a file or folder; a folder disappears at once and not file by file."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    gone = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
    os.replace(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def tidy(found: Folder, keep: int | None) -> None:
    """Remove snapshots of sessions that were given up, and all but the last `keep` steps.

    The weights at which averages began stay as long as snapshots that began with them do, and what is not trained stays
    as it was at the first of the steps that are kept.
    """
    for path in found.stale:
        discard(path)
    if keep is None:
        return
    kept = sorted({each.step for each in found.snapshots if not each.is_first})[-keep:]
    begins = {each.sessions[-1].begin for each in found.snapshots if each.step in kept and not each.is_first}
    begins.add(found.sessions[-1].begin)
    for each in found.snapshots:
        if each.sessions[-1].begin not in begins if each.is_first else each.step not in kept:
            discard(each.path)
    newer: set[str] = set()
    for each in reversed(found.part(kept[0]).rest if kept else []):
        if each.copied <= newer:
            discard(each.path)
        newer |= each.copied


def discard_leftovers(folder: Path) -> None:
    """Remove what a killed process left incomplete."""
    for path in folder.glob(f".*{TEMPORARY}"):
        with suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
