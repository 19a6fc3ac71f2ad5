"""C15's rule, EMA's sensitivity to its decay, on records made for each outcome."""

import pytest

from torchbelay.lab.claims.sensitivity import SETTINGS, judge_decay
from torchbelay.lab.claims.verdict import Answer
from torchbelay.lab.part import Record

SEEDS = range(6)


def ring(ema: float, belay: float, best: float = 1.0, noise: float = 0.0) -> list[Record]:
    """Losses with the longer memory over those with the shorter one, at two rates; `best` is that at another rate."""
    made: list[Record] = []
    for arm, factor in (("EMA", ema), ("BELAY", belay)):
        for setting, times in zip(SETTINGS[arm], (factor, 1.0), strict=True):
            for lr, loss in ((0.01, 0.02 * times), (0.1, 0.02 * times * best if times != 1 else 0.05)):
                for seed in SEEDS:
                    own = 1 + noise * (-1) ** seed * (times != 1)
                    about = {"kind": "run", "arm": arm, "setting": setting, "lr": lr, "seed": seed, "failed": False}
                    made.append(about | dict.fromkeys(("validation", "test"), loss * own * (1 + 0.1 * seed)))
    return made


def lengths(worst: float) -> list[Record]:
    """Losses of averages of one run: the best half-life is 40, and the one four times as long is worse by a factor."""
    return [
        {
            "kind": "network",
            "lr": 0.01,
            "half_life": life,
            "along": [0.02 * factor * (1 + 0.1 * seed) for seed in SEEDS],
        }
        for life, factor in (
            (10.0, 1.01),
            (40.0, 1.0),
            (160.0, worst),
            (640.0, 9.0),
        )  # the last is too far off to count
    ]


@pytest.mark.parametrize(
    ("on_ring", "of_one_run", "answer", "passed"),
    [
        (ring(1.4, 1.0), lengths(1.2), Answer.HOLDS, 3),
        (ring(1.4, 1.4), lengths(1.2), Answer.HOLDS, 3),  # BELAY's own sensitivity is shown, and does not count
        (ring(0.7, 1.0), lengths(1.2), Answer.HOLDS, 3),  # in either direction
        (ring(1.4, 1.0), lengths(1.01), Answer.IN_PART, 2),
        (ring(1.01, 1.0), lengths(1.2), Answer.FAILS, 1),
        (ring(1.0, 1.4), lengths(1.01), Answer.FAILS, 0),
        (ring(1.1, 1.0, noise=0.2), lengths(1.2), Answer.UNDECIDED, 1),
    ],
    ids=["sensitive", "BELAY too", "shorter is worse", "ring alone", "one run alone", "not", "undecided"],
)
def test_each_outcome(on_ring: list[Record], of_one_run: list[Record], answer: Answer, passed: int) -> None:
    found = judge_decay({"ring": on_ring, "posthoc": of_one_run})
    assert (found.answer, len(found.passed), len(found.tests)) == (answer, passed, 3)


def test_the_summary_has_both_ways_and_belay_beside_them() -> None:
    found = judge_decay({"ring": ring(1.4, 1.3, best=0.5), "posthoc": lengths(1.2)})
    assert "multiplies EMA's loss by 1.40 and 0.700 and BELAY's by 1.30 and 0.650." in found.summary
    assert found.summary.endswith("In one run, half-lives differ 1.20-fold.")
    same = judge_decay({"ring": ring(1.4, 1.3), "posthoc": lengths(1.2) + [r | {"lr": 0.1} for r in lengths(1.5)]})
    assert "loss by 1.40 and BELAY's by 1.30. " in same.summary  # what is the same in both ways is said once
    assert same.summary.endswith("differ 1.50-fold.")
    assert [label for label, _ in same.numbers[:2]] == [
        "EMA at equal nominal rate: the longer memory ÷ the shorter",
        "EMA at each one's best: the longer memory ÷ the shorter",
    ]


def test_failed_runs_have_no_loss() -> None:
    records = ring(1.4, 1.0)
    for r in records:
        if r["arm"] == "EMA" and r["lr"] == 0.1:
            r |= {"failed": True, "test": 1e-9}
    found = judge_decay({"ring": records, "posthoc": lengths(1.2)})
    assert found.answer is Answer.HOLDS


def test_a_rate_is_chosen_by_the_validation_loss_of_the_other_seeds() -> None:
    records = ring(1.4, 1.0)
    for r in records:
        if r["arm"] == "EMA" and r["setting"] == SETTINGS["EMA"][1]:
            r["test"] *= 1 if r["lr"] == 0.01 else 1e-3  # a marvel, at a rate that validation does not choose
    numbers = dict(judge_decay({"ring": records, "posthoc": lengths(1.2)}).numbers)
    assert numbers["EMA at each one's best: the longer memory ÷ the shorter"].startswith("1.40 (")
    for r in records:
        if r["arm"] == "EMA" and r["lr"] == 0.1 and r["seed"] == 0:
            r["validation"] = 1e-9  # the seed's own loss does not choose for it, and the others follow it
    numbers = dict(judge_decay({"ring": records, "posthoc": lengths(1.2)}).numbers)
    assert not numbers["EMA at each one's best: the longer memory ÷ the shorter"].startswith("1.4 (1.4 to")


def test_half_lives_are_chosen_by_the_other_seeds_and_the_other_rule_stands_beside_it() -> None:
    """Without its first seed, 160 steps are best: then that seed compares 640 with 160, and the others 160 with 40."""
    lines = lengths(1.2)
    for r in lines:
        if r["half_life"] == 160.0:
            r["along"] = [0.03, *(0.0199 * (1 + 0.1 * seed) for seed in list(SEEDS)[1:])]
    found = judge_decay({"ring": ring(1.4, 1.0), "posthoc": lines})
    numbers = dict(found.numbers)
    one, once = (numbers[f"EMA of one run at 0.01: the {what}"] for what in WAYS)
    assert one != once
    assert dict(found.tests)["EMA of one run at 0.01"] is None
    assert numbers["if half-lives are chosen once for all seeds"].endswith("of 3 tests")


WAYS = ("worst half-life ÷ the best", "same, chosen once for all seeds")
