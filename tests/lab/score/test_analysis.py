"""Statistics of the score models, against numbers worked out by hand."""

import math

import pytest

from helpers import score_records
from torchbelay.lab.part import Record
from torchbelay.lab.score.analysis import (
    FAILED,
    FID_NOISE,
    StudyResults,
    compare_fids,
    fid_at_best,
    fid_noise,
    fids,
    is_lost,
    median_loss,
    rate_difference,
    rate_of_fids,
    worst_loss,
)
from torchbelay.lab.score.comparison import Comparison, compare
from torchbelay.lab.statistics import ratio


def study(factors: score_records.Factors, base: dict[float, float], seeds: int = 3, **more: float) -> StudyResults:
    return StudyResults(score_records.runs("rates", base, factors, seeds=seeds, **more), "rates")


@pytest.mark.parametrize(
    ("ones", "others", "reading"),
    [
        ([0.8, 0.82, 0.81], [1.0, 1.0, 1.0], "lower"),
        ([1.2, 1.22, 1.21], [1.0, 1.0, 1.0], "higher"),
        ([1.0, 1.01, 1.0], [1.0, 1.0, 1.0], "equal"),
        ([0.8, 1.3, 1.0], [1.0, 1.0, 1.0], "open"),
        ([0.8, 0.82, 0.8], [None, None, None], "open"),  # three lost against none: a coin does that once in eight times
        ([0.8, 0.82, 0.8, 0.8, 0.8], [None, None, None, None, 0.9], "open"),
        ([0.8, 0.82, 0.8, 0.8, 0.8], [None, None, None, None, None], "lower"),
        ([0.8, 0.82, 0.8, 0.8, None], [None, None, None, None, 0.9], "open"),
        ([1.2, 1.22, 1.21, 1.2, 1.2, 1.2], [1.0, 1.0, None, None, None, None], "open"),  # safer, and higher
        ([0.8, 0.82, 0.81, 0.7], [1.0, 1.0, 1.0, None], "lower"),
        ([0.8, 0.82, 0.81, None], [1.0, 1.0, 1.0, 1.0], "open"),  # lower in three seeds, lost in one
        ([0.8, None], [1.0, None], "open"),
        ([None, None], [1.0, 1.0], "open"),
        ([None, None, None, None, None], [1.0, 1.0, 1.0, 1.0, 1.0], "higher"),
        ([None, None], [None, None], "lost"),
        ([1.0, 1.0, None], [1.0, 1.0, 1.0], "open"),
        ([0.5], [1.0], "open"),
        ([None], [1.0], "open"),
        ([], [], "open"),
    ],
)
def test_a_comparison_is_read_with_what_was_lost(
    ones: list[float | None], others: list[float | None], reading: str
) -> None:
    found = compare(dict(enumerate(ones)), dict(enumerate(others)))
    assert found.reading == reading
    assert found.lower is (reading == "lower")
    assert found.higher is (reading == "higher")
    assert found.judged is (len(ones) >= 2)


def test_only_seeds_that_both_have_are_compared_in_pairs() -> None:
    found = compare({0: 2.0, 1: 3.0, 7: 100.0}, {1: 1.5, 0: 1.0, 5: 1e-9})
    assert (found.seeds, found.point) == (2, pytest.approx(2.0))
    assert found.ratio == ratio([2.0, 3.0], [1.0, 1.5])


@pytest.mark.parametrize(
    ("ones", "others", "said"),
    [
        ({0: 2.0, 1: 2.0}, {0: 1.0, 1: 1.0}, "2.00 (2.00 to 2.00)"),
        ({0: 2.0}, {0: 1.0}, "2.00 (one seed)"),
        ({0: None, 1: None}, {0: None, 1: 1.0}, "both lost in 1 of 2 seeds, A lost in 1 of 2 seeds"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, {0: 1.0, 1: 1.0, 2: None}, "1.0000 (1.0000 to 1.0000), B lost in 1 of 3 seeds"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, {0: None, 1: 1.0, 2: None}, "1.0000 (one seed), B lost in 2 of 3 seeds, p = 0.25"),
        ({0: 1.0}, {1: 1.0}, "not run"),
    ],
)
def test_a_comparison_in_words(ones: dict[int, float | None], others: dict[int, float | None], said: str) -> None:
    assert compare(ones, others).describe("A", "B") == said


