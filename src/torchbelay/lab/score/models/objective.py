"""What a score model is to the training loop: a network, a loss on drawn noise, and a way to make images."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

Shape = tuple[int, int, int]  # channels, height, width
Step = Callable[[int], object]  # told after each evaluation of the network, how many images it was for


@dataclass(frozen=True)
class Draws:
    """All that is random in a training step but the choice of images; the same for every arm of a seed.

    >>> Draws(torch.ones(2), torch.zeros(2, 1, 4, 4))[:1].sigma
    tensor([1.])
    """

    sigma: Tensor  # (n,) the noise's standard deviation, for each image
    noise: Tensor  # (n, channels, height, width), standard normal
    augment: Tensor | None = None  # (n, …) what the augmentation of each image is made from

    def __getitem__(self, rows: slice) -> "Draws":
        return Draws(self.sigma[rows], self.noise[rows], None if self.augment is None else self.augment[rows])


class Objective(Protocol):
    """NCSNv2 and EDM, as the loop sees them. Pixels are float32 in [0, 1] on the network's device."""

    MODEL: ClassVar[str]  # its name in records

    @property
    def shape(self) -> Shape:
        """Of an image."""

    @property
    def reduction(self) -> str:
        """How the loss of an image is made of those of its pixels."""

    @property
    def sampler(self) -> str:
        """How it makes images, in words."""

    def describe(self) -> dict[str, Any]:
        """Its setting, as records have it."""

    def network(self) -> nn.Module:
        """A fresh network, its weights drawn from torch's global generator."""

    def draws(self, n: int, generator: torch.Generator, *, augment: bool) -> Draws:
        """The noise for n images; `augment` only in training."""

    def loss(self, network: nn.Module, pixels: Tensor, draws: Draws) -> Tensor:
        """The loss of each image, (n,), in float32."""

    def sample(self, network: nn.Module, n: int, generator: torch.Generator, tick: Step) -> Tensor:
        """Make n images, as pixels in [0, 1]."""
