"""The results derived from the ring's runs, for runs made up so that the answer is known."""

import json
import math
from collections.abc import Callable

import pytest

from torchbelay.lab.arms import BELAY, EMA, MATCHED, PLAIN, REPULSIVE
from torchbelay.lab.part import Record
from torchbelay.lab.ring.statistics import (
    CONTESTS,
    TUNED,
    Choice,
    RunTable,
    choose,
    compare_choices,
    derive_records,
    find_ranges,
    split_seeds,
)

LRS = (0.001, 0.01, 0.1, 1.0)
SEEDS = 6
SCALES = {PLAIN: 1.0, EMA: 1.0, MATCHED: 0.5, BELAY: 0.5, REPULSIVE: 1.0}
SETTINGS = {
    PLAIN: ("none",),
    EMA: ("decay 0.9", "decay 0.99"),
    MATCHED: ("k 1, m1 1, m2 1", "k 2, m1 1, m2 1"),
    BELAY: ("k 1, m1 1, m2 1", "k 2, m1 1, m2 1"),
    REPULSIVE: ("θ −0.5",),
}
Loss = Callable[[str, str, float, int], float | None]


def bowl(arm: str, setting: str, lr: float, seed: int) -> float | None:
    """A loss that is best at 0.01, ten times worse a decade away, different per seed, and lost at the largest rate."""
    return None if lr == 1.0 else (1 + seed / 10) * 10 ** abs(math.log10(lr / 0.01))


def runs(loss: Loss = bowl, validation: Loss | None = None) -> list[Record]:
    return [
        {
            "kind": "run",
            "arm": arm,
            "setting": setting,
            "lr": lr,
            "effective_lr": lr * SCALES[arm],
            "seed": seed,
            "validation": (validation or loss)(arm, setting, lr, seed),
            "test": loss(arm, setting, lr, seed),
        }
        for arm, settings in SETTINGS.items()
        for setting in settings
        for lr in LRS
        for seed in range(SEEDS)
    ]


def chosen(found: list[Record], one: str, other: str) -> Record:
    (pair,) = [r for r in found if r["kind"] == "pair" and (r["scope"], r["one"], r["other"]) == ("chosen", one, other)]
    return pair


# Choices --------------------------------------------------------------------------------------------------------------


def test_every_seed_reports_the_choice_of_the_other_half() -> None:
    def fickle(arm: str, setting: str, lr: float, seed: int) -> float:
        good = 0.01 if seed < SEEDS // 2 else 0.1  # the halves do not agree
        return 1.0 if lr == good else 2.0

    first, second = choose(RunTable(runs(fickle)), PLAIN)
    assert (first.reported_on, first.chosen_on, first.lr) == ([0, 1, 2], [3, 4, 5], 0.1)
    assert (second.reported_on, second.chosen_on, second.lr) == ([3, 4, 5], [0, 1, 2], 0.01)
    assert first.test == second.test == [2.0, 2.0, 2.0]  # the other half's choice is wrong for each
    assert first.validation == second.validation == 1.0


def test_choices_are_made_by_validation_and_reported_by_test() -> None:
    def misleading(arm: str, setting: str, lr: float, seed: int) -> float:
        return 1.0 if lr == 0.1 else 2.0

    for choice in choose(RunTable(runs(bowl, misleading)), EMA):
        assert choice.lr == 0.1
        assert choice.test == [bowl(EMA, "", 0.1, seed) for seed in choice.reported_on]


def test_only_tuned_contestants_choose_among_settings() -> None:
    def second_is_better(arm: str, setting: str, lr: float, seed: int) -> float:
        return 1.0 if setting in ("decay 0.99", "k 2, m1 1, m2 1") else 3.0

    table = RunTable(runs(second_is_better))
    for arm in (EMA, MATCHED, BELAY):
        plain, tuned = list(choose(table, arm)), list(choose(table, arm + TUNED))
        assert {c.setting for c in plain} == {SETTINGS[arm][0]}
        assert {c.setting for c in tuned} == {SETTINGS[arm][1]}
        assert {c.trials for c in plain} == {len(LRS)}
        assert {c.trials for c in tuned} == {2 * len(LRS)}


