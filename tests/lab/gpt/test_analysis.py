"""Best rates, ranges and hypotheses, on made-up runs whose answers are known."""

import math
import re

import pytest

from helpers import kept_records
from helpers.captions import check_brevity
from torchbelay.lab.answer import Answer
from torchbelay.lab.gpt import figures
from torchbelay.lab.gpt.analysis import Runs, judged, width_ratio
from torchbelay.lab.gpt.arms import ARMS, BELAY, CONSTANT, HALF, QUARTER
from torchbelay.lab.hypotheses import Hypothesis
from torchbelay.lab.part import Record, Table

LRS = (0.001, 0.002, 0.004, 0.008)


def make(arm: str, lr: float, seed: int, loss: float | None, split: str = "judge") -> Record:
    losses = {"w1": loss, "w2": loss, **dict.fromkeys(ARMS[arm].spectators, loss)}
    theta = ARMS[arm].theta
    key = {"kind": "run", "arm": arm, "theta": theta, "lr": lr, "seed": seed, "split": split}
    return {**key, "losses": losses, "fresh": loss}


def curve(arm: str, losses: list[float | None], seeds: int = 5) -> list[Record]:
    """Runs of an arm at all rates: two seeds for tuning, and some for judging, all a little different."""
    found = []
    for split, first, count in (("tune", 0, 2), ("judge", 1000, seeds)):
        for seed in range(first, first + count):
            for lr, loss in zip(LRS, losses, strict=True):
                noisy = None if loss is None else loss * (1 + 1e-4 * (seed % 7) + 1e-5 * ((seed * len(arm)) % 5))
                found.append(make(arm, lr, seed, noisy, split))
    return found


def study(seeds: int = 5, **special: list[float | None]) -> Runs:
    losses = {
        CONSTANT.name: [1.1, 1.0, 1.1, 1.3],
        QUARTER.name: [1.1, 1.0, 1.01, 1.015],
        HALF.name: [1.1, 1.0, 1.1, 1.3],
        BELAY.name: [1.1, 1.0, 1.1, 1.3],
    }
    losses |= special
    return Runs([record for arm, values in losses.items() for record in curve(arm, values, seeds)])


def test_the_best_rate_is_that_of_the_seeds_for_tuning() -> None:
    runs = Runs(
        [make(CONSTANT.name, lr, 0, loss, "tune") for lr, loss in zip(LRS, (3.0, 2.0, 1.0, None), strict=True)]
        + [make(CONSTANT.name, lr, 1000, loss) for lr, loss in zip(LRS, (0.1, 2.0, 3.0, 0.05), strict=True)]
    )
    assert runs.best_lr(CONSTANT.name) == 0.004


def test_a_rate_that_loses_a_seed_is_never_the_best() -> None:
    runs = Runs(
        [
            *(make(CONSTANT.name, 0.001, seed, 2.0, "tune") for seed in (0, 1)),
            make(CONSTANT.name, 0.002, 0, 0.5, "tune"),
            make(CONSTANT.name, 0.002, 1, None, "tune"),
        ]
    )
    assert runs.best_lr(CONSTANT.name) == 0.001


def test_a_rate_with_fewer_seeds_is_never_the_best() -> None:
    runs = Runs(
        [
            *(make(CONSTANT.name, lr, 0, loss, "tune") for lr, loss in zip(LRS, (3.0, 2.0, 1.9, 1.0), strict=True)),
            *(make(CONSTANT.name, lr, 1, loss, "tune") for lr, loss in zip(LRS[:3], (3.0, 1.8, 2.0), strict=True)),
        ]
    )
    assert runs.best_lr(CONSTANT.name) == 0.002


def answers(runs: Runs) -> dict[str, Answer]:
    return {h.id: h.answer for h in judged(runs)}


def test_the_hypotheses_hold_if_the_numbers_say_so() -> None:
    assert answers(study()) == {
        f"H2 {QUARTER.name}": Answer.HOLDS,
        f"H2 {HALF.name}": Answer.UNDECIDED,  # the same curve as EMA's
        "H3": Answer.HOLDS,
        "H5": Answer.HOLDS,
    }


