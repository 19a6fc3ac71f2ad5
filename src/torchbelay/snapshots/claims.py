"""Folders that Recorders of this process write to: a run that begins needs one of its own."""

import gc
import os
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary


class _Claim(NamedTuple):
    folder: str
    run: int  # the id of a Belay, which the Recorder keeps alive


_claims: WeakKeyDictionary[object, _Claim] = WeakKeyDictionary()  # by the Recorder


def claim(recorder: object, folder: Path, run: object, *, begins: bool) -> None:
    """Let a Recorder have a folder; refuse a run that begins, if a Recorder of another one writes there."""
    wanted = _Claim(os.path.realpath(folder), id(run))
    if begins:
        gc.collect()  # a Recorder that was dropped is not in the way
        if any(each.folder == wanted.folder and each.run != wanted.run for each in _claims.values()):
            raise ValueError(
                f"folder={str(folder)!r} is where a Recorder of another Belay writes, and each would remove the "
                "other's snapshots; give each a folder of its own, or close() the other first"
            )
    _claims[recorder] = wanted


def release(recorder: object) -> None:
    """Give a folder up."""
    _claims.pop(recorder, None)
