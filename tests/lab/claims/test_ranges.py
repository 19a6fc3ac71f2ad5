"""C14's rule, Adam against SGD, on records made for each outcome."""

import pytest

from torchbelay.lab.claims.ranges import CLAIMS, count_working, judge_adam
from torchbelay.lab.claims.verdict import Answer
from torchbelay.lab.part import Record

RATES = [10.0**e for e in range(-5, 5)]
FUNCTIONS = ("Rosenbrock", "Beale", "absolute", "bowl")


def rates(arm: str, works: int) -> list[Record]:
    """An arm that works at the first `works` rates, on every function."""
    common = {"kind": "rate", "arm": arm, "judged": "w2" if "+" in arm else "w1"}
    return [
        common | {"function": function, "lr": lr, "converged": 0.9 if i < works else 0.89}
        for function in FUNCTIONS
        for i, lr in enumerate(RATES)
    ]


def plane(alone: tuple[int, int], ema: tuple[int, int], belay: tuple[int, int]) -> list[Record]:
    """The numbers of rates at which Adam and SGD work, alone, with EMA and with BELAY."""
    pairs = {"": alone, "EMA+": ema, "BELAY+": belay}
    return [
        record
        for around, works in pairs.items()
        for inner, count in zip(("Adam", "SGD"), works, strict=True)
        for record in rates(f"{around}{inner}", count)
    ]


@pytest.mark.parametrize(
    ("pairs", "answer", "passed"),
    [
        (((6, 4), (6, 4), (6, 4)), Answer.HOLDS, 12),
        (((5, 4), (6, 4), (6, 4)), Answer.IN_PART, 8),  # one step of the grid is not notable
        (((4, 6), (6, 4), (4, 6)), Answer.FAILS, 4),
        (((5, 4), (5, 4), (6, 4)), Answer.UNDECIDED, 4),
        (((4, 6), (4, 6), (4, 6)), Answer.FAILS, 0),
    ],
)
def test_each_outcome(pairs: tuple[tuple[int, int], ...], answer: Answer, passed: int) -> None:
    found = judge_adam({"robustness": plane(*pairs)})
    assert (found.answer, len(found.passed), len(found.tests)) == (answer, passed, 12)
    assert f"than SGD's in {passed} of 12 comparisons" in found.summary


def test_the_numbers_are_decades() -> None:
    numbers = dict(judge_adam({"robustness": plane((6, 4), (5, 2), (3, 0))}).numbers)
    assert numbers["Beale: decades that work, Adam and SGD"] == "6, 4"
    assert numbers["bowl: decades that work, BELAY+Adam and BELAY+SGD"] == "3, 0"


def test_a_range_is_unbroken() -> None:
    with_a_hole = [{"converged": share} for share in (0.9, 0.9, 0.0, 0.9, 1.0, 0.95, 0.1)]
    assert count_working(with_a_hole) == 3


def test_the_claim_is_judged_by_the_records_of_the_plane() -> None:
    (claim,) = CLAIMS
    assert (claim.id, claim.needs) == ("C14", ("robustness",))
