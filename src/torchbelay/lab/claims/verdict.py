"""What a verdict is. It is computed from records by a rule that is stated beside it, never typed in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from torchbelay.lab.part import Record

Records = Mapping[str, Sequence[Record]]  # of each part, by its name


class Answer(StrEnum):
    """What may be said of a claim."""

    HOLDS = "holds"
    IN_PART = "holds in part"
    FAILS = "does not hold"
    OPEN = "not run"


@dataclass(frozen=True)
class Finding:
    """An answer, and the numbers that it rests on."""

    answer: Answer
    summary: str  # one sentence for a person who reads nothing else; its numbers come from the records
    numbers: tuple[tuple[str, str], ...] = ()  # what was measured, and its value


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, and how it is judged."""

    id: str  # "C1" …
    text: str  # what the paper says, in our words
    rule: str  # when it holds, holds in part, or does not
    needs: tuple[str, ...]  # the parts whose records the rule looks at
    judge: Callable[[Records], Finding]
    plate: str | None = None  # the figure behind it


@dataclass(frozen=True)
class Verdict:
    """A claim and what was found."""

    claim: Claim
    finding: Finding


def verdict(claim: Claim, records: Records) -> Verdict:
    """Judge a claim; where a part that it needs has not been run, that is the finding."""
    missing = [part for part in claim.needs if part not in records]
    if missing:
        return Verdict(claim, Finding(Answer.OPEN, f"needs {', '.join(missing)}, which has not been run"))
    return Verdict(claim, claim.judge(records))


def of_parts(kept: Sequence[bool]) -> Answer:
    """The answer for a claim that says several things; where none was looked at, there is none."""
    if not kept:
        return Answer.OPEN
    return Answer.HOLDS if all(kept) else Answer.IN_PART if any(kept) else Answer.FAILS
