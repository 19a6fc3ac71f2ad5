"""The records of our own full run, which the documents quote: some beside the documents, some in the package."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from helpers.root import ROOT
from torchbelay.lab import records

DOCS = ROOT / "docs" / "records"
# of the parts that need a GPU
PACKAGE = tuple(Path(str(files(f"torchbelay.lab.{room}"))) / "records" for room in ("score", "gpt"))


def paths() -> dict[str, Path]:
    """Return the file of each part, by the part's name; a file in docs comes before one in the package."""
    return {path.stem: path for folder in (*PACKAGE, DOCS) for path in sorted(folder.glob("*.jsonl"))}


def head(name: str) -> dict[str, Any]:
    """Return the header of a part's records."""
    return records.read(paths()[name])[0]


def lines(name: str) -> list[dict[str, Any]]:
    """Return a part's records."""
    return records.read(paths()[name])[1]
