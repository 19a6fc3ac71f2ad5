"""C11's rule on constructed records of each outcome."""

import pytest

from helpers import score_records
from torchbelay.lab.claims.trained import (
    NEGATIVE,
    Tally,
    _nearly_all,
    compare_on_mnist,
    compare_on_plane,
    compare_on_ring,
    compare_signs,
    count_lost_by_sign,
    judge_robustness,
)
from torchbelay.lab.claims.verdict import Answer
from torchbelay.lab.part import Record

RATES = [10.0**e for e in range(-5, 5)]
FUNCTIONS = ("Rosenbrock", "Beale", "absolute", "bowl")


def rates(arm: str, works: int) -> list[Record]:
    """An arm that works at the first `works` rates, on every function."""
    common = {"kind": "rate", "arm": arm, "judged": "w2"}
    return [
        common | {"function": function, "lr": lr, "converged": 0.9 if i < works else 0.89}
        for function in FUNCTIONS
        for i, lr in enumerate(RATES)
    ]


def plane(belay: int, ema: int, matched: int) -> list[Record]:
    return [
        record
        for family in ("SGD", "Adam")
        for arm, works in (("BELAY", belay), ("EMA", ema), ("matched EMA", matched))
        for record in rates(f"{arm}+{family}", works)
    ]


LRS = (1e-3, 1e-2, 1e-1, 1.0)
Losses = tuple[float | None, ...]
FLAT, NARROW, FLAT_BUT_BAD = (1.0,) * 4, (9.0, 1.0, 9.0, 9.0), (2.0,) * 4
LOST: Losses = (None,) * 4


def runs(arm: str, curves: list[Losses], setting: str = "the paper's") -> list[Record]:
    """A loss for each learning rate, for each seed."""
    return [
        {"kind": "run", "arm": arm, "setting": setting, "seed": seed, "lr": lr, "test": loss}
        for seed, curve in enumerate(curves)
        for lr, loss in zip(LRS, curve, strict=True)
    ]


def ring(belay: Losses, ema: Losses, matched: Losses) -> list[Record]:
    tuned = runs("BELAY", [FLAT] * 10, setting="another")  # not to be looked at
    return runs("BELAY", [belay] * 10) + tuned + runs("EMA", [ema] * 10) + runs("matched EMA", [matched] * 10)


@pytest.mark.parametrize(
    ("on_plane", "on_ring", "answer"),
    [
        ((6, 4, 4), (FLAT, NARROW, NARROW), Answer.HOLDS),
        ((5, 4, 4), (FLAT, NARROW, NARROW), Answer.IN_PART),  # one step of the grid is not notable
        ((6, 4, 4), (FLAT, NARROW, FLAT), Answer.IN_PART),
        ((6, 4, 8), (FLAT_BUT_BAD, NARROW, NARROW), Answer.IN_PART),  # three of six
        ((4, 6, 6), (FLAT_BUT_BAD, NARROW, NARROW), Answer.FAILS),  # flat, but because it is nowhere good: two of six
        ((6, 4, 8), (NARROW, FLAT, FLAT), Answer.FAILS),  # one of six
        ((4, 4, 4), (FLAT, FLAT, FLAT), Answer.FAILS),
        ((4, 6, 6), (LOST, NARROW, NARROW), Answer.FAILS),
        ((4, 6, 6), (LOST, LOST, LOST), Answer.FAILS),
    ],
)
def test_each_outcome(on_plane: tuple[int, int, int], on_ring: tuple[Losses, Losses, Losses], answer: Answer) -> None:
    found = judge_robustness({"robustness": plane(*on_plane), "ring": ring(*on_ring)})
    assert found.answer is answer


@pytest.mark.parametrize(("agree", "kept"), [(9, True), (8, False)])
def test_nearly_all_seeds_must_agree(agree: int, kept: bool) -> None:
    belay: list[Losses] = [FLAT] * agree + [NARROW] * (10 - agree)
    of_ring = runs("BELAY", belay) + runs("EMA", [NARROW] * 10) + runs("matched EMA", [NARROW] * 10)
    for shared in (True, False):
        assert compare_on_ring({"ring": of_ring}, "EMA", shared=shared) == (agree, 0, 10)
    answer = judge_robustness({"robustness": plane(4, 4, 4), "ring": of_ring}).answer
    assert answer is (Answer.IN_PART if kept else Answer.UNDECIDED)


@pytest.mark.parametrize("cases", [10, 20, 30, 50, 100])
def test_a_range_that_is_wider_for_exactly_a_tenth_of_the_seeds_fails(cases: int) -> None:
    tenth = cases // 10
    assert _nearly_all(Tally(tenth, 0, cases)) is False
    assert _nearly_all(Tally(tenth + 1, 0, cases)) is None
    assert _nearly_all(Tally(cases - tenth, 0, cases)) is True


