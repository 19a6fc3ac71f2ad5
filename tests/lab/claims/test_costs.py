"""C5 and C16, what BELAY costs, on records of every outcome."""

import pytest

from torchbelay.lab import overhead
from torchbelay.lab.claims.costs import CLAIMS
from torchbelay.lab.claims.verdict import Answer, Finding, judge_claim
from torchbelay.lab.part import Record, Settings

BY_ID = {claim.id: claim for claim in CLAIMS}
HOLDS, IN_PART, FAILS, UNDECIDED = Answer.HOLDS, Answer.IN_PART, Answer.FAILS, Answer.UNDECIDED
SPRING = {"C5": overhead.BELAY, "C16": overhead.VELOCITIES}


def judged(claim: str, records: list[Record]) -> Finding:
    return judge_claim(BY_ID[claim], {"overhead": records}).finding


def costs(
    mlp: float = 1.01, conv: float = 1.01, average: float = 0.0, ema: float = 0.0, arm: str = overhead.BELAY
) -> list[Record]:
    """Times over none (the upper ends of the intervals), bytes for each weight of BELAY's average and of the EMA."""
    records = []
    for network, high in (("MLP", mlp), ("convolutional", conv)):
        for each, own in ((overhead.PLAIN, 0.0), (overhead.EMA, ema), (arm, average)):
            t = {"low": high - 0.02, "ratio": high - 0.01, "high": high}
            records.append(
                {
                    "kind": "cost",
                    "network": network,
                    "arm": each,
                    "weights": 100,
                    "bytes": {"weights": 400, "gradients": 400, "AdamW": 800, "average": 100 * own},
                    "bytes_during_update": 400 if each == arm else 0,
                    "timing_s": {"median": 1.0, "to_plain": t, "to_ema": t},
                }
            )
    return records


@pytest.mark.parametrize("claim", BY_ID)
@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({}, HOLDS),
        ({"average": 0.79, "ema": 0.79}, HOLDS),  # the threshold is 5% of 16 bytes, 0.8
        ({"average": 0.81, "ema": 0.81}, IN_PART),
        ({"average": 4, "ema": 4}, IN_PART),  # the usual average: as much as an EMA, a quarter more than nothing
        ({"mlp": 1.06}, IN_PART),  # from 1.04: open
        ({"mlp": 1.2, "average": 4, "ema": 4}, IN_PART),  # two of four
        ({"mlp": 1.06, "average": 4, "ema": 0}, UNDECIDED),
        ({"mlp": 1.2, "conv": 1.2, "average": 4, "ema": 4}, FAILS),  # the same as EMA in memory, and nothing else
        ({"mlp": 1.2, "conv": 1.2, "average": 4, "ema": 0}, FAILS),
    ],
)
def test_each_outcome(claim: str, given: dict[str, float], answer: Answer) -> None:
    finding = judged(claim, costs(**given, arm=SPRING[claim]))
    assert finding.answer is answer
    assert len(finding.tests) == 4


def test_the_summary_has_the_numbers() -> None:
    finding = judged("C5", costs(mlp=1.21, average=4, ema=4))
    assert "costs +20% (MLP) and +0% (convolutional) time, +25% memory, the same as an EMA." in finding.summary
    assert "+25% beside an EMA" in judged("C5", costs(average=4)).summary


def test_an_arm_that_was_not_run_is_not_judged() -> None:
    assert judged("C16", costs()) == Finding(Answer.OPEN, "the records lack BELAY (velocities)")


def test_the_part_records_what_the_rules_read_and_draws_their_figure() -> None:
    records = overhead.run(Settings(quick=True), lambda n: None)
    assert all(len(judged(claim, records).numbers) == 8 for claim in BY_ID)
    assert {claim.plate for claim in CLAIMS} == {plate.name for plate in overhead.draw(records)}
