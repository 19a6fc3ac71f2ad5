"""What a claim, a test, a finding and a verdict are. Rules compute verdicts from records; no verdict is typed in.

protocol.md beside this file states the rules that all claims share.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torchbelay.lab.answer import Answer as Answer  # every claim has one
from torchbelay.lab.part import Record
from torchbelay.lab.report.words import listed

Records = Mapping[str, Sequence[Record]]  # the records of each part, by the part's name
Numbers = tuple[tuple[str, str], ...]  # what was measured, and its value
Outcome = bool | None  # of a test: passed, failed, or None if the records decide neither
Tests = Mapping[str, Outcome]  # by the name of each test, a phrase that says what is true if the test is passed


@dataclass(frozen=True)
class Finding:
    """An answer, the headline that explains it, and the numbers behind both."""

    answer: Answer
    summary: str  # at most two short sentences, about 30 words, computed from the records
    numbers: Numbers = ()  # everything else that was measured
    tests: Tests = field(default_factory=dict)  # the tests behind the answer

    @property
    def passed(self) -> list[str]:
        """The names of the tests that were passed."""
        return [name for name, outcome in self.tests.items() if outcome]


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, and the rule that judges it."""

    id: str  # "C1" …
    text: str  # what the paper says, in our words
    rule: str  # when the claim holds, holds in part, or does not hold
    needs: tuple[str, ...]  # the parts whose records the rule reads
    judge: Callable[[Records], Finding]
    plate: str | None = None  # the name of the figure behind it


@dataclass(frozen=True)
class Verdict:
    """A claim, and the finding of its rule."""

    claim: Claim
    finding: Finding


def judge_claim(claim: Claim, records: Records) -> Verdict:
    """Judge a claim. If a part that it needs has not been run, the finding names that part."""
    missing = [part for part in claim.needs if part not in records]
    if missing:
        run = "has" if len(missing) == 1 else "have"
        return Verdict(claim, Finding(Answer.OPEN, f"needs {listed(missing)}, which {run} not been run"))
    return Verdict(claim, claim.judge(records))


def combine(tests: Sequence[Outcome]) -> Answer:
    """Return the answer to a claim of several tests, by the rule of protocol.md.

    All passed: holds. At least half passed: holds in part. More than half failed: does not hold. Else undecided: the
    open tests may still bring the passed ones to half. Without a test: not run.

    >>> [combine(tests).value for tests in ([True, True], [True, False], [True, False, False], [True, None, False])]
    ['holds', 'holds in part', 'does not hold', 'undecided']
    """
    passed, failed = tests.count(True), tests.count(False)
    if not tests:
        return Answer.OPEN
    if passed == len(tests):
        return Answer.HOLDS
    if 2 * passed >= len(tests):
        return Answer.IN_PART
    return Answer.FAILS if 2 * failed > len(tests) else Answer.UNDECIDED


def find(tests: Tests, summary: str, numbers: Numbers = ()) -> Finding:
    """Return the finding of some tests."""
    return Finding(combine([*tests.values()]), summary, numbers, tests)
