"""What was committed before the runs is what the formulas give, and the formulas are checked by simulation."""

import math

import pytest
import torch

from torchbelay.lab.score import prediction
from torchbelay.lab.score.prediction import BETAS, RATES, committed, penalty, predict
from torchbelay.lab.score.studies import PENALTY_AVERAGING, PENALTY_BETAS


def test_the_committed_prediction_is_that_of_the_formulas() -> None:
    assert committed() == predict()
    assert [(each.beta1, each.rate) for each in committed()] == [
        (b, c) for b in PENALTY_BETAS for c in PENALTY_AVERAGING
    ]
    assert (BETAS, RATES) == (PENALTY_BETAS, PENALTY_AVERAGING)


def test_the_shares_are_within_their_brackets_and_the_penalty_shrinks() -> None:
    for each in committed():
        assert each.low <= each.share <= each.high
        if (each.beta1, each.rate) != prediction.REFERENCE:
            assert each.high < 1


def test_with_small_curvatures_a_longer_memory_costs_more() -> None:
    """The page says so: then H4 would fail by theory's own account."""
    assert penalty((0.9, 0.005), 0.03) > penalty((0.9, 0.0895), 0.03)
    assert penalty((0.9, 0.005), 0.05) > 0.9 * penalty((0.9, 0.0895), 0.05)


@pytest.mark.thorough
@pytest.mark.parametrize(("theta", "beta1", "rate"), [(-0.5, 0.9, 0.0895), (0.0, 0.9, 0.0895), (-0.5, 0.0, 0.0895)])
def test_the_noise_in_a_loss_is_what_a_simulation_finds(
    theta: float, beta1: float, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many copies of one mode, stepped as the method is defined: Adam's momentum, centre of mass, average."""
    x, copies = 0.8, 40_000
    monkeypatch.setattr(prediction, "POINTS", 1)
    monkeypatch.setattr(prediction, "BOTTOM", x)  # a spectrum of one point
    source = torch.Generator().manual_seed(0)
    centre, mean, w2 = (torch.zeros(copies, dtype=torch.float64) for _ in range(3))
    for _ in range(600):
        w1 = centre + theta * (centre - w2)
        noise = math.sqrt(x) * torch.randn(copies, dtype=torch.float64, generator=source)
        mean = beta1 * mean + (1 - beta1) * (x * w1 + noise)
        centre = centre - mean
        w2 = w2 + rate * (centre - w2)
    assert prediction.excess(theta, (beta1, rate), x) == pytest.approx(float(x * w2.square().mean()), rel=0.04)
