"""Figures 1 to 3 and robustness: their records, against golden ones and by hand, and their figures."""

import json
import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D
from torch import Tensor

from helpers import golden_records
from helpers.captions import check_brevity, full_text
from helpers.golden_records import PARTS, QUICK, quick, run_quick
from torchbelay.lab.part import Part, Plate, Record, Settings
from torchbelay.lab.plane import fig1, fig2, fig3, race, robustness, trajectories
from torchbelay.lab.plane.functions import BEALE, FUNCTIONS, ROSENBROCK
from torchbelay.lab.records import without_times
from torchbelay.lab.report import style

each = pytest.mark.parametrize("part", PARTS, ids=lambda part: part.NAME)
random = pytest.mark.parametrize("part", [fig2, fig3, robustness], ids=lambda part: part.NAME)


@cache
def drawn(part: Part) -> dict[str, Plate]:
    return {plate.name: plate for plate in part.draw(quick(part))}


# Records ------------------------------------------------------------------------------------------------------------


@each
def test_the_records_are_those_that_were_stored(part: Part) -> None:
    assert golden_records.differences(golden_records.distil(quick(part)), golden_records.read(part)) == []


@each
def test_a_second_run_gives_the_same_records_to_the_last_bit(part: Part) -> None:
    again = part.run(QUICK, lambda units: None)
    assert [without_times(r) for r in again] == [without_times(r) for r in quick(part)]


@each
def test_a_part_does_the_work_that_it_planned(part: Part) -> None:
    assert part.plan(QUICK)[0] == run_quick(part)[1] > 0


@each
def test_the_full_version_is_planned_larger_or_the_same(part: Part) -> None:
    (few, small), (many, large) = part.plan(QUICK), part.plan(Settings())
    assert (many > few, small != large) == (part is not fig1, part is not fig1)
    assert "\n" not in small + large


@each
def test_records_have_a_kind_a_function_and_the_options_of_their_lane(part: Part) -> None:
    for record in quick(part):
        assert isinstance(record["kind"], str)
        assert record["function"] in {f.name for f in FUNCTIONS}
        assert {"arm", "inner", "method", "lr", "inner_lr", "effective_lr"} <= record.keys()


class _CaughtError(Exception):
    """The starts that a part would run from."""

    def __init__(self, starts: Tensor) -> None:
        super().__init__()
        self.starts = starts


@pytest.fixture
def starts_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Part, int], Tensor]:
    def run(functions: object, starts: Tensor, *_: object, **__: object) -> None:
        raise _CaughtError(starts)

    monkeypatch.setattr(trajectories, "trace", lambda *_: [])
    monkeypatch.setattr(race, "run", run)

    def starts_of(part: Part, seed: int) -> Tensor:
        with pytest.raises(_CaughtError) as caught:
            part.run(Settings(seed=seed, quick=True), lambda units: None)
        return caught.value.starts

    return starts_of


@random
def test_another_seed_gives_other_starts_and_the_same_seed_the_same(
    part: Part, starts_of: Callable[[Part, int], Tensor]
) -> None:
    zero, one = starts_of(part, 0), starts_of(part, 1)
    assert torch.equal(zero, starts_of(part, 0))
    assert not bool((zero == one).any())


@pytest.mark.parametrize("part", [fig3, robustness], ids=lambda part: part.NAME)
def test_starts_lie_in_the_boxes_of_their_functions(part: Part, starts_of: Callable[[Part, int], Tensor]) -> None:
    starts = starts_of(part, 0)
    assert len(starts) == len(FUNCTIONS)
    for function, each in zip(FUNCTIONS, starts, strict=True):
        assert 0.8 * function.half_width < float(each.abs().max()) <= function.half_width


def test_figure_2_has_starts_in_three_boxes(starts_of: Callable[[Part, int], Tensor]) -> None:
    for half_width, each in zip((0.3, 0.5, 1.0), starts_of(fig2, 0), strict=True):
        assert 0.8 * half_width < float(each.abs().max()) <= half_width


# One step by hand ---------------------------------------------------------------------------------------------------


