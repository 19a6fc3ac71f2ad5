"""H4: every answer that penalties can give, and the prediction that was committed before the runs."""

import math

import pytest

from helpers import study_records
from helpers.captions import check_brevity
from torchbelay.lab.answer import Answer
from torchbelay.lab.hypotheses import judge
from torchbelay.lab.part import Table
from torchbelay.lab.registry import PARTS
from torchbelay.lab.score import penalty, run
from torchbelay.lab.score.penalty import ELSEWHERE, agrees, share_interval
from torchbelay.lab.score.prediction import REFERENCE, Cell, Share

SPREAD = (1.0, 1.001, 0.999, 1.0005)


def ratios(**cells: float | None) -> dict[Cell, list[float | None]]:
    """The ratios of four seeds, which differ a little, around a mean for each cell."""
    means = {"reference": 1.04, "rate": 1.002, "beta": 1.01, "both": 1.002} | cells
    places = {"reference": REFERENCE, "rate": (0.9, 0.005), "beta": (0.0, 0.0895), "both": (0.0, 0.005)}
    return {
        places[name]: [None if mean is None else mean * SPREAD[(i + len(name)) % 4] for i in range(4)]
        for name, mean in means.items()
    }


def answers(**cells: float | None) -> dict[str, Answer]:
    return {h.id: h.answer for h in judge(penalty.hypotheses(study_records.penalty(ratios(**cells))))}


def test_a_penalty_that_shrinks_is_shown() -> None:
    assert answers() == {"H4 β1": Answer.HOLDS, "H4 c": Answer.HOLDS}


def test_a_penalty_that_grows_refutes_it_and_one_that_stays_decides_nothing() -> None:
    assert answers(beta=1.08, rate=1.04) == {"H4 β1": Answer.FAILS, "H4 c": Answer.UNDECIDED}


def test_without_a_penalty_nothing_can_shrink() -> None:
    assert set(answers(reference=0.98).values()) == {Answer.NOT_REPRODUCED}


def test_lost_runs_are_the_worst_and_tests_are_then_by_signs() -> None:
    found = {h.id: h for h in penalty.hypotheses(study_records.penalty(ratios(beta=None)))}
    assert found["H4 β1"].p == 1.0
    assert found["H4 β1"].against == 2**-4
    found = {h.id: h for h in penalty.hypotheses(study_records.penalty(ratios(reference=None)))}
    assert {h.p for h in found.values()} == {2**-4}
    assert all("no share" in h.numbers for h in found.values())
    found = {h.id: h for h in penalty.hypotheses(study_records.penalty(ratios(reference=None, rate=None)))}
    assert found["H4 c"].p == 1.0  # both are lost: no difference


def test_the_penalty_is_of_the_averages_of_the_same_rate() -> None:
    """The EMA of the second rate is a spectator, whose loss differs from that of the first."""
    losses = penalty.losses_by_cell(study_records.penalty(ratios()))
    for cell, expected in ratios().items():
        found = penalty.penalties(losses[cell])
        assert list(found) == [10, 11, 12, 13]
        assert list(found.values()) == pytest.approx([math.log(x) for x in expected if x is not None])


def test_seeds_without_all_their_runs_do_not_count() -> None:
    records = study_records.penalty(ratios())
    partly = [r for r in records if (r["seed"], r["beta1"], r["theta"]) != (13, 0.0, -0.5)]
    assert {h.id: h.seeds for h in penalty.hypotheses(partly)} == {"H4 β1": 3, "H4 c": 4}
    few = [r for r in records if r["seed"] < 12]
    assert {h.answer for h in judge(penalty.hypotheses(few))} == {Answer.UNDECIDED}
    assert {h.answer for h in judge(penalty.hypotheses([]))} == {Answer.OPEN}


