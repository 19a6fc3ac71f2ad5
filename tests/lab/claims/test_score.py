"""C9 and C10 on made-up records of each outcome."""

import re

import pytest

from helpers import score_records
from helpers.score_records import RATES, Factor, cifar10, mnist, table1, with_table1, without
from torchbelay.lab.claims.score import CLAIMS, Contest, describe, judge_cifar10, judge_mnist
from torchbelay.lab.claims.verdict import Answer
from torchbelay.lab.part import Record
from torchbelay.lab.score.analysis import compare

HIGH = {**dict.fromkeys(RATES, 1.0), 5e-2: 0.7}  # better at the paper's rate alone
GONE = {**dict.fromkeys(RATES, 1.0), 5e-2: None}
BETTER = 0.7


def one_fid() -> list[Record]:
    return [r for r in cifar10() if r["kind"] != "fid" or r["seed"] == 0]


def no_fid() -> list[Record]:
    return without(cifar10(), kind="fid", arm="BELAY")


(C9,) = [claim for claim in CLAIMS if claim.id == "C9"]

# C9 -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "answer", "passed"),
    [
        (mnist(BETTER, long_belay=0.7, fid_ratio=0.7), Answer.HOLDS, 4),
        (mnist(BETTER), Answer.IN_PART, 2),  # in the short runs alone
        (mnist(BETTER, BETTER), Answer.FAILS, 1),  # the matched EMA is as good, and the long runs are equal
        (mnist(HIGH, HIGH, long_belay=0.7, fid_ratio=0.7), Answer.IN_PART, 3),
        (mnist(long_belay=0.7, fid_ratio=0.7), Answer.IN_PART, 2),
        (mnist(), Answer.FAILS, 0),
        (mnist(1.3, long_belay=1.3, fid_ratio=1.3), Answer.FAILS, 0),
        (mnist(1.0, GONE, ema=GONE, seeds=5), Answer.IN_PART, 2),  # the rivals are lost, in five seeds
        (mnist(1.0, GONE, ema=GONE, seeds=3), Answer.UNDECIDED, 0),  # three are too few to show it
    ],
    ids=["all", "short", "not the spring", "most", "long", "equal", "worse", "rivals lost", "three lost"],
)
def test_each_outcome_on_mnist(records: list[Record], answer: Answer, passed: int) -> None:
    found = judge_mnist({"mnist": records})
    assert found.answer is answer, found.tests
    assert len(found.passed) == passed
    assert len(found.tests) == 4
    assert found.summary.startswith(f"At the paper's rate, BELAY wins {passed} of 4 comparisons (")
    assert f"({[*found.tests.values()].count(None)} open). Elsewhere BELAY's loss is " in found.summary
    assert found.summary.endswith(" times either EMA's.")
    assert found.summary.count(". ") == 1  # two sentences


def lost_at_the_papers_rate(belay: Factor = 1.1, fid_ratio: float = 1.2) -> list[Record]:
    """All methods lose every seed at the paper's rate, in the short runs and in the long ones."""
    one = {**dict.fromkeys(RATES, belay), 5e-2: None}
    return with_table1(
        mnist(one, {**GONE}, ema={**GONE}, noise=0.0, spread=0.0),
        [r for r in table1(fid_ratio) if r["kind"] != "grid"],
    )


def test_if_no_method_trains_the_claim_is_not_reproduced_and_never_fails() -> None:
    found = judge_mnist({"mnist": lost_at_the_papers_rate()})
    assert found.answer is Answer.NOT_REPRODUCED
    assert found.tests == {}
    assert found.summary.startswith("At the paper's rate of 0.05 no method trains. Elsewhere BELAY's loss is ")


def test_the_effects_are_given_in_three_ways_and_in_their_order() -> None:
    """BELAY is 1.1 times EMA and 1.1/1.05 times the matched EMA at every rate; the best rates are the same."""
    belay, matched = ({**dict.fromkeys(RATES, factor), 5e-2: None} for factor in (1.1, 1.05))
    short = without(mnist(belay, matched, ema=GONE, noise=0.0, spread=0.0), study="table1")
    found = judge_mnist({"mnist": short})
    assert found.summary == (
        "At the paper's rate of 0.05 no method trains. Elsewhere BELAY's loss is 1.048 to 1.10 times either EMA's."
    )
    labels = [label for label, _ in found.numbers if label.startswith("test loss, rates, at ")]
    assert labels == [
        "test loss, rates, at equal nominal rate: BELAY ÷ EMA",
        "test loss, rates, at equal effective rate: BELAY ÷ matched EMA",
        "test loss, rates, at each one's best: BELAY ÷ EMA",
    ]