def test_so_many_seeds_would_show_it() -> None:
    differences = [0.03, -0.02, 0.015]
    few = compare(dict(enumerate(map(math.exp, differences))), dict.fromkeys(range(3), 1.0))
    assert few.reading == "open"
    needed = few.seeds_to_be_equal
    assert needed is not None

    def after(seeds: int) -> Comparison:
        """As many seeds with the same mean and standard deviation, as nearly as they can be had."""
        mean = sum(differences) / 3
        spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / 2)
        signs = [(-1) ** i for i in range(seeds)]
        signs[-1] *= not seeds % 2  # an odd one stands in the middle
        size = spread * math.sqrt((seeds - 1) / sum(map(abs, signs)))
        return compare(
            {i: math.exp(mean + size * sign) for i, sign in enumerate(signs)}, dict.fromkeys(range(seeds), 1.0)
        )

    assert after(needed).equal
    assert not after(needed - 1).equal
    assert compare({0: 2.0, 1: 2.1}, {0: 1.0, 1: 1.0}).seeds_to_be_equal is None


@pytest.mark.parametrize(
    ("fewer", "more", "p"), [(0, 4, 1 / 16), (3, 4, 1 / 2), (0, 0, 1.0), (5, 5, 1.0), (0, 5, 1 / 32)]
)
def test_lost_seeds_are_compared_in_pairs(fewer: int, more: int, p: float) -> None:
    found = compare(
        {seed: None if seed < fewer else 0.1 for seed in range(5)},
        {seed: None if seed < more else 0.1 for seed in range(5)},
    )
    assert found.p_loses_fewer == pytest.approx(p)
    assert found.lower is (p <= 0.05)


def test_a_median_is_of_all_seeds_and_a_worst_one_is_lost_if_any_is() -> None:
    assert (median_loss([0.06, 1.0, 0.07]), median_loss([0.06, None, None]), median_loss([])) == (0.07, None, None)
    assert (worst_loss([0.06, 0.3]), worst_loss([0.06, 0.51]), worst_loss([0.06, None]), worst_loss([])) == (
        0.3,
        None,
        None,
        None,
    )


def test_the_bar_lies_between_those_that_work_and_those_that_do_not() -> None:
    found = study({"EMA": 1.0, "BELAY": {1e-3: 16.0, 1e-2: None}}, {1e-3: 0.04, 1e-2: 0.05}, spread=0.0, noise=0.0)
    kept, gone = found.loss_gap()
    assert (kept, gone) == (pytest.approx(1.12 * 0.05), pytest.approx(16 * 0.04))  # w1 of the one, w2 of the other
    assert kept < FAILED < gone
    assert StudyResults([], "rates").loss_gap() == (None, None)


def test_a_loss_of_more_than_half_of_nothing_is_lost() -> None:
    assert [is_lost(x) for x in (None, FAILED + 0.01, FAILED, 0.01)] == [True, True, False, False]
    found = study({"EMA": 1.0, "BELAY": 30.0}, {1e-3: 0.04}, noise=0.0, seeds=5)
    assert [*found.valid_losses("BELAY", 1e-3).values()] == [None] * 5
    assert None not in found.losses("BELAY", 1e-3).values()
    assert found.compare("EMA", "BELAY", 1e-3).reading == "lower"
    assert (found.lost_count("EMA", 1e-3), found.lost_count("BELAY", 1e-3)) == (0, 5)


def test_the_rate_of_a_seed_is_chosen_by_the_training_loss_of_the_others() -> None:
    trains = {1: [0.10, 0.50, 0.50], 2: [0.30, 0.20, 0.20]}  # of three seeds at two rates; test losses say otherwise
    runs: list[Record] = []
    for lr, losses in trains.items():
        for seed, train in enumerate(losses):
            (run,) = score_records.runs("rates", {float(lr): 0.3}, {"EMA": 1.0}, seeds=1)
            run |= {"seed": seed, "final": {"w2": {"train": train, "test": 0.01 * lr + 0.1 * seed}}}
            runs.append(run)
    found = StudyResults(runs, "rates")
    assert [found.best_rate("EMA", without=seed) for seed in (0, 1, 2, None)] == [2.0, 1.0, 1.0, 2.0]
    assert found.at_best("EMA") == pytest.approx({0: 0.02, 1: 0.11, 2: 0.21})
    assert StudyResults(runs[:1], "rates").at_best("EMA") == {0: 0.01}  # there is no other seed to choose by


def rates_of(losses: dict[float, list[float]]) -> StudyResults:
    """A study of one arm with these training losses, by rate and seed; test losses are the same."""
    runs: list[Record] = []
    for lr, each in losses.items():
        for seed, loss in enumerate(each):
            (run,) = score_records.runs("rates", {lr: 0.3}, {"BELAY": 1.0}, seeds=1)
            runs.append(run | {"seed": seed, "final": {"w2": {"train": loss, "test": loss}}})
    return StudyResults(runs, "rates")


