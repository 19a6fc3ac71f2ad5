"""A folder of snapshots: what it holds, which of it belongs together, and what is known of each average.

    000040000.average.NAME.safetensors    an average after step 40,000
    000000000.weights.safetensors         the weights themselves, for instance those that the run began with
    000000000.rest.SESSION.safetensors    what is not trained, or what of it had changed when this step was recorded
    history.SESSION.LOW-HIGH.safetensors  couplings that no text can tell, of the steps LOW + 1 to HIGH

Of a sharded model, the first three are folders of torch.distributed.checkpoint, with the ending .dcp.
Every snapshot says of itself all that is needed to know its profile. A run that was resumed from a checkpoint writes in
a new session, and the snapshots of the old session after that checkpoint do not belong to it. They are left out by what
the files say of their sessions, so that it does not matter when a process was killed. A run whose averages began again,
by `reset()`, writes in a new session too. What was before still belongs to it, but is another part: other weights may
have been loaded, so that no update leads from one part to the next.
"""

import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
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
from .session import Session, belongs, read_sessions

FORMAT = 1
ABOUT = "torchbelay.snapshot"  # the metadata of a snapshot, in JSON
ABOUT_FILE = "snapshot.json"  # the same, in a folder of torch.distributed.checkpoint
_FILE, _SHARDS = ".safetensors", ".dcp"
_SNAPSHOT = re.compile(r"(\d{9,})\.(?:weights|average\..+)\.(?:safetensors|dcp)")
_REST = re.compile(r"\d{9,}\.rest\.[\w-]+\.(?:safetensors|dcp)")
_OLD_REST = ("rest.safetensors", "rest.dcp")  # what earlier versions wrote
_HISTORY = re.compile(r"history\.([\w-]+)\.(\d+)-(\d+)\.safetensors")


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
    copied: frozenset[str] = frozenset()  # what is not averaged: buffers, and what is not trained
    tied: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)  # those of the parameters, if the file has another one
    order: tuple[str, ...] = ()  # the keys of the model's state dict; snapshots of earlier versions do not have them
    values: Mapping[str, str] = field(default_factory=dict)  # of what is not trained: what tells whether it changed
    origins: Mapping[str, str] = field(default_factory=dict)  # first names of parameters that have others now

    def origin(self, name: str) -> str:
        """Return the first name of the parameter that has this name here."""
        return self.origins.get(name, name)

    def story(self, name: str) -> Story | None:
        """Return how a tensor of this file came about; None if it holds the weights themselves."""
        return None if name in self.copied else self.told.of(name)

    def count(self, name: str) -> int:
        """Return the steps that the optimizer of a tensor had taken."""
        return self.counts.get(name, self.step)

    def open(self) -> Checkpoint:
        """Open the file to read its tensors."""
        return open_checkpoint(self.path)

    @property
    def is_first(self) -> bool:
        """Whether it holds the weights at which the averages began, or began again."""
        return self.average is None and self.step == self.sessions[-1].begin

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
                "values": dict(self.values),
                "origins": dict(self.origins),
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
                read_sessions(found["sessions"]),
                Told.read(found["told"]),
                Told.read(found["pull"]),
                {str(name): int(count) for name, count in found["counts"].items()},
                frozenset(found["copied"]),
                dict(found["tied"]),
                dict(found["dtypes"]),
                tuple(map(str, found.get("order", ()))),
                {str(name): str(value) for name, value in found.get("values", {}).items()},
                {str(name): str(first) for name, first in found.get("origins", {}).items()},
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


def rest_name(step: int, session: Session, *, sharded: bool = False) -> str:
    """Return the name of a file, or folder, with what is not trained."""
    return f"{step:09d}.rest.{session.name}{_SHARDS if sharded else _FILE}"


def history_name(session: str, low: int, high: int) -> str:
    """Return the name of a file of couplings of the steps low + 1 to high."""
    return f"history.{session}.{low}-{high}.safetensors"


class Part(NamedTuple):
    """The snapshots that tell of the averages at a step: those since the averages began, or last began again."""

    begin: int  # the steps that were taken before that
    snapshots: list[Snapshot]
    rest: list[Snapshot]  # what is not trained, from the oldest to the newest: the newest that has a tensor counts


