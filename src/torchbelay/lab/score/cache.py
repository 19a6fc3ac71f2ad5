"""A cache of finished records. The name of a cache file depends on code, settings and machine."""

import hashlib
from collections.abc import Collection, Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from torchbelay.lab import records as on_disk
from torchbelay.lab.part import LabError, Record, Settings

from .download import cache_folder

# What a group's records depend on, besides the group itself. A caption or a figure may change without hours of runs.
SOURCES = (
    "data.py",
    "experiment.py",
    "fid.py",
    "fid_curve.py",
    "formats.py",
    "models/",
    "training/batches.py",
    "training/learner.py",
    "training/speed.py",
    "training/validation.py",
)


@cache
def code_digest() -> str:
    """Return the digest of the code that runs depend on: records of another version are not reused."""
    return digest_sources(files(__package__), SOURCES)


def digest_sources(folder: Traversable, names: Collection[str] | None = None) -> str:
    """Return the SHA-256 of the names and contents of all Python files in a folder and below it, or of some of them.

    `names` begins the names of those that count, as "models/" or "data.py".
    """
    sha = hashlib.sha256()
    for name, content in sorted(_sources(folder)):
        if names is None or name.startswith(tuple(names)):
            sha.update(name.encode() + b"\0" + content + b"\0")
    return sha.hexdigest()


def _sources(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _sources(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".py"):
            yield f"{prefix}{entry.name}", entry.read_bytes()


class CachedRecords:
    """A cache file for some records; `key` is everything that they depend on besides the code.

    `code` is the digest of the code that they depend on, by default that of this package's SOURCES.
    """

    def __init__(self, name: str, *key: object, code: str | None = None) -> None:
        self.name, self.key, self.code = name, key, code
        text = repr((code or code_digest(), key))
        self.path = cache_folder() / "studies" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"

    def piece(self, name: str) -> "CachedRecords":
        """Return the cache file of a piece of these records, which is finished before all of them are."""
        return CachedRecords(f"{self.name}-{name}", *self.key, code=self.code)

    def read(self) -> tuple[float, list[Record]] | None:
        """Return the seconds that the records took, and the records; None if the file is missing or damaged."""
        if not self.path.exists():
            return None
        try:
            head, found = on_disk.read(self.path)
        except LabError:
            return None
        return float(head["wall_s"]), found

    def write(self, records: list[Record], wall_s: float = 0.0) -> None:
        """Write the records and the seconds that they took."""
        on_disk.write(self.path, on_disk.header(self.path.stem, Settings(), wall_s), records)