def test_a_lost_seed_does_not_bend_the_choice_of_a_rate() -> None:
    """Seed 1 is lost at the better rate: the others keep that rate, and seed 1 counts as lost there."""
    found = rates_of({3e-4: [0.075, 0.075, 0.074], 1e-3: [0.066, 1.0, 0.067]})
    assert [found.best_rate("BELAY", without=seed) for seed in (0, 1, 2, None)] == [1e-3] * 4
    assert found.at_best("BELAY") == {0: 0.066, 1: None, 2: 0.067}
    assert found.safe_rate("BELAY") == 3e-4


def test_if_lost_seeds_leave_one_other_to_choose_by_all_seeds_choose() -> None:
    """Without seed 1, seed 0 alone would choose the second rate, which is bad for seed 1."""
    found = rates_of({3e-4: [0.058, 0.058, 0.057], 1e-3: [0.057, 0.070, 1.0]})
    assert [found.best_rate("BELAY", without=seed) for seed in (0, 1, 2, None)] == [3e-4] * 4
    assert found.at_best("BELAY") == {0: 0.058, 1: 0.058, 2: 0.057}
    four = rates_of({3e-4: [0.058, 0.058, 0.057, 0.058], 1e-3: [0.057, 0.070, 1.0, 0.057]})
    assert [four.best_rate("BELAY", without=seed) for seed in range(4)] == [
        3e-4,
        1e-3,
        3e-4,
        3e-4,
    ]  # two others are left


def test_a_lucky_seed_does_not_make_a_rate() -> None:
    found = rates_of({1e-3: [0.064, 0.065, 0.063], 3e-3: [0.8, 1.0, 0.062]})
    assert found.eligible_rates("BELAY") == [1e-3]
    assert [found.best_rate("BELAY", without=seed) for seed in (0, 1, 2)] == [1e-3] * 3


def test_means_are_over_the_seeds_that_are_kept_at_every_rate() -> None:
    """At the second rate the worst seed is lost: its mean over the others is lower, though every seed is higher."""
    found = rates_of({1e-3: [0.06, 0.06, 0.2, 0.06], 3e-3: [0.07, 0.07, 1.0, 0.07]})
    assert found.best_rate("BELAY") == 1e-3


def test_if_every_rate_loses_most_seeds_the_one_with_most_kept_is_taken() -> None:
    found = rates_of({1e-3: [1.0, 1.0, 0.06], 3e-3: [1.0, 1.0, 1.0]})
    assert found.eligible_rates("BELAY") == [1e-3]
    assert found.at_best("BELAY") == {0: None, 1: None, 2: 0.06}


def test_the_noise_of_a_fid_is_measured_if_a_network_has_several_sets_of_samples() -> None:
    base = score_records.runs("table1", {1e-3: 0.05}, {"EMA": 1.0, "BELAY": 1.0}, seeds=3)
    study = StudyResults(base, "table1")
    one = [score_records.fid("table1", arm, 1e-3, 20.0, seed) for arm in ("EMA", "BELAY") for seed in range(3)]
    assert fid_noise(one, study) == FID_NOISE
    more = [*one, score_records.fid("table1", "EMA", 1e-3, 22.0, 0) | {"sample_seed": 1}]
    assert fid_noise(more, study) == pytest.approx(math.log(1.1) / math.sqrt(2))
    own = [line | {"sample_seed": line["seed"]} for line in one]
    assert fid_noise(own, study) == 0.0  # the spread over the seeds has it
    assert fid_noise([], study) == 0.0
    assert compare_fids(one, study, "BELAY", "EMA").ratio.low < 1 < compare_fids(one, study, "BELAY", "EMA").ratio.high
    assert compare_fids(own, study, "BELAY", "EMA").ratio.low == 1.0


def test_a_study_has_only_its_own_runs_and_the_arms_asked_for() -> None:
    records = score_records.mnist()
    assert StudyResults(records, "rates", ("EMA", "BELAY")).arms == ["EMA", "BELAY"]
    assert {run["steps"] for run in StudyResults(records, "table1").runs} == {30_000}
    assert not StudyResults(records, "elsewhere")
    assert StudyResults(records, "elsewhere").best_rate("EMA") is None
    assert StudyResults(records, "elsewhere").working_ranges(["EMA"]) == {"EMA": (None, None)}


def test_a_range_that_works_has_no_seed_that_is_lost() -> None:
    found = study({"EMA": 1.0}, {1e-3: 0.04, 1e-2: 0.04, 1e-1: 0.04}, spread=0.0, noise=0.0)
    (run,) = [run for run in found.runs if (run["lr"], run["seed"]) == (1e-1, 2)]
    run["final"]["w2"]["test"] = 0.8  # the median is as good as before
    ((shared, _),) = found.working_ranges(["EMA"]).values()
    assert shared is not None
    assert (shared.low, shared.high, shared.open_high) == (1e-3, 1e-2, False)


