"""BELAY against EMA in three ways: the seeds behind the ratios, the rates that are left out, what is undecided."""

import pytest

from helpers import kept_records, score_records
from helpers.captions import check_brevity
from helpers.score_records import Factor
from torchbelay.lab.part import Record, Table
from torchbelay.lab.score.analysis import StudyResults, compare
from torchbelay.lab.score.comparison import format_ratio
from torchbelay.lab.score.effects import (
    Effect,
    describe_choice,
    describe_left_out,
    effects,
    effects_plate,
    fid_effect,
    loss_effect,
    spans,
)

NAMES = {"rates": "short runs"}
BASE = {1e-4: 0.06, 1e-3: 0.05, 1e-2: 0.07}


def runs(belay: Factor = 1.1, matched: Factor = 1.0, seeds: int = 3) -> list[Record]:
    return score_records.runs("rates", BASE, {"EMA": 1.0, "matched EMA": matched, "BELAY": belay}, seeds=seeds)


def lose(records: list[Record], arm: str, lr: float, seeds: tuple[int, ...]) -> list[Record]:
    """The same with some runs lost."""
    nothing = {weights: {"train": None, "test": None} for weights in ("w1", "w2")}
    return [r | {"final": nothing} if (r["arm"], r["lr"]) == (arm, lr) and r["seed"] in seeds else r for r in records]


def fid(arm: str, lr: float, seed: int, value: float) -> Record:
    about = {"kind": "fid", "study": "rates", "weights": "w2"}
    return about | {"arm": arm, "lr": lr, "seed": seed, "fid": value}


def loss(records: list[Record]) -> Effect:
    return loss_effect(StudyResults(records, "rates"))


def test_the_seeds_are_counted_with_the_lost_ones() -> None:
    assert loss(runs(seeds=4)).seeds == "4"
    assert loss(lose(runs(seeds=4), "BELAY", 1e-4, (2,))).seeds == "4"


def test_if_the_ways_have_different_seeds_each_is_counted() -> None:
    few = [r for r in runs() if r["arm"] != "matched EMA" or r["seed"] == 0]
    assert loss(few).seeds == "3, 1, 3"
    fewer = [r for r in few if (r["arm"], r["lr"], r["seed"]) != ("EMA", 1e-4, 0)]
    assert loss(fewer).seeds == "2 to 3, 1, 3"
    assert loss([r for r in runs() if r["arm"] != "matched EMA"]).seeds == "3"  # a way that was not run has none


def test_a_rate_at_which_one_run_is_lost_is_left_out_and_named() -> None:
    found = loss(lose(runs(), "BELAY", 1e-2, (1,)))
    assert [*found.nominal] == [*found.effective] == [1e-4, 1e-3]
    assert found.left_out == ([1e-2], [1e-2])
    assert describe_left_out([found], NAMES) == (
        "The first two ways leave out rates at which a run of the two arms is lost: short runs, test loss at 0.01."
    )


def test_a_choice_that_hangs_on_a_lost_seed_is_told() -> None:
    whole = loss(runs())
    assert whole.safest is None
    assert describe_choice([whole], NAMES) == ""
    study = StudyResults(lose(runs(), "BELAY", 1e-3, (1,)), "rates")  # at BELAY's best rate
    found = loss_effect(study)
    assert found.best.unpaired == 1
    assert found.safest == compare(study.valid_losses("BELAY", 1e-4), study.valid_losses("EMA", 1e-3))
    assert found.safest.unpaired == 0
    said = describe_choice([found], NAMES)
    assert said.endswith(f"the third way gives: short runs, test loss {found.safest.describe('BELAY', 'EMA')}.")
    (plate,) = [effects_plate(lose(runs(), "BELAY", 1e-3, (1,)), "mnist", NAMES)]
    assert plate is not None
    assert said in plate.notes


def test_each_way_names_its_own_rates_if_they_differ() -> None:
    found = loss(lose(lose(runs(), "EMA", 1e-2, (0, 1, 2)), "matched EMA", 1e-4, (0,)))
    assert found.left_out == ([1e-2], [1e-4])
    said = describe_left_out([found], NAMES)
    assert said.endswith("test loss at 0.01 (equal nominal rate), 0.0001 (equal effective rate).")