def test_the_numbers_are_those_of_the_records() -> None:
    tally, numbers = compare_on_plane({"robustness": plane(6, 4, 9)}, "EMA")
    assert tally == (8, 0, 8)
    assert numbers[0] == ("Rosenbrock, SGD: decades that work, BELAY and EMA", "6, 4")
    found = judge_robustness({"robustness": plane(6, 4, 9), "ring": ring(NARROW, NARROW, FLAT)})
    assert (
        found.summary
        == "BELAY's range is wider than EMA's in 8 of 18 cases and narrower in 0; matched EMA's: 0 and 18. "
        "With ties open: undecided."
    )
    behind = dict(found.numbers)
    assert behind["plane: BELAY's range against EMA's"] == "wider in 8 and narrower in 0 of 8 cases"
    assert behind["plane: BELAY's range against the matched EMA's"] == "wider in 0 and narrower in 8 of 8 cases"
    total = "all, by the better best loss of the two: BELAY's range against {}"
    assert behind[total.format("EMA's")] == "wider in 8 and narrower in 0 of 18 cases"
    assert behind[total.format("the matched EMA's")] == "wider in 0 and narrower in 18 of 18 cases"
    by = "ring, by the better best loss of the two: BELAY's range against {}"
    assert behind[by.format("EMA's")] == "wider in 0 and narrower in 0 of 10 seeds"
    assert behind[by.format("the matched EMA's")] == "wider in 0 and narrower in 10 of 10 seeds"


def test_the_summary_gives_the_cases_by_own_best_losses_if_they_differ() -> None:
    """BELAY's curve is flat by its own best loss, and too high everywhere by the better best loss of the two."""
    found = judge_robustness({"robustness": plane(4, 4, 4), "ring": ring(FLAT_BUT_BAD, NARROW, NARROW)})
    assert found.summary.startswith("BELAY's range is wider than EMA's in 0 of 18 cases and narrower in 10; ")
    assert "matched EMA's: 0 and 10 (own bests: 10 and 0; 10 and 0)." in found.summary


def test_the_summary_says_what_a_rule_would_find_in_which_ties_stay_open() -> None:
    ties = judge_robustness({"robustness": plane(4, 4, 4), "ring": ring(FLAT, FLAT, FLAT)})
    assert ties.answer is Answer.FAILS
    assert ties.summary.endswith(" With ties open: undecided.")
    rule = "by a rule in which ties stay open"
    assert dict(ties.numbers)[rule] == "undecided: 0 passed, 0 failed, 6 open of 6 tests"
    narrower = judge_robustness({"robustness": plane(4, 6, 6), "ring": ring(NARROW, FLAT, FLAT)})
    assert "ties" not in narrower.summary  # no range is equal, and both rules agree
    assert dict(narrower.numbers)[rule] == "does not hold: 0 passed, 6 failed, 0 open of 6 tests"


def test_the_two_bars_differ_and_a_hair_wider_is_not_wider() -> None:
    def counts(belay: Losses, rival: Losses) -> list[tuple[int, int, int]]:
        records = {"ring": runs("BELAY", [belay]) + runs("EMA", [rival])}
        return [compare_on_ring(records, "EMA", shared=shared) for shared in (True, False)]

    assert counts(FLAT_BUT_BAD, NARROW) == [(0, 1, 1), (1, 0, 1)]
    assert counts((1.0, 1.0, 9.0, 9.0), (1.0, 1.0, 9.1, 9.0)) == [(0, 0, 1), (0, 0, 1)]


# Images --------------------------------------------------------------------------------------------------------------

MIDDLE = {1e-4: 3.0, 3e-4: 1.0, 1e-3: 1.0, 3e-3: 1.0, 1e-2: 1.0, 5e-2: None}  # against the made-up EMA
WIDE = dict.fromkeys(MIDDLE, 1.0)


@pytest.mark.parametrize(
    ("belay", "ema", "matched", "expected"),
    [
        (WIDE, MIDDLE, WIDE, [(3, 0, 3), (0, 0, 3)]),
        (MIDDLE, WIDE, MIDDLE, [(0, 3, 3), (0, 0, 3)]),
    ],
)
def test_ranges_on_mnist_are_compared_seed_by_seed(
    belay: dict[float, float | None],
    ema: dict[float, float | None],
    matched: dict[float, float | None],
    expected: list[tuple[int, int, int]],
) -> None:
    records = {"mnist": score_records.mnist(belay, matched, ema=ema, noise=0.0)}
    for shared in (True, False):
        assert [compare_on_mnist(records, rival, shared=shared) for rival in ("EMA", "matched EMA")] == expected


