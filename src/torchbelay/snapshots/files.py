"""Bytes of tensors in files, read and written by several threads, and folders that are replaced whole or not at all."""

import ctypes
import glob
import io
import os
import shutil
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from torchbelay.belay import files

if os.name != "nt":
    import fcntl


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


class FilePart(io.RawIOBase):
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


def reserve(path: Path, size: int) -> None:
    """Make a file of a size and reserve its room on the disk, if the system can.

    Writing to memory that is mapped to a file ends the process if the disk is full; this raises an error before.
    """
    with open(path, "ab") as file:
        os.truncate(path, size)
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)


def write_bytes(file: IO[bytes], data: memoryview) -> None:
    """Write all of the memory to a file."""
    done = 0
    while done < len(data):
        done += file.write(data[done:])


@contextmanager
def replacing_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a new folder to write to; at the end of the block that folder takes the place of `path`.

    If the block fails, or the process is killed, whatever was at `path` stays as it was. What a killed process left
    beside it, `.NAME.xxxxxxxx.tmp`, is removed the next time. Linux and macOS exchange two folders in one step; on file
    systems that cannot (NFS), the old one is gone for the moment between two renames.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "merged"
    >>> with replacing_folder(folder) as temporary:
    ...     _ = (temporary / "note").write_text("all of it")
    >>> (folder / "note").read_text(), len(list(folder.parent.iterdir()))
    ('all of it', 1)
    """
    path = Path(os.path.realpath(path))
    _remove_stale(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")  # same folder: a rename crosses no disks
    temporary.mkdir()
    lock = _lock(temporary)
    try:
        yield temporary
        sync(temporary)
        if path.exists():
            _exchange(temporary, path)
        else:
            os.rename(temporary, path)
        files.sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # what is left of it, or what was at `path` before
        if lock is not None:
            os.close(lock)


def lock(folder: Path) -> int | None:
    """Lock a folder until the handle is closed, or the process ends; raise BlockingIOError if another handle locks it.

    Return None on Windows and on file systems without locks. No file is made, and a lock is seen on one host only.
    """
    if os.name == "nt":
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        os.close(handle)
        if isinstance(problem, BlockingIOError):
            raise
        return None
    return handle


def _lock(folder: Path) -> int | None:
    """Lock a folder; return None if it cannot be done, or another process has done it."""
    with suppress(BlockingIOError):
        return lock(folder)
    return None


def _remove_stale(path: Path) -> None:
    """Remove temporary folders of processes that were killed; those of living ones are locked."""
    for folder in path.parent.glob(f".{glob.escape(path.name)}.????????.tmp"):
        with suppress(OSError):
            if (lock := _lock(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _exchange(new: Path, old: Path) -> None:
    """Let two folders trade places in one step, or, if the file system cannot, in two."""
    with suppress(AttributeError, OSError):  # no such function, or not on this file system
        libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            failed = libc.renamex_np(os.fsencode(new), os.fsencode(old), 2)  # RENAME_SWAP
        else:
            here = -100  # AT_FDCWD
            failed = libc.renameat2(here, os.fsencode(new), here, os.fsencode(old), 2)  # RENAME_EXCHANGE
        if not failed:
            return
    aside = old.with_name(f"{new.name.removesuffix('.tmp')}.old")
    os.rename(old, aside)
    os.rename(new, old)
    shutil.rmtree(aside, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until all files below a folder, and the folder itself, are on the disk."""
    for folder, _, names in os.walk(path):
        for name in names:
            files.sync(Path(folder, name))
        files.sync(Path(folder))
