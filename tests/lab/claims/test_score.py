"""C9 and C10 on made-up records of each outcome."""

import re

import pytest

from helpers import score_records
from helpers.score_records import RATES, cifar10, mnist, table1, with_table1, without
from torchbelay.lab.claims.score import CLAIMS, about_equal, beats_ema
from torchbelay.lab.claims.verdict import Answer
from torchbelay.lab.part import Record

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
    found = beats_ema({"mnist": records})
    assert found.answer is answer
    assert sum(value.endswith("; lower") for _, value in found.numbers) == lower
    assert len([what for what, _ in found.numbers if "BELAY ÷" in what]) == 6
    assert found.summary.endswith(".")
    assert found.summary.count(". ") == 0  # one sentence


def test_the_numbers_on_mnist_are_those_of_the_records() -> None:
    found = beats_ema({"mnist": without(mnist(HIGH, GONE, noise=0.0), kind="fid")})
    numbers = dict(found.numbers)
    assert numbers["test loss at the paper's rate of 0.05: BELAY ÷ EMA"] == "0.7 (0.7 to 0.7); lower"
    assert numbers["test loss at each one's best rate: BELAY ÷ EMA"] == "1.000 (1.000 to 1.000); as good as equal"
    lost = "matched EMA lost in 3 of 3 seeds, p = 0.05"
    assert numbers["test loss at the paper's rate of 0.05: BELAY ÷ matched EMA"] == f"{lost}; lower"
    assert numbers["FID at the paper's rate of 0.05: BELAY ÷ EMA"] == "not run"
    assert found.summary == (
        f"At the paper's rate of 0.05 BELAY's test loss is 0.7 times EMA's (0.7 to 0.7) and {lost}; at each one's best "
        "rate BELAY's test loss is 1.000 times EMA's (1.000 to 1.000) and 1.000 times the matched EMA's (1.000 to "
        "1.000); FID has not been run."
    )


def test_where_all_are_lost_nobody_beats_anybody_and_it_is_said() -> None:
    one = {**dict.fromkeys(RATES, 1.1), 5e-2: None}
    found = beats_ema({"mnist": without(mnist(one, GONE, ema=GONE, noise=0.0, spread=0.0), study="table1")})
    assert found.answer is Answer.FAILS
    assert found.summary.startswith(
        "At the paper's rate of 0.05 BELAY, EMA and the matched EMA are all lost in every seed; at each one's best "
        "rate BELAY's test loss is 1.1 times EMA's (1.1 to 1.1)"
    )
    assert "Where both are lost, BELAY does not beat the other" in C9.rule


def in_the_long_runs(long: list[Record]) -> str:
    """What is said of them where the short ones are lost at the paper's rate."""
    return beats_ema({"mnist": with_table1(mnist(GONE, GONE, ema=GONE), long)}).summary.split("; in the long runs ")[1]


def test_fids_of_lost_networks_are_lost_and_not_missing() -> None:
    lost = "at the paper's rate of 0.05 BELAY and EMA are both lost in every seed; at each one's best rate"
    rates = "BELAY at 0.0003, EMA at 0.001, so that rates are compared as much as averages."
    assert in_the_long_runs(table1(0.8)) == f"{lost} BELAY's FID is 0.8 times EMA's (0.8 to 0.8); {rates}"
    assert in_the_long_runs(table1(1.5, fid_seeds=2)) == f"{lost} BELAY's FID is 1.5 times EMA's (1.5 to 1.5); {rates}"
    one = "BELAY's FID is 0.8 times EMA's (one seed, which decides nothing)"
    open_yet = "; by FID it might yet hold in part."
    assert in_the_long_runs(table1(fid_seeds=1)) == f"{lost} {one}; {rates[:-1]}{open_yet}"
    assert in_the_long_runs(table1(fid_seeds=0)) == f"{lost} FID against EMA has not been run{open_yet}"


def test_fids_at_one_rate_are_not_said_to_compare_rates() -> None:
    long = [r | {"lr": 3e-4} if r.get("lr") == 1e-3 and r["kind"] == "fid" else r for r in table1(0.8)]
    assert in_the_long_runs(long).endswith("BELAY's FID is 0.8 times EMA's (0.8 to 0.8).")


@pytest.mark.parametrize(("fid_seeds", "answer"), [(1, Answer.FAILS), (2, Answer.IN_PART), (3, Answer.IN_PART)])
def test_a_lower_fid_at_the_best_rate_counts_from_two_seeds_on(fid_seeds: int, answer: Answer) -> None:
    found = beats_ema({"mnist": with_table1(mnist(GONE, GONE, ema=GONE), table1(0.8, fid_seeds=fid_seeds))})
    assert found.answer is answer
    numbers = dict(found.numbers)
    assert numbers["FID at the paper's rate of 0.05: BELAY ÷ EMA"] == "both lost in 3 of 3 seeds; lost"
    assert numbers["FID at each one's best rate: BELAY ÷ EMA"].endswith("; lower") is (answer is Answer.IN_PART)


