"""The folder of a run: its options, one line per report, the checkpoint, the images."""

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
except ImportError:  # Windows has no file locks of this kind
    fcntl = None

FORMAT = 1
OPTION_NAMES = ("preset", "budget", "lr", "seed", "every", "compile", "device", "processes")  # fixed for the whole run
UNWRITTEN = {"beta1": 0.9}  # of every run whose options do not have it


class Folder:
    """The folder of a run. The last checkpoint is complete even if the process is killed."""

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
    def locked(self) -> Iterator[None]:
        """Keep other processes from training here; the lock ends with its process.

        Folders that were created for the lock are removed at the end if they are empty.
        """
        if fcntl is None:
            yield
            return
        made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        handle = self._open_lock()
        try:
            yield
        finally:
            with suppress(OSError):
                self.lock.unlink()
            os.close(handle)
            for path in made:
                with suppress(OSError):
                    path.rmdir()

    def _open_lock(self) -> int:
        """Return the lock as an open file; refuse if another process holds it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise LabError(f"cannot write {self.lock}: {error.strerror or error}; choose another --out") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = os.path.samestat(os.fstat(handle), self.lock.stat())  # false if the holder has just removed it
        except (BlockingIOError, FileNotFoundError):
            alone = False
        except OSError:  # a file system without locks: assume that no other process trains here
            alone = True
        if not alone:
            os.close(handle)
            raise LabError(f"another process trains in {self.path}; wait until it ends, or choose another --out")
        return handle

    # Options ----------------------------------------------------------------------------------------------------------

    def read_options(self) -> Record | None:
        """Return the options of the run; None if the folder has no run."""
        if not self.options.exists():
            if self.checkpoint.exists():
                raise LabError(
                    f"{self.path} is not a run: it has a checkpoint but no options.json; choose another folder"
                )
            return None
        try:
            found = json.loads(self.options.read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise LabError(f"{self.options} has format {found['format']!r}, this version reads {FORMAT}")
            if lacking := {*OPTION_NAMES, "resolved"} - found.keys():
                raise KeyError(min(lacking))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise LabError(f"cannot read {self.options} ({error!r}); move the folder away") from error
        return dict(found)

    def refuse_other_options(self, options: Record) -> None:
        """Refuse to continue with other options than those of the run; the error names the first that differs."""
        before = self.read_options()
        for name in OPTION_NAMES if before else ():
            if before is not None and before[name] != options[name]:
                was, now = _option_text(name, before[name]), _option_text(name, options[name])
                raise LabError(f"{self.path} was begun with {was}, not {now}; go on with that, or choose another --out")

    def refuse_changed_plan(self, resolved: Record) -> None:
        """Refuse to continue if the same options now give another plan, as after a change of the preset."""
        before = self.read_options()
        if before is None:
            return
        was, now = UNWRITTEN | before["resolved"], UNWRITTEN | json.loads(json.dumps(resolved))  # as JSON returns it
        for name in sorted({*was, *now}):
            if was.get(name) != now.get(name):
                changed = f"{name} was {was.get(name)}, and is {now.get(name)} now"
                raise LabError(
                    f"the preset of {self.path} has changed: {changed}; train in another folder, or go back to the "
                    "version that began it"
                )

    def begin(self, options: Record) -> None:
        """Write the options of a new run, so that a folder that cannot be written to fails before training."""
        if not self.options.exists():
            write_text(self.options, json.dumps({"format": FORMAT, **options}, indent=2, allow_nan=False) + "\n")

    def tidy(self) -> None:
        """Remove temporary files of a process that was killed while writing; they can be as large as a checkpoint."""
        for file in (
            self.options,
            self.stats,
            self.checkpoint,
            self.samples,
        ):  # `sample` and `fid` may be writing other files now
            for path in self.path.glob(f".{file.name}.*"):
                path.unlink(missing_ok=True)

    # Reports ----------------------------------------------------------------------------------------------------------

    def report(self, record: Record) -> None:
        """Append a report to stats.jsonl."""
        append_record(self.stats, record)

    def cut_reports(self, step: int) -> None:
        """Remove reports of steps after `step`, and an incomplete last line: training will report them again."""
        if not self.stats.exists():
            return
        text = self.stats.read_text(encoding="utf-8", errors="replace")
        lines = []
        for line in text.splitlines(keepends=True):
            try:
                if not line.endswith("\n") or json.loads(line)["step"] > step:
                    break
            except (ValueError, LookupError, TypeError):
                break
            lines.append(line)
        if "".join(lines) != text:
            write_text(self.stats, "".join(lines))

    # Checkpoint -------------------------------------------------------------------------------------------------------

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint, completely or not at all."""
        try:
            with replacing(self.checkpoint) as temporary:
                torch.save({"format": FORMAT, **state}, temporary)
        except (OSError, RuntimeError) as error:  # torch's writer reports a full disk as a RuntimeError
            why = " ".join(str(error).split())[:200]
            raise LabError(f"cannot write {self.checkpoint} ({why}); the previous one is kept") from error

    def load(self, device: torch.device | str = "cpu", *, peek: bool = False) -> dict[str, Any] | None:
        """Return the checkpoint; None if there is none. With `peek`, tensors are read from disk only when used."""
        if not self.checkpoint.exists():
            return None
        try:
            state = torch.load(self.checkpoint, map_location=device, weights_only=True, mmap=peek)
            if state["format"] != FORMAT:
                raise ValueError(f"format {state['format']!r}, this version reads {FORMAT}")
        except Exception as error:  # a damaged file can raise anything
            why = " ".join(str(error).split())[:200]
            raise LabError(f"cannot read {self.checkpoint} ({why}); move the folder away") from error
        return dict(state)

    def step(self) -> int:
        """Return the step of the checkpoint; 0 without one."""
        state = self.load(peek=True)
        return 0 if state is None else int(state["step"])


def append_record(path: Path, record: Record) -> None:
    """Append a record to a file with one JSON object per line."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n")
    except OSError as error:
        raise LabError(f"cannot write {path}: {error.strerror or error}") from error


def _option_text(name: str, value: Any) -> str:
    """Return an option as it is typed on the command line."""
    if name == "preset":
        return f"the preset {value}"
    if name == "processes":
        return f"{value} process{'es' if value != 1 else ''}"
    if value is None or value is False:
        return f"no --{name}"
    return f"--{name}" if value is True else f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}"