def test_a_narrower_range_refutes_that_it_is_wider() -> None:
    found = answers(study(**{QUARTER.name: [1.3, 1.0, 1.3, 1.3]}))
    assert found[f"H2 {QUARTER.name}"] is Answer.FAILS


def test_seeds_without_all_their_runs_do_not_count() -> None:
    whole = study()
    without = [r for r in whole.all if (r["arm"], r["lr"], r["seed"]) != (QUARTER.name, 0.008, 1004)]
    runs = Runs(without)
    assert runs.whole_seeds() == [1000, 1001, 1002, 1003]
    assert {h.seeds for h in judged(runs)} == {4}
    late = Runs([r for r in without if r["arm"] != BELAY.name or r["seed"] < 1002])
    assert {h.id: h.seeds for h in judged(late)}["H5"] == 2


def test_too_few_seeds_decide_nothing_and_none_are_not_run() -> None:
    assert set(answers(study(seeds=2)).values()) == {Answer.UNDECIDED}
    assert set(answers(study(seeds=0)).values()) == {Answer.OPEN}
    assert set(answers(Runs([])).values()) == {Answer.OPEN}


def by_id(runs: Runs) -> dict[str, Hypothesis]:
    return {h.id: h for h in judged(runs)}


def test_a_worse_arm_is_not_shown_to_be_as_good() -> None:
    found = by_id(study(**{HALF.name: [1.2, 1.05, 1.2, 1.4]}))
    assert found["H3"].answer is Answer.FAILS
    assert found["H3"].p > 0.9


def test_a_difference_near_the_margin_is_undecided() -> None:
    found = by_id(study(seeds=3, **{HALF.name: [1.2, 1.01, 1.2, 1.4]}))
    assert found["H3"].answer is Answer.UNDECIDED


def test_a_better_belay_refutes_its_hypothesis() -> None:
    assert by_id(study(**{BELAY.name: [1.0, 0.9, 1.0, 1.2]}))["H5"].answer is Answer.FAILS


def test_lost_runs_count_as_the_worst() -> None:
    found = by_id(study(**{HALF.name: [None, 1.0, None, None]}))
    assert found["H3"].answer is Answer.HOLDS
    found = by_id(study(**{HALF.name: [None, None, None, None]}))
    assert found["H3"].p == 1.0
    assert found["H3"].against == 2**-5  # by signs alone
    assert found[f"H2 {HALF.name}"].answer is Answer.FAILS  # a range of one point


def test_the_width_is_read_off_the_curve() -> None:
    runs = study()
    # from 0.002 up, 1.015 stays below 1.02; below it, the line from 1.0 to 1.1 reaches 1.02 after log 1.02/log 1.1
    expected = math.log(4) + math.log(2) * math.log(1.02) / math.log(1.1)
    assert runs.width(QUARTER.name, 1001) == pytest.approx(expected, rel=1e-3)


def test_the_ratio_of_two_ranges_is_that_of_their_ends() -> None:
    found = width_ratio(study(), QUARTER.name)
    assert found is not None
    # around 0.002, EMA's ends after log 1.02/log 1.1 of the way to either neighbour
    share = math.log(2) * math.log(1.02) / math.log(1.1)
    assert found.mean == pytest.approx(math.exp(math.log(4) + share - 2 * share), rel=2e-3)
    assert found.low <= found.mean <= found.high
    assert width_ratio(study(seeds=1), QUARTER.name) is None
    assert "ratio" not in by_id(study(seeds=1))["H2 θ = −0.25"].numbers


ABOUT = {
    "kind": "protocol",
    "complete": True,
    "layers": 1,
    "width": 8,
    "context": 8,
    "batch": 2,
    "steps": 10,
    "warmup": 1,
    "rate": 0.01,
    "bytes": {"train": 1, "tune": 1, "judge": 1},
    "packages": 1,
    "digest": "0" * 64,
    "device_s": 1,
    "date": "2026-01",
    "device": "CPU",
    "torch": "2",
}


