"""The quadratic as powers of a matrix: one step, the flow that paths tend to, and expected losses with noise."""

import math

import pytest
import torch

from torchbelay.lab.plane import quadratic
from torchbelay.lab.plane.quadratic import HEAVY, LENGTHS, PAPER, T0
from torchbelay.physics.spring import Spring


@pytest.mark.parametrize("masses", [PAPER, HEAVY], ids=lambda m: m.name)
def test_the_rules_give_k_as_stated(masses: quadratic.Masses) -> None:
    assert quadratic.make_spring(masses, "printed", T0).k == 1.0
    assert quadratic.make_spring(masses, "printed", T0 // 10).k == pytest.approx(10, rel=1e-12)
    assert {quadratic.make_spring(masses, "k of 1,000,000", steps).k for steps in LENGTHS} == {1.0}
    assert {quadratic.make_spring(HEAVY, "k of 1,000", steps).k for steps in LENGTHS} == {1000.0}


@pytest.mark.parametrize("follow", ["before", "after"])
def test_a_step_of_the_matrix_is_a_step_of_algorithm_1(follow: str) -> None:
    spring, lr, h = Spring(k=1.0, m1=10.0, m2=20.0, follow=follow), 0.1, 2.0
    w1, w2 = 0.7, -0.4
    stepped = w1 - lr * h * w1
    expected = [0.95 * stepped + 0.05 * w2, 0.975 * w2 + 0.025 * (stepped if follow == "after" else w1)]
    found = quadratic.step_matrix(spring, lr, h) @ torch.tensor([w1, w2], dtype=torch.float64)
    assert found.tolist() == pytest.approx(expected, rel=1e-14)


def test_the_flow_starts_as_a_copy_and_forgets_at_the_rate_of_its_slow_mode() -> None:
    path = quadratic.flow_path(HEAVY)
    assert path[0].tolist() == [1.0, 1.0]
    a, b = (T0 / (2 * m) for m in (HEAVY.m1, HEAVY.m2))
    for column, h in enumerate(quadratic.CURVATURES):
        pull = quadratic.TIME * h
        total = a + b + pull  # λ² + total·λ + b·pull = 0
        slow, fast = (0.5 * (-total + sign * math.sqrt(total**2 - 4 * b * pull)) for sign in (1, -1))
        # w2 = A·e^slow + (1 − A)·e^fast, with no speed at the start
        share = fast / (fast - slow)
        expected = share * math.exp(slow) + (1 - share) * math.exp(fast)
        assert path[-1, column].item() == pytest.approx(expected, rel=1e-12)


def test_the_expected_loss_of_plain_averaging_is_the_textbooks() -> None:
    """For w1 under an EMA it follows from the stationary variance of SGD, η²σ²/(1 − (1 − ηh)²)."""
    w1, w2 = quadratic.expected_losses(Spring.ema(decay=0.99), 100_000)
    variances = [(0.05 * 1.0) ** 2 / (1 - (1 - 0.05 * h) ** 2) for h in quadratic.CURVATURES]
    assert w1 == pytest.approx(sum(h / 2 * v for h, v in zip(quadratic.CURVATURES, variances, strict=True)), rel=1e-10)
    # of the EMA: the variance of an AR(1) with factor f, filtered: v·(1−d)(1+df)/((1+d)(1−df))
    d, total = 0.99, 0.0
    for h, v in zip(quadratic.CURVATURES, variances, strict=True):
        f = 1 - 0.05 * h
        total += h / 2 * v * (1 - d) * (1 + d * f) / ((1 + d) * (1 - d * f))
    assert w2 == pytest.approx(total, rel=1e-10)