def test_the_equal_memory_ema_stands_in_for_the_papers_under_its_own_name() -> None:
    renamed = [r | {"arm": "equal-memory EMA"} if r.get("arm") == "EMA" else r for r in lost_at_the_papers_rate()]
    found = judge_mnist({"mnist": renamed})
    assert "either EMA's" in found.summary  # the other is the matched one
    assert all("BELAY ÷ EMA" not in label for label, _ in found.numbers)
    alone = judge_mnist({"mnist": without(renamed, arm="matched EMA")})
    assert " times the equal-memory EMA's." in alone.summary


def reading(features: int, warm_up: int, eps: float, belay: Factor, ema: Factor = 1.0, seeds: int = 5) -> list[Record]:
    """The runs of a reading of the paper, at its rate."""
    made = score_records.runs("readings", {5e-2: 0.06}, {"EMA": ema, "BELAY": belay}, seeds=seeds)
    return [r | {"features": features, "warm_up": warm_up, "eps": eps} for r in made]


@pytest.mark.parametrize(
    ("trained", "answer", "passed"),
    [
        ([(64, 500, 1e-3, 0.7), (32, 500, 1e-2, 0.7)], Answer.HOLDS, 2),
        ([(64, 500, 1e-3, 0.7), (32, 500, 1e-2, 1.3)], Answer.IN_PART, 1),
        ([(64, 500, 1e-3, 1.3)], Answer.FAILS, 0),
        ([(64, 500, 1e-3, 1.0)], Answer.FAILS, 0),  # as good is not better
        ([], Answer.NOT_REPRODUCED, 0),
    ],
    ids=["both", "one", "worse", "equal", "none"],
)
def test_whatever_reading_trains_decides(
    trained: list[tuple[int, int, float, float]], answer: Answer, passed: int
) -> None:
    lines = reading(64, 0, 1e-8, None, None)  # a reading that does not train is no test
    for each in trained:
        lines += reading(*each)
    found = judge_mnist({"mnist": lost_at_the_papers_rate(), "readings": lines})
    assert (found.answer, len(found.passed), len(found.tests)) == (answer, passed, len(trained)), found
    if trained:
        features, warm_up, eps, _ = trained[0]
        assert f"{warm_up} steps of warm-up, Adam's eps {eps:g}, {features} features" in str(found.tests)


def test_a_reading_in_which_one_method_alone_trains_is_a_test() -> None:
    lines = reading(64, 500, 1e-3, 1.0, None)
    found = judge_mnist({"mnist": lost_at_the_papers_rate(), "readings": lines})
    assert found.answer is Answer.HOLDS  # EMA loses five seeds of five, BELAY none
    fewer = reading(64, 500, 1e-3, 1.0, None, seeds=4)
    assert judge_mnist({"mnist": lost_at_the_papers_rate(), "readings": fewer}).answer is Answer.UNDECIDED


def test_a_lost_run_is_one_above_half_of_what_predicting_nothing_gives() -> None:
    half = {**dict.fromkeys(RATES, 1.0), 5e-2: 0.6 / RATES[5e-2]}
    found = judge_mnist({"mnist": mnist(1.0, half, ema=half, noise=0.0, spread=0.0)})
    numbers = dict(found.numbers)
    label = "test loss, at the paper's rate of 0.05, cold start, Adam's eps 1e-8, short runs: BELAY ÷ EMA"
    assert numbers[label] == "EMA lost in 3 of 3 seeds, p = 0.12; undecided"
    assert numbers["a run is lost if its loss exceeds 0.5: the largest loss below, the least above"] == "0.238, 0.6"


@pytest.mark.parametrize(
    ("records", "answer", "summary"),
    [
        (mnist(BETTER, fid_ratio=0.8, seeds=1), Answer.OPEN, "At the paper's rate of 0.05, 1 seed is not enough"),
        ([], Answer.OPEN, "Too few seeds to judge by: no seed."),
        (without(mnist(BETTER), study="rates"), Answer.FAILS, "Elsewhere BELAY's loss is 0.9"),
        (without(mnist(BETTER), study="table1"), Answer.HOLDS, "Elsewhere BELAY's loss is 0.6"),
        (without(mnist(BETTER, fid_ratio=0.8), lr=5e-2), Answer.OPEN, "Nothing was run at the paper's rate of 0.05."),
    ],
    ids=["one seed", "nothing", "no rates", "no long runs", "not at 5e-2"],
)
def test_what_is_missing_on_mnist_is_not_judged(records: list[Record], answer: Answer, summary: str) -> None:
    found = judge_mnist({"mnist": records})
    assert (found.answer, summary in found.summary) == (answer, True), found.summary


