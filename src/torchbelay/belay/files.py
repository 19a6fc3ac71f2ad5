"""Write a file as a whole or not at all."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TORCH_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".tar")  # of names of files of torch.save


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary path to write to; at the end of the block that file replaces `path`, on the disk too.

    If the block fails, or the process is killed, the old file at `path` stays as it was. The new file has the
    permissions that the user's files usually have. A symbolic link stays, and the file that it leads to is replaced.

    >>> import tempfile
    >>> note = Path(tempfile.mkdtemp()) / "note"
    >>> with replacing(note) as temporary:
    ...     _ = temporary.write_text("all of it")
    >>> note.read_text(), len(list(note.parent.iterdir()))
    ('all of it', 1)
    """
    path = destination(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")  # same folder: a rename crosses no disks
    try:
        permissions = usual_permissions(temporary)
        yield temporary
        temporary.chmod(permissions)
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync(path.parent)


def destination(path: str | os.PathLike[str], *, argument: str = "path") -> Path:
    """Return the file that a path leads to, through symbolic links; refuse, with the cure, if none can be put there.

    `argument` is the name that the path has for the user.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{argument}={path!r} is not a path; give a text or a pathlib.Path")
    real = Path(os.path.realpath(path))
    if real.is_dir() or os.fspath(path).endswith(("/", os.sep)):
        raise IsADirectoryError(f"{argument}={os.fspath(path)!r} is a folder; give the name of a file in it")
    if real.is_symlink():
        raise OSError(f"{argument}={os.fspath(path)!r} is a symbolic link that leads back to itself; remove it first")
    if real.exists() and not real.is_file():
        raise OSError(
            f"{argument}={os.fspath(path)!r} is not a file but a device, a pipe or a socket; give another name"
        )
    if not real.parent.is_dir():
        raise FileNotFoundError(
            f"{argument}={os.fspath(path)!r}: there is no folder {str(real.parent)!r}; make it first"
        )
    return real


def check_safetensors_name(path: str | os.PathLike[str]) -> None:
    """Refuse, for a safetensors file, a name that says torch.save: what reads the file would trust the name."""
    if isinstance(path, str | os.PathLike) and os.fspath(path).lower().endswith(TORCH_ENDINGS):
        raise ValueError(
            f"path={os.fspath(path)!r} has the name of a file of torch.save, and this is a safetensors file; give a "
            "name that ends in .safetensors"
        )


def usual_permissions(probe: Path) -> int:
    """Return the permissions that a new file has, by making one there; some libraries write with fewer."""
    try:
        probe.touch()
        return probe.stat().st_mode & 0o777
    finally:
        probe.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk: after a crash, a rename could otherwise point to an empty file."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
