"""Best rates, ranges and hypotheses, on made-up runs whose answers are known."""

import math

import pytest

from torchbelay.lab.gpt import figures
from torchbelay.lab.gpt.analysis import Hypothesis, Runs, holm, hypotheses, one_sided
from torchbelay.lab.gpt.arms import ARMS, BELAY, CONSTANT, HALF, QUARTER
from torchbelay.lab.part import Record, Table

LRS = (0.001, 0.002, 0.004, 0.008)


def make(arm: str, lr: float, seed: int, loss: float | None, split: str = "judge") -> Record:
    losses = {"w1": loss, "w2": loss, **dict.fromkeys(ARMS[arm].spectators, loss)}
    theta = ARMS[arm].theta
    return {"kind": "run", "arm": arm, "theta": theta, "lr": lr, "seed": seed, "split": split, "losses": losses}


def curve(arm: str, losses: list[float | None], seeds: int = 5) -> list[Record]:
    """Runs of an arm at all rates: two seeds for tuning, and some for judging, all a little different."""
    found = []
    for split, first, count in (("tune", 0, 2), ("judge", 1000, seeds)):
        for seed in range(first, first + count):
            for lr, loss in zip(LRS, losses, strict=True):
                noisy = None if loss is None else loss * (1 + 1e-4 * (seed % 7) + 1e-5 * ((seed * len(arm)) % 5))
                found.append(make(arm, lr, seed, noisy, split))
    return found


def study(**special: list[float | None]) -> Runs:
    losses = {
        CONSTANT.name: [1.1, 1.0, 1.1, 1.3],
        QUARTER.name: [1.1, 1.0, 1.01, 1.015],
        HALF.name: [1.1, 1.0, 1.1, 1.3],
        BELAY.name: [1.1, 1.0, 1.1, 1.3],
    }
    losses |= special
    return Runs([record for arm, values in losses.items() for record in curve(arm, values)])


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


def test_the_hypotheses_hold_if_the_numbers_say_so() -> None:
    found = {h.id: h for h in hypotheses(study())}
    assert found[f"H2 {QUARTER.name}"].holds
    assert not found[f"H2 {HALF.name}"].holds  # the same curve as EMA's
    assert found["H3"].holds
    assert found["H5"].holds


def test_a_worse_arm_is_not_shown_to_be_as_good() -> None:
    found = {h.id: h for h in hypotheses(study(**{HALF.name: [1.2, 1.05, 1.2, 1.4]}))}
    assert not found["H3"].holds
    assert found["H3"].p > 0.9


def test_a_better_belay_refutes_its_hypothesis() -> None:
    found = {h.id: h for h in hypotheses(study(**{BELAY.name: [1.0, 0.9, 1.0, 1.2]}))}
    assert not found["H5"].holds


def test_lost_runs_count_as_the_worst() -> None:
    found = {h.id: h for h in hypotheses(study(**{HALF.name: [None, 1.0, None, None]}))}
    assert found["H3"].holds
    found = {h.id: h for h in hypotheses(study(**{HALF.name: [None, None, None, None]}))}
    assert not found["H3"].holds
    assert not found[f"H2 {HALF.name}"].holds


def test_the_width_is_read_off_the_curve() -> None:
    runs = study()
    # from 0.002 up, 1.015 stays below 1.02; below it, the line from 1.0 to 1.1 reaches 1.02 after log 1.02/log 1.1
    expected = math.log(4) + math.log(2) * math.log(1.02) / math.log(1.1)
    assert runs.width(QUARTER.name, 1001) == pytest.approx(expected, rel=1e-3)


def test_holm_stops_at_the_first_that_fails() -> None:
    found = holm([Hypothesis(name, "", p, "") for name, p in (("A", 0.001), ("B", 0.03), ("C", 0.02), ("D", 0.5))])
    assert [h.holds for h in found] == [True, False, False, False]
    found = holm([Hypothesis(name, "", p, "") for name, p in (("A", 0.001), ("B", 0.02), ("C", 0.016), ("D", 0.5))])
    assert [h.holds for h in found] == [True, True, True, False]


def test_one_sided_tests_know_their_direction() -> None:
    assert one_sided([1.0, 1.1, 0.9]) < 0.01 < 0.99 < one_sided([-1.0, -1.1, -0.9])
    assert one_sided([1.0]) == 1.0
    assert one_sided([0.0, 0.0]) == 1.0


def test_the_plates_are_drawn_from_records_alone() -> None:
    about = {
        "kind": "protocol",
        "layers": 1,
        "width": 8,
        "context": 8,
        "batch": 2,
        "steps": 10,
        "warmup": 1,
        "rate": 0.01,
        "bytes": {"train": 1, "tune": 1, "judge": 1},
        "packages": 1,
        "digest": "0" * 64,
        "device_s": 1,
        "date": "2026-01",
        "device": "CPU",
        "torch": "2",
    }
    plates = {plate.name: plate for plate in figures.draw([about, *study().all])}
    assert set(plates) == {"gpt-rates", "gpt-arms", "gpt-hypotheses"}
    table = plates["gpt-hypotheses"].figure
    assert isinstance(table, Table)
    assert [row[-1] for row in table.rows] == ["holds", "not shown", "holds", "holds"]
    assert "wider than EMA's with θ = −0.25" in plates["gpt-rates"].caption
