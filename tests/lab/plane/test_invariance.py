"""The rule k(T): real runs against powers of a matrix, noise against simulation, and the figures."""

import json
from itertools import pairwise

import pytest

from helpers.captions import check_brevity, full_text
from torchbelay.lab.part import Record, Settings
from torchbelay.lab.plane import invariance
from torchbelay.lab.plane.invariance import runs_by_length
from torchbelay.lab.plane.quadratic import HEAVY, LENGTHS, PAPER, Masses
from torchbelay.lab.report import style

QUICK = Settings(seed=0, quick=True)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return invariance.run(QUICK, lambda n: None)


def test_real_runs_agree_with_the_matrices(records: list[Record]) -> None:
    real = [r for r in records if r["kind"] == "path" and r["deviation_of_belay"] is not None]
    assert {r["steps"] for r in real} == {1000}
    assert {(r["masses"], r["rule"]) for r in real} >= {(HEAVY.name, rule) for rule in HEAVY.rules}
    assert max(r["deviation_of_belay"] for r in real) < 1e-12  # a thousand steps of rounding


@pytest.mark.parametrize("masses", [PAPER, HEAVY], ids=lambda m: m.name)
@pytest.mark.parametrize("rule", ["printed", "exact"])
def test_with_the_rule_paths_tend_to_the_flow_as_one_over_T(records: list[Record], masses: Masses, rule: str) -> None:
    rows = [r for r in runs_by_length(records, "path", masses.name, rule) if r["steps"] >= 10_000]
    far = [r["distance_from_flow"] for r in rows]
    for long, longer in pairwise(far):
        assert 8 < long / longer < 14  # 10, except for the next order, κ, which is 0.12 at its largest here


@pytest.mark.parametrize("rule", ["k of 1,000,000", "k of 1,000"])
def test_without_the_rule_paths_differ(records: list[Record], rule: str) -> None:
    apart = invariance.spread(runs_by_length(records, "path", HEAVY.name, rule))
    assert apart > 100 * invariance.spread(runs_by_length(records, "path", HEAVY.name, "printed"))


def test_spread_is_the_largest_gap_at_any_mark() -> None:
    assert invariance.spread([{"path": [1.0, 0.5, 0.2]}, {"path": [1.0, 0.75, 0.1]}, {"path": [1.0, 0.6, 0.1]}]) == 0.25


def test_the_printed_rule_is_refused_if_it_makes_no_average(records: list[Record]) -> None:
    (refused,) = (r for r in records if r["kind"] == "refused")
    assert (refused["masses"], refused["rule"], refused["steps"]) == (PAPER.name, "printed", 1000)
    assert "rule='exact'" in refused["why"]
    assert [r["steps"] for r in runs_by_length(records, "path", PAPER.name, "exact")] == list(LENGTHS)


def test_the_exact_rule_cannot_keep_the_effective_learning_rate(records: list[Record]) -> None:
    short, *_, long = runs_by_length(records, "path", PAPER.name, "exact")
    assert short["effective_lr_scale"] == pytest.approx(0.6858, abs=1e-4)
    assert long["effective_lr_scale"] == pytest.approx(0.7998, abs=1e-4)


# Noise ---------------------------------------------------------------------------------------------------------------


def test_noisy_runs_through_belay_have_the_expected_losses(records: list[Record]) -> None:
    simulated = [r for r in records if r["kind"] == "noise" and r["runs"]]
    assert len(simulated) == 6  # every spring of the shortest run
    for r in simulated:
        assert abs(r["simulated_w2"] - r["loss_w2"]) < 4 * r["standard_error"]
        assert r["standard_error"] < 0.15 * r["loss_w2"]


def test_with_noise_and_a_constant_learning_rate_longer_runs_are_better(records: list[Record]) -> None:
    losses = [r["loss_w2"] for r in runs_by_length(records, "noise", HEAVY.name, "printed")]
    for short, long in pairwise(losses):
        assert 8 < short / long < 12  # as 1/T
    floor = [r["loss_w2"] for r in runs_by_length(records, "noise", HEAVY.name, "k of 1,000")]
    assert floor[-1] == pytest.approx(floor[0], rel=1e-4)


# The part ------------------------------------------------------------------------------------------------------------


def test_the_same_settings_give_the_same_records(records: list[Record]) -> None:
    done = []
    assert invariance.run(QUICK, done.append) == records
    assert sum(done) == invariance.plan(QUICK)[0]


def test_figures_are_drawn_from_records_that_have_been_on_disk(records: list[Record]) -> None:
    plates = invariance.draw(json.loads(json.dumps(records, allow_nan=False)))
    assert [plate.name for plate in plates] == ["invariance-paths", "invariance-lengths"]
    assert all(len(style.as_bytes(plate.figure, "png")) > 10_000 for plate in plates)
    for plate in plates:
        check_brevity(plate)
    paths, lengths = (full_text(plate) for plate in plates)
    for rule, form in (("printed", ".2%"), ("k of 1,000,000", ".0%"), ("k of 1,000", ".0%")):
        assert format(invariance.spread(runs_by_length(records, "path", HEAVY.name, rule)), form) in paths
    assert "no average for 1,000 steps and is refused" in lengths
    for r in runs_by_length(records, "noise", HEAVY.name, "printed")[:: len(LENGTHS) - 1]:
        assert f"{r['loss_w2']:.1e}" in lengths
