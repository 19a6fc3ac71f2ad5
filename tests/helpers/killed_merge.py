"""A merge that goes on and on: of two sets of checkpoints in turns, each in the place of the other."""

import itertools
from pathlib import Path

from torchbelay.snapshots import merge, merger


def forever(sets: list[list[Path]], out: Path) -> None:
    """Merge the sets in turns until the process is killed."""
    merger._PART = 1 << 14  # many small writes
    for paths in itertools.cycle(sets):
        merge(paths, out, overwrite=True, threads=2)


def once(paths: list[Path], out: Path) -> None:
    """Merge one set."""
    merge(paths, out, overwrite=True)