def test_a_curve_on_mnist_that_is_flat_because_it_is_bad_is_narrow_by_the_bar_that_both_share() -> None:
    bad = {lr: 2 * min(score_records.RATES.values()) / loss for lr, loss in score_records.RATES.items()}
    records = {"mnist": score_records.mnist(bad, noise=0.0)}
    assert compare_on_mnist(records, "EMA", shared=True) == (0, 3, 3)
    assert compare_on_mnist(records, "EMA", shared=False) == (3, 0, 3)


@pytest.mark.parametrize(
    ("belay", "passed", "answer"),
    [(WIDE, 4, Answer.UNDECIDED), (MIDDLE, 0, Answer.FAILS)],  # on the plane all are equal, which leaves two tests open
    ids=["wider on MNIST alone", "nowhere"],
)
def test_mnist_counts(belay: dict[float, float | None], passed: int, answer: Answer) -> None:
    rest = {"robustness": plane(4, 4, 4), "ring": ring(FLAT, FLAT, FLAT)}
    found = judge_robustness(rest | {"mnist": score_records.mnist(belay, MIDDLE, ema=MIDDLE, noise=0.0)})
    assert (found.answer, len(found.passed), len(found.tests)) == (answer, passed, 10)
    assert f"than EMA's in {3 if belay is WIDE else 0} of 21 cases and narrower in 0; matched" in found.summary
    label = "score models of MNIST, by the better best loss of the two: BELAY's range against EMA's"
    assert dict(found.numbers)[label] == f"wider in {3 if belay is WIDE else 0} and narrower in 0 of 3 seeds"
    without = judge_robustness(rest | {"mnist": []})
    assert (without.answer, "MNIST" in str(without.numbers)) == (Answer.FAILS, False)
    assert "of 18 cases" in without.summary


REST = {"robustness": plane(4, 4, 4), "ring": ring(FLAT, FLAT, FLAT)}
GONE = {1e-3: 1.0, 4e-3: 1.0, 1.2e-2: None}


def test_the_numbers_have_the_runs_that_each_sign_of_the_spring_loses() -> None:
    some = {"θ −0.5": 1.0, "θ −0.25": 1.0, "θ 0": GONE, "θ +1": GONE}
    found = judge_robustness(REST | {"sign": score_records.sign(some)})
    numbers = dict(found.numbers)
    assert numbers[f"MNIST at 0.012: runs lost with {NEGATIVE}, θ = 0 (EMA), θ > 0"] == "0 of 10, 5 of 5, 5 of 5"
    ratio = "MNIST at 0.012: test loss with θ = −0.5 ÷ that with θ = 0"
    assert numbers[ratio] == "θ = 0 lost in 5 of 5 seeds, p = 0.031"
    alone = judge_robustness(REST)
    assert (found.answer, found.summary) == (alone.answer, alone.summary)  # the other sign decides nothing
    assert "θ" not in str(alone.numbers)


def test_if_nothing_is_lost_the_numbers_count_where_the_other_sign_is_lower_and_higher() -> None:
    some = {"θ −0.5": {1e-3: 1.2, 4e-3: 0.8, 1.2e-2: 0.8}, "θ 0": 1.0, "θ +1": 0.5}
    counted = count_lost_by_sign({"sign": score_records.sign(some)})
    assert counted == [(f"MNIST: loss with {NEGATIVE} against θ = 0", "lower in 2 and higher in 1 of 3 cases")]
    assert counted[0] in judge_robustness(REST | {"sign": score_records.sign(some)}).numbers
    assert compare_signs({"sign": score_records.sign({"θ −0.5": 0.9})}) == []  # nothing to compare with
    assert count_lost_by_sign({"sign": score_records.sign({"θ 0": 1.0, "θ +1": None})}) == []


def test_the_numbers_have_what_the_other_sign_does_on_cifar10() -> None:
    images = score_records.cifar10(other_sign=1.5, noise=0.0)
    both = judge_robustness(REST | {"sign": score_records.sign({"θ −0.5": 1.0, "θ 0": GONE}), "cifar10": images})
    label = "CIFAR-10 at 0.001: test loss with θ = −0.5 ÷ EMA's"
    assert dict(both.numbers)[label] == "1.50 (1.50 to 1.50)"
    gone = judge_robustness(REST | {"cifar10": score_records.cifar10(other_sign=None)})
    assert dict(gone.numbers)[label] == "θ = −0.5 lost in 3 of 3 seeds, p = 0.12"
