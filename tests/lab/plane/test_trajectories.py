"""Recorded paths: their steps, digits and fields; and what theory predicts for two starts."""

import json
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchbelay.lab.arms import ADAM, BELAY_SGD, EMA_SGD, PAPER_ARMS, SGD, SLOW_SGD, Arm, Lane
from torchbelay.lab.part import Record
from torchbelay.lab.plane import race, trajectories
from torchbelay.lab.plane.functions import BOWL, ROSENBROCK

# Which steps, which digits ------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6))
def test_the_first_and_the_last_steps_are_recorded_and_between_them_ever_fewer(steps: int) -> None:
    chosen = trajectories.recorded_steps(steps)
    dense = min(steps, 80)
    assert chosen[: dense + 1] == list(range(dense + 1))
    assert chosen[-1] == steps
    for before, after in pairwise(chosen):
        assert before < after <= 1.0175 * before + 2  # both are rounded
    assert len(chosen) <= 82 + 40 * math.log2(max(steps, 80) / 80)


def test_a_path_is_recorded_with_nine_digits() -> None:
    record = trace(Lane(SGD, 0.1), start=(1 / 3, 2e-17 / 3))
    assert record["w1"][0] == [0.333333333, 6.66666667e-18]


# Records of a path --------------------------------------------------------------------------------------------------


def trace(lane: Lane, start: tuple[float, float] = (1.0, 10.0), steps: int = 100, function=BOWL) -> Record:
    (record,) = trajectories.trace(function, [start], [lane], steps, lambda units: None)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    return record


def test_a_path_is_recorded_from_its_start_with_all_options() -> None:
    record = trace(Lane(BELAY_SGD, 0.5))
    assert record["w1"][0] == record["w2"][0] == record["start"] == [1.0, 10.0]
    assert {key: record[key] for key in ("kind", "function", "arm", "inner", "lr", "inner_lr", "steps")} == {
        "kind": "path",
        "function": "bowl",
        "arm": "BELAY+SGD",
        "inner": "SGD",
        "lr": 0.5,
        "inner_lr": 0.5,
        "steps": 100,
    }
    assert record["method"] == repr(BELAY_SGD.method)
    assert record["effective_lr"] == pytest.approx(0.5 * 0.95 / 3, rel=1e-15)
    assert record["at"] == trajectories.recorded_steps(100)
    assert len(record["w1"]) == len(record["w2"]) == len(record["at"])


def test_a_control_runs_at_its_share_of_the_rate() -> None:
    record = trace(Lane(SLOW_SGD, 0.5))
    assert record["inner_lr"] == record["effective_lr"] == pytest.approx(0.5 * 0.95 / 3, rel=1e-15)
    assert record["w1"][1][0] == pytest.approx(1 - 0.4 * 0.5 * 0.95 / 3, rel=1e-9)


def test_the_points_are_those_after_as_many_steps() -> None:
    record = trace(Lane(SGD, 0.5))
    assert record["method"] is None
    assert record["w2"] is None
    for step, (x, y) in zip(record["at"], record["w1"], strict=True):
        assert x == pytest.approx(0.8**step, rel=1e-8)  # nine digits are recorded
        assert y == pytest.approx(10 * 0.998**step, rel=1e-8)


def test_the_record_of_a_run_that_arrives_has_the_step() -> None:
    record = trace(Lane(SGD, 0.5), start=(1.0, 0.0))
    inside = next(step for step in range(100) if 0.8 ** (2 * step) <= 0.01)
    assert (record["arrived_at"], record["diverged_at"]) == (inside, None)
    assert record["goal"] == pytest.approx(0.01 * 0.2, rel=1e-9)


def test_the_record_of_a_run_that_does_neither_has_no_step() -> None:
    record = trace(Lane(SGD, 1e-4))
    assert (record["arrived_at"], record["diverged_at"]) == (None, None)


@pytest.mark.parametrize("arm", [SGD, EMA_SGD], ids=lambda arm: arm.name)
def test_a_run_that_diverges_is_recorded_until_then(arm: Arm) -> None:
    record = trace(Lane(arm, 10.0), start=(1.0, 0.0))  # x grows by −3 per step
    out = next(step for step in range(100) if 3**step >= 1e6)
    assert (record["arrived_at"], record["diverged_at"]) == (None, out)
    assert record["at"] == list(range(out))
    assert [w[0] for w in record["w1"]] == pytest.approx([(-3.0) ** step for step in range(out)], rel=1e-8)


def test_runs_from_several_starts_share_the_goal_of_the_lowest() -> None:
    records = trajectories.trace(
        BOWL, [(1.0, 0.0), (2.0, 0.0)], [Lane(SGD, 0.1), Lane(ADAM, 0.1)], 5, lambda units: None
    )
    assert [(r["start"], r["arm"]) for r in records] == [
        ([1.0, 0.0], "SGD"),
        ([1.0, 0.0], "Adam"),
        ([2.0, 0.0], "SGD"),
        ([2.0, 0.0], "Adam"),
    ]
    assert {r["goal"] for r in records} == {0.002}


@pytest.mark.parametrize("which", ["w1", "w2"])
def test_losses_along_a_path_are_those_of_its_points(which: str) -> None:
    record = trace(Lane(EMA_SGD, 1e-3), start=(-0.2, 0.3), function=ROSENBROCK)
    expected = [x**2 + 100 * (x - y**2) ** 2 for x, y in record[which]]
    assert trajectories.losses(record, which) == pytest.approx(expected, rel=1e-12)


# What theory predicts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [(0.05, 0.05), (-0.2, 0.3)])
def test_in_the_gap_between_the_limits_sgd_and_ema_overflow_and_belay_converges(start: tuple[float, float]) -> None:
    lanes = [Lane(arm, 0.01) for arm in (SGD, EMA_SGD, BELAY_SGD)]
    sgd, ema, belay = trajectories.trace(ROSENBROCK, [start], lanes, 3000, lambda units: None)
    assert sgd["diverged_at"] is not None
    assert ema["diverged_at"] == sgd["diverged_at"]
    assert ema["w1"] == sgd["w1"]  # an average that only watches cannot prevent it
    assert belay["diverged_at"] is None
    assert belay["arrived_at"] < 2700
    assert trajectories.losses(belay, "w2")[-1] < 1e-3 * trajectories.losses(belay, "w2")[0]


def test_what_overflows_is_not_a_number_in_the_end() -> None:
    seen = {}
    start = torch.tensor([[[0.05, 0.05]]], dtype=torch.float64)
    lanes = [Lane(arm, 0.01) for arm in PAPER_ARMS]
    race.run(
        [ROSENBROCK],
        start,
        lanes,
        steps=3000,
        tolerances=[1e-3],
        observed=(),
        watch=lambda step, w1, w2: seen.update({step: w1.isfinite().flatten(1).all(1).tolist()}),
    )
    finite = dict(zip((arm.name for arm in PAPER_ARMS), seen[3000], strict=True))
    assert [name for name, fine in finite.items() if not fine] == ["EMA+SGD", "SGD"]
