"""Records on disk: one JSON object a line, the first one about the rest. Written whole or not at all."""

import json
import math
import os
import platform
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from torchbelay import __version__

from .part import LabError, Record, Settings

FORMAT = 1
DIGITS = 6  # of a number in a record
_HEAD = {"part": str, "seed": int, "quick": bool, "records": int, "wall_s": int | float}  # without these it is none


def header(part: str, settings: Settings, wall_s: float) -> Record:
    """Where and how the records that follow were made."""
    return {
        "format": FORMAT,
        "part": part,
        "seed": settings.seed,
        "quick": settings.quick,
        "wall_s": round(wall_s, 2),
        "device": f"{platform.machine()}, one thread",
        "torchbelay": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def write(path: Path, head: Record, records: Iterable[Record]) -> None:
    """Write a part's records; until the last one is on disk, what was there before stays."""
    records = list(records)
    head = head | {"records": len(records)}
    lines = [json.dumps(line, allow_nan=False, ensure_ascii=False) for line in (head, *records)]
    write_text(path, "\n".join(lines) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:
        raise LabError(f"cannot write {path}: {error.strerror or error}; choose another folder with --out") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # a temporary file is its owner's alone; a report is for everybody
        os.replace(name, path)
    except OSError as error:
        raise LabError(f"cannot write {path}: {error.strerror or error}; choose another folder with --out") from error
    finally:
        Path(name).unlink(missing_ok=True)


def read(path: Path) -> tuple[Record, list[Record]]:
    """The header and the records of a file; a damaged one is refused, and stays as it is."""
    cure = "move it away, or run again with --force"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"cannot read {path}: {error}; {cure}") from error
    if not text.endswith("\n"):
        raise LabError(f"{path} is damaged ({'cut short' if text else 'empty'}); {cure}")
    lines: list[Any] = []
    for number, line in enumerate(text[:-1].split("\n"), 1):  # splitlines() would split a text at U+2028, too
        try:
            lines.append(json.loads(line, parse_constant=_refuse))
        except (ValueError, RecursionError) as error:
            raise LabError(f"{path} is damaged in line {number} ({error}); {cure}") from error
        if not isinstance(lines[-1], dict):
            raise LabError(f"{path} is damaged in line {number} (not an object); {cure}")
    head = lines[0]
    if head.get("format") != FORMAT:
        raise LabError(f"{path} has format {head.get('format')!r}, this version reads {FORMAT}; {cure}")
    if lacking := [key for key, kind in _HEAD.items() if not isinstance(head.get(key), kind)]:
        raise LabError(f"{path} is damaged in line 1 (no {', '.join(lacking)}); {cure}")
    if head["records"] != len(lines) - 1:
        raise LabError(f"{path} is damaged ({len(lines) - 1} of {head['records']} records); {cure}")
    return head, lines[1:]


def _refuse(constant: str) -> None:
    """JSON has neither NaN nor infinity, though Python would read them."""
    raise ValueError(f"{constant} is no number")


def rounded(value: float, digits: int = DIGITS) -> float | None:
    """Round a number to the digits that a record keeps; None for one that is not finite.

    >>> rounded(0.123456789), rounded(math.nan)
    (0.123457, None)
    """
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def without_times(record: Record) -> Record:
    """What must be the same in every run with the same settings: times end in `_s`."""
    return {key: value for key, value in record.items() if not key.endswith("_s")}