def test_the_share_that_is_left_has_an_interval_over_seeds() -> None:
    here, there = {1: 0.04, 2: 0.05, 3: 0.04}, {1: 0.01, 2: 0.01, 3: 0.012, 4: 1.0}
    found = share_interval(here, there)
    assert found is not None
    mean = (0.25 + 0.2 + 0.3) / 3
    reach = 4.302653 * math.sqrt(sum((x - mean) ** 2 for x in (0.25, 0.2, 0.3)) / 2 / 3)
    assert found == pytest.approx((mean, mean - reach, mean + reach))
    assert share_interval({1: 0.04, 2: -0.01}, there) is None
    assert share_interval({1: 0.04}, there) is None


def test_a_share_agrees_if_its_interval_meets_the_bracket() -> None:
    expected = Share(0.0, 0.0895, 0.26, 0.19, 0.66)
    assert agrees((0.3, 0.2, 0.4), expected)
    assert agrees((0.1, 0.0, 0.2), expected)
    assert not agrees((0.1, 0.05, 0.15), expected)
    assert not agrees((0.9, 0.8, 1.0), expected)


def test_the_table_has_measured_and_predicted_shares() -> None:
    table, judged = penalty.draw(study_records.penalty(ratios()))
    assert isinstance(table.figure, Table)
    rows = {row[0]: row[1:] for row in table.figure.rows}
    assert rows["β1 = 0.9, c = 0.0895"][:3] == ("4", "0.2000", "0.2080")
    assert rows["β1 = 0.9, c = 0.0895"][3].startswith("1.040 (")
    assert rows["β1 = 0.9, c = 0.005"][1] == "0.4000"
    assert rows["β1 = 0, c = 0.0895"][5].endswith("; theory 0.26 (0.19 to 0.66), agrees")
    best = {name: float(row[4].split()[0]) for name, row in rows.items()}  # EMA's best is 0.2, in the first row
    assert best == {name: pytest.approx(float(row[2]) / 0.2, rel=3e-3) for name, row in rows.items()}
    assert best["β1 = 0.9, c = 0.005"] > 1.9 > float(rows["β1 = 0.9, c = 0.005"][3].split()[0])
    check_brevity(table)
    assert isinstance(judged.figure, Table)
    assert [row[0] for row in judged.figure.rows] == [*ELSEWHERE]


def test_the_table_counts_the_seeds_of_each_cell_and_those_that_are_lost() -> None:
    records = study_records.penalty(ratios(beta=None))
    partly = [r for r in records if (r["seed"], r["theta"], r["beta1"], r["rate"]) != (13, -0.5, 0.9, 0.005)]
    table = penalty.draw(partly)[0]
    assert isinstance(table.figure, Table)
    rows = {row[0]: row[1:] for row in table.figure.rows}
    assert {name: row[0] for name, row in rows.items()} == {
        "β1 = 0.9, c = 0.0895": "4",
        "β1 = 0.9, c = 0.005": "3",
        "β1 = 0, c = 0.0895": "4",
        "β1 = 0, c = 0.005": "4",
    }
    assert rows["β1 = 0, c = 0.0895"][1:4] == ("0.2000", "4 of 4 lost", "–")
    assert any("is a mean of ratios" in note for note in table.notes)


def test_an_ema_that_loses_a_seed_is_not_the_best() -> None:
    cells = {(0.9, 0.0895): {1: (1.0, 0.5), 2: (1.0, None)}, (0.9, 0.005): {1: (1.2, 0.8), 2: (1.2, 0.8)}}
    found = penalty.compare_with_best(cells, (0.9, 0.0895))
    assert found is not None
    assert found.point == pytest.approx(1.0 / 0.8)
    assert penalty.compare_with_best({(0.9, 0.0895): {1: (1.0, None)}}, (0.9, 0.0895)) is None


def test_it_is_a_part_and_without_runs_it_draws_nothing() -> None:
    assert PARTS["penalty"] is penalty
    found = run.read_committed("penalty", "There is no GPU here.")
    assert len(penalty.draw(found)) == 2
    assert penalty.draw([line for line in found if line["kind"] != "run"]) == []


def test_both_plates_say_what_theta_below_zero_is() -> None:
    plates = penalty.draw(study_records.penalty(ratios()))
    told = "θ < 0 is Generalized Primal Averaging, and schedule-free its case c = 1/t."
    assert [told in plate.notes for plate in plates] == [True, True]
