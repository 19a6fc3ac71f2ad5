"""Best rates, ranges and hypotheses, on made-up runs whose answers are known."""

import math
import re

import pytest

from helpers.language import ABOUT, LRS, make, study
from torchbelay.lab.answer import Answer
from torchbelay.lab.gpt import figures
from torchbelay.lab.gpt.analysis import Runs, judged, width_ratio
from torchbelay.lab.gpt.arms import BELAY, CONSTANT, HALF, QUARTER
from torchbelay.lab.hypotheses import Hypothesis
from torchbelay.lab.part import Table


def test_the_best_rate_is_that_of_the_seeds_for_tuning() -> None:
    runs = Runs(
        [make(CONSTANT.name, lr, 0, loss, "tune") for lr, loss in zip(LRS, (3.0, 2.0, 1.0, None), strict=True)]
        + [make(CONSTANT.name, lr, 1000, loss) for lr, loss in zip(LRS, (0.1, 2.0, 3.0, 0.05), strict=True)]
    )
    assert runs.best_lr(CONSTANT.name) == 0.004


def test_a_rate_that_loses_a_seed_is_never_the_best() -> None:
    runs = Runs(
        [
            *(make(CONSTANT.name, 0.001, seed, 2.0, "tune") for seed in (0, 1)),
            make(CONSTANT.name, 0.002, 0, 0.5, "tune"),
            make(CONSTANT.name, 0.002, 1, None, "tune"),
        ]
    )
    assert runs.best_lr(CONSTANT.name) == 0.001


def test_a_rate_with_fewer_seeds_is_never_the_best() -> None:
    runs = Runs(
        [
            *(make(CONSTANT.name, lr, 0, loss, "tune") for lr, loss in zip(LRS, (3.0, 2.0, 1.9, 1.0), strict=True)),
            *(make(CONSTANT.name, lr, 1, loss, "tune") for lr, loss in zip(LRS[:3], (3.0, 1.8, 2.0), strict=True)),
        ]
    )
    assert runs.best_lr(CONSTANT.name) == 0.002


def answers(runs: Runs) -> dict[str, Answer]:
    return {h.id: h.answer for h in judged(runs)}


def test_the_hypotheses_hold_if_the_numbers_say_so() -> None:
    assert answers(study()) == {
        f"H2 {QUARTER.name}": Answer.HOLDS,
        f"H2 {HALF.name}": Answer.UNDECIDED,  # the same curve as EMA's
        "H3": Answer.HOLDS,
        "H5": Answer.HOLDS,
    }


def test_a_narrower_range_refutes_that_it_is_wider() -> None:
    found = answers(study(**{QUARTER.name: [1.3, 1.0, 1.3, 1.3]}))
    assert found[f"H2 {QUARTER.name}"] is Answer.FAILS


def test_seeds_without_all_their_runs_do_not_count() -> None:
    whole = study()
    without = [r for r in whole.all if (r["arm"], r["lr"], r["seed"]) != (QUARTER.name, 0.008, 1004)]
    runs = Runs(without)
    assert runs.whole_seeds() == [1000, 1001, 1002, 1003]
    assert {h.seeds for h in judged(runs)} == {4}
    late = Runs([r for r in without if r["arm"] != BELAY.name or r["seed"] < 1002])
    assert {h.id: h.seeds for h in judged(late)}["H5"] == 2


def test_too_few_seeds_decide_nothing_and_none_are_not_run() -> None:
    assert set(answers(study(seeds=2)).values()) == {Answer.UNDECIDED}
    assert set(answers(study(seeds=0)).values()) == {Answer.OPEN}
    assert set(answers(Runs([])).values()) == {Answer.OPEN}


def by_id(runs: Runs) -> dict[str, Hypothesis]:
    return {h.id: h for h in judged(runs)}


def test_a_worse_arm_is_not_shown_to_be_as_good() -> None:
    found = by_id(study(**{HALF.name: [1.2, 1.05, 1.2, 1.4]}))
    assert found["H3"].answer is Answer.FAILS
    assert found["H3"].p > 0.9


def test_a_difference_near_the_margin_is_undecided() -> None:
    found = by_id(study(seeds=3, **{HALF.name: [1.2, 1.01, 1.2, 1.4]}))
    assert found["H3"].answer is Answer.UNDECIDED