def test_the_plates_are_drawn_from_records_alone() -> None:
    plates = {plate.name: plate for plate in figures.draw([ABOUT, *study().all])}
    assert set(plates) == {"gpt-rates", "gpt-arms", "gpt-effects", "gpt-hypotheses"}
    table = plates["gpt-hypotheses"].figure
    assert isinstance(table, Table)
    assert [row[-1] for row in table.rows] == ["holds", "undecided", "holds", "holds"]
    assert "wider than EMA's with θ = −0.25" in plates["gpt-rates"].caption


def test_the_table_of_arms_says_which_loss_is_the_lowest() -> None:
    def caption(**losses: list[float | None]) -> str:
        plates = {plate.name: plate for plate in figures.draw([ABOUT, *study(**losses).all])}
        return plates["gpt-arms"].caption.split("in nats per byte. ")[1]

    lowest = caption(**{HALF.name: [1.2, 0.9, 1.0, 1.1]})
    assert re.fullmatch(
        r"The lowest mean loss of an average, 0\.9\d+, is that of θ = −0\.5; ÷ EMA it is 0\.9\d+ \(.*\)\.", lowest
    )
    assert re.fullmatch(
        r"The lowest mean loss of an average is EMA's, 0\.[4-6]\d+\.", caption(**{CONSTANT.name: [1.2, 0.5, 1.1, 1.2]})
    )


@pytest.mark.parametrize("runs", [5, 20, 33])
def test_a_study_that_was_stopped_can_be_drawn_and_says_so(runs: int) -> None:
    plates = figures.draw([ABOUT | {"complete": False}, *study().all[:runs]])
    assert "Too few seeds" in plates[0].caption
    assert "The study is not complete: some arms lack runs." in plates[0].notes


def test_a_curve_that_leaves_the_figure_is_told_in_words() -> None:
    (curves, *_) = figures.draw([ABOUT, *study(**{HALF.name: [1.2, 1.0, 1.1, None]}).all])
    (told,) = (note for note in curves.notes if note.startswith("At 0.008, the mean losses are: "))
    assert "θ = −0.5 – (5 of 5 lost)" in told
    assert "not complete" not in " ".join(curves.notes)


def sharp(points: dict[float, float], loss: float | None = 1.0) -> list[Record]:
    """EMA's runs for tuning, with a curvature that is the given number over the rate."""
    return [make(CONSTANT.name, lr, 0, loss, "tune") | {"sharpness": x / lr} for lr, x in points.items()]


def test_points_above_the_limit_of_a_quadratic_are_counted() -> None:
    """With Adam's momentum β, the limit of θ = 0 is 2(1 + β)/(1 − β), which is 38."""
    others = [r for r in study().all if (r["arm"], r["split"]) != (CONSTANT.name, "tune")]
    curves = figures.draw([ABOUT, *others, *sharp({0.001: 37.9, 0.002: 38.1, 0.004: 50.0, 0.008: -60.0})])[0]
    (told,) = (note for note in curves.notes if "lie above" in note)
    assert told == (
        "2 of 3 points at the right lie above the limit of their θ: θ = 0 (EMA) 2 of 3. None of those runs diverged, "
        "so the limit for a quadratic is not one for this network."
    )
    assert "; 2 of 3 points lie above theirs." in curves.caption
    lost = figures.draw([ABOUT, *others, *sharp({0.001: 37.9}), *sharp({0.002: 39.0}, loss=None)])[0]
    (told,) = (note for note in lost.notes if "lie above" in note)
    assert told.endswith("θ = 0 (EMA) 1 of 2. 1 of those runs diverged.")
    below = figures.draw([ABOUT, *others, *sharp({0.001: 37.9})])[0]
    assert "lie above" not in " ".join((below.caption, *below.notes))


def test_most_points_of_the_kept_runs_lie_above_the_limit_and_none_is_lost() -> None:
    lines = kept_records.lines("gpt")
    found = [r for r in lines if r["kind"] == "run" and r.get("sharpness") is not None and r["sharpness"] > 0]
    ema = [r for r in found if r["arm"] == CONSTANT.name]
    above = sum(r["lr"] * r["sharpness"] > 38 for r in ema)
    (told,) = (note for note in figures.draw(lines)[0].notes if "lie above" in note)
    count, total = map(int, told.split(" points")[0].split(" of "))
    assert total == len(found) < 2 * count
    assert f"θ = 0 (EMA) {above} of {len(ema)}" in told
    assert all(r["losses"]["w2"] is not None for r in found)
    assert "None of those runs diverged" in told


