"""Golden records: an excerpt of the quick records of the planar parts, to see that they do not change.

After a change that is meant to change them, run this file to write them again:

    PYTHONPATH=tests python tests/helpers/golden_records.py

Read the difference before you commit it: every line that changed must have a reason.
"""

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from torchbelay.lab.part import Part, Record, Settings
from torchbelay.lab.plane import fig1, fig2, fig3, robustness

FOLDER = Path(__file__).parents[1] / "lab" / "plane" / "golden"
PARTS: tuple[Part, ...] = (fig1, fig2, fig3, robustness)
QUICK = Settings(seed=0, quick=True)

_POINTS = (0, 1, 5, 20, 80, -1)  # of a path, among those recorded
_KEPT = ("kind", "function", "arm", "lr", "start", "steps", "goal", "arrived_at", "diverged_at")
_CURVE = ("kind", "function", "half_width", "arm", "judged", "goal", "limit", "starts", "steps")
_ALONG = ("lr", "converged", "diverged", "median_arrival")
_BOX = 0.5  # the box of Figure 2 that the claims are judged by

# Processors differ in the last digits, and 600 steps enlarge the difference. With noise of 4e-16 of each weight added
# after every step, no coordinate moved by 1e-6 of itself, and no share by more than one start.
RELATIVE, ABSOLUTE, STARTS = 1e-6, 1e-12, 1
_SHARES = ("converged", "diverged")


def distil(records: Sequence[Record]) -> list[Record]:
    """Return an excerpt: a few points per path, and one line for many learning rates."""
    golden: list[Record] = []
    curves: dict[str, Record] = {}
    for record in records:
        if record["kind"] == "step":
            golden.append(record)
        elif record["kind"] == "path":
            golden.append({key: record[key] for key in _KEPT} | _few_points(record))
        elif _matters(record):
            about = {key: record[key] for key in _CURVE if key in record}
            line = curves.setdefault(json.dumps(about), about | {key: [] for key in _ALONG})
            for key in _ALONG:
                line[key].append(record[key])
    return golden + list(curves.values())


def _matters(record: Record) -> bool:
    """Whether a record belongs to the excerpt; many do not, so that the files stay small."""
    if record["kind"] in ("share", "curve"):
        return bool(record["half_width"] == _BOX)
    return record["kind"] != "rate" or record["function"] in ("Rosenbrock", "Beale")


def _few_points(record: Record) -> Record:
    places = [range(len(record["at"]))[i] for i in _POINTS if i < len(record["at"])]
    return {key: None if record[key] is None else [record[key][i] for i in places] for key in ("at", "w1", "w2")}


def differences(found: Sequence[Record], golden: Sequence[Record]) -> list[str]:
    """Return where records differ; shares and coordinates may differ a little, as processors do, and nothing else."""
    if len(found) != len(golden):
        return [f"{len(found)} records instead of {len(golden)}"]
    return [
        f"{key} of {expected}: {record.get(key)}"
        for record, expected in zip(found, golden, strict=True)
        for key in {**record, **expected}
        if not _alike(record.get(key), expected.get(key), STARTS / expected["starts"] if key in _SHARES else 0.0)
    ]


def _alike(one: object, other: object, margin: float) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_alike(x, y, margin) for x, y in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE + 1.001 * margin)
    return type(one) is type(other) and one == other


@cache
def run_quick(part: Part) -> tuple[list[Record], int]:
    """Run the quick version of a part; return its records, as a file would, and the units of work it reported."""
    ticks: list[int] = []
    records = part.run(QUICK, ticks.append)
    return json.loads(json.dumps(records, allow_nan=False)), sum(ticks)


def quick(part: Part) -> list[Record]:
    """Return a part's quick records. They are made once per process, and must not be changed."""
    return run_quick(part)[0]


def path(part: Part) -> Path:
    """Return the file of a part's golden records."""
    return FOLDER / f"{part.NAME}.jsonl"


def read(part: Part) -> list[Record]:
    """Read a part's golden records."""
    return [json.loads(line) for line in path(part).read_text(encoding="utf-8").splitlines()]


def write() -> None:
    """Write the golden records again."""
    FOLDER.mkdir(exist_ok=True)
    for part in PARTS:
        golden = distil(quick(part))
        lines = [json.dumps(record, ensure_ascii=False, separators=(",", ":")) for record in golden]
        path(part).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
