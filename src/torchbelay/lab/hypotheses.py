"""The hypotheses of the study on the sign of the spring: what each needs, and how all are judged together.

`claims/study.md` states the rules. They were committed before the first run of the study.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .answer import Answer
from .part import Plate, Table
from .statistics import holm

LEVEL = 0.05
GPA = "θ < 0 is Generalized Primal Averaging, and schedule-free its case c = 1/t."
FAMILY = ("H1", "H2 θ = −0.25", "H2 θ = −0.5", "H3", "H4 β1", "H4 c", "H5")  # the tests that Holm's rule is over


@dataclass(frozen=True)
class Hypothesis:
    """A hypothesis, what was measured, and the answer."""

    id: str  # one of FAMILY
    claim: str
    numbers: str  # what was measured, in words
    seeds: int = 0  # that have all runs which the hypothesis needs
    p: float = 1.0  # how likely such numbers are if the hypothesis is wrong
    against: float = 1.0  # how likely they are if its opposite is wrong
    least: int = 3  # seeds; with fewer it is not judged
    whole: bool = True  # False: if it is shown, then only in part
    absent: bool = False  # what the hypothesis explains did not occur
    answer: Answer = Answer.OPEN

    @property
    def judged(self) -> bool:
        """Whether it has enough seeds."""
        return self.seeds >= self.least


def judge(found: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Return the hypotheses with their answers, by Holm's rule over the whole family.

    A test without enough seeds counts with p = 1, and so does one that is not in `found`: an answer that is given
    stays when the others come.

    >>> one = Hypothesis("H3", "", "", seeds=5, p=0.001)
    >>> [h.answer.value for h in judge([one, replace(one, id="H5", p=0.02), replace(one, id="H1", seeds=2)])]
    ['holds', 'undecided', 'undecided']
    """
    shown, refuted = (
        holm([getattr(h, side) if h.judged else 1.0 for h in found], LEVEL, tests=len(FAMILY))
        for side in ("p", "against")
    )
    return [replace(h, answer=_answer(h, *both)) for h, *both in zip(found, shown, refuted, strict=True)]


def _answer(hypothesis: Hypothesis, shown: bool, refuted: bool) -> Answer:
    if not hypothesis.seeds:
        return Answer.OPEN
    if not hypothesis.judged:
        return Answer.UNDECIDED
    if hypothesis.absent:
        return Answer.NOT_REPRODUCED
    if shown:
        return Answer.HOLDS if hypothesis.whole else Answer.IN_PART
    return Answer.FAILS if refuted else Answer.UNDECIDED


def hypotheses_plate(name: str, title: str, judged: Sequence[Hypothesis]) -> Plate:
    """Return a table of hypotheses with their answers."""
    rows = tuple((h.id, h.claim, h.numbers, f"{h.seeds}", f"{h.p:.2g}", str(h.answer)) for h in judged)
    answers = "; ".join(f"{h.id} {h.answer}" for h in judged)
    caption = f"The hypotheses, which were written down before the first run. {answers[0].upper()}{answers[1:]}."
    notes = (
        "p: how likely such numbers are if the hypothesis is wrong, by a one-sided test over seeds. Holm's rule at "
        f"{LEVEL:.0%} over the {len(FAMILY)} tests of the study; those that are not in this table count with p = 1, so "
        "that no answer here depends on them.",
        "A hypothesis does not hold if its opposite is shown by the same rule. Rules, margins and seeds are in "
        "`claims/study.md`.",
        GPA,
    )
    table = Table(("", "Hypothesis", "Measured", "Seeds", "p", "Answer"), rows, prose=("Hypothesis", "Measured"))
    return Plate(name, title, caption, table, notes)
