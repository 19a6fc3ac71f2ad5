"""C9 and C10 on made-up records of each outcome."""

import re

import pytest

from helpers import score_records
from helpers.score_records import RATES, cifar10, mnist, table1, with_table1, without
from torchbelay.lab.claims.score import CLAIMS, Contest, describe, judge_cifar10, judge_mnist
from torchbelay.lab.claims.verdict import Answer, Finding
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
    ("records", "answer", "lower"),
    [
        (mnist(BETTER, fid_ratio=0.8), Answer.HOLDS, 6),
        (mnist(BETTER), Answer.IN_PART, 4),
        (mnist(fid_ratio=0.8), Answer.IN_PART, 2),
        (mnist(BETTER, BETTER, fid_ratio=0.8), Answer.IN_PART, 4),  # the matched EMA is as good
        (mnist(HIGH, HIGH), Answer.IN_PART, 1),
        (mnist(1.0, GONE, ema=GONE), Answer.IN_PART, 2),  # the rivals are lost at the paper's rate
        (mnist(GONE, GONE, ema=GONE), Answer.FAILS, 0),
        (mnist(GONE), Answer.FAILS, 0),
        (mnist(), Answer.FAILS, 0),
        (mnist(1.3, fid_ratio=1.2), Answer.FAILS, 0),
    ],
    ids=["all", "loss", "FID", "not the spring", "at 5e-2", "rivals lost", "all lost", "lost", "equal", "worse"],
)
def test_each_outcome_on_mnist(records: list[Record], answer: Answer, lower: int) -> None:
    found = judge_mnist({"mnist": records})
    assert found.answer is answer
    assert sum(value.endswith("; lower") for _, value in found.numbers) == lower
    assert len([what for what, _ in found.numbers if "BELAY ÷" in what]) == 6
    assert re.fullmatch(r"At the paper's rate of 0\.05, .*\. At each one's best rate, .*\.", found.summary)
    assert found.summary.count(". ") == 1  # two sentences


def test_the_numbers_on_mnist_are_those_of_the_records() -> None:
    found = judge_mnist({"mnist": without(mnist(HIGH, GONE, noise=0.0), kind="fid")})
    numbers = dict(found.numbers)
    assert numbers["test loss at the paper's rate of 0.05: BELAY ÷ EMA"] == "0.7 (0.7 to 0.7); lower"
    assert numbers["test loss at each one's best rate: BELAY ÷ EMA"] == "1.000 (1.000 to 1.000); equal"
    lost = "matched EMA lost in 3 of 3 seeds, p = 0.05"
    assert numbers["test loss at the paper's rate of 0.05: BELAY ÷ matched EMA"] == f"{lost}; lower"
    assert numbers["FID at the paper's rate of 0.05: BELAY ÷ EMA"] == "not run"
    assert found.summary == (
        "At the paper's rate of 0.05, BELAY's test loss is 0.7 times EMA's; seeds lost: BELAY 0 of 3 and the matched "
        "EMA 3 of 3; FID was not run. At each one's best rate, BELAY's test loss is 1.000 times EMA's and 1.000 times "
        "the matched EMA's, and FID was not run."
    )


def test_if_all_are_lost_none_beats_another_and_the_summary_says_so() -> None:
    one = {**dict.fromkeys(RATES, 1.1), 5e-2: None}
    found = judge_mnist({"mnist": without(mnist(one, GONE, ema=GONE, noise=0.0, spread=0.0), study="table1")})
    assert found.answer is Answer.FAILS
    assert found.summary.startswith(
        "At the paper's rate of 0.05, BELAY, EMA and the matched EMA lose every seed, and FID was not run. "
        "At each one's best rate, BELAY's test loss is 1.1 times EMA's"
    )
    assert "If both lose every seed, or if there are fewer than two seeds, BELAY does not win." in C9.rule


def judged_with(long: list[Record]) -> Finding:
    """C9, with these long runs, if the short ones are lost at the paper's rate."""
    return judge_mnist({"mnist": with_table1(mnist(GONE, GONE, ema=GONE), long)})


RATES_OF_FIDS = "rates at which the FIDs are best"