def algorithm_1(steps: int) -> tuple[list[list[float]], list[list[float]], list[float]]:
    """Return w1 and w2 before each step and after the last, by Algorithm 1 in plain numbers; and the last step's u."""
    k, m1, m2, lr = 8.0, 10.0, 20.0, 0.008
    alpha, beta = 1 - k / (2 * m1), 1 - k / (2 * m2)
    w1, w2 = [[-0.22, 0.61]], [[-0.22, 0.61]]
    u: list[float] = []
    for _ in range(steps):
        (x, y), average = w1[-1], w2[-1]
        u = [-lr * (2 * x + 200 * (x - y * y)), -lr * (-400 * y * (x - y * y))]
        w1.append([alpha * (w + d) + (1 - alpha) * a for w, d, a in zip((x, y), u, average, strict=True)])
        w2.append([beta * a + (1 - beta) * w for w, a in zip((x, y), average, strict=True)])
    return w1, w2, u


def test_figure_1_shows_a_step_of_algorithm_1() -> None:
    (record,) = quick(fig1)
    w1, w2, u = algorithm_1(record["step"])

    def near(point: Sequence[float]) -> object:
        return pytest.approx(point, rel=2e-9)  # nine digits are recorded

    assert record["step"] == 3
    assert record["start"] == w1[0] == [-0.22, 0.61]
    assert record["w1"] == near(w1[-2])
    assert record["w2"] == near(w2[-2])
    assert record["u"] == near(u)
    assert record["w1_star"] == near([w + d for w, d in zip(w1[-2], u, strict=True)])
    assert record["w1_new"] == near(w1[-1])
    assert record["w2_new"] == near(w2[-1])
    assert [near(point) for point in w1[:-1]] == record["trail1"]
    assert [near(point) for point in w2[:-1]] == record["trail2"]
    assert record["method"] == "Spring(k=8.0, m1=10.0, m2=20.0)"


# Figure 3's last step, and shares -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrivals", "last"), [({"BELAY+Adam": 70, "BELAY+SGD": 30}, 30), ({"BELAY+Adam": 70}, 70), ({"EMA+Adam": 3}, 600)]
)
def test_paths_stop_when_the_first_belay_run_has_arrived(arrivals: dict[str, int], last: int) -> None:
    arms = ("BELAY+Adam", "BELAY+SGD", "EMA+Adam", "SGD")
    assert fig3.stop_step([{"arm": arm, "arrived_at": arrivals.get(arm), "steps": 600} for arm in arms]) == last


def test_the_papers_rates() -> None:
    rates = {(r["arm"], r["lr"]) for r in quick(fig3) if r["kind"] == "path"}
    assert rates == {
        ("BELAY+Adam", 5e-2),
        ("BELAY+SGD", 1e-2),
        ("EMA+Adam", 1e-2),
        ("EMA+SGD", 1e-3),
        ("Adam", 1e-3),
        ("SGD", 1e-3),
    }
    assert {r["lr"] for r in quick(fig2) if r["kind"] == "path"} == {0.001, 0.01, 0.15}


def test_the_controls_of_figure_3_run_at_belays_effective_rate() -> None:
    effective = {r["arm"]: (r["inner_lr"], r["effective_lr"]) for r in quick(fig3) if r["kind"] == "arrival"}
    for inner in ("Adam", "SGD"):
        control = effective[f"{inner} at BELAY's effective rate"]
        assert control[0] == control[1] == pytest.approx(effective[f"BELAY+{inner}"][1], rel=1e-15)


def test_the_weights_of_an_ema_run_are_those_of_the_run_without_it() -> None:
    shares = {(r["arm"], r["judged"], r["lr"], r["half_width"]): r for r in quick(fig2) if r["kind"] == "share"}
    fields = ("converged", "diverged", "median_arrival")
    for (arm, judged, lr, half_width), record in shares.items():
        if arm.startswith("EMA+") and judged == "w1":
            plain = shares[arm.removeprefix("EMA+"), "w1", lr, half_width]
            assert [record[field] for field in fields] == [plain[field] for field in fields]


def test_robustness_has_every_method_at_every_rate() -> None:
    arms = ["SGD", "EMA+SGD", "BELAY+SGD", "SGD at BELAY's effective rate", "matched EMA+SGD"]
    arms = [*arms, *(arm.replace("SGD", "Adam") for arm in arms), "momentum"]
    for arm in arms:
        for function in FUNCTIONS:
            ships = "w2" if "+" in arm else "w1"
            rates = [
                r["lr"]
                for r in quick(robustness)
                if r["kind"] == "rate" and (r["arm"], r["function"], r["judged"]) == (arm, function.name, ships)
            ]
            assert rates == robustness.rate_grid(12), (arm, function.name)