def test_a_range_that_works_ends_where_the_worst_seed_leaves_it() -> None:
    found = study({"EMA": 1.0, "BELAY": 2.0}, {1e-3: 0.04, 1e-2: 0.04, 1e-1: 0.16}, spread=0.0, noise=0.0)
    shared, own = found.working_ranges(["EMA", "BELAY"])["EMA"]
    assert shared == own
    assert own is not None
    edge = 1e-2 * 10 ** (math.log(1.5) / math.log(4))
    assert (own.low, own.high, own.open_low, own.open_high) == (1e-3, pytest.approx(edge), True, False)
    nowhere, its_own = found.working_ranges(["EMA", "BELAY"])["BELAY"]
    assert nowhere is None
    assert its_own is not None
    assert its_own.high == pytest.approx(edge)


def test_fids_are_those_of_a_network_over_its_sets_of_samples() -> None:
    records = [
        score_records.fid("table1", "EMA", 0.05, 4.0),
        score_records.fid("table1", "EMA", 0.05, 9.0) | {"sample_seed": 1},
        score_records.fid("table1", "EMA", 0.05, None, seed=1),
        score_records.fid("table1", "EMA", 0.05, 5.0, seed=2, weights="w1"),
        score_records.fid("table1", "EMA", 0.01, 7.0, seed=3),
        score_records.fid("rates", "EMA", 0.05, 8.0, seed=4),
    ]
    assert fids(records, StudyResults(records, "table1"), "EMA", 0.05) == {
        0: pytest.approx(6.0),
        1: None,
    }  # seed 1 is lost


def test_a_collapsed_network_has_no_fid_though_it_makes_images() -> None:
    made = score_records.runs("table1", {1e-3: 0.05}, {"BELAY": 1.0}, seeds=2)
    made += [score_records.fid("table1", "BELAY", 1e-3, 20.0 + seed, seed) for seed in range(2)]
    assert fids(made, StudyResults(made, "table1"), "BELAY", 1e-3) == pytest.approx({0: 20.0, 1: 21.0})
    made[1]["final"] = {weights: {"train": 1.0, "test": FAILED + 0.1} for weights in ("w1", "w2")}
    assert fids(made, StudyResults(made, "table1"), "BELAY", 1e-3) == {0: pytest.approx(20.0), 1: None}


def test_of_two_rates_with_fids_the_better_one_is_taken() -> None:
    made = score_records.runs("table1", {3e-4: 0.05, 1e-3: 0.04}, {"EMA": 1.0, "BELAY": {3e-4: 1.0, 1e-3: 2.0}})
    made += [score_records.fid("table1", arm, lr, 1e4 * lr) for arm in ("EMA", "BELAY") for lr in (3e-4, 1e-3)]
    study = StudyResults(made, "table1")
    assert [rate_of_fids(made, study, arm) for arm in ("EMA", "BELAY")] == [1e-3, 3e-4]
    assert fid_at_best(made, study, "EMA") == {0: pytest.approx(10.0)}
    assert rate_difference(made, study, ["EMA", "BELAY"]).startswith("EMA at 0.001, BELAY at 0.0003, so that rates")
    assert rate_difference(made, study, ["EMA"]) == ""


def test_the_fids_of_an_arm_are_those_at_its_best_rate_that_has_any() -> None:
    records = score_records.table1(0.5)
    long = StudyResults(records, "table1")
    assert fid_at_best(records, long, "BELAY") == pytest.approx({3: 7.0, 4: 7.5, 5: 8.0})
    assert fid_at_best(records, long, "no such arm") == {}


def test_fids_where_all_seeds_are_lost_are_not_those_at_the_best_rate() -> None:
    records = score_records.table1()
    lost_alone = [r for r in records if r["kind"] != "fid" or r["fid"] is None]
    assert fid_at_best(lost_alone, StudyResults(records, "table1"), "EMA") == {}
    everywhere = StudyResults(score_records.runs("table1", {3e-4: 1.0, 5e-2: 1.0}, {"EMA": None}), "table1")
    assert fid_at_best(lost_alone, everywhere, "EMA") == {3: None, 4: None, 5: None}


def test_two_runs_of_one_place_are_refused_and_do_not_hide_each_other() -> None:
    lines = score_records.runs("rates", {1e-3: 0.1}, {"BELAY": 1.0})
    study = StudyResults([*lines, *lines], "rates")
    assert len(study.runs) == 2 * len(lines)
    with pytest.raises(ValueError, match=r"two runs of rates have arm BELAY, rate 0\.001, seed 0"):
        study.lost_count("BELAY", 1e-3)
