"""study.md states what the code does, with the code's own numbers; and all hypotheses are judged as one family."""

import re

import pytest

from helpers import study_records
from torchbelay.lab.answer import Answer
from torchbelay.lab.claims.study import judge_study, read_study
from torchbelay.lab.gpt import analysis, study
from torchbelay.lab.gpt.arms import ARMS
from torchbelay.lab.gpt.training import BETA2, CLIP
from torchbelay.lab.hypotheses import FAMILY, LEVEL
from torchbelay.lab.score import penalty, prediction, studies, warm_up
from torchbelay.lab.score.analysis import FAILED
from torchbelay.lab.score.formats import DATASETS

PAGE = read_study()
TEXT = " ".join(PAGE.split())
FULL = study.FULL
COLD = next(studies.warmup())
PART = DATASETS["cifar10-part"]


def test_it_has_every_test_of_the_family_with_its_least_number_of_seeds() -> None:
    rows = re.findall(r"^\| (H\d.*?) \| (\w+) \| .* \| (\d+) \|$", PAGE, re.M)
    found = {each.id: each.least for each in judge_study({})}
    assert [name for name, _, _ in rows] == [*FAMILY] == [*found]
    assert {name: int(least) for name, _, least in rows} == found


@pytest.mark.parametrize(
    "sentence",
    [
        f"Holm's rule at {LEVEL:.0%} over all {len(FAMILY)} tests",
        f"{studies.CONTROLLED_WARM_UPS[1]} steps of warm-up remove EMA's losses on MNIST at {studies.LOSING_RATE:g}",
        f"the range of rates within {analysis.NEAR - 1:.0%} of the best",
        f"not worse than EMA at its own, by a margin of {analysis.MARGIN - 1:.0%}",
        f"at most {analysis.NEAR:g} times the arm's own best loss",
        f"Lost means above {FAILED:g} on images",
        f"batch ({COLD.batch}) and averaging rate (c = 1/{1 / studies.AVERAGING:g}) of the part sign, "
        f"{COLD.steps:,} steps",
        "Seeds 10 to 13 at four rates: 0.001, 0.004, 0.012 and 0.036. Seeds 14 to 25 at 0.012 alone",
        f"{sum(len(each.lanes) for each in studies.warmup())} networks",
        "β1 = 0.9 and 0, c = 0.0895 and 0.005",
        f"The first {PART.train:,} training images and the first {PART.test:,} test images",
        f"{len(next(studies.penalty()).lanes)} networks per seed. Seeds 10 to 13.",
        f"{FULL.shape.layers} layers of {FULL.shape.width}, context {FULL.shape.context}, batch {FULL.batch}, "
        f"{FULL.steps:,} steps, {FULL.warmup} of them warm-up, AdamW (β2 {BETA2:g}, weight decay 0.1, gradients "
        f"clipped at {CLIP:g})",
        "Rates 0.0003, 0.00058, 0.0011, 0.0021, 0.0041 and 0.008. Averages have c = 0.01.",
        f"at most {study.count(FULL)} runs",
        f"x = lr·h is spread evenly over its logarithm from {prediction.BOTTOM:g} to {prediction.PRIMARY:g}",
        f"for tops of x from {min(prediction.TOPS):g} to {max(prediction.TOPS):g}",
    ],
)
def test_its_numbers_are_those_of_the_code(sentence: str) -> None:
    assert sentence in TEXT


def test_its_seeds_and_rates_are_those_of_the_code() -> None:
    whole, more = [each for each in studies.warmup() if len(each.lanes) > 4], [*studies.warmup()][4:]
    assert [each.seed for each in whole] == [each.seed for each in studies.penalty()] == [10, 11, 12, 13]
    assert [each.seed for each in more] == [*range(14, 26)]
    assert {lane.lr for lane in COLD.lanes} == {0.001, 0.004, 0.012, 0.036}
    assert {lane.lr for each in more for lane in each.lanes} == {0.012}
    assert FULL.lrs == (3e-4, 5.8e-4, 1.1e-3, 2.1e-3, 4.1e-3, 8e-3)
    assert (FULL.tuned_on, FULL.judged_on, FULL.rate) == (2, 5, 0.01)
    assert len(ARMS) == 7


def test_its_prediction_is_the_committed_one() -> None:
    for each in prediction.committed():
        if (each.beta1, each.rate) != prediction.REFERENCE:
            assert f"{each.share:.2g} ({each.low:.2g} to {each.high:.2g})" in TEXT


def test_parts_that_were_run_are_judged_while_the_others_are_not() -> None:
    lost, works = [None] * 8, [0.17] * 8
    found = {each.id: each.answer for each in judge_study({"warmup": study_records.warmup(lost, works)})}
    assert found.pop("H1") is Answer.HOLDS
    assert set(found.values()) == {Answer.OPEN}


def test_evidence_from_one_part_leaves_more_room_for_another() -> None:
    """Holm's rule is over the whole family: seven losses of eight are enough once other tests are passed."""
    warmed = study_records.warmup([None] * 7 + [0.17], [0.17] * 8)
    cells = {(0.9, 0.0895): 1.04, (0.9, 0.005): 1.0, (0.0, 0.0895): 1.01, (0.0, 0.005): 1.0}
    ratios = {cell: [mean, mean * 1.001, mean * 0.999] for cell, mean in cells.items()}
    ratios[0.9, 0.005][0] *= 1.002
    ratios[0.0, 0.0895][1] *= 1.001
    alone = {each.id: each for each in judge_study({"warmup": warmed})}
    both = {each.id: each for each in judge_study({"warmup": warmed, "penalty": study_records.penalty(ratios)})}
    assert alone["H1"].answer is Answer.UNDECIDED
    assert both["H4 c"].answer is Answer.HOLDS
    assert both["H1"].answer is Answer.HOLDS


def test_the_parts_are_those_that_the_page_names() -> None:
    named = set(re.findall(r"^## S\d, the part (\w+):", PAGE, re.M))
    assert named == {warm_up.NAME, penalty.NAME, study.NAME}
    assert re.search(r"Dated \d{4}-\d{2}-\d{2}, and committed before the first run", TEXT)
