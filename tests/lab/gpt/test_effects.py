"""BELAY against EMA on the language model in three ways: computed a second time, from the kept lines alone."""

import math
from statistics import fmean, stdev

import pytest

from helpers import kept_records
from helpers.captions import check_brevity
from torchbelay.lab.gpt.analysis import Runs
from torchbelay.lab.gpt.effects import effect, effects_plate

LINES = kept_records.lines("gpt")
T = 2.776445  # Student's 97.5% quantile for five pairs, from tables


def interval(lr: float, emas_lr: float) -> list[float]:
    """BELAY ÷ EMA with its interval."""
    judged = {(r["arm"], r["lr"], r["seed"]): r["losses"]["w2"] for r in LINES if r.get("split") == "judge"}
    seeds = sorted(seed for arm, rate, seed in judged if (arm, rate) == ("θ = +0.25", lr))
    assert len(seeds) == 5
    logs = [math.log(judged["θ = +0.25", lr, seed] / judged["constant", emas_lr, seed]) for seed in seeds]
    reach = T * stdev(logs) / math.sqrt(len(logs))
    return [math.exp(fmean(logs) + side * reach) for side in (0, -1, 1)]


def test_every_ratio_is_that_of_the_runs() -> None:
    found = effect(Runs(LINES))
    assert found is not None
    assert [*found.nominal] == [*found.effective] == [0.0021]
    for each, right in ((found.nominal[0.0021], (0.0021, 0.0021)), (found.best, (0.0021, 0.0011))):
        assert each.ratio is not None
        assert [each.ratio.mean, each.ratio.low, each.ratio.high] == pytest.approx(interval(*right), rel=1e-6)
    assert interval(0.0021, 0.0021) == pytest.approx([1.0081, 1.0056, 1.0107], abs=1e-4)
    assert interval(0.0021, 0.0011) == pytest.approx([1.0053, 1.0015, 1.0091], abs=1e-4)


def test_the_plate_says_that_the_first_two_ways_have_the_same_runs() -> None:
    (about,) = (line for line in LINES if line["kind"] == "protocol")
    plate = effects_plate(Runs(LINES), about)
    assert plate is not None
    check_brevity(plate)
    assert any("the first two ways have the same runs" in note for note in plate.notes)


def test_without_belay_there_is_no_effect() -> None:
    assert effect(Runs([line for line in LINES if line.get("arm") != "θ = +0.25"])) is None
