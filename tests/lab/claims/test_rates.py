"""The rules behind C12 and C13, on records made for each outcome."""

from collections.abc import Iterable

import pytest

from helpers import golden_records
from torchbelay.lab.claims.planar import SIX
from torchbelay.lab.claims.rates import CLAIMS, PAPER_RATES
from torchbelay.lab.claims.verdict import Answer, Finding, judge_claim
from torchbelay.lab.part import Record
from torchbelay.lab.plane import robustness

HOLDS, IN_PART, FAILS, UNDECIDED, OPEN = Answer.HOLDS, Answer.IN_PART, Answer.FAILS, Answer.UNDECIDED, Answer.OPEN
BY_ID = {claim.id: claim for claim in CLAIMS}


def judge(name: str, **records: list[Record]) -> Finding:
    return judge_claim(BY_ID[name], records).finding


def weights_of(arm: str) -> str:
    """What the rules must judge an arm by, written a second time."""
    return "w2" if "+" in arm else "w1"


def test_the_claims_are_those_about_the_highest_rate() -> None:
    assert list(BY_ID) == ["C12", "C13"]
    assert {claim.needs for claim in CLAIMS} == {("robustness",)}
    assert all(str(claim.plate).startswith("robustness-") for claim in CLAIMS)


@pytest.mark.parametrize("name", BY_ID)
def test_the_rules_understand_what_the_part_records(name: str) -> None:
    finding = judge(name, robustness=golden_records.quick(robustness))
    assert finding.answer is not OPEN
    assert finding.numbers


# C12 and C13: the highest rate that works -----------------------------------------------------------------------------

GRID = (1e-4, 1e-3, 2e-3, 3e-3, 1e-2, 2e-2, 3e-2, 5e-2, 0.15, 0.5)


def works_up_to(arm: str, highest: float | None, function: str = "bowl", scale: float = 1.0) -> Iterable[Record]:
    """An arm's records over the grid: it works up to a rate, and nowhere if that is None."""
    for lr in GRID:
        works = highest is not None and lr <= highest
        yield {
            "kind": "rate",
            "function": function,
            "arm": arm,
            "judged": weights_of(arm),
            "lr": lr,
            "effective_lr": scale * lr,
            "converged": 0.9 if works else 0.899,
        }


def rates(*functions: dict[str, float | None]) -> list[Record]:
    """For each function the highest rate of each of the six; their paper rates, if not given."""
    return [
        record
        for i, given in enumerate(functions)
        for arm, highest in (PAPER_RATES | given).items()
        for record in works_up_to(arm, highest, f"f{i}")
    ]


ROOM = dict.fromkeys(PAPER_RATES, 0.5)  # ten times the largest of the paper's


@pytest.mark.parametrize(
    ("functions", "answer"),
    [
        ([{}], HOLDS),
        ([ROOM, {}], HOLDS),  # one function on which no higher rate works is enough
        ([{"SGD": 2e-3, "BELAY+SGD": 2e-2}], HOLDS),
        ([{"SGD": 1e-4}], HOLDS),  # the paper's own rate fails already
        ([{"SGD": 3e-3}], IN_PART),  # three times the paper's rate still works
        ([{"BELAY+Adam": 0.15}], IN_PART),
        ([{"BELAY+SGD": 3e-2}], IN_PART),
        ([{"SGD": None}], IN_PART),  # nothing works: open
        ([dict.fromkeys(list(PAPER_RATES)[:3], 0.5)], IN_PART),  # higher rates work for half of them
        ([dict.fromkeys(list(PAPER_RATES)[:4], 0.5)], FAILS),
        ([{"SGD": None}, {}], HOLDS),  # a function on which nothing works does not count
        ([ROOM], FAILS),
        ([ROOM, ROOM], FAILS),
        ([dict.fromkeys(PAPER_RATES, None)], UNDECIDED),
    ],
)
def test_c12_each_method_was_run_at_its_highest_rate(functions: list[dict[str, float | None]], answer: Answer) -> None:
    assert judge("C12", robustness=rates(*functions)).answer is answer


def test_c12_says_at_how_much_higher_rates_the_others_work() -> None:
    finding = judge("C12", robustness=rates(ROOM | {"BELAY+Adam": 5e-2, "Adam": None}))
    assert finding.summary.startswith("BELAY+Adam ran within ×3 of their highest rate; higher rates work for BELAY+SGD")
    assert "BELAY+SGD (×50)" in finding.summary
    assert "EMA+SGD (×500)" in finding.summary
    assert finding.summary.endswith("; no rate works for Adam.")
    assert judge("C12", robustness=rates({})).summary.endswith(" and SGD ran within ×3 of their highest rate.")
    assert "nan" not in finding.summary
    label = "{}: the paper's rate, and the highest that works on every function"
    numbers = dict(finding.numbers)
    assert numbers[label.format("BELAY+SGD")] == "0.01, 0.5 (50 times the paper's)"
    assert numbers[label.format("Adam")] == "0.001, none"