def test_one_lost_run_keeps_a_rate_from_being_chosen() -> None:
    def risky(arm: str, setting: str, lr: float, seed: int) -> float | None:
        if lr == 0.1:
            return None if seed in (1, 4) else 1e-6  # one in each half
        return 1.0 if lr == 0.01 else 2.0

    assert {choice.lr for choice in choose(RunTable(runs(risky)), PLAIN)} == {0.01}


def test_a_choice_survives_its_record() -> None:
    for choice in choose(RunTable(runs()), BELAY):
        assert Choice.from_record(json.loads(json.dumps(choice.record()))) == choice


@pytest.mark.parametrize("count", [2, 4, 5, 10])
def test_halves_hold_every_seed_once(count: int) -> None:
    first, second = split_seeds(range(count))
    assert first + second == list(range(count))
    assert abs(len(first) - len(second)) <= 1


# Contests -------------------------------------------------------------------------------------------------------------


def test_a_contest_is_the_ratio_of_each_seeds_test_losses() -> None:
    def better_by(arm: str, setting: str, lr: float, seed: int) -> float:
        factor = {BELAY: 0.8 * (1 + 0.01 * seed), EMA: 1.0}.get(arm, 1.0)
        return factor * (bowl(arm, setting, min(lr, 0.1), seed) or 0)

    pair = chosen(derive_records(runs(better_by)), BELAY, EMA)
    expected = [0.8 * (1 + 0.01 * seed) for seed in range(SEEDS)]
    assert pair["ratios"] == pytest.approx(expected, rel=1e-4)  # five digits are kept
    assert pair["ratio"] == pytest.approx(math.prod(expected) ** (1 / SEEDS), rel=1e-4)
    assert pair["reading"] == "lower"
    assert pair["pairs"] == SEEDS


def test_methods_with_the_same_losses_are_equal() -> None:
    found = derive_records(runs())
    for one, other in CONTESTS:
        pair = chosen(found, one, other)
        assert (pair["ratio"], pair["reading"]) == (1.0, "equal")


def test_contests_have_as_many_trials_on_either_side() -> None:
    for pair in (r for r in derive_records(runs()) if r.get("scope") == "chosen"):
        ones, others = pair["trials"]
        if PLAIN in (pair["one"], pair["other"]) or pair["one"] == REPULSIVE:
            assert min(ones, others) == len(LRS)  # they have only one setting
        else:
            assert ones == others


def test_missing_contestants_are_not_compared() -> None:
    choices = [choice for name in (BELAY, EMA) for choice in choose(RunTable(runs()), name)]
    assert [(pair["one"], pair["other"]) for pair in compare_choices(choices)] == [(BELAY, EMA)]


def test_at_each_rate_lost_runs_are_recorded_as_lost() -> None:
    pairs = [r for r in derive_records(runs()) if r.get("scope") == "rate"]
    assert {pair["lr"] for pair in pairs} == set(LRS)
    for pair in pairs:
        lost = pair["lr"] == 1.0
        assert (pair["reading"] == "lost") == lost
        assert pair["pairs"] == (0 if lost else SEEDS)
        assert (pair["ratio"] is None) == lost


def test_belay_and_its_matched_ema_are_compared_at_the_same_setting() -> None:
    pairs = [
        r for r in derive_records(runs()) if r.get("scope") == "rate" and (r["one"], r["other"]) == (BELAY, MATCHED)
    ]
    assert {(p["one_setting"], p["other_setting"]) for p in pairs} == {(s, s) for s in SETTINGS[BELAY]}


# Ranges ---------------------------------------------------------------------------------------------------------------


def widths(loss: Loss) -> dict[tuple[str, str, str], Record]:
    return {(r["arm"], r["setting"], r["against"]): r for r in find_ranges(RunTable(runs(loss)))}


