"""Files that are there as a whole or not at all."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to; when the block is done, that file takes the place of `path`, on the disk too.

    Whoever is killed, or fails, before that leaves what was at `path` as it was.

    >>> import tempfile
    >>> there = Path(tempfile.mkdtemp()) / "note"
    >>> with replacing(there) as temporary:
    ...     _ = temporary.write_text("all of it")
    >>> there.read_text(), len(list(there.parent.iterdir()))
    ('all of it', 1)
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")  # beside it: a rename crosses no disks
    try:
        temporary.touch()
        rights = temporary.stat().st_mode & 0o777  # what the user's files have; a library may write with fewer
        temporary.unlink()
        yield temporary
        temporary.chmod(rights)
        _sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Wait until what was written is on the disk: after a crash a rename may else point to an empty file."""
    if path.is_dir() and os.name == "nt":
        return  # Windows has no directories to open
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
