"""All claims together, on the committed records: short headlines, rules in sentences, numbers behind both."""

from importlib.resources import files
from pathlib import Path

import pytest

from helpers.root import ROOT
from torchbelay.lab import records as on_disk
from torchbelay.lab.claims import CLAIMS, judge
from torchbelay.lab.claims.verdict import Answer, Verdict, combine

FOLDERS = (ROOT / "docs" / "records", Path(str(files("torchbelay.lab.score"))) / "records")
WORDS = 32  # of a headline, at most


@pytest.fixture(scope="module")
def verdicts() -> list[Verdict]:
    return judge({path.stem: on_disk.read(path)[1] for folder in FOLDERS for path in folder.glob("*.jsonl")})


def test_every_claim_of_the_paper_has_a_rule_and_without_records_none_is_judged() -> None:
    assert [claim.id for claim in CLAIMS] == [f"C{i}" for i in range(1, 17)]
    assert {verdict.finding.answer for verdict in judge({})} == {Answer.OPEN}


def test_the_committed_records_answer_every_claim_with_numbers(verdicts: list[Verdict]) -> None:
    assert len(verdicts) == len(CLAIMS)
    for verdict in verdicts:
        assert verdict.finding.answer is not Answer.OPEN
        assert len(verdict.finding.numbers) >= 3, verdict.claim.id
        labels = [label for label, _ in verdict.finding.numbers]
        assert len({*labels}) == len(labels), verdict.claim.id


def test_a_claim_that_holds_in_part_names_at_least_half_of_its_tests(verdicts: list[Verdict]) -> None:
    for verdict in verdicts:
        finding = verdict.finding
        if finding.answer is not Answer.NOT_REPRODUCED:
            assert combine([*finding.tests.values()]) is finding.answer, verdict.claim.id
        if finding.answer is Answer.IN_PART:
            assert 2 * len(finding.passed) >= len(finding.tests)


def test_a_headline_is_at_most_two_short_sentences(verdicts: list[Verdict]) -> None:
    for verdict in verdicts:
        summary = verdict.finding.summary
        assert summary.endswith(".")
        assert summary.replace("Eq. ", "Eq.").count(". ") <= 1, summary
        assert len(summary.split()) <= WORDS, summary


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_claim_and_its_rule_are_sentences(claim) -> None:
    assert claim.text.endswith(".")
    assert claim.rule.endswith(".")
    assert "in part" in claim.rule
