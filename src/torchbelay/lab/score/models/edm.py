"""EDM, the score model of "Elucidating the Design Space of Diffusion-Based Generative Models" (Karras et al., 2022).

A denoiser D(x; σ) is a network F with preconditioning, which keeps the input, output and target of F at unit variance
(Eq. 7, Table 1). The sampler follows dx/dσ = (x − D(x; σ))/σ from pure noise down to σ = 0 (Algorithm 1). The model
works with pixels in [−1, 1].
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchbelay.lab.part import LabError
from torchbelay.lab.ring.mixture import noise_levels

from . import augment as augmentation
from .objective import Draws, Shape, Step
from .unet import UNet, UNetShape

Denoise = Callable[[Tensor, Tensor], Tensor]  # noisy images (n, …) and their σ (n,) to clean ones

SIGMA_MIN, SIGMA_MAX, RHO = 0.002, 80.0, 7.0  # of the sampler, Table 1


@dataclass(frozen=True)
class Frame:
    """The preconditioning of Table 1, for data of standard deviation `sigma_data`, at noise levels σ of any shape.

    >>> frame = Frame(sigma_data=0.5)
    >>> sigma = torch.tensor(0.5)
    >>> [round(float(c(sigma)), 4) for c in (frame.c_skip, frame.c_out, frame.c_in, frame.c_noise, frame.weight)]
    [0.5, 0.3536, 1.4142, -0.1733, 8.0]
    """

    sigma_data: float = 0.5

    def c_skip(self, sigma: Tensor) -> Tensor:
        """Return the factor on the noisy image in D: that of the best linear denoiser."""
        return self.sigma_data**2 / (sigma**2 + self.sigma_data**2)

    def c_out(self, sigma: Tensor) -> Tensor:
        """Return the factor on the network's output in D: the deviation of the best linear denoiser's error."""
        return sigma * self.sigma_data / (sigma**2 + self.sigma_data**2).sqrt()

    def c_in(self, sigma: Tensor) -> Tensor:
        """Return the factor that brings noisy images to unit variance."""
        return 1 / (sigma**2 + self.sigma_data**2).sqrt()

    def c_noise(self, sigma: Tensor) -> Tensor:
        """Return the network's input for σ."""
        return sigma.log() / 4

    def weight(self, sigma: Tensor) -> Tensor:
        """Return λ(σ) = 1/c_out²: the weighted error of D is the plain error of F."""
        return (sigma**2 + self.sigma_data**2) / (sigma * self.sigma_data) ** 2

    def denoise(self, network: nn.Module, x: Tensor, sigma: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return D(x; σ) of Eq. 7, for images (n, …), σ (n,) and labels of their augmentation (None: unchanged images).

        The result is float32 at any precision of the network.
        """
        x, sigma = x.float(), sigma.float()
        column = sigma.view(-1, *[1] * (x.ndim - 1))
        answer: Tensor = network(self.c_in(column) * x, self.c_noise(sigma), labels).float()
        return self.c_skip(column) * x + self.c_out(column) * answer


def heun(denoise: Denoise, latents: Tensor, steps: int = 18, tick: Step = lambda n: None) -> Tensor:
    """Turn unit noise (n, …) into images: Algorithm 1 without added noise, at the noise levels of Eq. 5.

    Heun's step is of second order. The last step, to σ = 0 where the slope is undefined, is Euler's: the denoiser is
    evaluated 2·steps − 1 times. The arithmetic in between and the result are float64, as in the paper.

    >>> heun(lambda x, sigma: torch.full_like(x, 0.25), torch.randn(1, 2))  # if all data are one point
    tensor([[0.2500, 0.2500]], dtype=torch.float64)
    """
    if steps < 2:
        raise LabError(f"steps={steps}: the noise levels need at least 2 steps")
    levels = noise_levels(steps, high=SIGMA_MAX, low=SIGMA_MIN, rho=RHO).tolist()
    n = len(latents)

    def slope(x: Tensor, sigma: float) -> Tensor:
        clean = denoise(x, x.new_full((n,), sigma)).double()
        tick(n)
        return (x - clean) / sigma

    x: Tensor = latents.double() * levels[0]
    for sigma, lower in pairwise(levels):
        here = slope(x, sigma)
        euler = x + (lower - sigma) * here
        x = x + (lower - sigma) * (here + slope(euler, lower)) / 2 if lower > 0 else euler
    return x


@dataclass(frozen=True)
class EDM:
    """EDM as an `Objective`.

    The network keeps its mode: call its `eval()` before measuring a test loss and before sampling.

    >>> small = EDM((1, 28, 28), UNetShape(channels=32, multipliers=(1, 2), blocks=1, attention=(14,)))
    >>> generator = torch.Generator().manual_seed(0)
    >>> draws = small.draws(2, generator, augment=False)
    >>> bool((small.loss(small.network(), torch.rand(2, 1, 28, 28), draws) > 0).all())
    True
    """

    MODEL: ClassVar[str] = "edm"
    reduction: ClassVar[str] = "edm"  # the mean over pixels, weighted

    shape: Shape
    unet: UNetShape = field(default_factory=UNetShape)
    augment: float = 0.0  # the probability of each kind of augmentation
    sigma_data: float = 0.5
    p_mean: float = -1.2  # of ln σ in training
    p_std: float = 1.2
    steps: int = 18  # of the sampler

    def __post_init__(self) -> None:
        if not 0 <= self.augment <= 1:
            raise LabError(f"augment={self.augment}: give a probability, from 0 to 1")
        if not self.sigma_data > 0:
            raise LabError(f"sigma_data={self.sigma_data}: give a standard deviation, above 0")
        if not self.p_std >= 0:
            raise LabError(f"p_std={self.p_std}: give a standard deviation, 0 or more")
        if self.steps < 2:
            raise LabError(f"steps={self.steps}: the sampler needs at least 2 steps")

    @property
    def sampler(self) -> str:
        """The sampler, in words."""
        return f"Heun, {self.steps} steps"

    def describe(self) -> dict[str, Any]:
        """Return the setting for records."""
        setting = {
            "model": self.MODEL,
            "augment": self.augment,
            "sigma_data": self.sigma_data,
            "steps_to_sample": self.steps,
        }
        return setting | {"p_mean": self.p_mean, "p_std": self.p_std} | asdict(self.unet)

    @property
    def frame(self) -> Frame:
        """The preconditioning."""
        return Frame(self.sigma_data)

    def network(self) -> UNet:
        """Return a new network; its weights are drawn from torch's global generator."""
        return UNet(self.shape, **asdict(self.unet), augment_labels=augmentation.LABELS if self.augment else 0)

    def draws(self, n: int, generator: torch.Generator, *, augment: bool) -> Draws:
        """Draw ln σ ~ N(p_mean, p_std²), the noise and, in training, the augmentation of each image."""
        device = generator.device
        sigma = (self.p_mean + self.p_std * torch.randn(n, generator=generator, device=device)).exp()
        noise = torch.randn(n, *self.shape, generator=generator, device=device)
        changes = augmentation.parameters(n, self.augment, generator) if augment and self.augment else None
        return Draws(sigma, noise, changes)

    def loss(self, network: nn.Module, pixels: Tensor, draws: Draws) -> Tensor:
        """Return λ(σ)·‖D(y + σ·noise; σ) − y‖² of each image, (n,), as the mean over its pixels.

        It is the mean squared error of F against a target of unit variance (Eq. 8), so that it starts at about 1.
        """
        clean, labels = pixels * 2 - 1, None
        if draws.augment is not None:
            clean, labels = augmentation.warp(clean, draws.augment), augmentation.labels(draws.augment)
        sigma = draws.sigma
        noisy = clean + sigma.view(-1, 1, 1, 1) * draws.noise
        error = self.frame.denoise(network, noisy, sigma, labels) - clean
        return self.frame.weight(sigma) * error.square().flatten(1).mean(1)

    def denoise(self, network: nn.Module, x: Tensor, sigma: Tensor) -> Tensor:
        """Return D(x; σ), for noisy images (n, …) of the range [−1, 1], and σ (n,)."""
        return self.frame.denoise(network, x, sigma)

    @torch.no_grad()
    def sample(self, network: nn.Module, n: int, generator: torch.Generator, tick: Step) -> Tensor:
        """Make n images, as pixels in [0, 1]."""
        latents = torch.randn(n, *self.shape, generator=generator, device=generator.device)
        made = heun(lambda x, sigma: self.denoise(network, x, sigma), latents, self.steps, tick)
        return ((made + 1) / 2).clamp(0, 1).float()


CIFAR10 = EDM((3, 32, 32), augment=0.12)  # the paper's unconditional model: FID 1.97 after 200 million images
