"""C14: is Adam more stable than SGD? And the range of learning rates that work on the plane, which C11 uses too."""

import math
from collections.abc import Sequence
from itertools import groupby

from torchbelay.lab.part import Record

from .planar import WORKS
from .rates import VOID, curve, functions
from .verdict import Claim, Finding, Outcome, Records, describe_answer, find

NOTABLE = 2  # steps of the grid of learning rates; smaller differences of a range do not count


def count_working(chosen: Sequence[Record]) -> int:
    """Return the length of the longest unbroken run of rates on the grid at which a method works."""
    runs = [sum(1 for _ in some) for works, some in groupby(chosen, lambda r: bool(r["converged"] >= WORKS)) if works]
    return max(runs, default=0)


def decades(chosen: Sequence[Record]) -> float:
    """Return the number of decades between two neighbours on the grid of learning rates."""
    return math.log10(chosen[-1]["lr"] / chosen[0]["lr"]) / max(1, len(chosen) - 1)


def judge_adam(records: Records) -> Finding:
    """Judge C14."""
    tests: dict[str, Outcome] = {}
    void: list[Outcome] = []  # by a rule in which a test is open unless both methods work at some rate
    numbers = []
    for around in ("", "EMA+", "BELAY+"):
        for f in functions(records):
            adam, sgd = (curve(records, f, f"{around}{inner}") for inner in ("Adam", "SGD"))
            counts = count_working(adam), count_working(sgd)
            more = counts[0] - counts[1]
            tests[f"{around}Adam on {f}"] = found = None if abs(more) < NOTABLE else more > 0
            void.append(found if all(counts) else None)
            widths = [f"{count_working(chosen) * decades(chosen):.2g}" for chosen in (adam, sgd)]
            numbers.append((f"{f}: decades that work, {around}Adam and {around}SGD", ", ".join(widths)))
    numbers.append((VOID, describe_answer(void)))
    wider, narrower = list(tests.values()).count(True), list(tests.values()).count(False)
    summary = (
        f"Alone, with EMA or with BELAY, Adam's range of rates is wider than SGD's in {wider} of {len(tests)} "
        f"comparisons and narrower in {narrower}."
    )
    return find(tests, summary, tuple(numbers))


CLAIMS = (
    Claim(
        "C14",
        "Adam is generally more stable than SGD.",
        "Twelve tests: Adam against SGD on each of four functions, alone, with EMA and with BELAY. Adam passes if its "
        "range of learning rates that work, the longest unbroken one, is wider, and fails if it is narrower, by "
        f"{NOTABLE} steps of the grid or more; else the test is open. A method that works at no rate has a range of no "
        "steps. Holds if all are passed, in part if at least half are.",
        ("robustness",),
        judge_adam,
        "robustness-adam-nominal",
    ),
)
