"""Denoising score matching and annealed Langevin sampling, against hand-made values and a Gaussian."""

import math

import pytest
import torch
from torch import Tensor, nn

from torchbelay.lab.part import LabError
from torchbelay.lab.score.models.ncsn import NCSN, langevin
from torchbelay.lab.score.models.noise_levels import Levels
from torchbelay.lab.score.models.objective import Draws

SHAPE = (1, 2, 2)


class Constant(nn.Module):
    """Gives the same score everywhere, and remembers what it was asked."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        self.asked = x
        return torch.full_like(x, self.value)


@pytest.mark.parametrize(("reduction", "factor"), [("pixel_mean", 1.0), ("pixel_sum", 4 / 2)])
def test_the_loss_by_hand(reduction: str, factor: float) -> None:
    """σ = 2, s = 0.25: (σs + z)² is 0.5² = 0.25 where z = 0, 1.5² = 2.25 where z = 1 and 0.25 where z = −1."""
    noise = torch.tensor([0.0, 1.0, -1.0, 0.0]).view(1, *SHAPE)
    network, pixels = Constant(0.25), torch.full((1, *SHAPE), 0.5)
    objective = NCSN(shape=SHAPE, reduction=reduction)  # type: ignore[arg-type]
    loss = objective.loss(network, pixels, Draws(torch.tensor([2.0]), noise))
    torch.testing.assert_close(loss, torch.tensor([factor * (0.25 + 2.25 + 0.25 + 0.25) / 4]))
    torch.testing.assert_close(network.asked, 0.5 + 2 * noise)


def test_a_network_that_knows_the_noise_has_no_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    objective = NCSN(shape=SHAPE)
    draws, pixels = objective.draws(50, generator, augment=True), torch.rand(50, *SHAPE)

    class Knows(nn.Module):
        def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
            return (pixels - x) / sigma.view(-1, 1, 1, 1) ** 2

    assert objective.loss(Knows(), pixels, draws).abs().max() < 1e-6


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(LabError, match="reduction is 'mean'; choose from pixel_mean, pixel_sum"):
        NCSN(reduction="mean")  # type: ignore[arg-type]


def test_every_level_is_drawn_equally_often() -> None:
    objective = NCSN(shape=SHAPE, levels=Levels(10.0, 0.1, 5, 1, 1e-3))
    draws = objective.draws(50_000, torch.Generator().manual_seed(0), augment=True)
    found, counts = draws.sigma.unique(return_counts=True)
    torch.testing.assert_close(found.flip(0), torch.tensor(objective.levels.sigmas), rtol=1e-5, atol=0)
    assert (counts - 10_000).abs().max() < 4.5 * math.sqrt(10_000 * 0.8)
    assert draws.noise.mean().abs() < 0.02
    assert abs(draws.noise.var() - 1) < 0.02


def test_langevin_samples_a_gaussian() -> None:
    """Data N(μ, Σ) has the score −(Σ + σ²)⁻¹(x − μ): what comes out has μ and Σ, within sampling error and its bias."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.tensor([0.3, 0.7])
    covariance = torch.tensor([[0.05, 0.03], [0.03, 0.08]])
    walk = Levels(2.0, 0.01, count=40, steps=60, epsilon=2e-5)

    def score(x: Tensor, sigma: Tensor) -> Tensor:
        inverse = torch.linalg.inv(covariance + sigma[0] ** 2 * torch.eye(2))
        return ((mean - x.view(-1, 2)) @ inverse).view(x.shape)

    asked: list[int] = []
    n = 20_000
    made = langevin(score, torch.rand(n, 1, 1, 2, generator=generator), walk, generator, asked.append).view(n, 2)
    assert asked == [n] * (walk.count * walk.steps + 1)
    # what a walk with this many steps leaves out: computed exactly, for the same linear recursion
    m, s = torch.full((2,), 0.5) - mean, torch.eye(2) / 12
    for sigma in walk.sigmas:
        inverse = torch.linalg.inv(covariance + sigma**2 * torch.eye(2))
        alpha = walk.epsilon * (sigma / walk.last) ** 2
        step = torch.eye(2) - alpha * inverse
        for _ in range(walk.steps):
            m, s = step @ m, step @ s @ step + 2 * alpha * torch.eye(2)
    last = torch.eye(2) - walk.last**2 * torch.linalg.inv(covariance + walk.last**2 * torch.eye(2))
    m, s = last @ m, last @ s @ last
    torch.testing.assert_close(made.mean(0), mean + m, atol=4.5 * math.sqrt(0.08 / n), rtol=0)
    torch.testing.assert_close(made.T.cov(), s, atol=4.5 * 0.08 * math.sqrt(2 / n), rtol=0)
    # and the walk itself is right: close to the data's own moments
    torch.testing.assert_close(made.mean(0), mean, atol=0.02, rtol=0)
    torch.testing.assert_close(made.T.cov(), covariance, atol=0.012, rtol=0)


def test_sampling_gives_pixels_and_depends_on_the_seed_alone() -> None:
    torch.manual_seed(0)
    objective = NCSN(features=4, levels=Levels(1.0, 0.1, 2, 1, 1e-3))
    network = objective.network()
    one, two, other = (
        objective.sample(network, 3, torch.Generator().manual_seed(seed), lambda n: None) for seed in (1, 1, 2)
    )
    assert one.shape == (3, 1, 28, 28)
    assert 0 <= one.min() <= one.max() <= 1
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
