"""Folders that Recorders write to: a run that begins needs one of its own.

Runs of this process are known by a table. Other processes of this host are known by a lock on the folder itself: it
leaves no file behind, and the system drops it when a process ends, however that happens. Processes of other hosts are
not seen.
"""

import gc
import os
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torchbelay.belay.shard import is_first_rank
from torchbelay.physics.warnings import warn

from .files import lock


class _Lock:
    """A lock on a folder, which ends with this object."""

    def __init__(self, handle: int) -> None:
        self._handle: int | None = handle

    def close(self) -> None:
        """Let the handle go; the lock ends with the last process that has it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    __del__ = close


class _Claim(NamedTuple):
    folder: str
    run: int  # the id of a Belay, which the Recorder keeps alive
    lock: _Lock | None  # one for all claims of a folder


_claims: WeakKeyDictionary[object, _Claim] = WeakKeyDictionary()  # by the Recorder


def claim(recorder: object, folder: Path, run: object, *, begins: bool) -> None:
    """Let a Recorder have a folder, which exists; refuse a run that begins, if another run is recorded there.

    A resumed run is not refused: the process that it goes on from may be about to end.
    """
    real = os.path.realpath(folder)
    if begins:
        gc.collect()  # a Recorder that was dropped is not in the way
    others = [each for each in _claims.values() if each.folder == real]
    if begins and any(each.run != id(run) for each in others):
        raise ValueError(
            f"folder={str(folder)!r} is where a Recorder of another Belay writes, and each would remove the "
            "other's snapshots; give each a folder of its own, or close() the other first"
        )
    held = next((each.lock for each in others if each.lock is not None), None)
    _claims[recorder] = _Claim(real, id(run), held or _locked(folder, begins=begins))


def _locked(folder: Path, *, begins: bool) -> _Lock | None:
    """Return a lock on a folder, if there can be one; refuse a run that begins, if another process has the lock."""
    if not is_first_rank():  # the other ranks of this run do not write there
        return None
    try:
        handle = lock(folder)
    except BlockingIOError:
        if begins:
            raise ValueError(
                f"folder={str(folder)!r} is where another process records a run, and each would remove the other's "
                "snapshots; give each a folder of its own, or end the other process first"
            ) from None
        warn(
            f"another process still records to folder={str(folder)!r}: if it is not about to end, each will remove "
            "the other's snapshots"
        )
        return None
    return None if handle is None else _Lock(handle)


def release(recorder: object) -> None:
    """Give a folder up."""
    _claims.pop(recorder, None)


def _close_all() -> None:
    """Let all locks go in a process that was forked: a worker may live on when its parent was killed."""
    for each in list(_claims.values()):
        if each.lock is not None:
            each.lock.close()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_close_all)
