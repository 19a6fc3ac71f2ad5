"""Bytes of tensors in files, read and written by several threads, and folders that are replaced whole or not at all."""

import ctypes
import os
import threading
from pathlib import Path
from typing import IO

from torch import Tensor


def buffer(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host, to read into or to write from; keep the tensor alive."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError("only contiguous tensors on the host have a buffer")
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B") if size else memoryview(b"")


class Handles:
    """Files that are open, one per thread: each thread has a position of its own and needs no lock.

    A thread keeps the file that it used last. A sharded checkpoint has hundreds, more than a process may open.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.local = threading.local()

    def at(self, path: Path, position: int) -> IO[bytes]:
        """Return a file at a position."""
        held: _Held | None = getattr(self.local, "held", None)
        if held is None or held.path != path or held.file.closed:
            self.close()
            held = self.local.held = _Held(path, self.mode)
        held.file.seek(position)
        return held.file

    def close(self) -> None:
        """Close the file of this thread; those of other threads close as their threads end, or with this object."""
        if hasattr(self.local, "held"):
            self.local.held.file.close()
            del self.local.held


class _Held:
    """A file that closes silently when nothing refers to it any more."""

    def __init__(self, path: Path, mode: str) -> None:
        self.path = path
        self.file: IO[bytes] = open(path, mode, buffering=0)  # noqa: SIM115

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()


def read_bytes(file: IO[bytes], into: memoryview) -> None:
    """Fill memory from a file; refuse if the file is shorter."""
    done = 0
    while done < len(into):
        count = file.readinto(into[done:])  # type: ignore[attr-defined]
        if not count:
            raise ValueError(f"{file.name} ends {len(into) - done:,} bytes too early; it is damaged: copy it again")
        done += count


def write_bytes(file: IO[bytes], data: memoryview) -> None:
    """Write all of the memory to a file."""
    done = 0
    while done < len(data):
        done += file.write(data[done:])


def sync(path: Path) -> None:
    """Wait until all files below a folder, and the folder itself, are on the disk."""
    for folder, _, names in os.walk(path):
        for name in names:
            _fsync(Path(folder, name), os.O_RDWR)
        if os.name != "nt":  # Windows cannot open a folder
            _fsync(Path(folder), os.O_RDONLY)


def _fsync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