def test_a_better_belay_refutes_its_hypothesis() -> None:
    assert by_id(study(**{BELAY.name: [1.0, 0.9, 1.0, 1.2]}))["H5"].answer is Answer.FAILS


def test_lost_runs_count_as_the_worst() -> None:
    found = by_id(study(**{HALF.name: [None, 1.0, None, None]}))
    assert found["H3"].answer is Answer.HOLDS
    found = by_id(study(**{HALF.name: [None, None, None, None]}))
    assert found["H3"].p == 1.0
    assert found["H3"].against == 2**-5  # by signs alone
    assert found[f"H2 {HALF.name}"].answer is Answer.FAILS  # a range of one point


def test_the_width_is_read_off_the_curve() -> None:
    runs = study()
    # from 0.002 up, 1.015 stays below 1.02; below it, the line from 1.0 to 1.1 reaches 1.02 after log 1.02/log 1.1
    expected = math.log(4) + math.log(2) * math.log(1.02) / math.log(1.1)
    assert runs.width(QUARTER.name, 1001) == pytest.approx(expected, rel=1e-3)


def test_the_ratio_of_two_ranges_is_that_of_their_ends() -> None:
    found = width_ratio(study(), QUARTER.name)
    assert found is not None
    # around 0.002, EMA's ends after log 1.02/log 1.1 of the way to either neighbour
    share = math.log(2) * math.log(1.02) / math.log(1.1)
    assert found.mean == pytest.approx(math.exp(math.log(4) + share - 2 * share), rel=2e-3)
    assert found.low <= found.mean <= found.high
    assert width_ratio(study(seeds=1), QUARTER.name) is None
    assert "ratio" not in by_id(study(seeds=1))["H2 θ = −0.25"].numbers


def test_the_plates_are_drawn_from_records_alone() -> None:
    plates = {plate.name: plate for plate in figures.draw([ABOUT, *study().all])}
    assert set(plates) == {"gpt-rates", "gpt-arms", "gpt-effects", "gpt-hypotheses"}
    table = plates["gpt-hypotheses"].figure
    assert isinstance(table, Table)
    assert [row[-1] for row in table.rows] == ["holds", "undecided", "holds", "holds"]
    assert "wider than EMA's with θ = −0.25" in plates["gpt-rates"].caption


def test_the_table_of_arms_says_which_loss_is_the_lowest() -> None:
    def caption(**losses: list[float | None]) -> str:
        plates = {plate.name: plate for plate in figures.draw([ABOUT, *study(**losses).all])}
        return plates["gpt-arms"].caption.split("in nats per byte. ")[1]

    lowest = caption(**{HALF.name: [1.2, 0.9, 1.0, 1.1]})
    assert re.fullmatch(
        r"The lowest mean loss of an average, 0\.9\d+, is that of θ = −0\.5; ÷ EMA it is 0\.9\d+ \(.*\)\.", lowest
    )
    assert re.fullmatch(
        r"The lowest mean loss of an average is EMA's, 0\.[4-6]\d+\.", caption(**{CONSTANT.name: [1.2, 0.5, 1.1, 1.2]})
    )


@pytest.mark.parametrize("runs", [5, 20, 33])
def test_a_study_that_was_stopped_can_be_drawn_and_says_so(runs: int) -> None:
    plates = figures.draw([ABOUT | {"complete": False}, *study().all[:runs]])
    assert "Too few seeds" in plates[0].caption
    assert "The study is not complete: some arms lack runs." in plates[0].notes


def test_a_curve_that_leaves_the_figure_is_told_in_words() -> None:
    (curves, *_) = figures.draw([ABOUT, *study(**{HALF.name: [1.2, 1.0, 1.1, None]}).all])
    (told,) = (note for note in curves.notes if note.startswith("At 0.008, the mean losses are: "))
    assert "θ = −0.5 – (5 of 5 lost)" in told
    assert "not complete" not in " ".join(curves.notes)


def test_every_plate_says_what_theta_below_zero_is() -> None:
    plates = [plate for plate in figures.draw([ABOUT, *study().all]) if plate.name != "gpt-effects"]  # it has θ > 0
    assert [any("Generalized Primal Averaging" in note for note in plate.notes) for plate in plates] == [True] * 3