def test_learning_rates_are_spread_evenly_over_the_decades() -> None:
    rates = robustness.rate_grid(40)
    assert (rates[0], rates[-1], len(rates)) == (1e-4, 100.0, 40)
    steps = [math.log(b / a) for a, b in pairwise(rates)]
    assert steps == pytest.approx([math.log(1e6) / 39] * 39, rel=1e-4)  # six digits are kept


def rates(**diverged: float) -> list[Record]:
    return [{"lr": float(lr.removeprefix("at_")), "diverged": share} for lr, share in diverged.items()]


def test_the_measured_limit_lies_between_the_last_safe_rate_and_the_first_that_loses_half() -> None:
    assert robustness.measure_limit(rates(at_1=0.0, at_2=0.49, at_8=0.5, at_9=1.0)) == pytest.approx(4.0)
    assert robustness.measure_limit(rates(at_1=0.0, at_2=0.49)) is None
    assert robustness.measure_limit(rates(at_1=0.5)) is None


# Drawing ------------------------------------------------------------------------------------------------------------

NAMES = {
    "fig1": ["fig1"],
    "fig2": ["fig2", "fig2-loss", "fig2-starts"],
    "fig3": ["fig3", "fig3-loss", "fig3-times", "fig3-saddle"],
    "robustness": [
        "robustness-sgd-nominal",
        "robustness-sgd-effective",
        "robustness-adam-nominal",
        "robustness-adam-effective",
        "robustness-theta",
    ],
}
PLATES = [(part, name) for part in PARTS for name in NAMES[part.NAME]]


@each
def test_every_figure_is_drawn(part: Part) -> None:
    assert list(drawn(part)) == NAMES[part.NAME]


@pytest.mark.parametrize(("part", "name"), PLATES, ids=[name for _, name in PLATES])
def test_a_figure_becomes_a_file_without_a_warning(part: Part, name: str) -> None:
    figure = drawn(part)[name].figure
    with style.house():
        assert style.as_bytes(figure, "png").startswith(b"\x89PNG")
    width, _ = figure.get_size_inches()
    assert width <= 9


@pytest.mark.parametrize(("part", "name"), PLATES, ids=[name for _, name in PLATES])
def test_a_caption_is_short_and_its_notes_state_steps_and_starts(part: Part, name: str) -> None:
    plate = drawn(part)[name]
    check_brevity(plate)
    text = full_text(plate)
    assert re.search(r"\(-?0\.\d+, -?0\.\d+\)|\d+ (random )?starts|[Ff]rom the same starts", text), text
    assert re.search(r"\d steps|Step \d", text), text


def test_captions_and_notes_state_the_numbers_of_the_records() -> None:
    texts = {name: full_text(drawn(part)[name]) for part, name in PLATES}
    assert "from (-0.2, 0.3)" in texts["fig2"]
    assert "600 steps" in texts["fig2"]
    assert "40 random starts" in texts["fig2-starts"]
    for function in FUNCTIONS:
        assert f"{function.name} {fig3.START[function.name]}" in texts["fig3"]
    assert "30 random starts" in texts["fig3-times"]
    assert "30 starts within ±0.25" in texts["fig3-saddle"]
    assert "20 starts" in texts["robustness-theta"]
    assert "BELAY+Adam 0.05, BELAY+SGD 0.01, EMA+Adam 0.01, EMA+SGD 0.001, Adam 0.001, SGD 0.001" in texts["fig3-loss"]
    (sgd,) = (r for r in quick(fig3) if r["kind"] == "saddle" and r["arm"] == "SGD")
    assert f"With SGD {sgd['converged']:.0%} of the starts" in texts["fig3-saddle"]
    for start in fig2.STARTS:
        (lost,) = traced(fig2, start=list(start), lr=0.01, arm="SGD")
        assert f"SGD diverges at step {lost['diverged_at']}" in texts["fig2"]
    at = {
        (r["arm"], r["half_width"]): r["converged"]
        for r in quick(fig2)
        if r["kind"] == "share" and r["lr"] == 0.01 and r["judged"] == "w2"
    }
    for half_width in fig2.BOXES:
        share = at["BELAY+SGD", half_width]
        assert f"within ±{half_width:g}: {share:.0%} for BELAY+SGD" in texts["fig2-starts"]