def test_a_range_is_that_of_the_median_in_both_rates() -> None:
    width = widths(bowl)[BELAY, "k 1, m1 1, m2 1", "own"]
    reach = 1.5  # a decade away is ten times worse, so that 1.5 times worse is a factor 1.5 away
    assert width["best_lr"] == 0.01
    assert width["best"] == pytest.approx(1.25)  # the median of 1, 1.1, … 1.5
    assert width["low"] == pytest.approx(0.01 / reach, rel=1e-4)
    assert width["high"] == pytest.approx(0.01 * reach, rel=1e-4)
    assert width["width"] == pytest.approx(reach**2, rel=1e-4)
    assert width["high_effective"] == pytest.approx(0.005 * reach, rel=1e-4)
    assert width["low_effective"] == pytest.approx(0.005 / reach, rel=1e-4)
    assert (width["open_low"], width["open_high"]) == (False, False)


def test_a_method_that_is_never_near_the_best_has_no_range_against_it() -> None:
    def ema_is_twice_as_good(arm: str, setting: str, lr: float, seed: int) -> float | None:
        loss = bowl(arm, setting, lr, seed)
        return loss if loss is None else loss * (0.5 if arm == EMA else 1.0)

    found = widths(ema_is_twice_as_good)
    assert found[BELAY, "k 1, m1 1, m2 1", "best"]["width"] is None
    assert found[BELAY, "k 1, m1 1, m2 1", "own"]["width"] == pytest.approx(2.25, rel=1e-4)
    assert found[EMA, "decay 0.9", "best"]["width"] == pytest.approx(2.25, rel=1e-4)


def test_upper_ends_are_compared_in_both_rates_and_widths_in_one() -> None:
    def ema_goes_further(arm: str, setting: str, lr: float, seed: int) -> float | None:
        return 1.0 if arm == EMA and lr == 0.1 else bowl(arm, setting, lr, seed)

    found = derive_records(runs(ema_goes_further))
    pairs = {
        r["scope"]: r
        for r in found
        if (r.get("one"), r.get("other"), r.get("other_setting")) == (BELAY, EMA, "decay 0.9") and r["scope"] != "rate"
    }
    # EMA is at its best at the rate 0.1, where its range ends beside a lost run; BELAY at 0.01
    for scope, factor in (("high", 1.0), ("high_effective", 0.5)):
        assert pairs[scope]["ratios"] == pytest.approx([factor * 0.01 * 1.5 / 0.1] * SEEDS, rel=1e-4)
    assert pairs["width"]["ratios"][0] == pytest.approx(1.5**2 / (10 * 1.5), rel=1e-4)
    assert pairs["width"]["reading"] == "lower"


def test_a_poor_best_loss_does_not_widen_the_range_against_the_better_of_two() -> None:
    def twenty_percent_worse(arm: str, setting: str, lr: float, seed: int) -> float | None:
        loss = bowl(arm, setting, lr, seed)
        return loss if loss is None else loss * {BELAY: 1.2, PLAIN: 9.0}.get(arm, 1.0)

    found = [r for r in derive_records(runs(twenty_percent_worse)) if r["kind"] == "pair"]
    pairs = {(r["scope"], r["one"], r["other"]): r for r in found if "one_setting" in r}
    assert pairs["width", BELAY, MATCHED]["ratio"] == pytest.approx(1, rel=1e-4)
    # 1.5/1.2 of its own best on either side for BELAY, 1.5 for the other
    assert pairs["width_shared", BELAY, MATCHED]["ratio"] == pytest.approx(1.2**-2, rel=1e-4)
    assert pairs["width_shared", EMA, PLAIN]["reading"] == "lost"  # it never comes within 1.5 of the better one


def test_runs_that_are_all_lost_are_reported_and_break_nothing() -> None:
    found = derive_records(runs(lambda arm, setting, lr, seed: None))
    assert all(r["reading"] == "lost" for r in found if r["kind"] == "pair")
    assert all(r["width"] is None for r in found if r["kind"] == "width")
    assert all(r["validation"] is None for r in found if r["kind"] == "choice")
    json.dumps(found, allow_nan=False)


def test_records_keep_five_digits() -> None:
    found = derive_records(runs(lambda arm, setting, lr, seed: math.exp(seed) / 3))
    numbers = [r["validation"] for r in found if r["kind"] == "choice"]
    assert numbers
    assert all(number == float(f"{number:.5g}") for number in numbers)
    assert {number == float(f"{number:.4g}") for number in numbers} == {False}
