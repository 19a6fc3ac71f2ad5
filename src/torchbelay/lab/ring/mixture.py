"""A ring of Gaussians in the plane, its exact denoiser, and the score model's bookkeeping of Karras et al. (2022).

The best denoiser of a Gaussian mixture is known in closed form, so that a trained network can be held against the truth
itself rather than against noisy targets. Written from the EDM paper: D(y; σ) = c_skip·y + c_out·F(c_in·y, ln σ/4), and
its loss weight is 1/c_out², so that the weighted squared error of D is the plain one of F.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

Denoiser = Callable[[Tensor, Tensor], Tensor]  # noisy points (…, 2) and their σ (…, 1) to clean points

LOG_SIGMA = (-1.2, 1.2)  # mean and standard deviation of ln σ in training
WAVES = (math.pi / 2, math.pi)  # of the place, which a small network is given to see the modes by
NEAR = 2.5  # standard deviations from a centre within which a sample counts as one of the mixture's
FEATURES = 3 + 4 * len(WAVES)


@dataclass(frozen=True)
class Ring:
    """Equally likely round Gaussians on a circle, as wide as EDM expects data to be: variance ¼ in each coordinate."""

    modes: int = 8
    spread: float = 0.1  # standard deviation of each Gaussian
    sigma_data: float = 0.5

    @property
    def radius(self) -> float:
        """Of the circle that the centres lie on."""
        return math.sqrt(2 * (self.sigma_data**2 - self.spread**2))

    @cached_property
    def centres(self) -> Tensor:
        """(modes, 2)."""
        angle = torch.arange(self.modes, dtype=torch.float64) * (2 * math.pi / self.modes)
        return self.radius * torch.stack([angle.cos(), angle.sin()], dim=-1)

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Points of the mixture, (…, 2) in float64."""
        which = torch.randint(self.modes, shape, generator=generator)
        noise = torch.randn(*shape, 2, generator=generator, dtype=torch.float64)
        return self.centres[which] + self.spread * noise

    def denoise(self, y: Tensor, sigma: Tensor) -> Tensor:
        """E[x | x + σ·noise = y], in closed form: every Gaussian's own answer, by how likely y is to come from it."""
        centres = self.centres.to(y)
        away = y.unsqueeze(-2) - centres  # (…, modes, 2)
        variance = (self.spread**2 + sigma**2).unsqueeze(-1)
        likely = torch.softmax(-away.square().sum(-1, keepdim=True) / (2 * variance), dim=-2)
        return (likely * (centres + self.spread**2 / variance * away)).sum(-2)

    def near(self, points: Tensor, within: float = NEAR) -> float:
        """The share of points at most `within` standard deviations from a centre: 1 − exp(−within²/2) of true ones."""
        distance = torch.cdist(points.to(torch.float64), self.centres).amin(-1)
        return float((distance <= within * self.spread).double().mean())

    # What a network sees, and what it is to say ---------------------------------------------------------------------

    def features(self, y: Tensor, sigma: Tensor) -> Tensor:
        """The network's input, (…, FEATURES): c_in·y, ln σ/4, and sines and cosines of c_in·y."""
        place = y / (sigma**2 + self.sigma_data**2).sqrt()
        waves = [wave(k * place) for k in WAVES for wave in (torch.sin, torch.cos)]
        return torch.cat([place, sigma.log() / 4, *waves], dim=-1)

    def answer(self, y: Tensor, sigma: Tensor, clean: Tensor) -> Tensor:
        """The F with which D(y; σ) is `clean`. Zero is the answer of the best linear denoiser."""
        total = sigma**2 + self.sigma_data**2
        return (clean - self.sigma_data**2 / total * y) / (sigma * self.sigma_data / total.sqrt())

    def denoised(self, y: Tensor, sigma: Tensor, answer: Tensor) -> Tensor:
        """D(y; σ) of the network's F: the inverse of `answer`."""
        total = sigma**2 + self.sigma_data**2
        return self.sigma_data**2 / total * y + sigma * self.sigma_data / total.sqrt() * answer

    def triples(self, shape: tuple[int, ...], generator: torch.Generator) -> "Triples":
        """Points, noise levels and noise as in training."""
        clean = self.sample(shape, generator)
        drawn = torch.randn(*shape, 3, generator=generator, dtype=torch.float64)
        mean, deviation = LOG_SIGMA
        sigma = (mean + deviation * drawn[..., :1]).exp()
        return Triples(self, clean, sigma, clean + sigma * drawn[..., 1:])


@dataclass(frozen=True)
class Triples:
    """Clean points, their noise levels, and the noisy points."""

    ring: Ring
    clean: Tensor
    sigma: Tensor
    noisy: Tensor

    @property
    def features(self) -> Tensor:
        """What the network sees."""
        return self.ring.features(self.noisy, self.sigma)

    @property
    def targets(self) -> Tensor:
        """What it is trained towards: the F that would give back the clean point."""
        return self.ring.answer(self.noisy, self.sigma, self.clean)

    @property
    def truth(self) -> Tensor:
        """The F of the exact denoiser: what an endlessly trained, endlessly large network would say."""
        return self.ring.answer(self.noisy, self.sigma, self.ring.denoise(self.noisy, self.sigma))


def noise_levels(steps: int, high: float = 10.0, low: float = 0.002, rho: float = 7.0) -> Tensor:
    """EDM's schedule from `high` down to `low`, and then 0: `steps` + 1 numbers."""
    share = torch.arange(steps, dtype=torch.float64) / (steps - 1)
    levels = (high ** (1 / rho) + share * (low ** (1 / rho) - high ** (1 / rho))) ** rho
    return torch.cat([levels, torch.zeros(1, dtype=torch.float64)])


@torch.no_grad()
def draw(denoiser: Denoiser, latents: Tensor, steps: int = 18) -> Tensor:
    """Samples by Heun's method along the probability flow, from unit noise (…, 2); no noise is added on the way."""
    levels = noise_levels(steps)
    x = latents * levels[0]
    for sigma, lower in pairwise(levels):
        slope = (x - denoiser(x, sigma.expand_as(x[..., :1]))) / sigma
        euler = x + (lower - sigma) * slope
        if lower > 0:
            then = (euler - denoiser(euler, lower.expand_as(x[..., :1]))) / lower
            x = x + (lower - sigma) * (slope + then) / 2
        else:
            x = euler
    return x