def test_c12_looks_at_the_average_if_an_arm_has_one() -> None:
    decoys = [r | {"judged": "w1", "converged": 1.0} for arm in SIX if "+" in arm for r in works_up_to(arm, 0.5, "f0")]
    sweep = [r | {"kind": "theta"} for r in works_up_to("SGD", 0.5, "f0")]
    assert judge("C12", robustness=[*decoys, *sweep, *rates({})]).answer is HOLDS


MOMENTUM, BELAYS = 10.0, 0.25  # how much farther a constant gradient moves them than SGD


def against(*functions: tuple[float | None, float | None, float | None]) -> list[Record]:
    """For each function the highest rates of EMA, BELAY and momentum."""
    return [
        record
        for i, highest in enumerate(functions)
        for arm, lr, scale in zip(("EMA+SGD", "BELAY+SGD", "momentum"), highest, (1.0, BELAYS, MOMENTUM), strict=True)
        for record in works_up_to(arm, lr, f"f{i}", scale)
    ]


@pytest.mark.parametrize(
    ("functions", "answer"),
    [
        ([(0.15, 0.15, 1e-3)], HOLDS),
        ([(0.15, 0.15, None)], HOLDS),
        ([(0.15, 0.15, 1e-3), (0.15, 0.15, 1e-3), (None, None, 1e-3)], HOLDS),  # on most functions
        ([(0.15, 0.15, 1e-3), (None, None, None)], HOLDS),  # a function on which nothing works does not count
        ([(2e-2, 2e-2, 1e-2)], IN_PART),  # more in the nominal rate, less in the effective one: two of four
        ([(0.15, 1e-3, 1e-2)], IN_PART),  # EMA alone, in both rates
        ([(2e-2, 1e-3, 1e-2)], FAILS),  # EMA in the nominal rate alone: one of four
        ([(1e-3, 1e-3, 1e-3)], UNDECIDED),  # equal in the nominal rate, less in the effective one
        ([(None, None, 1e-3)], FAILS),
        ([(None, None, None)], UNDECIDED),
        ([(0.15, 0.15, 1e-3), (1e-3, 1e-3, 1e-2)], UNDECIDED),  # as often higher as lower
    ],
)
def test_c13_averaging_works_at_higher_rates_than_momentum(
    functions: list[tuple[float | None, float | None, float | None]], answer: Answer
) -> None:
    assert judge("C13", robustness=against(*functions)).answer is answer


def test_c13_says_for_which_of_the_four_comparisons() -> None:
    finding = judge("C13", robustness=against((0.15, 2e-2, 1e-2), (0.15, 2e-2, None)))
    assert finding.summary == "Averaging works at higher rates than momentum in 3 of 4 comparisons."
    assert finding.passed == ["EMA by nominal rate", "BELAY by nominal rate", "EMA by effective rate"]
    numbers = dict(finding.numbers)
    assert numbers["nominal: the highest rate of BELAY+SGD against that of momentum"] == (
        "higher on 2 and lower on 0 of 2 functions"
    )
    assert numbers["effective: the highest rate of BELAY+SGD against that of momentum"] == (
        "higher on 1 and lower on 1 of 2 functions"
    )
    assert numbers["f0, effective: highest rate of BELAY+SGD and of momentum"] == "0.005, 0.1"
    assert numbers["f1, nominal: highest rate of EMA+SGD and of momentum"] == "0.15, none"


NONE_FOR_ONE = ((0.15, 0.15, 1e-3), (1e-3, None, 1e-2), (0.5, 0.5, 1e-3), (1e-3, 1e-3, 1e-2))


def test_c13_a_method_that_works_at_no_rate_is_the_lower_one_and_the_other_rule_stands_beside_it() -> None:
    """BELAY is higher on two functions and lower on two; without the one on which no rate of it works it would win."""
    finding = judge("C13", robustness=against(*NONE_FOR_ONE))
    assert finding.tests["BELAY by nominal rate"] is None
    other = dict(finding.numbers)["if a function on which no rate works for one of the two decided nothing"]
    assert other.startswith("holds in part: 2 passed")
    assert finding.answer is UNDECIDED
    assert finding.summary.endswith(" Without functions on which one never works: 2, holds in part.")
