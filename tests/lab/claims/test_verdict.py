"""What a verdict is: a rule sees the records of the parts that it needs, and several parts make one answer."""

import pytest

from torchbelay.lab.claims.verdict import Answer, Claim, Finding, combine, judge_claim

HOLDS, IN_PART, FAILS, OPEN = Answer.HOLDS, Answer.IN_PART, Answer.FAILS, Answer.OPEN


def test_missing_parts_are_named_and_present_ones_are_not() -> None:
    claim = Claim("C0", "text", "rule", ("a", "b", "c"), lambda records: Finding(HOLDS, "never asked"))
    assert judge_claim(claim, {"b": []}).finding.summary == "needs a, c, which has not been run"


def test_a_rule_sees_the_records() -> None:
    claim = Claim("C0", "text", "rule", ("a",), lambda records: Finding(FAILS, f"{len(records['a'])} records"))
    assert judge_claim(claim, {"a": [{}, {}], "b": []}).finding == Finding(FAILS, "2 records")


@pytest.mark.parametrize(
    ("kept", "answer"),
    [([True], HOLDS), ([True, True], HOLDS), ([True, False], IN_PART), ([False], FAILS), ([False, False], FAILS)],
)
def test_a_claim_of_several_parts_holds_or_holds_in_part_or_fails(kept: list[bool], answer: Answer) -> None:
    assert combine(kept) is answer


def test_a_claim_without_parts_is_open() -> None:
    assert combine([]) is OPEN