@pytest.mark.parametrize(
    ("long", "expected", "value", "undecided"),
    [
        (table1(0.8), "and its FID is 0.8 times EMA's.", "0.8 (0.8 to 0.8); lower", False),
        (table1(1.5, fid_seeds=2), "and its FID is 1.5 times EMA's.", "1.5 (1.5 to 1.5); higher", False),
        (table1(fid_seeds=1), "and its FID is 0.8 times EMA's (one seed).", "0.8 (one seed)", True),
        (table1(fid_seeds=0), "and FID was not run.", "not run", True),
    ],
    ids=["lower", "higher", "one seed", "none"],
)
def test_fids_of_lost_networks_are_lost_and_not_missing(
    long: list[Record], expected: str, value: str, undecided: bool
) -> None:
    found = judged_with(long)
    assert found.summary.startswith("At the paper's rate of 0.05, BELAY, EMA and the matched EMA lose every seed. At")
    assert found.summary.endswith(expected)
    numbers = dict(found.numbers)
    assert numbers["FID at each one's best rate: BELAY ÷ EMA"] == value
    assert ("what more seeds could change" in numbers) is undecided
    rates = "BELAY at 0.0003, EMA at 0.001, so that rates are compared as much as averages"
    assert numbers.get(RATES_OF_FIDS) == (None if value == "not run" else rates)


def test_fids_at_one_rate_do_not_compare_rates() -> None:
    long = [r | {"lr": 3e-4} if r.get("lr") == 1e-3 and r["kind"] == "fid" else r for r in table1(0.8)]
    found = judged_with(long)
    assert found.summary.endswith("its FID is 0.8 times EMA's.")
    assert RATES_OF_FIDS not in dict(found.numbers)


@pytest.mark.parametrize(("fid_seeds", "answer"), [(1, Answer.FAILS), (2, Answer.IN_PART), (3, Answer.IN_PART)])
def test_a_lower_fid_at_the_best_rate_counts_from_two_seeds_on(fid_seeds: int, answer: Answer) -> None:
    found = judge_mnist({"mnist": with_table1(mnist(GONE, GONE, ema=GONE), table1(0.8, fid_seeds=fid_seeds))})
    assert found.answer is answer
    numbers = dict(found.numbers)
    assert numbers["FID at the paper's rate of 0.05: BELAY ÷ EMA"] == "both lost in 3 of 3 seeds; lost"
    assert numbers["FID at each one's best rate: BELAY ÷ EMA"].endswith("; lower") is (answer is Answer.IN_PART)


def test_a_lost_run_is_one_above_half_of_what_predicting_nothing_gives() -> None:
    half = {**dict.fromkeys(RATES, 1.0), 5e-2: 0.6 / RATES[5e-2]}
    found = judge_mnist({"mnist": mnist(1.0, half, ema=half, noise=0.0, spread=0.0)})
    numbers = dict(found.numbers)
    assert numbers["test loss at the paper's rate of 0.05: BELAY ÷ EMA"].startswith("EMA lost in 3 of 3 seeds")
    assert numbers["a run is lost if its loss exceeds 0.5: the largest loss below, the least above"] == "0.238, 0.6"
    assert "0.5, half the loss of a network that predicts nothing" in C9.rule


@pytest.mark.parametrize(
    ("records", "answer", "summary"),
    [
        (mnist(BETTER, fid_ratio=0.8, seeds=1), Answer.OPEN, "Too few seeds to judge by: 1 seed."),
        ([], Answer.OPEN, "Too few seeds to judge by: no seed."),
        (without(mnist(BETTER), study="rates"), Answer.FAILS, "and test loss was not run."),
        (without(mnist(BETTER), study="table1"), Answer.IN_PART, "FID was not run."),
        (without(mnist(BETTER), arm="matched EMA"), Answer.IN_PART, "test loss was not run against the matched EMA"),
        (without(mnist(BETTER, fid_ratio=0.8), lr=5e-2), Answer.IN_PART, "paper's rate of 0.05, nothing was run. At"),
        (without(mnist(BETTER), kind="run"), Answer.FAILS, "and test loss was not run."),
    ],
    ids=["one seed", "nothing", "no rates", "no long runs", "no control", "not at 5e-2", "FID alone"],
)
def test_what_is_missing_on_mnist_is_not_judged(records: list[Record], answer: Answer, summary: str) -> None:
    found = judge_mnist({"mnist": records})
    assert (found.answer, summary in found.summary) == (answer, True), found.summary


