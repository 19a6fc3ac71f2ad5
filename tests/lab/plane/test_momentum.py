"""The coupling table run live: methods against their programs, deviations that show an error, and the two limits."""

import json
import sys
from itertools import islice

import pytest
import sympy as sp
import torch

from helpers.captions import check_brevity, full_text
from torchbelay.lab.arms import PAPER_SPRING, Arm, Lane
from torchbelay.lab.part import Record, Settings
from torchbelay.lab.plane import momentum, programs
from torchbelay.lab.plane.functions import ROSENBROCK
from torchbelay.lab.records import select, without_times
from torchbelay.lab.report import style
from torchbelay.lab.statistics import fit_power
from torchbelay.ops.reference import couple
from torchbelay.physics import methods
from torchbelay.physics.spring import Spring

QUICK = Settings(seed=0, quick=True)
START = torch.tensor([[0.3, -0.2], [0.1, 0.4]], dtype=torch.float64)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return momentum.run(QUICK, lambda n: None)


def only(records: list[Record], kind: str, **having: object) -> Record:
    (found,) = (r for r in records if r["kind"] == kind and having.items() <= r.items())
    return found


# The table -----------------------------------------------------------------------------------------------------------

ROWS = [row.name for row in programs.table()]


# Methods that the report's table leaves out; tests/behaviour/test_against_programs.py has their programs.
LEFT_OUT = {methods.belay, methods.centred, methods.diloco, methods.ema_nesterov, methods.hard_sync}


def test_the_table_has_the_methods_of_the_library() -> None:
    made = {type(row.method) for row in programs.table()}
    named = {getattr(methods, name) for name in methods.__all__} - {methods.Method} - LEFT_OUT
    assert made == named | {Spring}


@pytest.mark.parametrize("name", ROWS)
def test_every_method_agrees_with_its_program(records: list[Record], name: str) -> None:
    # momentum remembers 10 steps with their rounding; a wrong coefficient differs by at least 1e-3
    assert only(records, "method", name=name)["deviation"] < 1e-13


@pytest.mark.parametrize("name", ROWS)
def test_a_program_differs_from_all_other_methods(name: str) -> None:
    """A deviation near 0 is evidence only if every other row of the table is far off."""
    programs_by_name = {row.name: row.program for row in programs.table()}

    def end(which: str) -> torch.Tensor:
        *_, (w1, w2) = islice(programs_by_name[which](START), 60)
        return torch.cat([w1, w1 if w2 is None else w2])

    mine = end(name)
    assert all((mine - end(other)).abs().max() > 1e-4 for other in programs_by_name if other != name)


def test_the_numbers_are_those_of_the_last_step(records: list[Record]) -> None:
    swa = only(records, "method", name="SWA")
    assert (swa["a"], swa["b"], swa["p"], swa["q"]) == (0.0, 1 / 60, 1.0, 1 / 60)
    lookahead = only(records, "method", name="Lookahead")
    assert (lookahead["a"], lookahead["b"]) == (0.5, 0.5)  # 60 is a multiple of 6: a sync
    assert only(records, "method", name="BELAY")["theta"] == 2.0


def test_schedule_free_by_hand_is_the_package() -> None:
    package = pytest.importorskip("schedulefree", reason="the definition is compared with the authors' package")
    by_hand, theirs = programs._schedule_free(0.9), programs._schedule_free_package(0.9, package)
    for mine, other in islice(zip(by_hand(START), theirs(START), strict=True), 100):
        for x, y in zip(mine, other, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-14)  # a hundred steps of rounding


def test_without_the_package_the_definition_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "schedulefree", None)  # makes the import fail
    (row,) = (row for row in programs.table() if row.name == "schedule-free")
    assert row.against == "its definition"
    assert len(list(islice(row.program(START), 3))) == 3


def test_a_wrong_method_is_detected() -> None:
    lanes = [Lane(Arm("EMA", "SGD", Spring.ema(decay=0.94)), programs.LR)]
    mine = momentum.train(lanes, START, 20, lambda n: None)
    assert momentum.deviation(mine, 0, programs.torch_ema(), START) > 1e-4


# BELAY as momentum ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["momentum", "average of the centre of mass"])
def test_belay_has_this_form_on_a_loss_that_is_not_quadratic(records: list[Record], form: str) -> None:
    assert only(records, "form", name=form)["deviation"] < 1e-14


