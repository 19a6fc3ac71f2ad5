"""A folder of snapshots: what it holds, which of it belongs together, and what is known of each average.

    000040000.average.NAME.safetensors    an average after step 40,000
    000000000.weights.safetensors         the weights themselves, for instance those that the run began with
    rest.safetensors                      what is not trained
    history.SESSION.LOW-HIGH.safetensors  couplings that no text can tell, of the steps LOW + 1 to HIGH

Of a sharded model, the first three are folders of torch.distributed.checkpoint, with the ending .dcp.
Every snapshot says of itself all that is needed to know its profile. A run that was resumed from a checkpoint writes in
a new session, and the snapshots of the old session after that checkpoint do not belong to it. They are left out by what
the files say of their sessions, so that it does not matter when a process was killed.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote

import torch
from torch import Tensor

from torchbelay.physics.warnings import warn

from .checkpoint import Checkpoint
from .layouts.safetensors import read_header
from .opening import open_checkpoint

FORMAT = 1
ABOUT = "torchbelay.snapshot"  # the metadata of a snapshot, in JSON
ABOUT_FILE = "snapshot.json"  # the same, in a folder of torch.distributed.checkpoint
REST = "rest"
_FILE, _SHARDS = ".safetensors", ".dcp"
_SNAPSHOT = re.compile(r"(\d{9,})\.(?:weights|average\..+)\.(?:safetensors|dcp)")
_HISTORY = re.compile(r"history\.([\w-]+)\.(\d+)-(\d+)\.safetensors")


class Session(NamedTuple):
    """A part of a run, from its start or a resume on: its name, and the steps taken before it."""

    name: str  # begins with a number that is larger than those of all sessions before
    start: int

    @property
    def generation(self) -> int:
        """The number in the name."""
        return int(self.name.partition("-")[0])


class Story(NamedTuple):
    """How an average came about: its method, the steps taken before it began, and how often it is coupled.

    `table` names the couplings in the history, if the text of the method does not tell them.
    """

    method: str
    born: int
    every: int
    table: str | None = None


class Told(NamedTuple):
    """How some tensors came about: by the first of these stories, except for those in `other`; -1 is by none."""

    stories: tuple[Story, ...] = ()
    other: Mapping[str, int] = MappingProxyType({})

    def of(self, name: str) -> Story | None:
        """Return the story of a tensor."""
        number = self.other.get(name, 0 if self.stories else -1)
        return None if number < 0 else self.stories[number]

    @classmethod
    def read(cls, found: Any) -> "Told":
        """Return what was written in JSON."""
        stories, other = found
        return cls(
            tuple(Story(str(m), int(b), int(e), t) for m, b, e, t in stories),
            {str(n): int(i) for n, i in other.items()},
        )


_NOTHING = Told()


@dataclass(frozen=True, eq=False)
class Snapshot:
    """An average, or the weights (`average` is None), at a step, in a file."""

    path: Path
    step: int
    average: str | None
    sessions: tuple[Session, ...]
    told: Told = _NOTHING  # of the average; none for tensors that are the weights themselves
    pull: Told = _NOTHING  # of the average that pulled the weights, recorded or not
    counts: Mapping[str, int] = field(default_factory=dict)  # steps of tensors whose own optimizer took others
    copied: frozenset[str] = frozenset()  # buffers, and parameters that are not trained any more
    tied: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)  # those of the parameters, if the file has another one
    order: tuple[str, ...] = ()  # the keys of the model's state dict; snapshots of earlier versions do not have them

    def story(self, name: str) -> Story | None:
        """Return how a tensor of this file came about; None if it holds the weights themselves."""
        return None if name in self.copied else self.told.of(name)

    def count(self, name: str) -> int:
        """Return the steps that the optimizer of a tensor had taken."""
        return self.counts.get(name, self.step)

    def open(self) -> Checkpoint:
        """Open the file to read its tensors."""
        return open_checkpoint(self.path)

    def about(self) -> str:
        """Return all that the file says of itself, in JSON."""
        return json.dumps(
            {
                "format": FORMAT,
                "step": self.step,
                "average": self.average,
                "sessions": self.sessions,
                "told": (self.told.stories, dict(self.told.other)),
                "pull": (self.pull.stories, dict(self.pull.other)),
                "counts": dict(self.counts),
                "copied": sorted(self.copied),
                "tied": dict(self.tied),
                "dtypes": dict(self.dtypes),
                "order": self.order,
            }
        )

    @classmethod
    def read(cls, path: Path) -> "Snapshot":
        """Return what a file says of itself; refuse one that is damaged or not a snapshot."""
        if path.is_dir():
            text = (path / ABOUT_FILE).read_text(encoding="utf-8")
        else:
            text = read_header(path).metadata.get(ABOUT, "")
        try:
            found: Any = json.loads(text)
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']}, and this version reads {FORMAT}")
            return cls(
                path,
                int(found["step"]),
                found["average"],
                tuple(Session(str(name), int(start)) for name, start in found["sessions"]),
                Told.read(found["told"]),
                Told.read(found["pull"]),
                {str(name): int(count) for name, count in found["counts"].items()},
                frozenset(found["copied"]),
                dict(found["tied"]),
                dict(found["dtypes"]),
                tuple(map(str, found.get("order", ()))),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise ValueError(f"{path} does not say what it is a snapshot of ({problem}); remove it") from problem


def file_name(step: int, average: str | None, *, sharded: bool = False) -> str:
    """Return the name of a snapshot's file, or of its folder if it is sharded.

    >>> file_name(1000, "short/1"), file_name(0, None, sharded=True)
    ('000001000.average.short%2F1.safetensors', '000000000.weights.dcp')
    """
    what = "weights" if average is None else f"average.{quote(average, safe=' ')}"
    return f"{step:09d}.{what}{_SHARDS if sharded else _FILE}"


def rest_name(*, sharded: bool = False) -> str:
    """Return the name of the file, or folder, with what is not trained."""
    return f"{REST}{_SHARDS if sharded else _FILE}"


def history_name(session: str, low: int, high: int) -> str:
    """Return the name of a file of couplings of the steps low + 1 to high."""
    return f"history.{session}.{low}-{high}.safetensors"


class Folder:
    """What a folder of snapshots holds of the run that was recorded last."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"{self.path} is not a folder; give the one that a Recorder wrote to")
        everything = list(_snapshots(self.path))
        newest = max(everything, key=lambda each: each.sessions[-1].generation, default=None)
        self.sessions = newest.sessions if newest is not None else ()
        self.snapshots = sorted(
            (each for each in everything if belongs(each.sessions[-1], each.step, self.sessions)),
            key=lambda each: (each.step, each.average is not None, each.average or ""),
        )
        kept = {each.path for each in self.snapshots}
        self.stale = [each.path for each in everything if each.path not in kept]

    @property
    def last(self) -> int:
        """The last step that has a snapshot; -1 if there is none."""
        return self.snapshots[-1].step if self.snapshots else -1

    @property
    def steps(self) -> list[int]:
        """The steps that have snapshots."""
        return sorted({each.step for each in self.snapshots})

    @property
    def rest(self) -> Path | None:
        """The file with what is not trained, if there is one."""
        found = (self.path / rest_name(sharded=sharded) for sharded in (False, True))
        return next((path for path in found if path.exists()), None)

    def owns(self, path: str | os.PathLike[str]) -> bool:
        """Whether a path leads to a file of this folder that a Recorder wrote, or will write."""
        real = Path(os.path.realpath(path))
        if real.parent != Path(os.path.realpath(self.path)):
            return False
        named = real.name in (rest_name(), rest_name(sharded=True))
        return named or _SNAPSHOT.fullmatch(real.name) is not None or _HISTORY.fullmatch(real.name) is not None

    def couplings(self, table: str, born: int, stop: int) -> Tensor | None:
        """Return (a, b, p, q) of the steps born + 1 to stop of a table of the history; None if some are not known."""
        found: list[Tensor] = []
        at = born
        ends = [session.start for session in self.sessions[1:]] + [stop]
        for session, end in zip(self.sessions, ends, strict=True):
            for low, high, path in sorted(_histories(self.path, session.name)):
                rows = _rows(path, table, low, high, born)
                if rows is None or low > at or min(high, end) <= at:
                    continue
                first = max(low, born)
                found.append(rows[at - first : min(high, end, stop) - first])
                at = min(high, end, stop)
        return torch.cat(found) if found and at >= stop else None


