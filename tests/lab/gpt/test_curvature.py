"""The curvature of the runs beside the limits of theory, in made-up records and in the kept ones."""

import math
from itertools import pairwise
from typing import Any

import pytest

from helpers import kept_records
from helpers.captions import check_brevity
from helpers.language import ABOUT, make, study
from torchbelay.lab.gpt import curvature, figures
from torchbelay.lab.gpt.analysis import Runs
from torchbelay.lab.gpt.arms import CONSTANT, HALF
from torchbelay.lab.part import Record
from torchbelay.lab.report import style


def sharp(points: dict[float, float], loss: float | None = 1.0) -> list[Record]:
    """EMA's runs for tuning, with a curvature that is the given number over the rate."""
    return [make(CONSTANT.name, lr, 0, loss, "tune") | {"sharpness": x / lr} for lr, x in points.items()]


def test_points_above_the_limit_of_a_quadratic_are_counted() -> None:
    """With Adam's momentum β, the limit of θ = 0 is 2(1 + β)/(1 − β), which is 38."""
    others = [r for r in study().all if (r["arm"], r["split"]) != (CONSTANT.name, "tune")]
    curves = figures.draw([ABOUT, *others, *sharp({0.001: 37.9, 0.002: 38.1, 0.004: 50.0, 0.008: -60.0})])[0]
    (told,) = (note for note in curves.notes if "lie above" in note)
    assert told == (
        "2 of 3 points at the right lie above the limit of their θ: θ = 0 (EMA) 2 of 3. None of those runs diverged: "
        "a run of this network may end above the limit for a quadratic."
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
    assert "no axis here is θ: the figure of the floor has it." in notes
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


STEPS = ABOUT["steps"]


def trace(arm: str, lr: float, *points: tuple[int, float | None]) -> Record:
    """Return a record of curvatures after steps; they are given as multiples of 1/lr."""
    found = [[step, None if x is None else x / lr] for step, x in points]
    return {"kind": "curvature", "arm": arm, "theta": 0.0, "lr": lr, "seed": 0, "products": 10, "curvatures": found}


TRACES = [
    trace(CONSTANT.name, 0.001, (1, 39.0), (STEPS, 10.0)),
    trace(CONSTANT.name, 0.002, (1, -5.0), (STEPS, 40.0)),
    trace(HALF.name, 0.001, (1, 50.0), (STEPS, None)),
]


def test_curvatures_that_were_traced_take_the_place_of_those_at_the_end_of_runs() -> None:
    lines = [*study().all, *sharp({0.001: 60.0})]
    (old,) = curvature.looks(Runs(lines), STEPS)
    assert (old.lr, old.step, old.x) == (0.001, STEPS, pytest.approx(60.0))
    found = curvature.looks(Runs([*lines, *TRACES]), STEPS)
    assert [(each.arm, each.lr, each.step) for each in found] == [
        (CONSTANT, 0.001, 1),
        (CONSTANT, 0.001, STEPS),
        (CONSTANT, 0.002, 1),
        (CONSTANT, 0.002, STEPS),
        (HALF, 0.001, 1),
        (HALF, 0.001, STEPS),
    ]
    assert [each.x for each in curvature.points(found)] == pytest.approx([39.0, 10.0, 40.0, 50.0])
    assert found[0].loss == 1.0  # of the run for tuning


def test_the_curvature_is_drawn_over_the_steps_with_the_limit_of_each_theta() -> None:
    plates = {plate.name: plate for plate in figures.draw([ABOUT, *study().all, *TRACES])}
    plate = plates["gpt-curvature"]
    check_brevity(plate)
    assert plate.caption.endswith("Above its limit: 1 of 2 points before the end, 1 of 2 at the end.")
    left, right = plate.figure.axes  # type: ignore[union-attr]
    lines = [(list(line.get_xdata()), [float(y) for y in line.get_ydata()]) for line in left.lines]
    assert lines[0] == ([1, STEPS], pytest.approx([39.0, 10.0]))
    assert lines[1] == ([1, STEPS], pytest.approx([math.nan, 40.0], nan_ok=True))
    assert lines[2][1] == pytest.approx([38.0, 38.0], rel=1e-3)  # the limit of θ = 0 at β1 = 0.9
    assert len(right.lines) == 2
    notes = " ".join(plate.notes)
    assert "by Lanczos, 10 products" in notes
    assert "2 of 6 measurements have no point" in notes
    told = f"θ = 0 (EMA) at 0.002 −5 after step 1; θ = −0.5 at 0.001 not finite after step {STEPS}."
    assert f"Rate × curvature is: {told}" in notes
    assert "The figure of curvature has earlier steps." in " ".join(plates["gpt-rates"].notes)


def test_no_line_passes_over_a_measurement_without_a_point() -> None:
    broken = trace(CONSTANT.name, 0.001, (1, 30.0), (4, -5.0), (7, 33.0), (STEPS, 34.0))
    plates = {plate.name: plate for plate in figures.draw([ABOUT, *study().all, broken, *TRACES[1:]])}
    (line, *_) = plates["gpt-curvature"].figure.axes[0].lines  # type: ignore[union-attr]
    assert list(line.get_ydata()) == pytest.approx([30.0, math.nan, 33.0, 34.0], nan_ok=True)
    over_rates = [trace(CONSTANT.name, lr, (STEPS, x)) for lr, x in ((0.001, 30.0), (0.002, -5.0), (0.004, 33.0))]
    (rates, *_) = figures.draw([ABOUT, *study().all, *over_rates])
    (line, *_) = rates.figure.axes[1].lines  # type: ignore[union-attr]
    assert list(line.get_ydata()) == pytest.approx([30.0, math.nan, 33.0], nan_ok=True)


def test_some_of_the_traces_do_not_take_the_place_of_the_ends() -> None:
    """If the minutes do not suffice, the figures stay those of the ends, as study.md says."""
    lines = [*study().all, *sharp({0.001: 60.0, 0.004: 70.0})]
    found = curvature.looks(Runs([*lines, *TRACES]), STEPS)
    assert [(each.arm, each.lr, each.step) for each in found] == [(CONSTANT, 0.001, STEPS), (CONSTANT, 0.004, STEPS)]
    plates = {plate.name: plate for plate in figures.draw([ABOUT, *lines, *TRACES])}
    assert "gpt-curvature" not in plates
    assert "20 steps of power iteration" in " ".join(plates["gpt-rates"].notes)
    whole = [*lines, *TRACES, trace(CONSTANT.name, 0.004, (1, 1.0), (STEPS, 2.0))]
    assert len(curvature.looks(Runs(whole), STEPS)) == 8


@pytest.mark.parametrize("top", [50.0, 5e2, 5e3, 1e5, 1e8])
def test_labels_of_the_curvature_do_not_overlap(top: float) -> None:
    lines = [ABOUT, *study().all, trace(CONSTANT.name, 0.001, (1, 5.0), (STEPS, top)), *TRACES[1:]]
    with style.house():
        for plate in figures.draw(lines)[:2]:
            fig: Any = plate.figure
            fig.draw_without_rendering()
            ax = fig.axes[1 if plate.name == "gpt-rates" else 0]
            low, high = ax.get_ylim()
            texts = [tick for tick, y in zip(ax.get_yticklabels(), ax.get_yticks(), strict=True) if low <= y <= high]
            boxes = sorted((text.get_window_extent() for text in texts if text.get_text()), key=lambda box: box.y0)
            assert len(boxes) > 1
            assert all(below.y1 < above.y0 for below, above in pairwise(boxes)), plate.name


def test_negative_curvatures_of_runs_that_are_all_lost_are_told() -> None:
    others = [r for r in study().all if (r["arm"], r["split"]) != (CONSTANT.name, "tune")]
    curves = figures.draw([ABOUT, *others, *sharp({0.001: -60.0}, loss=None)])[0]
    (told,) = (note for note in curves.notes if "no point, because" in note)
    assert "θ = 0 (EMA) with a loss of – at 0.001. These" in told


def test_without_curvatures_before_the_end_no_figure_of_them_is_drawn() -> None:
    names = [plate.name for plate in figures.draw([ABOUT, *study().all, *sharp({0.001: 60.0})])]
    assert "gpt-curvature" not in names
    assert "gpt-floor" in names
    assert "gpt-curvature" not in [plate.name for plate in figures.draw([ABOUT, *study().all])]