def test_belay_is_quasi_hyperbolic_momentum_of_negative_share_for_any_gradients() -> None:
    kappa1, kappa2, lr = sp.symbols("kappa1 kappa2 eta", positive=True)
    beta, theta = 1 - kappa1 - kappa2, kappa1 / kappa2
    nu, share = -theta / beta, (1 - kappa1) * kappa2 / (kappa1 + kappa2)
    w1 = w2 = w = sp.Symbol("w")
    v = sp.Integer(0)
    for n in range(3):
        g = sp.Symbol(f"g{n}")  # any loss: both are at the same point
        w1, w2 = couple(w1, w2, -lr * g, a=kappa1, b=kappa2, p=1 - kappa1, q=0)
        v = beta * v + (1 - beta) * g
        w = w - share * lr * ((1 - nu) * g + nu * v)
        assert sp.simplify(w1 - w) == 0


def test_the_share_of_momentum_is_recorded_with_its_sign(records: list[Record]) -> None:
    form = only(records, "form", name="momentum")
    assert form["beta"] == pytest.approx(1 - PAPER_SPRING.kappa1 - PAPER_SPRING.kappa2, rel=1e-15)
    assert form["nu"] == pytest.approx(-2 / 0.925, rel=1e-15)
    assert form["lr_share"] == pytest.approx(PAPER_SPRING.effective_lr_scale, rel=1e-15)


def test_a_share_of_1_is_torchs_momentum() -> None:
    ours, torchs = programs.quasi_hyperbolic(0.9, 1.0, programs.LR / 0.1), programs._torch_sgd(momentum=0.9)
    for (x, _), (y, _) in islice(zip(ours(START), torchs(START), strict=True), 100):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-14)


# The two limits ------------------------------------------------------------------------------------------------------


def test_at_infinite_mass_belay_is_torchs_ema_one_step_late(records: list[Record]) -> None:
    ema = only(records, "ema")
    assert ema["deviation_one_step_later"] < 1e-15
    assert ema["deviation_same_step"] > 1e-3
    assert ema["deviation_follow_after"] == 0


def test_belay_tends_to_the_ema_as_the_mass_grows(records: list[Record]) -> None:
    limit = select(records, "limit")
    assert [r["m1"] for r in limit] == list(momentum.MASSES)
    # at m1 = 100 the next order, m2/m1, still shows
    assert fit_power([r["m1"] for r in limit], [r["difference"] for r in limit]) == pytest.approx(-1, abs=0.01)


def test_gradients_of_an_average_are_averages_of_gradients_for_a_quadratic(records: list[Record]) -> None:
    bowl = [r for r in select(records, "gradient") if r["function"] == momentum.BOWL.name]
    assert len(bowl) == len(momentum.BOWL_RATES)
    assert max(r["deviation"] for r in bowl) < 1e-14
    printed = only(records, "gradient as printed")
    assert printed["deviation"] > 0.1
    assert printed["deviation_unexplained"] < 1e-14  # the missing weight explains all of it


def test_gradients_of_an_average_agree_to_first_order_for_other_losses(records: list[Record]) -> None:
    curved = [r for r in select(records, "gradient") if r["function"] == ROSENBROCK.name]
    power = fit_power([r["distance"] for r in curved], [r["deviation"] for r in curved])
    assert power == pytest.approx(2, abs=0.02)  # the longest paths bend a little


# The part ------------------------------------------------------------------------------------------------------------


def test_the_same_settings_give_the_same_records(records: list[Record]) -> None:
    done = []
    again = momentum.run(QUICK, done.append)
    assert [without_times(r) for r in again] == [without_times(r) for r in records]
    assert sum(done) == momentum.plan(QUICK)[0]
    other = momentum.run(Settings(seed=1, quick=True), lambda n: None)
    assert only(other, "ema")["deviation_same_step"] != only(records, "ema")["deviation_same_step"]


def test_figures_are_drawn_from_records_that_have_been_on_disk(records: list[Record]) -> None:
    plates = momentum.draw(json.loads(json.dumps(records, allow_nan=False)))
    assert [plate.name for plate in plates] == ["momentum-methods", "momentum-limits"]
    for plate in plates:
        assert len(style.as_bytes(plate.figure, "png")) > 10_000
        check_brevity(plate)
        assert "60 steps" in full_text(plate)
        assert f"{momentum.STARTS} " in full_text(plate)
    methods_text, limits_text = (full_text(plate) for plate in plates)
    worst = max(select(records, "method"), key=lambda r: r["deviation"])
    assert f"{worst['deviation']:.1e} ({worst['name']})" in methods_text
    assert "heavy ball, Nesterov, primal averaging and schedule-free" in methods_text
    assert f"{only(records, 'ema')['deviation_one_step_later']:.1e}" in limits_text
