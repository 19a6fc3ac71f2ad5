"""Denoising score matching over noise levels, and annealed Langevin sampling: NCSNv2 as an objective."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from torchbelay.lab.part import LabError

from .ncsnv2 import NCSNv2
from .noise_levels import Levels, levels
from .objective import Draws, Shape, Step

Reduction = Literal["pixel_mean", "pixel_sum"]
MNIST_LEVELS = levels(28 * 28, 17.0)  # 16.9 is the largest distance between two of its images


@dataclass(frozen=True)
class NCSN:
    """NCSNv2 on images of a given shape.

    `reduction` says how the losses of pixels become the loss of an image. "pixel_mean" is the mean of (σs + z)²: about
    0.05 for a trained network, which fits the paper's numbers. "pixel_sum" is half the sum, as in the NCSNv2 authors'
    code: about 20.
    """

    MODEL: ClassVar[str] = "ncsnv2"

    shape: Shape = (1, 28, 28)
    features: int = 64
    levels: Levels = MNIST_LEVELS
    reduction: Reduction = "pixel_mean"

    def __post_init__(self) -> None:
        if self.reduction not in get_args(Reduction):
            raise LabError(f"reduction is {self.reduction!r}; choose from {', '.join(get_args(Reduction))}")

    @property
    def sampler(self) -> str:
        """The sampler, in words."""
        return f"annealed Langevin, {self.levels.count} levels × {self.levels.steps}, and a denoising step"

    def describe(self) -> dict[str, Any]:
        """Return the setting for records."""
        return {
            "model": self.MODEL,
            "features": self.features,
            "noise_levels": self.levels.count,
            "sigma_max": self.levels.first,
            "sigma_min": self.levels.last,
            "langevin_steps": self.levels.steps,
            "epsilon": self.levels.epsilon,
            "reduction": self.reduction,
        }

    def network(self) -> nn.Module:
        """Return a new network; its weights are drawn from torch's global generator."""
        return NCSNv2(self.shape, self.features)

    def draws(self, n: int, generator: torch.Generator, *, augment: bool) -> Draws:
        """Draw a noise level for each of n images, uniformly, and the noise."""
        device = generator.device
        index = torch.randint(self.levels.count, (n,), generator=generator, device=device)
        sigma = self.levels.first * torch.exp(-math.log(self.levels.ratio) * index)
        return Draws(sigma, torch.randn((n, *self.shape), generator=generator, device=device))

    def loss(self, network: nn.Module, pixels: Tensor, draws: Draws) -> Tensor:
        """Return Eq. 2 of the NCSNv2 paper, weighted by σ²: the squared distance of σ·s(x + σz) from −z, per image."""
        sigma = draws.sigma.view(-1, 1, 1, 1)
        score = network(pixels + sigma * draws.noise, draws.sigma)
        error: Tensor = (sigma * score + draws.noise).square().flatten(1)
        return error.mean(1) if self.reduction == "pixel_mean" else error.sum(1) / 2

    def sample(self, network: nn.Module, n: int, generator: torch.Generator, tick: Step) -> Tensor:
        """Make n images, as pixels in [0, 1]."""
        start = torch.rand((n, *self.shape), generator=generator, device=generator.device)
        return langevin(network, start, self.levels, generator, tick).clamp(0, 1)


@torch.no_grad()
def langevin(
    score: Callable[[Tensor, Tensor], Tensor], x: Tensor, levels: Levels, generator: torch.Generator, tick: Step
) -> Tensor:
    """Sample by annealed Langevin dynamics (algorithm 1 of both NCSN papers), with a denoising step at the end.

    T times per level x ← x + α·s + √(2α)·z, with α = ε(σ_i/σ_L)²; at the end x ← x + σ_L²·s.
    """
    n = len(x)
    for value in levels.sigmas:
        sigma = torch.full((n,), value, device=x.device)
        alpha = levels.epsilon * (value / levels.last) ** 2
        for _ in range(levels.steps):
            z = torch.randn(x.shape, generator=generator, device=x.device)
            x = x + alpha * score(x, sigma) + math.sqrt(2 * alpha) * z
            tick(n)
    x = x + levels.last**2 * score(x, torch.full((n,), levels.last, device=x.device))
    tick(n)
    return x
