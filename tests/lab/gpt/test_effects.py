"""BELAY against EMA on the language model in three ways: computed a second time, from the kept lines alone."""

import math
from statistics import fmean, stdev

import pytest

from helpers import kept_records
from helpers.captions import check_brevity
from torchbelay.lab.gpt.analysis import Runs
from torchbelay.lab.gpt.effects import effect, effects_plate, explain_largest
from torchbelay.lab.part import Record

LINES = kept_records.lines("gpt")
LRS = [0.0003, 0.00058, 0.0011, 0.0021, 0.0041, 0.008]
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
    assert [*found.nominal] == [*found.effective] == LRS
    shared = [(found.nominal[lr], (lr, lr)) for lr in LRS]
    for each, right in (*shared, (found.best, (0.0021, 0.0011))):
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


def test_it_says_that_the_largest_ratio_is_one_of_large_losses() -> None:
    means = {
        (arm, lr): fmean(
            r["losses"]["w2"] for r in LINES if (r.get("arm"), r.get("lr"), r.get("split")) == (arm, lr, "judge")
        )
        for arm, lr in (("θ = +0.25", 0.008), ("θ = +0.25", 0.0021), ("constant", 0.008), ("constant", 0.0011))
    }
    assert means["θ = +0.25", 0.008] > 2 * means["θ = +0.25", 0.0021]
    assert means["constant", 0.008] > 2 * means["constant", 0.0011]
    ratio, low, high = interval(0.008, 0.008)
    most = max(interval(lr, lr)[0] for lr in LRS[:-1])
    assert explain_largest(Runs(LINES)) == (
        f"On the GPT the largest ratio is {ratio:.3f} ({low:.3f} to {high:.3f}) at 0.008, where both losses are more "
        f"than 2 times those at the best rates. At other rates it is at most {most:.3f}."
    )
    assert not explain_largest(Runs([line for line in LINES if line.get("lr") != 0.008]))


def test_a_rate_at_which_a_run_is_lost_is_left_out_and_named() -> None:
    def lose(line: Record) -> Record:
        is_it = (line.get("arm"), line.get("lr"), line.get("seed")) == ("constant", 0.008, 1003)
        return line | {"losses": line["losses"] | {"w2": None}} if is_it else line

    lines = [lose(line) for line in LINES]
    found = effect(Runs(lines))
    assert found is not None
    assert [*found.nominal] == [*found.effective] == LRS[:-1]
    assert [*found.left_out[0]] == [*found.left_out[1]] == [0.008]
    plate = effects_plate(Runs(lines), next(line for line in LINES if line["kind"] == "protocol"))
    assert plate is not None
    assert any("a run of the two arms is lost" in note and "at 0.008" in note for note in plate.notes)


def test_without_belay_there_is_no_effect() -> None:
    assert effect(Runs([line for line in LINES if line.get("arm") != "θ = +0.25"])) is None