# C10 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "answer", "summary"),
    [
        (cifar10(), Answer.HOLDS, "In short runs (FID about 20), 3 of 3 comparisons show equality."),
        (cifar10(1.03, 1.03, noise=0.001), Answer.HOLDS, "3 of 3 comparisons show equality. "),
        (cifar10(1.2), Answer.FAILS, "1 of 3 comparisons show equality and 2 a difference. "),
        (cifar10(1.2, 1.2, fid_ratio=1.5), Answer.FAILS, "1 of 3 comparisons show equality and 2 a difference. "),
        (cifar10(fid_ratio=1.5), Answer.IN_PART, "2 of 3 comparisons show equality and 1 a difference. "),
        (cifar10(1.2, 1.0, fid_ratio=0.5), Answer.FAILS, "0 of 3 comparisons show equality and 3 a difference. "),
        (cifar10(None, fid_ratio=None, seeds=5), Answer.FAILS, "Seeds lost: BELAY 5 of 5 and EMA 0 of 5."),
        (cifar10(None, fid_ratio=None), Answer.UNDECIDED, "Seeds lost: BELAY 3 of 3 and EMA 0 of 3."),
        (without(cifar10(noise=0.06), kind="fid"), Answer.UNDECIDED, "In short runs, 0 of 3 comparisons show equality"),
        (cifar10(fid_ratio=None), Answer.IN_PART, "2 of 3 comparisons show equality. BELAY's test loss is"),
        (cifar10(fid_ratio=None), Answer.IN_PART, ", and seeds lost: BELAY 3 of 3 and EMA 0 of 3."),
        (no_fid(), Answer.IN_PART, "2 of 3 comparisons show equality. BELAY's test loss is"),
        (no_fid(), Answer.IN_PART, ", and FID was not run."),
        (one_fid(), Answer.IN_PART, " (one seed) times EMA's."),
        (cifar10(seeds=1), Answer.OPEN, "Too few seeds to judge by: 1 seed."),
        ([], Answer.OPEN, "Too few seeds to judge by: no seed."),
        (without(cifar10(), arm="matched EMA"), Answer.IN_PART, "2 of 3 comparisons show equality. "),
    ],
    ids=[
        "equal", "within", "loss differs", "FID differs, and from EMA", "FID differs", "all differ", "lost",
        "three lost", "undecided", "FID lost", "FID lost, clause", "no FID", "no FID, clause", "one FID", "one seed",
        "nothing", "no control",
    ],
)  # fmt: skip
def test_each_outcome_on_cifar10(records: list[Record], answer: Answer, summary: str) -> None:
    found = judge_cifar10({"cifar10": records})
    assert (found.answer, summary in found.summary) == (answer, True), found.summary


def test_if_seeds_are_too_few_the_numbers_say_how_many_might_do() -> None:
    found = judge_cifar10({"cifar10": cifar10(noise=0.06)})
    assert re.search(
        r"test loss is [\d.]+ \(undecided\) and its FID [\d.]+( \(undecided\))? times EMA's", found.summary
    )
    assert re.fullmatch(r"\d+", dict(found.numbers)["seeds that might decide what is undecided"])


def test_rates_are_chosen_before_fids_are_compared() -> None:
    records = mnist(BETTER, fid_ratio=0.8)
    for r in records:
        if r["kind"] == "fid" and r["lr"] == 5e-2:
            r["fid"] = 1e-3  # a marvel, at a rate at which the training loss is poor
    (best,) = [value for label, value in judge_mnist({"mnist": records}).numbers if "FID, table1, at each one" in label]
    assert best.startswith("0.799 (")


def test_what_is_lost_by_one_quantity_alone_names_it() -> None:
    gone, lower = {0: None, 1: None}, {0: 0.8, 1: 0.8}
    contests = [
        Contest("EMA", "test loss", "", compare(gone, gone)),
        Contest("EMA", "FID", "", compare(lower, dict.fromkeys(lower, 1.0))),
    ]
    assert describe(contests[:1]) == "BELAY and EMA lose every seed"
    assert describe(contests) == "BELAY and EMA lose every seed (test loss), and BELAY's FID is 0.800 times EMA's"


def test_the_made_up_records_are_what_files_can_hold(tmp_path: pytest.TempPathFactory) -> None:
    score_records.write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"mnist.jsonl", "sign.jsonl", "cifar10.jsonl"}
