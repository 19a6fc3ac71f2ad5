"""What a claim, a test, a finding and a verdict are. Rules compute verdicts from records; no verdict is typed in.

protocol.md beside this file states the rules that all claims share.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torchbelay.lab.answer import Answer as Answer  # every claim has one
from torchbelay.lab.part import Record
from torchbelay.lab.report.words import listed

Records = Mapping[str, Sequence[Record]]  # the records of each part, by the part's name
Numbers = tuple[tuple[str, str], ...]  # what was measured, and its value
Outcome = bool | None  # of a test: passed, failed, or None if the records decide neither
Tests = Mapping[str, Outcome]  # by the name of each test, a phrase that says what is true if the test is passed
T = TypeVar("T")


class NotRecordedError(Exception):
    """Records that a rule needs are missing. The message says which; the answer is "not run"."""


@dataclass(frozen=True)
class Finding:
    """An answer, the headline that explains it, and the numbers behind both."""

    answer: Answer
    summary: str  # at most two short sentences, at most 25 words, computed from the records
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
    """Judge a claim. If a part that it needs has not been run, or lacks an arm, the finding names what is missing."""
    missing = [part for part in claim.needs if not records.get(part)]
    if missing:
        run = "has" if len(missing) == 1 else "have"
        return Verdict(claim, Finding(Answer.OPEN, f"needs {listed(missing)}, which {run} not been run"))
    try:
        return Verdict(claim, claim.judge(records))
    except NotRecordedError as missed:
        return Verdict(claim, Finding(Answer.OPEN, f"the records lack {missed}"))


def need(found: Mapping[str, T], names: Iterable[str]) -> Mapping[str, T]:
    """Return what was found if it has all of these names; else raise NotRecordedError with those that it lacks.

    >>> need({"SGD": 1}, ["SGD"])
    {'SGD': 1}
    """
    missing = [name for name in names if name not in found]
    if missing:
        raise NotRecordedError(listed(missing))
    return found


def need_one(found: Sequence[T], what: str) -> T:
    """Return the only one that was found; raise NotRecordedError if there is none.

    >>> need_one([3], "the EMA")
    3
    """
    if not found:
        raise NotRecordedError(what)
    (one,) = found
    return one


def need_some(found: Sequence[T], what: str) -> Sequence[T]:
    """Return what was found; raise NotRecordedError if that is nothing."""
    if not found:
        raise NotRecordedError(what)
    return found


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


def more(one: float, other: float) -> Outcome:
    """Whether the first is more (True) or the second (False); None for a tie.

    >>> more(3, 1), more(0, 2), more(2, 2)
    (True, False, None)
    """
    return None if one == other else one > other


def count_outcomes(outcomes: Sequence[Outcome]) -> str:
    """Return how many tests have each outcome.

    >>> count_outcomes([True, False, None, None])
    '1 passed, 1 failed, 2 open'
    """
    names = {True: "passed", False: "failed", None: "open"}
    return ", ".join(f"{outcomes.count(outcome)} {name}" for outcome, name in names.items())


def describe_answer(tests: Sequence[Outcome]) -> str:
    """Return the answer to some tests with their outcomes, for a rule that stands beside the claim's own.

    >>> describe_answer([True, False, None])
    'undecided: 1 passed, 1 failed, 1 open of 3 tests'
    """
    return f"{combine(tests)}: {count_outcomes(tests)} of {len(tests)} tests"


def find(tests: Tests, summary: str, numbers: Numbers = ()) -> Finding:
    """Return the finding of some tests."""
    return Finding(combine([*tests.values()]), summary, numbers, tests)
