"""Put files into a folder so that it never holds a mixture of an old and a new model."""

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .files import sync, usual_permissions

# A file of weights, whole or one of several (-00001-of-00003), or the index of several, perhaps of a variant (fp16).
_WEIGHTS = re.compile(r"(?P<stem>.+?)(-\d{5}-of-\d{5})?\.(safetensors|bin)(?P<index>\.index(?P<variant>\.\w+)?\.json)?")


@contextmanager
def filling(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Give an empty folder beside `folder` to write to; at the end of the block its files go into `folder`.

    If the block fails, `folder` stays as it was. A folder that does not exist yet appears with all files at once. In
    one that exists, each file is replaced as a whole, and files of other names stay, except weights that the new ones
    replace: a model that was saved in three files and is now in one. If the process is killed while files are
    replaced, the folder holds the old weights, the new ones, or an incomplete set that no library loads.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "notes.txt").write_text("mine")
    >>> with filling(folder) as new:
    ...     _ = (new / "config.json").write_text("{}")
    >>> sorted(path.name for path in folder.iterdir())
    ['config.json', 'notes.txt']
    """
    there = destination(folder)
    there.parent.mkdir(parents=True, exist_ok=True)
    new = there.with_name(f".{there.name}.{uuid.uuid4().hex[:8]}.tmp")  # beside it: a rename crosses no disks
    try:
        new.mkdir()
        yield new
        _make_durable(new)
        if there.exists() or not _renamed(new, there):
            _merge(new, there)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    sync(there)
    sync(there.parent)


def destination(folder: str | os.PathLike[str]) -> Path:
    """Return the folder that a path leads to, through symbolic links; refuse, with the cure, if none can be there."""
    real = Path(os.path.realpath(folder))
    if not os.fspath(folder):
        raise ValueError("folder='' is no name; give the name of a folder")
    if real.is_symlink():
        raise OSError(f"folder={os.fspath(folder)!r} is a symbolic link that leads back to itself; remove it first")
    if real.exists() and not real.is_dir():
        raise NotADirectoryError(f"folder={os.fspath(folder)!r} is a file; give the name of a folder")
    above = next(path for path in real.parents if path.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"folder={os.fspath(folder)!r}: {str(above)!r} is a file, not a folder")
    return real


def _make_durable(folder: Path) -> None:
    """Give files the user's usual permissions, and wait until they are on the disk."""
    permissions = usual_permissions(folder / f".{uuid.uuid4().hex[:8]}.tmp")
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file():
            path.chmod(permissions)
        sync(path)
    sync(folder)


def _renamed(new: Path, there: Path) -> bool:
    """Let a folder appear with all files at once; False if another process has made it in the meantime."""
    try:
        os.replace(new, there)
    except OSError:
        if there.is_dir():
            return False
        raise
    return True


def _merge(new: Path, there: Path) -> None:
    """Replace files one by one, in such an order that old and new weights are never read together."""
    files = sorted((path.relative_to(new) for path in new.rglob("*") if path.is_file()), key=_turn)
    for file in files:
        if (there / file).is_dir():
            raise IsADirectoryError(f"{str(there / file)!r} is a folder, and a file of the model has that name")
    families = {found for file in files if (found := _family(file)) is not None}
    folders = {there / file.parent for file in files}
    old = [path.relative_to(there) for each in folders if each.is_dir() for path in each.iterdir() if not path.is_dir()]
    outdated = sorted((file for file in old if _family(file) in families), key=_turn, reverse=True)
    split = {_family(file) for file in files if _is_index(file)}
    for file in outdated:
        if _is_index(file) and _family(file) in split:
            (there / file).unlink(missing_ok=True)  # without it, old pieces are not read together with new ones
    for file in files:
        (there / file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(new / file, there / file)
    for file in outdated:
        if file not in files:
            (there / file).unlink(missing_ok=True)


def _turn(file: Path) -> int:
    """Return when a file is replaced: weights after all others, and their index last."""
    return 0 if _family(file) is None else 1 + _is_index(file)


def _family(file: Path) -> tuple[Path, str, str] | None:
    """Return what all files of one set of weights share; None for a file that has no weights."""
    found = _WEIGHTS.fullmatch(file.name)
    return None if found is None else (file.parent, found["stem"] + (found["variant"] or ""), found[3])


def _is_index(file: Path) -> bool:
    found = _WEIGHTS.fullmatch(file.name)
    return found is not None and found["index"] is not None