def test_without_lost_runs_nothing_is_left_out() -> None:
    assert describe_left_out([loss(runs())], NAMES) == "No rate is left out because of lost runs."


def test_rates_with_lost_runs_that_stay_are_not_said_to_be_left_out() -> None:
    """Every rate loses a run: those stay at which both arms keep more than half."""
    records = runs()
    for lr, seeds in ((1e-4, (0,)), (1e-3, (1,)), (1e-2, (0, 1))):
        records = lose(records, "BELAY", lr, seeds)
    found = loss(records)
    assert [*found.nominal] == [1e-4, 1e-3]
    assert found.left_out == ([1e-2], [1e-2])
    assert "A rate stays if none would be left without it" in describe_left_out([found], NAMES)
    assert "BELAY lost in 1 of 3 seeds" in found.cells[0]


def test_fids_are_left_out_if_every_pair_has_a_lost_run_and_not_if_there_are_none() -> None:
    records = lose(runs(), "BELAY", 1e-2, (0, 1, 2))
    records += [
        fid(arm, lr, seed, value + seed)
        for arm, value in (("EMA", 10.0), ("BELAY", 12.0))
        for lr in (1e-3, 1e-2)
        for seed in (0, 1)
    ]
    found = fid_effect(records, StudyResults(records, "rates"))
    assert [*found.nominal] == [1e-3]
    assert found.left_out == ([1e-2], [])
    assert found.seeds == "2"
    assert describe_left_out([found], NAMES).endswith("short runs, FID at 0.01 (equal nominal rate).")


def test_the_table_has_the_seeds_and_its_notes_the_rates_that_are_left_out() -> None:
    plate = effects_plate(lose(runs(seeds=5), "BELAY", 1e-2, (1,)), "mnist", NAMES)
    assert plate is not None
    assert isinstance(plate.figure, Table)
    assert plate.figure.columns[1] == "Seeds"
    assert [row[1] for row in plate.figure.rows] == ["5"]
    assert plate.notes[-1].endswith("short runs, test loss at 0.01.")
    check_brevity(plate)


def test_an_end_of_a_span_that_is_undecided_is_marked() -> None:
    """BELAY is 1.3 times EMA at one rate, and at another a lone pair of seeds disagrees about it."""
    shown, doubtful = (compare({0: one, 1: other}, {0: 1.0, 1: 1.0}) for one, other in ((1.3, 1.3), (0.8, 1.25)))
    assert doubtful.reading == "open"
    nothing = compare({}, {})
    both = Effect("rates", "test loss", "EMA", {1e-4: doubtful, 1e-3: shown}, {1e-3: shown}, doubtful, ((), ()))
    assert spans([both]) == ["1.0000 (undecided) to 1.30", "1.30", "1.0000 (undecided)"]
    assert spans([Effect("rates", "FID", "EMA", {}, {}, nothing, ((), ()))]) == ["not run"] * 3


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (0.99987, "0.9999"),
        (1.00014, "1.0001"),
        (0.9994, "0.999"),
        (1.0006, "1.001"),
        (0.9, "0.900"),
        (1.1, "1.10"),
        (1.25, "1.25"),
    ],
)
def test_a_ratio_shows_on_which_side_of_one_it_lies(ratio: float, text: str) -> None:
    assert format_ratio(ratio) == text


def test_the_rates_that_the_kept_records_leave_out_are_those_with_lost_runs() -> None:
    lines = kept_records.lines("mnist")
    names = {"rates": "short runs", "table1": "long runs"}
    for each in effects(lines, [*names]):
        if each.quantity == "test loss":
            for rival, rates in zip((each.rival, "matched EMA"), each.left_out, strict=True):
                lost = {
                    r["lr"]
                    for r in lines
                    if r["kind"] == "run"
                    and (r["study"], r["arm"]) in ((each.study, "BELAY"), (each.study, rival))
                    and ((end := r["final"]["w2"]["test"]) is None or end > 0.5)
                }
                assert {*rates} == lost