def test_runs_of_negative_curvature_have_no_point_and_are_told_with_their_losses() -> None:
    lines = kept_records.lines("gpt")
    measured = [r for r in lines if r["kind"] == "run" and r.get("sharpness") is not None]
    negative = [r for r in measured if r["sharpness"] <= 0]
    plates = {plate.name: plate for plate in figures.draw(lines)}
    for name in ("gpt-rates", "gpt-floor"):
        (told,) = (note for note in plates[name].notes if "no point, because" in note)
        assert told.startswith(f"{len(negative)} of {len(measured)} measured runs")
        for r in negative:
            best = min(other["losses"]["w2"] for other in measured if other["arm"] == r["arm"])
            assert f"{r['losses']['w2']:.4f} at {r['lr']:g}" in told
            assert f"({best:.4f} at the best rate)" in told
    positive = [r for r in lines if r not in negative]
    assert not any("no point, because" in note for plate in figures.draw(positive) for note in plate.notes)


def test_the_notes_say_where_the_floor_is_drawn_and_when_the_curvature_was_measured() -> None:
    (about,) = (line for line in kept_records.lines("gpt") if line["kind"] == "protocol")
    notes = " ".join(figures.draw(kept_records.lines("gpt"))[0].notes)
    assert f"after the last of {about['steps']:,} steps of the first seed for tuning" in notes
    floor = -0.1 / (1 - 0.9 * 0.99)  # −(1 − β)/(1 − β(1 − c))
    assert about["rate"] == 0.01
    assert "no axis here is θ: the next figure has it." in notes
    assert f"At β1 = 0.9 and averaging rate 0.01 it is −{-floor:.2f}; every θ drawn lies above it." in notes
    short = figures.draw([ABOUT | {"rate": 0.5}, *study().all])[0]  # the floor of so short an average is −0.18
    assert "it is −0.18; below it: θ = −0.25 and θ = −0.5." in " ".join(short.notes)


def test_the_floor_and_the_limit_are_drawn_over_theta_with_the_curvatures_of_the_runs() -> None:
    lines = kept_records.lines("gpt")
    (plate,) = [plate for plate in figures.draw(lines) if plate.name == "gpt-floor"]
    check_brevity(plate)
    (ax,) = plate.figure.axes  # type: ignore[union-attr]
    curve, floor, *circles = ax.lines
    limits = dict(zip([round(float(theta), 3) for theta in curve.get_xdata()], curve.get_ydata(), strict=True))
    assert floor.get_xdata()[0] == pytest.approx(-0.1 / (1 - 0.9 * 0.99))
    left = [limit for theta, limit in limits.items() if theta < floor.get_xdata()[0]]
    assert max(left) < min(limit for theta, limit in limits.items() if floor.get_xdata()[0] < theta < 0.5) / 2
    found = [r for r in lines if r["kind"] == "run" and (r.get("sharpness") or 0) > 0]
    shown = sorted(float(line.get_ydata()[0]) for line in circles if len(line.get_ydata()))
    assert shown == pytest.approx(sorted(r["lr"] * r["sharpness"] for r in found))
    (told,) = (note for note in figures.draw(lines)[0].notes if "lie above" in note)
    assert plate.caption.endswith(f"Below the floor: no run; above the limit: {told.split(' points')[0]}.")


def test_every_curvature_of_the_kept_runs_is_of_the_first_seed_for_tuning() -> None:
    lines = [line for line in kept_records.lines("gpt") if line["kind"] == "run"]
    first = min(line["seed"] for line in lines if line["split"] == "tune")
    assert {(line["seed"], line["split"]) for line in lines if "sharpness" in line} == {(first, "tune")}


def test_every_plate_says_what_theta_below_zero_is() -> None:
    plates = [plate for plate in figures.draw([ABOUT, *study().all]) if plate.name != "gpt-effects"]  # it has θ > 0
    assert [any("Generalized Primal Averaging" in note for note in plate.notes) for plate in plates] == [True] * 3
