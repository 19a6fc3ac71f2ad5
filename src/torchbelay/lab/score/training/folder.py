"""The folder of a run: its options, a line for each report, the checkpoint, the pictures."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from torchbelay.belay.files import replacing
from torchbelay.lab.part import LabError, Record
from torchbelay.lab.records import write_text

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

FORMAT = 1
ASKED = ("preset", "budget", "lr", "seed", "every", "compile", "device", "processes")  # a run keeps what it began with


class Folder:
    """Where a run is kept. Whatever kills it, the last checkpoint is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.options = path / "options.json"
        self.stats = path / "stats.jsonl"
        self.checkpoint = path / "checkpoint.pt"
        self.samples = path / "samples.png"
        self.fids = path / "fid.jsonl"
        self.lock = path / ".lock"

    # One process at a time --------------------------------------------------------------------------------------------

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from training here; the lock of one that is killed ends with it.

        Folders that were made for the lock are gone in the end, unless something was written there.
        """
        if fcntl is None:
            yield
            return
        made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        handle = self._locked()
        try:
            yield
        finally:
            with suppress(OSError):
                self.lock.unlink()
            os.close(handle)
            for path in made:
                with suppress(OSError):
                    path.rmdir()

    def _locked(self) -> int:
        """The lock, as an open file."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise LabError(f"cannot write {self.lock}: {error.strerror or error}; choose another --out") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = os.path.samestat(os.fstat(handle), self.lock.stat())  # not one that its holder has just removed
        except (BlockingIOError, FileNotFoundError):
            alone = False
        except OSError:  # a file system without locks, where nothing can be known
            alone = True
        if not alone:
            os.close(handle)
            raise LabError(f"another process trains in {self.path}; wait until it ends, or choose another --out")
        return handle

    # Options ----------------------------------------------------------------------------------------------------------

    def asked(self) -> Record | None:
        """The options that the run was begun with; None if there is none here."""
        if not self.options.exists():
            if self.checkpoint.exists():
                raise LabError(f"{self.path} is no run: it has a checkpoint but no options.json; choose another folder")
            return None
        try:
            found = json.loads(self.options.read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise LabError(f"{self.options} has format {found['format']!r}, this version reads {FORMAT}")
            if lacking := {*ASKED, "resolved"} - found.keys():
                raise KeyError(min(lacking))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise LabError(f"cannot read {self.options} ({error!r}); move the folder away") from error
        return dict(found)

    def refuse_others(self, asked: Record) -> None:
        """Refuse to go on with other options than the run was begun with, and name the one that differs."""
        before = self.asked()
        for name in ASKED if before else ():
            if before is not None and before[name] != asked[name]:
                raise LabError(
                    f"{self.path} was begun with {_said(name, before[name])}, not {_said(name, asked[name])}; "
                    "go on with that, or choose another --out"
                )

    def refuse_changes(self, resolved: Record) -> None:
        """Refuse to go on where the same options have come to mean something else, in another version say."""
        before = self.asked()
        if before is None:
            return
        was, now = before["resolved"], json.loads(json.dumps(resolved))  # as it would be read again
        for name in sorted({*was, *now}):
            if was.get(name) != now.get(name):
                changed = f"{name} was {was.get(name)}, and is {now.get(name)} now"
                raise LabError(
                    f"the preset of {self.path} has changed: {changed}; train in another folder, or go back to the "
                    "version that began it"
                )

    def begin(self, options: Record) -> None:
        """Write down what is going to be run; also finds out now that nothing can be written."""
        if not self.options.exists():
            write_text(self.options, json.dumps({"format": FORMAT, **options}, indent=2, allow_nan=False) + "\n")

    def tidy(self) -> None:
        """Remove what a process that was killed while it wrote has left: it may be as large as a checkpoint."""
        for file in (self.options, self.stats, self.checkpoint, self.samples):  # others may be being written now
            for path in self.path.glob(f".{file.name}.*"):
                path.unlink(missing_ok=True)

    # Reports ----------------------------------------------------------------------------------------------------------

    def report(self, record: Record) -> None:
        """Add a line to the reports."""
        append(self.stats, record)

    def cut(self, step: int) -> None:
        """Forget the reports of later steps, and a line that was not finished: they will come again."""
        if not self.stats.exists():
            return
        text = self.stats.read_text(encoding="utf-8", errors="replace")
        kept = []
        for line in text.splitlines(keepends=True):
            try:
                if not line.endswith("\n") or json.loads(line)["step"] > step:
                    break
            except (ValueError, LookupError, TypeError):
                break
            kept.append(line)
        if "".join(kept) != text:
            write_text(self.stats, "".join(kept))

    # Checkpoint -------------------------------------------------------------------------------------------------------

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint, whole or not at all."""
        try:
            with replacing(self.checkpoint) as temporary:
                torch.save({"format": FORMAT, **state}, temporary)
        except (OSError, RuntimeError) as error:  # torch's writer reports a full disk as a RuntimeError
            why = " ".join(str(error).split())[:200]
            raise LabError(f"cannot write {self.checkpoint} ({why}); the one before is kept") from error

    def load(self, device: torch.device | str = "cpu", *, peek: bool = False) -> dict[str, Any] | None:
        """The checkpoint, if there is one. With `peek` tensors are read only when they are looked at."""
        if not self.checkpoint.exists():
            return None
        try:
            state = torch.load(self.checkpoint, map_location=device, weights_only=True, mmap=peek)
            if state["format"] != FORMAT:
                raise ValueError(f"format {state['format']!r}, this version reads {FORMAT}")
        except Exception as error:  # whatever a broken file makes of itself
            why = " ".join(str(error).split())[:200]
            raise LabError(f"cannot read {self.checkpoint} ({why}); move the folder away") from error
        return dict(state)

    def step(self) -> int:
        """How far it has come: the checkpoint's step, 0 without one."""
        state = self.load(peek=True)
        return 0 if state is None else int(state["step"])


def append(path: Path, record: Record) -> None:
    """Add a record to a file of one JSON object a line."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n")
    except OSError as error:
        raise LabError(f"cannot write {path}: {error.strerror or error}") from error


def _said(name: str, value: Any) -> str:
    """An option as one would type it."""
    if name == "preset":
        return f"the preset {value}"
    if name == "processes":
        return f"{value} process{'es' if value != 1 else ''}"
    if value is None or value is False:
        return f"no --{name}"
    return f"--{name}" if value is True else f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}"
