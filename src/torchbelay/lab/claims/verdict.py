"""What a claim, a finding and a verdict are. A rule computes each verdict from records; no verdict is typed in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from torchbelay.lab.part import Record

Records = Mapping[str, Sequence[Record]]  # the records of each part, by the part's name
Numbers = tuple[tuple[str, str], ...]  # what was measured, and its value


class Answer(StrEnum):
    """The possible answers to a claim."""

    HOLDS = "holds"
    IN_PART = "holds in part"
    FAILS = "does not hold"
    OPEN = "not run"


@dataclass(frozen=True)
class Finding:
    """An answer, the headline that explains it, and the numbers behind both."""

    answer: Answer
    summary: str  # at most two short sentences, for readers who read nothing else; computed from the records
    numbers: Numbers = ()  # everything else that was measured


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
        return Verdict(claim, Finding(Answer.OPEN, f"needs {', '.join(missing)}, which has not been run"))
    return Verdict(claim, claim.judge(records))


def combine(parts: Sequence[bool]) -> Answer:
    """Return the answer to a claim of several parts: all of them hold, some, or none; open if there is no part.

    >>> combine([True, True]).value, combine([True, False]).value, combine([False]).value, combine([]).value
    ('holds', 'holds in part', 'does not hold', 'not run')
    """
    if not parts:
        return Answer.OPEN
    return Answer.HOLDS if all(parts) else Answer.IN_PART if any(parts) else Answer.FAILS
