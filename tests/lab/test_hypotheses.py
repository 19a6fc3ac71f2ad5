"""Every answer that a hypothesis can have, and Holm's rule over the whole family."""

from dataclasses import replace
from itertools import product

import pytest

from torchbelay.lab.answer import Answer
from torchbelay.lab.hypotheses import FAMILY, Hypothesis, hypotheses_plate, judge
from torchbelay.lab.part import Table
from torchbelay.lab.statistics import holm, one_sided

ONE = Hypothesis("H3", "a claim", "numbers", seeds=5)


@pytest.mark.parametrize(
    ("hypothesis", "expected"),
    [
        (replace(ONE, seeds=0), Answer.OPEN),
        (replace(ONE, seeds=2, p=0.0), Answer.UNDECIDED),
        (replace(ONE, seeds=4, least=5, p=0.0), Answer.UNDECIDED),
        (replace(ONE, p=0.007), Answer.HOLDS),  # 0.05/7 = 0.00714
        (replace(ONE, p=0.008), Answer.UNDECIDED),
        (replace(ONE, p=0.007, whole=False), Answer.IN_PART),
        (replace(ONE, p=1.0, against=0.007), Answer.FAILS),
        (replace(ONE, p=1.0, against=0.008), Answer.UNDECIDED),
        (replace(ONE, absent=True), Answer.NOT_REPRODUCED),
    ],
)
def test_every_answer_has_its_rule(hypothesis: Hypothesis, expected: Answer) -> None:
    (found,) = judge([hypothesis])
    assert found.answer is expected
    assert replace(found, answer=Answer.OPEN) == hypothesis


def test_a_test_with_too_few_seeds_does_not_help_the_others() -> None:
    strong, weak = replace(ONE, p=0.0), replace(ONE, id="H5", p=0.008)  # 0.05/6 = 0.00833
    assert [h.answer for h in judge([strong, weak])] == [Answer.HOLDS, Answer.HOLDS]
    assert [h.answer for h in judge([replace(strong, seeds=2), weak])] == [Answer.UNDECIDED, Answer.UNDECIDED]


def test_an_answer_stays_when_the_others_come() -> None:
    """Whatever the p of tests that are added later, what held before holds."""
    values = (0.0, 0.004, 0.0084, 0.011, 0.04, 0.6)
    for first, second, third in product(values, repeat=3):
        early = holm([first, second], 0.05, tests=3)
        late = holm([first, second, third], 0.05)
        assert all(then or not now for now, then in zip(early, late, strict=False))


def test_holm_stops_at_the_first_that_fails() -> None:
    assert holm([0.001, 0.03, 0.02, 0.5], 0.05) == [True, False, False, False]
    assert holm([0.001, 0.02, 0.016, 0.5], 0.05) == [True, True, True, False]
    assert holm([], 0.05) == []


def test_one_sided_tests_know_their_direction() -> None:
    assert one_sided([1.0, 1.1, 0.9]) < 0.01 < 0.99 < one_sided([-1.0, -1.1, -0.9])
    assert one_sided([1.0]) == 1.0
    assert one_sided([0.0, 0.0]) == 1.0
    assert one_sided([0.5, 0.5]) == 0.0


def test_the_family_has_every_test_once() -> None:
    assert len({*FAMILY}) == len(FAMILY) == 7


def test_the_table_has_every_answer() -> None:
    plate = hypotheses_plate("name", "title", judge([replace(ONE, p=0.0), replace(ONE, id="H5", seeds=0)]))
    assert isinstance(plate.figure, Table)
    assert [row[-1] for row in plate.figure.rows] == ["holds", "not run"]
    assert plate.caption.endswith("H3 holds; H5 not run.")
