"""The rules of NCSNv2 for noise levels and step size, against their definitions."""

import math
from itertools import pairwise

import pytest
import torch

from torchbelay.lab.score.models.noise_levels import OVERLAP, Levels, levels, overlap, step_size


def test_mnist_has_what_the_rules_are_known_to_give() -> None:
    mnist = levels(784, 17.0)
    assert mnist.count == 95
    assert mnist.epsilon == pytest.approx(1.1e-5, rel=0.02)


def test_cifar_10_comes_close_to_the_authors_own_setting() -> None:
    """They have 232 levels from 50 to 0.01 and 6.2e-6, chosen by the same rules, rounded in ways that are not told."""
    found = levels(3072, 50.0)
    assert found.count == pytest.approx(232, rel=0.06)
    assert step_size((50 / 0.01) ** (1 / 231), 0.01, 5) == pytest.approx(6.2e-6, rel=0.05)


@pytest.mark.parametrize("pixels", [16, 784, 3072])
def test_neighbouring_levels_overlap_by_half(pixels: int) -> None:
    found = levels(pixels, 20.0)
    # the number of levels is whole, so that the overlap is only nearly what it should be
    one_more, one_less = ((20.0 / 0.01) ** (1 / (found.count - 1 + d)) for d in (1, -1))
    assert overlap(one_less, pixels) < OVERLAP < overlap(one_more, pixels)


def test_the_overlap_is_the_share_of_a_shell_within_three_deviations_of_the_next() -> None:
    """Proposition 2: ‖x‖ of noise of level σ is about σ√D ± σ/√2; counted here in a sample."""
    pixels, ratio = 784, 1.08
    norms = torch.randn(20_000, pixels, generator=torch.Generator().manual_seed(0), dtype=torch.float64).norm(dim=1)
    low, high = (ratio * (math.sqrt(pixels) + sign * 3 / math.sqrt(2)) for sign in (-1, 1))
    share = float(((norms > low) & (norms < high)).double().mean())
    assert overlap(ratio, pixels) == pytest.approx(share, abs=0.015)  # 4 deviations of the count


def test_levels_are_geometric_from_first_to_last() -> None:
    sigmas = Levels(10.0, 0.1, 5, steps=3, epsilon=1e-4).sigmas
    assert len(sigmas) == 5
    assert sigmas[0] == 10.0
    assert sigmas[-1] == pytest.approx(0.1)
    assert all(a / b == pytest.approx(10**0.5) for a, b in pairwise(sigmas))


def _variance_after(ratio: float, last: float, steps: int, epsilon: float) -> float:
    """Proposition 3 by doing it: T Langevin steps at a level, on noise `ratio` times as large, of data at one point."""
    variance = (ratio * last) ** 2
    for _ in range(steps):
        variance = (1 - epsilon / last**2) ** 2 * variance + 2 * epsilon
    return variance / last**2


@pytest.mark.parametrize(("ratio", "steps"), [(1.08, 5), (1.08, 1), (1.2, 3), (1.08, 100), (2.0, 10)])
def test_no_other_step_size_comes_closer_to_the_next_level(ratio: float, steps: int) -> None:
    found = step_size(ratio, 0.01, steps)
    best = abs(_variance_after(ratio, 0.01, steps, found) - 1)
    grid = [1e-4 * 10 ** (-6 + i / 50) for i in range(300)]
    assert best <= min(abs(_variance_after(ratio, 0.01, steps, each) - 1) for each in grid) + 1e-6
