"""The words in which a claim or a hypothesis is answered."""

from enum import StrEnum


class Answer(StrEnum):
    """The possible answers."""

    HOLDS = "holds"
    IN_PART = "holds in part"
    FAILS = "does not hold"
    UNDECIDED = "undecided"
    NOT_REPRODUCED = "not reproduced"
    OPEN = "not run"