class Folder:
    """What a folder of snapshots holds of the run that was recorded last."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"{self.path} is not a folder; give the one that a Recorder wrote to")
        everything = list(_snapshots(self.path, _SNAPSHOT))
        self._rest = list(_snapshots(self.path, _REST))
        newest = max(everything, key=lambda each: each.sessions[-1].generation, default=None)
        self.sessions = newest.sessions if newest is not None else ()
        self.snapshots = sorted(
            (each for each in everything if belongs(each.sessions[-1], each.step, self.sessions)),
            key=lambda each: (each.step, each.average is not None, each.average or ""),
        )
        kept = {each.path for each in self.snapshots}
        kept |= {each.path for each in self.rest_of(self.sessions)}
        self.stale = [each.path for each in [*everything, *self._rest] if each.path not in kept]

    @classmethod
    def of_run(cls, path: Path, sessions: tuple[Session, ...]) -> "Folder":
        """Return what the folder of a run holds; of one that is gone, nothing but the sessions.

        Training goes on, and whoever writes to it learns what is wrong.
        """
        try:
            return cls(path)
        except FileNotFoundError:
            if path.is_dir():  # it is one of the files that is gone
                raise
        found = cls.__new__(cls)
        found.path, found.sessions, found.snapshots, found.stale, found._rest = path, sessions, [], [], []
        return found

    def rest_of(self, sessions: Iterable[Session]) -> list[Snapshot]:
        """Return the files with what is not trained of a run of these sessions, from the oldest to the newest."""
        chain = list(sessions)
        found = (each for each in self._rest if belongs(each.sessions[-1], each.step, chain))
        return sorted(found, key=lambda each: (each.sessions[-1].generation, each.step))

    @property
    def last(self) -> int:
        """The last step that has a snapshot; -1 if there is none."""
        return self.snapshots[-1].step if self.snapshots else -1

    @property
    def steps(self) -> list[int]:
        """The steps that have snapshots."""
        return sorted({each.step for each in self.snapshots})

    def following(
        self, step: int, begins: tuple[int, int] | None, chain: Sequence[Session] | None = None
    ) -> tuple[Session, ...]:
        """Return the sessions of a run that goes on after a step with a new one: those of a `chain`, or of the folder.

        `begins` are the first and the last step at which its averages may have begun, or last begun again; None if they
        do so just now. They may have done it while nobody recorded them.
        """
        least, most = begins or (step, step)
        # A state of the step of a `reset()` may be of before or of after it.
        at_reset = begins is not None and least == step > 0
        past: list[Session] = []
        for each in self.sessions if chain is None else chain:
            if each.begin > most or (each.start >= step and not (at_reset and each.begin == step)):
                break
            past.append(each)
        begin = past[-1].begin if past else 0
        held = (each for each in self.snapshots if each.step <= step and each.sessions[-1] in past)
        if begins is None or not any(story.born == least for each in held for story in each.told.stories):
            begin = max(begin, least)
        generation = 1 + max((session.generation for session in (*self.sessions, *past)), default=-1)
        return (*past, Session(f"{generation}-{uuid.uuid4().hex[:8]}", step, begin))

    @property
    def last_average(self) -> int:
        """The last step that was recorded since averages began, or began again: at that step they are the weights."""
        return max((each.step for each in self.snapshots if each.step > each.sessions[-1].begin), default=self.last)

    def part(self, at: int) -> Part:
        """Return the part of the run that a step belongs to; the step of a `reset()` ends the part before it."""
        begins = [session.begin for session in self.sessions if session.begin < at]
        begin = max(begins, default=0)
        held = (each for each in self.snapshots if each.step <= at and each.sessions[-1].begin == begin)
        rest = (each for each in self.rest_of(self.sessions) if each.step <= at and each.sessions[-1].begin <= begin)
        return Part(begin, list(held), list(rest))

    def rest_files(self, at: int) -> list[Path]:
        """Return the files with what is not trained at a step: a tensor is in the first of them that has it."""
        old = (self.path / name for name in _OLD_REST)
        return [*(each.path for each in reversed(self.part(at).rest)), *(path for path in old if path.exists())]

    def owns(self, path: str | os.PathLike[str]) -> bool:
        """Whether a path leads to a file of this folder that a Recorder wrote, or will write."""
        real = Path(os.path.realpath(path))
        if real.parent != Path(os.path.realpath(self.path)):
            return False
        kinds = (_SNAPSHOT, _REST, _HISTORY)
        return real.name in _OLD_REST or any(kind.fullmatch(real.name) is not None for kind in kinds)

    def couplings(self, table: str, born: int, stop: int, sessions: tuple[Session, ...] | None = None) -> Tensor | None:
        """Return (a, b, p, q) of the steps born + 1 to stop of a table of the history; None if some are not known.

        The run consists of these sessions; without them, it is the one that was recorded last.
        """
        chain = self.sessions if sessions is None else sessions
        found: list[Tensor] = []
        at = born
        for session, following in zip_longest(chain, chain[1:]):
            end = stop if following is None else following.start
            for low, high, path in sorted(_histories(self.path, session.name)):
                rows = _rows(path, table, low, high, born)
                if rows is None or low > at or min(high, end) <= at:
                    continue
                first = max(low, born)
                found.append(rows[at - first : min(high, end, stop) - first])
                at = min(high, end, stop)
        return torch.cat(found) if found and at >= stop else None


def _snapshots(folder: Path, kind: re.Pattern[str]) -> Iterator[Snapshot]:
    for path in sorted(folder.iterdir()):
        if kind.fullmatch(path.name) is None:
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