@each
def test_drawing_leaves_the_records_alone(part: Part) -> None:
    before = json.dumps(quick(part))
    assert drawn(part)
    assert json.dumps(quick(part)) == before


def written(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def crosses(ax: Axes) -> list[Line2D]:
    return [line for line in ax.lines if line.get_marker() == "X"]


def traced(part: Part, **options: object) -> list[Record]:
    records = [r for r in quick(part) if r["kind"] == "path"]
    return [r for r in records if all(r[key] == value for key, value in options.items())]


def test_a_diverged_run_is_marked_on_its_path() -> None:
    shown = traced(fig2, start=[-0.2, 0.3]) + traced(fig2, start=[0.05, 0.05], lr=0.01)
    assert [r["arm"] for r in shown[-6:] if r["diverged_at"]] == ["EMA+SGD", "SGD"]
    for ax, record in zip(drawn(fig2)["fig2"].figure.axes, shown, strict=True):
        assert ax.get_title() == record["arm"]
        texts = [f"✕ diverged, step {record['diverged_at']}"] if record["diverged_at"] else []
        assert written(ax) == texts


def test_a_diverged_run_is_marked_on_its_loss_curve() -> None:
    for ax, lr in zip(drawn(fig2)["fig2-loss"].figure.axes, fig2.RATES, strict=True):
        lost = [r for r in traced(fig2, start=[-0.2, 0.3], lr=lr) if r["diverged_at"]]
        assert [line.get_xdata()[0] for line in crosses(ax)] == [r["diverged_at"] + 1 for r in lost]
        assert ax.get_title(loc="left") == f"learning rate {lr:g}"


@pytest.mark.parametrize(("until", "marked"), [(None, True), (7, True), (6, False)])
def test_a_path_is_marked_as_diverged_only_if_it_was_by_the_last_step_shown(until: int | None, marked: bool) -> None:
    points = [[0.1 * i, 0.0] for i in range(7)]
    record = {"arm": "SGD", "start": [0.0, 0.0], "at": list(range(7)), "w1": points, "w2": None, "diverged_at": 7}
    with style.house():
        ax = style.figure().subplots()
        trajectories.draw_path(ax, record, until)
    assert written(ax) == (["✕ diverged, step 7"] if marked else [])
    ends = [line for line in ax.lines if line.get_marker() == "o"]
    assert len(ends) == (1 if marked else 2)  # the start, and the end if there is one


def test_a_path_shows_w1_thin_and_w2_thick() -> None:
    record = next(r for r in traced(fig2, start=[-0.2, 0.3]) if r["arm"] == "BELAY+SGD")
    with style.house():
        ax = style.figure().subplots()
        trajectories.draw_path(ax, record, 20)
    thin, thick = (line for line in ax.lines if line.get_linestyle() == "-" and len(line.get_xdata()) > 1)
    for line, which in ((thin, "w1"), (thick, "w2")):
        assert [list(point) for point in line.get_xydata()] == record[which][:21]
    assert thin.get_linewidth() < thick.get_linewidth()
    assert thin.get_alpha() < 1 == thick.get_alpha()


def test_a_method_that_never_arrives_has_a_cross_and_the_word_never() -> None:
    rows = [
        {"arm": "SGD", "steps": 600, "median_arrival": None, "converged": 0.25},
        {"arm": "Adam", "steps": 600, "median_arrival": 30, "converged": 1.0},
        {"arm": "EMA+SGD", "steps": 600, "median_arrival": 0, "converged": 0.5},
    ]
    with style.house():
        ax = style.figure().subplots()
        fig3._draw_medians(ax, rows)
    assert written(ax) == ["never · 25%", "30 · 100%", "0 · 50%"]
    (cross,) = crosses(ax)
    assert cross.get_ydata()[0] == 0
    assert cross.get_xdata()[0] > 600


@pytest.mark.parametrize("name", ["fig3-times", "fig3-saddle"])
def test_every_method_has_its_row_of_times(name: str) -> None:
    kind = {"fig3-times": "arrival", "fig3-saddle": "saddle"}[name]
    functions = FUNCTIONS if kind == "arrival" else [BEALE]
    field = {"arrival": "median_arrival", "saddle": "median_of_arrived"}[kind]
    for ax, function in zip(drawn(fig3)[name].figure.axes, functions, strict=True):
        rows = [r for r in quick(fig3) if r["kind"] == kind and r["function"] == function.name]
        texts = ["never" if r[field] is None else str(r[field]) for r in rows]
        assert written(ax) == [f"{first} · {r['converged']:.0%}" for first, r in zip(texts, rows, strict=True)]
        assert len(crosses(ax)) == texts.count("never")


def test_a_share_that_diverged_is_hatched_from_above() -> None:
    chosen = [
        {"lr": lr, "effective_lr": 0.5 * lr, "converged": c, "diverged": d, "limit": 0.2}
        for lr, c, d in ((0.01, 0.2, 0.0), (0.1, 0.9, 0.0), (1.0, 0.0, 0.75))
    ]
    for axis, scale in (("lr", 1.0), ("effective_lr", 0.5)):
        ax = style.figure().subplots()
        robustness.draw_ridge(ax, chosen, axis, style.BELAY_COLOUR)
        filled, hatched = (c for c in ax.collections if isinstance(c, PolyCollection))
        assert hatched.get_hatch()
        assert not filled.get_hatch()
        corner = [1.0 * scale, 0.25]
        assert corner in hatched.get_paths()[0].vertices.tolist()
        assert [0.1 * scale, 0.9] in filled.get_paths()[0].vertices.tolist()
        (tick,) = (line for line in ax.lines if line.get_color() == "black")
        assert tick.get_xdata()[0] == pytest.approx(0.2 * scale)


@pytest.mark.parametrize("kind", ["nominal", "effective"])
def test_the_predicted_limit_is_drawn_for_every_sgd_method_on_every_smooth_function(kind: str) -> None:
    axes = drawn(robustness)[f"robustness-sgd-{kind}"].figure.axes
    arms = robustness.arm_order(quick(robustness), "SGD")
    assert len(axes) == len(arms) * len(FUNCTIONS)
    for i, ax in enumerate(axes):
        function, arm = FUNCTIONS[i % len(FUNCTIONS)], arms[i // len(FUNCTIONS)]
        record = next(
            r for r in quick(robustness) if (r.get("family"), r["arm"], r["function"]) == ("SGD", arm, function.name)
        )
        ticks = [line.get_xdata()[0] for line in ax.lines if line.get_color() == "black"]
        scale = 1.0 if kind == "nominal" else record["effective_lr"] / record["lr"]
        assert ticks == ([] if record["limit"] is None else [pytest.approx(record["limit"] * scale)])


def test_figure_1_draws_a_coil_between_the_masses_of_even_width_on_the_page() -> None:
    (record,), plate = quick(fig1), drawn(fig1)["fig1"]
    plate.figure.draw_without_rendering()
    (ax,) = plate.figure.axes
    (coil,) = (line for line in ax.lines if line.get_color() == fig1.COIL)
    page = torch.tensor(ax.transData.transform(coil.get_xydata()))
    along = (page[-1] - page[0]) / (page[-1] - page[0]).norm()
    across = (page - page[0]) @ torch.stack((-along[1], along[0]))
    assert coil.get_xydata()[0].tolist() == pytest.approx(record["w1"])
    assert coil.get_xydata()[-1].tolist() == pytest.approx(record["w2"])
    torch.testing.assert_close(across[1:-1].abs(), torch.full_like(across[1:-1], 7.0), rtol=0, atol=0.1)
    assert bool((across[1:-2] * across[2:-1] < 0).all())


@pytest.mark.parametrize("name", ["w1,", "w1*", "w1'", "w2,", "w2'", "spring"])
def test_figure_1_names_every_point(name: str) -> None:
    (ax,) = drawn(fig1)["fig1"].figure.axes
    assert [text for text in written(ax) if text.startswith(name)]


def test_contours_cover_the_panel_and_mark_the_minimum() -> None:
    with style.house():
        ax = style.figure().subplots()
        trajectories.draw_contours(ax, ROSENBROCK, (-0.5, 0.25), (-0.4, 0.8))
    (image,) = ax.images
    assert image.get_extent() == [-0.5, 0.25, -0.4, 0.8]
    assert ax.get_xlim() == (-0.5, 0.25)
    assert [line.get_xydata().tolist() for line in ax.lines if line.get_marker() == "+"] == [[[0.0, 0.0]]]
