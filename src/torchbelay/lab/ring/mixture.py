"""A ring of Gaussians in the plane, its exact denoiser, and the preconditioning of Karras et al. (2022).

The best denoiser of a Gaussian mixture is known in closed form, so a trained network can be compared with the truth
itself and not with noisy targets. Written from the EDM paper: D(y; σ) = c_skip·y + c_out·F(c_in·y, ln σ/4). The loss
weight is 1/c_out², so the weighted squared error of D is the plain squared error of F.
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
WAVES = (math.pi / 2, math.pi)  # of the inputs' sines and cosines, which help a small network to tell the modes apart
NEAR = 2.5  # a sample within this many standard deviations of a centre counts as one of the mixture's
FEATURES = 3 + 4 * len(WAVES)


@dataclass(frozen=True)
class Ring:
    """Equally likely round Gaussians on a circle, as wide as EDM expects data to be: variance ¼ in each coordinate."""

    modes: int = 8
    spread: float = 0.1  # standard deviation of each Gaussian
    sigma_data: float = 0.5

    @property
    def radius(self) -> float:
        """The radius of the circle of centres."""
        return math.sqrt(2 * (self.sigma_data**2 - self.spread**2))

    @cached_property
    def centres(self) -> Tensor:
        """The centres of the Gaussians, (modes, 2)."""
        angle = torch.arange(self.modes, dtype=torch.float64) * (2 * math.pi / self.modes)
        return self.radius * torch.stack([angle.cos(), angle.sin()], dim=-1)

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw points of the mixture, (…, 2) in float64."""
        which = torch.randint(self.modes, shape, generator=generator)
        noise = torch.randn(*shape, 2, generator=generator, dtype=torch.float64)
        return self.centres[which] + self.spread * noise

    def denoise(self, y: Tensor, sigma: Tensor) -> Tensor:
        """Return E[x | x + σ·noise = y] in closed form: a mean over the Gaussians, each weighted by its likelihood."""
        centres = self.centres.to(y)
        away = y.unsqueeze(-2) - centres  # (…, modes, 2)
        variance = (self.spread**2 + sigma**2).unsqueeze(-1)
        likely = torch.softmax(-away.square().sum(-1, keepdim=True) / (2 * variance), dim=-2)
        return (likely * (centres + self.spread**2 / variance * away)).sum(-2)

    def share_near(self, points: Tensor, within: float = NEAR) -> float:
        """Return the share of points within some deviations of a centre; 1 − exp(−within²/2) for the mixture."""
        distance = torch.cdist(points.to(torch.float64), self.centres).amin(-1)
        return float((distance <= within * self.spread).double().mean())

    # Inputs and outputs of a network --------------------------------------------------------------------------------

    def features(self, y: Tensor, sigma: Tensor) -> Tensor:
        """Return the network's input, (…, FEATURES): c_in·y, ln σ/4, and sines and cosines of c_in·y."""
        place = y / (sigma**2 + self.sigma_data**2).sqrt()
        waves = [wave(k * place) for k in WAVES for wave in (torch.sin, torch.cos)]
        return torch.cat([place, sigma.log() / 4, *waves], dim=-1)

    def encode_output(self, y: Tensor, sigma: Tensor, clean: Tensor) -> Tensor:
        """Return the output F with which D(y; σ) is `clean`. The best linear denoiser has F = 0."""
        total = sigma**2 + self.sigma_data**2
        return (clean - self.sigma_data**2 / total * y) / (sigma * self.sigma_data / total.sqrt())

    def decode_output(self, y: Tensor, sigma: Tensor, output: Tensor) -> Tensor:
        """Return D(y; σ) of a network's output F: the inverse of `encode_output`."""
        total = sigma**2 + self.sigma_data**2
        return self.sigma_data**2 / total * y + sigma * self.sigma_data / total.sqrt() * output

    def triples(self, shape: tuple[int, ...], generator: torch.Generator) -> "Triples":
        """Draw points, noise levels and noisy points as in training."""
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
        """The network's inputs."""
        return self.ring.features(self.noisy, self.sigma)

    @property
    def targets(self) -> Tensor:
        """The outputs that the network is trained towards: the F of the clean points."""
        return self.ring.encode_output(self.noisy, self.sigma, self.clean)

    @property
    def truth(self) -> Tensor:
        """The outputs of the exact denoiser."""
        return self.ring.encode_output(self.noisy, self.sigma, self.ring.denoise(self.noisy, self.sigma))


def noise_levels(steps: int, high: float = 10.0, low: float = 0.002, rho: float = 7.0) -> Tensor:
    """Return EDM's noise levels from `high` down to `low`, and then 0: `steps` + 1 numbers."""
    share = torch.arange(steps, dtype=torch.float64) / (steps - 1)
    levels = (high ** (1 / rho) + share * (low ** (1 / rho) - high ** (1 / rho))) ** rho
    return torch.cat([levels, torch.zeros(1, dtype=torch.float64)])


@torch.no_grad()
def draw_samples(denoiser: Denoiser, latents: Tensor, steps: int = 18) -> Tensor:
    """Draw samples by Heun's method along the probability flow, from unit noise (…, 2), without added noise."""
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
