"""Renew the words of kept records: `python -m torchbelay.lab.score.renewal FILE...`.

A protocol record holds how its setting differs from the paper's, one sentence each (`differs`). These sentences follow
from the plan in `studies.py`, so kept records get the plan's present ones. Sentences about what happened in a run are
the record's own (`remarks`). They stay as they are, and so does every measured number.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchbelay.lab import records as on_disk
from torchbelay.lab.arms import BELAY, EQUAL, MATCHED
from torchbelay.lab.part import LabError, Record

from .studies import PAPER_RATE, PLANS, Group


def present_differences(protocol: Record) -> list[str]:
    """Return how a protocol's setting differs from the paper's, in the words of the present plan."""
    planned = next(_groups(protocol["study"], 1.0))
    for group in _groups(protocol["study"], protocol["steps"] / planned.steps):
        if _describe(group).items() <= protocol.items():
            return list(group.differs)
    raise LabError(f"the plan of {protocol['study']} has no such setting; run it again with torchbelay reproduce")


def renew(path: Path) -> None:
    """Renew the sentences in a file of records; lines of other kinds stay as they are, byte by byte."""
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")  # splitlines() would split texts, too
    on_disk.write_text(path, "\n".join(map(_renew_line, lines)) + "\n")


def _renew_line(line: str) -> str:
    record = json.loads(line)
    if record.get("kind") != "protocol":
        return line
    return json.dumps(record | {"differs": present_differences(record)}, allow_nan=False, ensure_ascii=False)


def _groups(study: str, share: float) -> Iterator[Group]:
    """Yield the groups of a study; which rates Table 1 has is not among the differences."""
    best = (dict.fromkeys((EQUAL, MATCHED, BELAY), PAPER_RATE),) if study == "table1" else ()
    yield from PLANS[study](*best, share=share)


def _describe(group: Group) -> Record:
    """Return the fields of a group's protocol record that tell it from the study's other groups."""
    return {"dataset": group.dataset, "steps": group.steps, "batch": group.batch} | {
        key: value for key, value in group.objective.describe().items() if isinstance(value, int | float | str)
    }


def main(paths: Sequence[str]) -> None:
    """Renew the files."""
    for path in paths:
        renew(Path(path))


if __name__ == "__main__":
    main(sys.argv[1:])
