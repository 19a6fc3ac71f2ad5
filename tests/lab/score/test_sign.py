"""The part `sign`: what is drawn, and what its captions read from the records."""

from collections.abc import Callable
from typing import cast

import pytest

from helpers import score_records
from helpers.captions import full_text
from helpers.score_records import SIGN_RATES, THETAS, without
from torchbelay.lab.part import Part, Plate, Record, Table
from torchbelay.lab.score import sign
from torchbelay.lab.score.analysis import StudyResults
from torchbelay.lab.score.figures import theta_colour

ALL = ["sign-theta", "sign-table", "sign-speed"]


def drawn(records: list[Record]) -> dict[str, Plate]:
    return score_records.drawn(cast("Part", sign), records)


@pytest.fixture(scope="module")
def plates() -> dict[str, Plate]:
    return drawn(score_records.sign())


def cells(plate: Plate, row: str) -> dict[str, str]:
    assert isinstance(plate.figure, Table)
    (found,) = [each for each in plate.figure.rows if each[0] == row]
    return dict(zip(plate.figure.columns, found, strict=True))


def some_lost(lost: dict[str, int], lr: float = 1.2e-2) -> list[Record]:
    """Each θ loses its first seeds at a rate, `lost[arm]` of them: they stay at EDM's plateau, not at 1."""
    records = score_records.sign(dict.fromkeys(THETAS, 1.0), noise=0.0, spread=0.0)
    for r in records:
        if r["kind"] == "run" and r["lr"] == lr and r["seed"] < lost.get(r["arm"], 0):
            r["final"] = {weights: {"train": 0.86, "test": 0.86} for weights in ("w1", "w2")}
    return records


LOST = {"θ 0": 4, "θ +0.25": 3, "θ +1": 5}


def test_every_seed_is_a_dot_at_its_theta(plates: dict[str, Plate]) -> None:
    for lr, ax in zip(SIGN_RATES, plates["sign-theta"].figure.axes[:3], strict=True):
        dots = {
            each.get_xdata()[0]: each.get_ydata()
            for each in ax.lines
            if each.get_marker() == "." and len(each.get_xdata())
        }
        expected = StudyResults(score_records.sign(), "sign").losses("θ −0.5", lr).values()
        assert sorted(dots[1]) == pytest.approx(sorted(expected))
        bars = {round(each.get_xdata()[0]): each.get_ydata()[0] for each in ax.lines if each.get_marker() == "_"}
        assert bars[1] == pytest.approx(sorted(expected)[2])  # the median of five
    names = [text.get_text() for text in plates["sign-theta"].figure.axes[3].get_xticklabels()]
    assert names == ["−0.9", "−0.5", "−0.25", "0", "+0.25", "+1"]


def test_where_theta_0_is_lost_the_seeds_that_are_lost_are_counted() -> None:
    plate = drawn(some_lost(LOST))["sign-theta"]
    above, below = plate.figure.axes[2], plate.figure.axes[5]
    assert [bar.get_height() for bar in below.patches] == [0, 0, 0, 4, 3, 5]
    *shown, explained = [text.get_text() for text in below.texts]
    assert shown == [*["0/5", "p = 0.062"] * 3, "4/5", "3/5", "p = 0.5", "5/5"]
    assert "McNemar" in explained
    assert [text.get_text() for text in above.texts] == ["lost", "4 of 5", "3 of 5", "5 of 5"]
    bars = {round(each.get_xdata()[0]) for each in above.lines if each.get_marker() == "_"}
    assert bars == {0, 1, 2}  # no median if at least half are lost
    counts = "At 0.012, all 5 seeds are lost at θ = +1, 4 of 5 at 0, 3 of 5 at +0.25 and none at −0.9, −0.5 and −0.25"
    assert plate.caption.endswith(f" {counts}.")
    assert plate.notes[0].startswith(f"{counts}.")  # four seeds of five are not enough evidence, so no more is said
    assert "Generalized Primal Averaging; schedule-free is its case of an averaging rate 1/t" in full_text(plate)
    assert "12 of 90 runs are lost: their test loss is above 0.5" in full_text(plate)
    assert "runs that work end below 0.17 and collapsed runs end above 0.86." in full_text(plate)  # 1.12 × 0.15
    limits = [ax.get_ylim() for ax in plate.figure.axes]
    assert limits[3] == limits[4] != limits[5]  # ratios are not squeezed by what was lost


def test_one_lost_seed_is_no_evidence_and_leaves_the_ratios() -> None:
    made = drawn(some_lost({"θ 0": 1, "θ −0.5": 1}))
    below = made["sign-theta"].figure.axes[5]
    assert [text.get_text() for text in below.texts] == ["4 of 5"] * 5  # pairs that have a ratio
    assert "lose fewer" not in full_text(made["sign-theta"])
    table = made["sign-table"]
    assert cells(table, "θ = −0.5")["0.012: loss"] == "0.150, 1 of 5 lost"
    assert cells(table, "θ = −0.5")["0.012: ÷ θ = 0"] == "1.0000 (1.0000 to 1.0000)"
    assert cells(table, "θ = +1")["0.012: ÷ θ = 0"] == "fewer lost, p = 0.5"


