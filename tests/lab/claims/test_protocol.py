"""protocol.md states the rules that the code follows, with the code's own numbers."""

import re

import pytest

from helpers import kept_records
from torchbelay.lab.claims import CLAIMS, judge, planar, ranges
from torchbelay.lab.claims.planar import shares
from torchbelay.lab.claims.protocol import read_protocol
from torchbelay.lab.claims.score import contests_on_mnist
from torchbelay.lab.claims.verdict import Answer, combine
from torchbelay.lab.score.analysis import FAILED, FID_MARGIN, FID_NOISE
from torchbelay.lab.score.comparison import CHANCE, compare
from torchbelay.lab.score.effects import WAYS
from torchbelay.lab.statistics import CONFIDENCE, MARGIN, WORKS, mcnemar

TEXT = " ".join(read_protocol().split())


def test_it_has_every_verdict_that_a_claim_can_have() -> None:
    rows = re.findall(r"^\| ([a-z ]+) \| ", read_protocol(), re.M)
    assert rows == ["verdict", *map(str, Answer)]


@pytest.mark.parametrize(
    "sentence",
    [
        f"with a {CONFIDENCE:.0%} t-interval",
        f"two one-sided t-tests at {CHANCE:.0%} show a difference of at most {MARGIN - 1:.0%} (a loss) or "
        f"{FID_MARGIN - 1:.0%} (a FID)",
        f"have a test loss above {FAILED:g}",
        f"McNemar's exact one-sided test at {CHANCE:.0%}",
        f"it is taken as {FID_NOISE:.0%} of the FID",
        f"if at least {planar.WORKS:.0%} of the starts converge, and elsewhere if the loss is at most {WORKS:g} times",
        "if they differ by two steps of the grid",
        f"at **{WAYS[0]}** (against an EMA with the same learning rate), at **{WAYS[1]}** (",
        f"at **{WAYS[2]}** rate",
    ],
)
def test_its_numbers_are_those_of_the_code(sentence: str) -> None:
    assert sentence in TEXT


def test_it_takes_five_seeds_lost_against_none() -> None:
    assert ranges.NOTABLE == 2
    assert mcnemar(0, 4) > CHANCE >= mcnemar(0, 5)
    assert "it takes five seeds lost against none" in TEXT
    assert compare(dict.fromkeys(range(5), 1.0), dict.fromkeys(range(5), None)).better is True


def test_it_says_which_records_it_was_not_committed_before() -> None:
    """Every part that a claim needs had been run, or was planned before its first run."""
    before, _, planned = TEXT.partition("For figure4 and readings it is one: it was committed before their first run")
    assert planned
    listed = before.split("The parts fig1 to fig3, ")[1].split(" had been run")[0]
    named = {"fig1", "fig2", "fig3", *re.split(r", | and ", listed)}
    assert named | {"figure4", "readings"} >= {part for claim in CLAIMS for part in claim.needs}
    assert re.search(r"Dated \d{4}-\d{2}-\d{2}\.", TEXT)


def test_what_it_says_of_the_last_changes_follows_from_the_kept_records() -> None:
    """The last column has the verdict of today, and in italics that of the rule which stands beside it."""
    rows = {row[0]: row[-1] for row in re.findall(r"^\| (C\d+) \| .* \| (.*) \| (.*) \|$", read_protocol(), re.M)}
    before = {row[0]: row[1] for row in re.findall(r"^\| (C\d+) \| .* \| (.*) \| (.*) \|$", read_protocol(), re.M)}
    found = {v.claim.id: v.finding for v in judge({name: kept_records.lines(name) for name in kept_records.paths()})}
    assert [*rows] == ["C3", "C4", "C12", "C13", "C15"]
    for name, after in rows.items():
        finding = found[name]
        now = f"{finding.answer}, {len(finding.passed)} of {len(finding.tests)}"
        assert (before[name] if after.startswith("the same") else after.split(";")[0]) == now
        if other := re.search(r"\*(.*)\*, (\d+) of (\d+), if", after):
            answer, passed, tests = other.groups()
            values = [value for _, value in finding.numbers]
            assert any(v.startswith(f"{answer}: {passed} passed") and f"of {tests} tests" in v for v in values)
            assert f"{answer}." in finding.summary


def test_the_exception_of_c9_has_the_other_outcome_beside_it() -> None:
    """With equalities open, no test would be failed, and the verdict is the same."""
    (found,) = [
        v.finding
        for v in judge({name: kept_records.lines(name) for name in ("mnist", "readings", "figure4")})
        if v.claim.id == "C9"
    ]
    contests = contests_on_mnist({name: kept_records.lines(name) for name in ("mnist", "readings")})
    failed = [each for each in contests if found.tests.get(each.name) is False]
    assert len(failed) == 1
    assert failed[0].comparison.alike
    with_equality_open = [None if outcome is False else outcome for outcome in found.tests.values()]
    assert combine(with_equality_open) is found.answer is Answer.UNDECIDED


def test_the_exception_of_c2_has_the_other_outcome_beside_it() -> None:
    (found,) = [v.finding for v in judge({"fig2": kept_records.lines("fig2")}) if v.claim.id == "C2"]
    assert "There are three exceptions. C2 says" in TEXT
    assert found.tests == {"EMA saves SGD": False, "BELAY saves SGD": True}
    diverged = {r["arm"]: r["diverged"] for r in shares({"fig2": kept_records.lines("fig2")}, 0.01).values()}
    assert diverged["SGD"] == diverged["EMA+SGD"] == 1.0  # a tie
    assert combine([None, True]) is found.answer is Answer.IN_PART
    assert "With ties open, that test would be open, and C2 *holds in part* all the same." in TEXT


def test_equality_comes_before_a_difference() -> None:
    factors = dict(enumerate((0.9695, 0.970, 0.9705)))
    found = compare(factors, dict.fromkeys(factors, 1.0))
    assert found.below
    assert (found.better, found.alike) == (False, True)
    assert "0.970 (0.968 to 0.972) is equal, so that it fails C9 and passes C10" in TEXT
