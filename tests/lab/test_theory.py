"""The part `theory`: its measurements agree with the formulas, and its figures say so."""

import json

import numpy as np
import pytest
import torch

from helpers.quadratic import radius, step_matrix
from torchbelay.lab import theory
from torchbelay.lab.part import Record, Settings
from torchbelay.lab.records import select
from torchbelay.lab.registry import PARTS
from torchbelay.lab.report import style
from torchbelay.physics.methods import centred

QUICK = Settings(quick=True)
pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def records() -> list[Record]:
    done: list[int] = []
    found = theory.run(QUICK, done.append)
    assert sum(done) == theory.plan(QUICK)[0]
    return json.loads(json.dumps(found, allow_nan=False))


def test_it_is_a_part_of_the_report() -> None:
    assert PARTS["theory"] is theory


def test_measured_ranges_are_those_of_the_theorem_and_of_eigenvalues(records: list[Record]) -> None:
    found = select(records, "range")
    assert {r["beta"] for r in found} == set(theory.BETAS)
    for r in found:
        assert r["measured"] == pytest.approx(r["limit"], rel=0.15)  # 1,000 steps hardly grow just above the limit
        coupling = centred(r["theta"], r["rate"]).coupling(1, 0.1)
        assert radius(step_matrix(coupling, 0.99 * r["limit"], r["beta"])) < 1
        assert radius(step_matrix(coupling, 1.01 * r["limit"], r["beta"])) > 1
    collapsed = [r for r in found if r["beta"] == 0.9 and r["theta"] < -0.7]
    assert collapsed
    assert all(r["measured"] < 1 for r in collapsed)


def test_measured_noise_is_that_of_the_formula(records: list[Record]) -> None:
    found = select(records, "noise")
    assert len(found) == len(theory._noise_settings())
    for r in found:
        slow = np.exp(-2 * 400 * r["speed"])  # what 400 steps leave of the way to the stationary noise
        assert r["measured"] == pytest.approx(r["noise"], rel=0.3 + slow)
    curves = {name: select(records, "curve", name=name) for name in ("EMA", "critical")}
    for r in curves["EMA"]:  # at equal speed, critical damping has less
        if r["speed"] < theory.PUSH * 0.9:
            nearest = min(curves["critical"], key=lambda c: abs(c["speed"] / r["speed"] - 1))
            assert nearest["noise"] / nearest["speed"] < 1.02 * r["noise"] / r["speed"]


def test_measured_floors_lie_at_the_floor_or_below_it(records: list[Record]) -> None:
    for r in select(records, "floor"):
        assert r["measured"] < r["floor"] + 0.01
        if r["rate"] < 0.2:
            assert r["measured"] == pytest.approx(r["floor"], abs=0.03)


def test_the_figures_are_drawn_from_the_records(records: list[Record]) -> None:
    plates = theory.draw(records)
    assert [plate.name for plate in plates] == ["theory-range", "theory-noise", "theory-floor"]
    for plate in plates:
        assert style.as_bytes(plate.figure, "png").startswith(b"\x89PNG")
        assert plate.caption.count(".") >= 2
    worst = max(abs(r["measured"] / r["limit"] - 1) for r in select(records, "range"))
    assert f"at most {worst:.1%}" in plates[0].notes[0]


def test_the_same_seed_gives_the_same_noise() -> None:
    runs = [theory._noisy_run(-0.5, 0.05, 50, 30, torch.Generator().manual_seed(4)) for _ in range(2)]
    assert runs[0] == runs[1] > 0
