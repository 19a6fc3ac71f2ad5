"""What a verdict is: a rule sees the records of the parts that it needs, and several parts make one answer."""

from itertools import product

import pytest

from torchbelay.lab.claims.verdict import (
    Answer,
    Claim,
    Finding,
    NotRecordedError,
    combine,
    find,
    judge_claim,
    need,
    need_one,
    need_some,
)

HOLDS, IN_PART, FAILS, UNDECIDED, OPEN = Answer.HOLDS, Answer.IN_PART, Answer.FAILS, Answer.UNDECIDED, Answer.OPEN


def test_missing_parts_are_named_and_present_ones_are_not() -> None:
    claim = Claim("C0", "text", "rule", ("a", "b", "c"), lambda records: Finding(HOLDS, "never asked"))
    assert judge_claim(claim, {"b": [{}], "c": []}).finding.summary == "needs a and c, which have not been run"


def test_what_a_rule_misses_in_the_records_is_named_and_not_an_exception() -> None:
    claim = Claim("C0", "text", "rule", ("a",), lambda records: Finding(HOLDS, str(need({}, ["SGD", "Adam"]))))
    assert judge_claim(claim, {"a": [{}]}).finding == Finding(OPEN, "the records lack SGD and Adam")
    for missing in (need_one, need_some):
        with pytest.raises(NotRecordedError, match="the EMA"):
            missing([], "the EMA")
    assert need_some([1, 2], "numbers") == [1, 2]


def test_a_rule_sees_the_records() -> None:
    claim = Claim("C0", "text", "rule", ("a",), lambda records: Finding(FAILS, f"{len(records['a'])} records"))
    assert judge_claim(claim, {"a": [{}, {}], "b": []}).finding == Finding(FAILS, "2 records")


@pytest.mark.parametrize(
    ("tests", "answer"),
    [
        ([True], HOLDS),
        ([True, True], HOLDS),
        ([True, False], IN_PART),  # half is enough
        ([True, None], IN_PART),
        ([True, True, None], IN_PART),
        ([True] + [False] * 9, FAILS),  # one of ten is not a part
        ([True, False, False], FAILS),
        ([False], FAILS),
        ([False, None], UNDECIDED),  # the open test may still make it half
        ([True, None, None, False], UNDECIDED),
        ([None], UNDECIDED),
        ([], OPEN),
    ],
)
def test_a_claim_of_several_tests_is_answered_by_how_many_are_passed_and_failed(
    tests: list[bool | None], answer: Answer
) -> None:
    assert combine(tests) is answer


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_a_claim_and_its_opposite_never_both_hold_in_part_or_both_fail_unless_at_exactly_half(size: int) -> None:
    """The rule is symmetric: to fail a claim takes as much as to hold its opposite in part."""
    for tests in product([True, False, None], repeat=size):
        opposite = [None if test is None else not test for test in tests]
        one, other = combine(tests), combine(opposite)
        half = 2 * tests.count(True) == size == 2 * tests.count(False)
        assert (one in (HOLDS, IN_PART)) == (other is FAILS) or 2 * tests.count(True) == size, tests
        assert not (one in (HOLDS, IN_PART) and other in (HOLDS, IN_PART)) or half


def test_a_finding_has_the_names_of_its_tests() -> None:
    finding = find({"fast": True, "cheap": False, "stable": None}, "a summary")
    assert (finding.answer, finding.passed, finding.summary) == (UNDECIDED, ["fast"], "a summary")
