"""The interface between score models and the training loop: a network, a loss on drawn noise, and a sampler."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

Shape = tuple[int, int, int]  # channels, height, width
Step = Callable[[int], object]  # called after each evaluation of the network, with its number of images


@dataclass(frozen=True)
class Draws:
    """All random numbers of a training step except the choice of images; the same for every arm of a seed.

    >>> Draws(torch.ones(2), torch.zeros(2, 1, 4, 4))[:1].sigma
    tensor([1.])
    """

    sigma: Tensor  # (n,) the noise's standard deviation, for each image
    noise: Tensor  # (n, channels, height, width), standard normal
    augment: Tensor | None = None  # (n, …) the parameters of each image's augmentation

    def __getitem__(self, rows: slice) -> "Draws":
        return Draws(self.sigma[rows], self.noise[rows], None if self.augment is None else self.augment[rows])


class Objective(Protocol):
    """A score model: NCSNv2 or EDM. Pixels are float32 in [0, 1] on the network's device."""

    MODEL: ClassVar[str]  # its name in records

    def __hash__(self) -> int:
        """Return the same for equal settings."""

    @property
    def shape(self) -> Shape:
        """The shape of an image."""

    @property
    def reduction(self) -> str:
        """How the losses of pixels become the loss of an image."""

    @property
    def sampler(self) -> str:
        """The sampler, in words."""

    def describe(self) -> dict[str, Any]:
        """Return the setting for records."""

    def network(self) -> nn.Module:
        """Return a new network; its weights are drawn from torch's global generator."""

    def draws(self, n: int, generator: torch.Generator, *, augment: bool) -> Draws:
        """Draw the noise for n images; `augment` only in training."""

    def loss(self, network: nn.Module, pixels: Tensor, draws: Draws) -> Tensor:
        """Return the loss of each image, (n,), in float32."""

    def sample(self, network: nn.Module, n: int, generator: torch.Generator, tick: Step) -> Tensor:
        """Make n images, as pixels in [0, 1]."""