def test_a_lost_run_is_one_above_half_of_what_predicting_nothing_gives() -> None:
    half = {**dict.fromkeys(RATES, 1.0), 5e-2: 0.6 / RATES[5e-2]}
    found = beats_ema({"mnist": mnist(1.0, half, ema=half, noise=0.0, spread=0.0)})
    numbers = dict(found.numbers)
    assert numbers["test loss at the paper's rate of 0.05: BELAY ÷ EMA"].startswith("EMA lost in 3 of 3 seeds")
    assert numbers["above 0.5 a run is lost: the largest loss below, the least above"] == "0.238, 0.6"
    assert "0.5, half of what predicting nothing gives" in C9.rule


@pytest.mark.parametrize(
    ("records", "answer", "summary"),
    [
        (mnist(BETTER, fid_ratio=0.8, seeds=1), Answer.OPEN, "Too few seeds to judge by: 1 seed."),
        ([], Answer.OPEN, "Too few seeds to judge by: no seed."),
        (without(mnist(BETTER), study="rates"), Answer.FAILS, "test loss against EMA has not been run"),
        (without(mnist(BETTER), study="table1"), Answer.IN_PART, "FID has not been run."),
        (without(mnist(BETTER), arm="matched EMA"), Answer.IN_PART, "against the matched EMA has not been run"),
        (without(mnist(BETTER, fid_ratio=0.8), lr=5e-2), Answer.IN_PART, "rate of 0.05 test loss against EMA has not"),
        (without(mnist(BETTER), kind="run"), Answer.FAILS, "test loss against EMA has not been run"),
    ],
    ids=["one seed", "nothing", "no rates", "no long runs", "no control", "not at 5e-2", "FID alone"],
)
def test_what_is_missing_on_mnist_is_not_judged(records: list[Record], answer: Answer, summary: str) -> None:
    found = beats_ema({"mnist": records})
    assert (found.answer, summary in found.summary) == (answer, True), found.summary


# C10 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "answer", "summary"),
    [
        (cifar10(), Answer.HOLDS, "Three of three comparisons are shown equal: BELAY's test loss is 1.00"),
        (cifar10(1.03, 1.03, noise=0.001), Answer.HOLDS, "Three of three comparisons are shown equal: "),
        (cifar10(1.2), Answer.IN_PART, "One of three comparisons is shown equal and two different: "),
        (cifar10(1.2, 1.2, fid_ratio=1.5), Answer.IN_PART, "is shown equal and two different: "),
        (cifar10(fid_ratio=1.5), Answer.IN_PART, "Two of three comparisons are shown equal and one different: "),
        (cifar10(1.2, 1.0, fid_ratio=0.5), Answer.FAILS, "None of three comparisons are shown equal and three "),
        (cifar10(None, fid_ratio=None), Answer.FAILS, "BELAY lost in 3 of 3 seeds, p = 0.05 and BELAY lost"),
        (without(cifar10(noise=0.06), kind="fid"), Answer.OPEN, "Undecided, none of three comparisons are shown"),
        (cifar10(fid_ratio=None), Answer.IN_PART, "one different: BELAY's test loss is"),
        (cifar10(fid_ratio=None), Answer.IN_PART, "; BELAY lost in 3 of 3 seeds, p = 0.05."),
        (no_fid(), Answer.IN_PART, "shown equal: BELAY's test loss is"),
        (no_fid(), Answer.IN_PART, "; FID against EMA has not been run"),
        (one_fid(), Answer.IN_PART, "times EMA's (one seed, which decides nothing)."),
        (cifar10(seeds=1), Answer.OPEN, "Too few seeds to judge by: 1 seed."),
        ([], Answer.OPEN, "Too few seeds to judge by: no seed."),
        (without(cifar10(), arm="matched EMA"), Answer.IN_PART, "against the matched EMA has not been run"),
    ],
    ids=[
        "equal", "within", "loss differs", "FID differs, and from EMA", "FID differs", "all differ", "lost",
        "undecided", "FID lost", "FID lost, said", "no FID", "no FID, said", "one FID", "one seed", "nothing",
        "no control",
    ],
)  # fmt: skip
def test_each_outcome_on_cifar10(records: list[Record], answer: Answer, summary: str) -> None:
    found = about_equal({"cifar10": records})
    assert (found.answer, summary in found.summary) == (answer, True), found.summary


def test_where_seeds_are_too_few_it_is_said_how_many_might_do() -> None:
    found = about_equal({"cifar10": cifar10(noise=0.06)})
    assert re.search(r" \(\d+ seeds might decide it\)\.$", found.summary)


def test_rates_are_chosen_before_fids_are_compared() -> None:
    records = mnist(BETTER, fid_ratio=0.8)
    for r in records:
        if r["kind"] == "fid" and r["lr"] == 5e-2:
            r["fid"] = 1e-3  # a marvel, at a rate at which the training loss is poor
    said = beats_ema({"mnist": records}).summary
    assert "at the paper's rate of 0.05 BELAY's FID is 1.000 times EMA's (1.000 to 1.000); at each" in said
    assert "BELAY's FID is 0.799 times EMA's (" in said


def test_the_made_up_records_are_what_files_can_hold(tmp_path: pytest.TempPathFactory) -> None:
    score_records.write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"mnist.jsonl", "sign.jsonl", "cifar10.jsonl"}