def test_the_caption_says_which_thetas_are_lower_and_higher(plates: dict[str, Plate]) -> None:
    caption = full_text(drawn(score_records.sign(noise=0.0))["sign-theta"])
    at = "no seed is lost; the loss, over that at θ = 0, is"
    assert f"At 0.001 {at} higher at θ = −0.9 (1.090) and +1 (1.010)." in caption
    lower, higher = "lower at θ = −0.5 (0.970) and −0.25 (0.980)", "higher at θ = +0.25 (1.020) and +1 (1.050)"
    assert f"At 0.004 {at} {lower} and {higher}." in caption
    assert "At 0.012, all 5 seeds are lost at θ = +1 and none at −0.9, −0.5, −0.25, 0 and +0.25." in caption
    assert "averaging rate is 1/800" in caption  # as the records have it
    noisy = full_text(plates["sign-theta"])  # an interval that includes 1 shows nothing
    assert not sign.ratios_to_zero(StudyResults(score_records.sign(), "sign"), 4e-3)[-0.5].below
    assert "lower at θ = −0.5" not in noisy


def test_ratios_are_those_to_theta_0_with_their_interval(plates: dict[str, Plate]) -> None:
    found = sign.ratios_to_zero(StudyResults(score_records.sign(), "sign"), 1.2e-2)
    assert list(found) == [-0.9, -0.5, -0.25, 0.25, 1.0]
    assert found[-0.5].ratio is not None
    ax = plates["sign-theta"].figure.axes[5]
    shown = {round(bars.lines[0].get_xdata()[0]): bars for bars in ax.containers}
    assert set(shown) == {0, 1, 2, 4}
    ((low, high),) = [[y for _, y in segment] for segment in shown[1].lines[2][0].get_segments()]
    assert (low, high) == pytest.approx((found[-0.5].ratio.low, found[-0.5].ratio.high))
    assert [text.get_text() for text in ax.texts] == ["θ +1 lost"]


def test_the_range_that_works_is_told_for_every_theta() -> None:
    exact = score_records.sign({"θ −0.5": 1.0, "θ 0": {1e-3: 1.0, 4e-3: 1.0, 1.2e-2: 3.0}}, spread=0.0, noise=0.0)
    plate = drawn(exact)["sign-table"]
    assert cells(plate, "θ = −0.5")["Works over"] == "≥12× (0.001 to 0.012)"
    assert cells(plate, "θ = 0")["Works over"] == "≥5.28× (0.001 to 0.0053)"
    assert plate.caption.endswith("The widest range, ≥12× (0.001 to 0.012), is that of θ = −0.5.")
    assert cells(drawn(some_lost({"θ 0": 1}))["sign-table"], "θ = 0")["Works over"] == "≥4× (0.001 to 0.004)"


def test_the_time_of_runs_that_shared_the_gpu_is_set_apart() -> None:
    records = score_records.sign()
    for r in records:
        if r["kind"] == "run" and r["seed"] == 0:
            r |= {"shared_gpu": True, "wall_s": 120.0}
    (said,) = [note for note in drawn(records)["sign-table"].notes if note.startswith("Time per run")]
    assert said.endswith(
        ": 41.5 s with 6 side by side; 120 s with 6 side by side, while other work used the GPU too: not to be "
        "compared."
    )


def test_the_two_signs_have_two_hues_the_deeper_the_stronger() -> None:
    def channels(theta: float) -> tuple[int, ...]:
        return tuple(int(theta_colour(theta)[i : i + 2], 16) for i in (1, 3, 5))

    for theta in (-0.25, -0.5, -0.9):
        assert channels(theta)[2] > channels(theta)[0]  # blue
        assert channels(-theta)[2] < channels(-theta)[0]  # orange
    assert sum(channels(-0.25)) > sum(channels(-0.5)) > sum(channels(-0.9))
    assert theta_colour(3.0) == theta_colour(1.0)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda r: [], []),
        (lambda r: without(r, kind="run"), ["sign-speed"]),
        (lambda r: without(r, kind="throughput"), ["sign-theta", "sign-table"]),
        (lambda r: without(r, arm="θ 0"), ALL),
        (lambda r: [x for x in r if x.get("seed", 0) == 0], ALL),
        (lambda r: [x for x in r if x.get("lr", 1e-3) == 1e-3], ALL),
        (lambda r: without(r, arm="θ +1", lr=4e-3), ALL),
        (lambda r: without(r, arm="θ −0.5", seed=2), ALL),
        (lambda r: without(r, kind="protocol"), ALL),
    ],
    ids=["nothing", "no runs", "no speeds", "no θ = 0", "one seed", "one rate", "a hole", "a seed", "no protocol"],
)
def test_what_is_missing_is_left_out(change: Callable[[list[Record]], list[Record]], names: list[str]) -> None:
    assert list(drawn(change(score_records.sign()))) == names


def test_runs_that_are_all_lost_are_drawn_too() -> None:
    made = drawn(score_records.sign(dict.fromkeys(score_records.THETAS)))
    assert list(made) == ALL
    assert cells(made["sign-table"], "θ = 0")["Works over"] == "none"
    assert made["sign-table"].caption.endswith("No θ works at any of the rates.")
