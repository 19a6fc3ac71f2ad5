"""What is finished is kept in the cache, under a name that says all that it depends on: code, settings and machine."""

import hashlib
from functools import cache
from importlib.resources import files

from torchbelay.lab import records as on_disk
from torchbelay.lab.part import LabError, Record, Settings

from .data import cache_folder


@cache
def source() -> str:
    """A digest of this package's own code: what another version found is not what this one would find."""
    ours = sorted(
        (each for each in files(__package__).iterdir() if each.name.endswith(".py")), key=lambda each: each.name
    )
    return hashlib.sha256(b"\0".join(each.read_bytes() for each in ours)).hexdigest()


class Kept:
    """A place for some records; `depends` is what they depend on besides the code."""

    def __init__(self, name: str, *depends: object) -> None:
        told = repr((source(), depends))
        self.path = cache_folder() / "studies" / f"{name}-{hashlib.sha256(told.encode()).hexdigest()[:16]}.jsonl"

    def read(self) -> tuple[float, list[Record]] | None:
        """How long they took, and the records; None if there are none, or if they are damaged."""
        if not self.path.exists():
            return None
        try:
            head, found = on_disk.read(self.path)
        except LabError:
            return None
        return float(head["wall_s"]), found

    def write(self, records: list[Record], wall_s: float = 0.0) -> None:
        """Keep them."""
        on_disk.write(self.path, on_disk.header(self.path.stem, Settings(), wall_s), records)
