"""Records on disk: one JSON object per line, and a header line first. A file is written whole or not at all."""

import json
import math
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from torchbelay import __version__
from torchbelay.belay.files import replacing

from .part import LabError, Record, Settings

FORMAT = 1
DIGITS = 6  # significant digits of a number in a record, unless its part says otherwise
_HEADER = {"part": str, "seed": int, "quick": bool, "records": int, "wall_s": int | float}  # the fields it must have


def header(part: str, settings: Settings, wall_s: float) -> Record:
    """Return the header: the settings, the machine and the versions that made the records after it."""
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
    """Write a part's header and records; an older file stays until the new one is complete on the disk."""
    records = list(records)
    head = head | {"records": len(records)}
    lines = [json.dumps(line, allow_nan=False, ensure_ascii=False) for line in (head, *records)]
    write_text(path, "\n".join(lines) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all, and make its folder."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, and make its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise LabError(f"cannot write {path}: {error.strerror or error}; choose another folder with --out") from error


def read(path: Path) -> tuple[Record, list[Record]]:
    """Return the header and the records of a file; a damaged file is refused and left as it is."""
    cure = "move it away, or run again with --force"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"cannot read {path}: {error}; {cure}") from error
    if not text.endswith("\n"):
        raise LabError(f"{path} is damaged ({'cut short' if text else 'empty'}); {cure}")
    lines: list[Any] = []
    for number, line in enumerate(text[:-1].split("\n"), 1):  # splitlines() would also split a text at U+2028
        try:
            lines.append(json.loads(line, parse_constant=_refuse))
        except (ValueError, RecursionError) as error:
            raise LabError(f"{path} is damaged in line {number} ({error}); {cure}") from error
        if not isinstance(lines[-1], dict):
            raise LabError(f"{path} is damaged in line {number} (not an object); {cure}")
    head = lines[0]
    if head.get("format") != FORMAT:
        raise LabError(f"{path} has format {head.get('format')!r}, this version reads {FORMAT}; {cure}")
    if missing := [key for key, kind in _HEADER.items() if not isinstance(head.get(key), kind)]:
        raise LabError(f"{path} is damaged in line 1 (no {', '.join(missing)}); {cure}")
    if head["records"] != len(lines) - 1:
        raise LabError(f"{path} is damaged ({len(lines) - 1} of {head['records']} records); {cure}")
    return head, lines[1:]


def _refuse(constant: str) -> None:
    """Refuse NaN and infinity: JSON does not have them, but Python would read them."""
    raise ValueError(f"{constant} is not a JSON number")


def significant(value: float, digits: int = DIGITS) -> float:
    """Round a number to significant digits.

    >>> significant(123456.789, 4), significant(2 / 3e9)
    (123500.0, 6.66667e-10)
    """
    return float(f"{value:.{digits}g}")


def rounded(value: float, digits: int = DIGITS) -> float | None:
    """Round a number to the digits that a record keeps; None for one that is not finite.

    >>> rounded(0.123456789), rounded(math.nan)
    (0.123457, None)
    """
    return significant(value, digits) if math.isfinite(value) else None


def select(records: Sequence[Record], kind: str, **fields: object) -> list[Record]:
    """Return the records of a kind whose fields have the given values, in their order.

    >>> select([{"kind": "run", "lr": 0.1}, {"kind": "run", "lr": 0.2}, {"kind": "pair"}], "run", lr=0.2)
    [{'kind': 'run', 'lr': 0.2}]
    """
    return [r for r in records if r["kind"] == kind and all(r[key] == value for key, value in fields.items())]


def without_times(record: Record) -> Record:
    """Return a record without its times, the fields whose names end in `_s`: the rest is the same in every run.

    >>> without_times({"steps": 3, "wall_s": 0.2})
    {'steps': 3}
    """
    return {key: value for key, value in record.items() if not key.endswith("_s")}
