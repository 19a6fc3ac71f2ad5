"""H1: every answer that losses cold and warmed up can give."""

import pytest

from helpers import study_records
from helpers.captions import check_brevity
from torchbelay.lab.answer import Answer
from torchbelay.lab.hypotheses import judge
from torchbelay.lab.part import Record, Table
from torchbelay.lab.registry import PARTS
from torchbelay.lab.score import run, warm_up

WORKS, LOST = 0.17, None


@pytest.mark.parametrize(
    ("cold", "warm", "expected"),
    [
        ([LOST] * 8, [WORKS] * 8, Answer.HOLDS),  # 2⁻⁸ is below 0.05/7
        ([LOST] * 7 + [WORKS], [WORKS] * 8, Answer.UNDECIDED),  # 2⁻⁷ is not
        ([LOST] * 12, [WORKS] * 11 + [LOST], Answer.IN_PART),
        ([LOST] * 8, [LOST] * 8, Answer.FAILS),
        ([WORKS] * 8, [LOST] * 8, Answer.FAILS),
        ([LOST] * 8, [LOST] * 4 + [WORKS] * 4, Answer.UNDECIDED),
        ([WORKS] * 8, [WORKS] * 8, Answer.NOT_REPRODUCED),
        ([LOST] * 4, [WORKS] * 4, Answer.UNDECIDED),  # too few seeds
        ([0.86] * 8, [WORKS] * 8, Answer.HOLDS),  # a loss above the bar is lost, too
    ],
)
def test_every_answer_has_its_losses(cold: list[float | None], warm: list[float | None], expected: Answer) -> None:
    (found,) = judge(warm_up.hypotheses(study_records.warmup(cold, warm)))
    assert (found.id, found.answer) == ("H1", expected)


def test_a_run_that_warm_up_loses_counts_against_it() -> None:
    (found,) = warm_up.hypotheses(
        study_records.warmup([LOST, LOST, LOST, WORKS, WORKS], [WORKS, WORKS, LOST, LOST, 0.2])
    )
    assert found.p == pytest.approx(11 / 16)  # two heads or more in four throws of a fair coin
    assert found.against == pytest.approx(11 / 16)
    assert not found.whole


def test_only_seeds_with_both_runs_count() -> None:
    records = study_records.warmup([LOST] * 8, [WORKS] * 6)
    (found,) = warm_up.hypotheses(records)
    assert found.seeds == 6
    assert found.p == 2**-6


@pytest.mark.parametrize("records", [[], study_records.warmup([LOST] * 8, [])])
def test_without_both_starts_it_is_not_run(records: list[Record]) -> None:
    (found,) = judge(warm_up.hypotheses(records))
    assert found.answer is Answer.OPEN


def test_the_tables_say_what_is_lost() -> None:
    records = study_records.warmup([LOST] * 6 + [0.17] * 2, [0.16] * 8)
    records += study_records.warmup([0.18] * 4, [0.15] * 4, other=0.144, lr=0.001)
    table, judged = warm_up.draw(records)
    assert isinstance(table.figure, Table)
    rows = {row[0]: row[1:] for row in table.figure.rows}
    assert list(rows) == ["cold, 0.001", "cold, 0.012", "200 steps of warm-up, 0.001", "200 steps of warm-up, 0.012"]
    assert rows["cold, 0.012"][:3] == ("8", "0.1700, 6 of 8 lost", "0.1650")
    assert rows["cold, 0.001"] == ("4", "0.1800", "0.1440", "0.800 (0.800 to 0.800)")
    assert (
        "EMA loses 6 of 8 cold and 0 of 8 warmed up; θ = −0.5 loses 0 of 8 cold and 0 of 8 warmed up" in table.caption
    )
    check_brevity(table)
    assert judged.name == "warmup-hypotheses"


def test_it_is_a_part_and_without_runs_it_draws_nothing() -> None:
    assert PARTS["warmup"] is warm_up
    found = run.read_committed("warmup", "There is no GPU here.")
    assert len(warm_up.draw(found)) == 2
    assert warm_up.draw([line for line in found if line["kind"] != "run"]) == []