def belongs(session: Session, step: int, sessions: Iterable[Session]) -> bool:
    """Whether a step of a session belongs to a run that consists of these sessions.

    >>> run = [Session("0-a", 0), Session("2-c", 1500)]
    >>> [belongs(run[0], step, run) for step in (1000, 1500, 2000)], belongs(Session("1-b", 1000), 1200, run)
    ([True, True, False], False)
    """
    chain = list(sessions)
    for each, following in zip(chain, [*chain[1:], None], strict=True):
        if each == session:
            return each.start <= step and (following is None or step <= following.start)
    return False


def _snapshots(folder: Path) -> Iterator[Snapshot]:
    for path in sorted(folder.iterdir()):
        if _SNAPSHOT.fullmatch(path.name) is None:
            continue
        try:
            yield Snapshot.read(path)
        except (ValueError, OSError) as problem:
            warn(f"a snapshot cannot be used: {problem}")


def _histories(folder: Path, session: str) -> Iterator[tuple[int, int, Path]]:
    for path in folder.iterdir():
        match = _HISTORY.fullmatch(path.name)
        if match is not None and match[1] == session:
            yield int(match[2]), int(match[3]), path


def _rows(path: Path, table: str, low: int, high: int, born: int) -> Tensor | None:
    """Return the couplings of a table in a file, one row per step; None if the file does not have them all."""
    with open_checkpoint(path) as file:
        if table not in file.names:
            return None
        runs = file.read(table)
    rows = runs[:, 1:].repeat_interleave(runs[:, 0].to(torch.int64), dim=0)
    return rows if len(rows) == high - max(low, born) else None