# C10 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "answer", "summary"),
    [
        (cifar10(), Answer.HOLDS, "BELAY is shown equal in 3 of 3 comparisons. BELAY's test loss is 1.00"),
        (cifar10(1.03, 1.03, noise=0.001), Answer.HOLDS, "equal in 3 of 3 comparisons. "),
        (cifar10(1.2), Answer.IN_PART, "equal in 1 of 3 comparisons and different in 2. "),
        (cifar10(1.2, 1.2, fid_ratio=1.5), Answer.IN_PART, "equal in 1 of 3 comparisons and different in 2. "),
        (cifar10(fid_ratio=1.5), Answer.IN_PART, "equal in 2 of 3 comparisons and different in 1. "),
        (cifar10(1.2, 1.0, fid_ratio=0.5), Answer.FAILS, "equal in 0 of 3 comparisons and different in 3. "),
        (cifar10(None, fid_ratio=None), Answer.FAILS, "Seeds lost: BELAY 3 of 3, EMA 0 of 3 and the matched"),
        (without(cifar10(noise=0.06), kind="fid"), Answer.OPEN, "Undecided: BELAY is shown equal in 0 of 3"),
        (cifar10(fid_ratio=None), Answer.IN_PART, "different in 1. BELAY's test loss is"),
        (cifar10(fid_ratio=None), Answer.IN_PART, ", and seeds lost: BELAY 3 of 3 and EMA 0 of 3."),
        (no_fid(), Answer.IN_PART, "shown equal in 2 of 3 comparisons. BELAY's test loss is"),
        (no_fid(), Answer.IN_PART, ", and FID was not run."),
        (one_fid(), Answer.IN_PART, "times EMA's (one seed)."),
        (cifar10(seeds=1), Answer.OPEN, "Too few seeds to judge by: 1 seed."),
        ([], Answer.OPEN, "Too few seeds to judge by: no seed."),
        (without(cifar10(), arm="matched EMA"), Answer.IN_PART, "test loss was not run against the matched EMA"),
    ],
    ids=[
        "equal", "within", "loss differs", "FID differs, and from EMA", "FID differs", "all differ", "lost",
        "undecided", "FID lost", "FID lost, clause", "no FID", "no FID, clause", "one FID", "one seed", "nothing",
        "no control",
    ],
)  # fmt: skip
def test_each_outcome_on_cifar10(records: list[Record], answer: Answer, summary: str) -> None:
    found = judge_cifar10({"cifar10": records})
    assert (found.answer, summary in found.summary) == (answer, True), found.summary


def test_if_seeds_are_too_few_the_numbers_say_how_many_might_do() -> None:
    found = judge_cifar10({"cifar10": cifar10(noise=0.06)})
    assert "times EMA's (undecided)" in found.summary
    assert re.fullmatch(r"\d+", dict(found.numbers)["seeds that might decide what is undecided"])


def test_rates_are_chosen_before_fids_are_compared() -> None:
    records = mnist(BETTER, fid_ratio=0.8)
    for r in records:
        if r["kind"] == "fid" and r["lr"] == 5e-2:
            r["fid"] = 1e-3  # a marvel, at a rate at which the training loss is poor
    summary = judge_mnist({"mnist": records}).summary
    assert "and its FID is 1.000 times EMA's. At each" in summary
    assert summary.endswith("its FID is 0.799 times EMA's.")


def test_what_is_lost_by_one_quantity_alone_names_it() -> None:
    gone, lower = {0: None, 1: None}, {0: 0.8, 1: 0.8}
    contests = [
        Contest("EMA", "test loss", "", compare(gone, gone)),
        Contest("EMA", "FID", "", compare(lower, dict.fromkeys(lower, 1.0))),
    ]
    assert describe(contests[:1]) == "BELAY and EMA lose every seed"
    assert describe(contests) == "BELAY and EMA lose every seed (test loss), and BELAY's FID is 0.8 times EMA's"


def test_the_made_up_records_are_what_files_can_hold(tmp_path: pytest.TempPathFactory) -> None:
    score_records.write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"mnist.jsonl", "sign.jsonl", "cifar10.jsonl"}
