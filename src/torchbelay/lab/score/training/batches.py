"""The batches of a training: images and noise from one generator on the device, the same for every arm of a seed."""

import torch
from torch import Tensor

from torchbelay.lab.score.models.objective import Draws, Objective


class Batches:
    """Endless batches. Images are drawn with replacement, so that the generator's state is the only state.

    With several `ranks`, each process draws the whole batch and takes its own part of it: the result does not depend on
    the number of processes.
    """

    def __init__(
        self, images: Tensor, objective: Objective, size: int, seed: int, *, rank: int = 0, ranks: int = 1
    ) -> None:
        self.images, self.objective, self.size = images, objective, size
        self.generator = torch.Generator(images.device).manual_seed(seed)
        share = size // ranks
        self.mine = slice(rank * share, (rank + 1) * share)

    def next(self) -> tuple[Tensor, Draws]:
        """Return pixels in [0, 1], and the noise to train on."""
        index = torch.randint(len(self.images), (self.size,), generator=self.generator, device=self.images.device)
        draws = self.objective.draws(self.size, self.generator, augment=True)
        return as_pixels(self.images[index[self.mine]]), draws[self.mine]


def as_pixels(images: Tensor) -> Tensor:
    """Turn bytes into numbers in [0, 1].

    >>> as_pixels(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([0., 1.])
    """
    return images.float() / 255


def as_bytes(pixels: Tensor) -> Tensor:
    """Turn numbers in [0, 1] into bytes, rounded to the nearest.

    >>> as_bytes(torch.tensor([0.0, 0.499, 1.2]))
    tensor([  0, 127, 255], dtype=torch.uint8)
    """
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8)
