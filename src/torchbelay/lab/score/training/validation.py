"""How good weights are: their loss on fixed triples of image, noise level and noise, the same for everybody."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchbelay.lab.score.models.objective import Draws, Objective

from .batches import as_pixels
from .learner import Loss, Trainee, precision

if TYPE_CHECKING:
    from torchbelay.lab.score.data import Images

SEED = 271828  # of the triples; runs have small seeds


@dataclass(frozen=True)
class Yardstick:
    """Triples from the training and from the test images."""

    triples: dict[str, tuple[Tensor, Draws]]  # "train" and "test"
    batch: int

    @classmethod
    def make(
        cls, images: "Images", objective: Objective, device: torch.device, *, count: int = 2048, batch: int = 512
    ) -> "Yardstick":
        """`count` triples of each, on the device. They are drawn on the CPU, so that every device has the same."""
        generator = torch.Generator().manual_seed(SEED)
        triples = {}
        for name, all_of_them in (("train", images.train), ("test", images.test)):
            chosen = torch.randperm(len(all_of_them), generator=generator)[:count]
            draws = objective.draws(len(chosen), generator, augment=False)
            triples[name] = (
                as_pixels(all_of_them[chosen.to(all_of_them.device)]).to(device),
                Draws(draws.sigma.to(device), draws.noise.to(device)),
            )
        return cls(triples, batch)

    @torch.no_grad()
    def measure(self, loss: Loss, network: nn.Module) -> dict[str, float | None]:
        """The mean losses; None for what is no number."""
        training = network.training
        network.eval()
        found = {}
        for name, (pixels, draws) in self.triples.items():
            with precision(pixels.device):
                parts = [
                    loss(network, pixels[i : i + self.batch], draws[i : i + self.batch])
                    for i in range(0, len(pixels), self.batch)
                ]
            found[name] = number(float(torch.cat(parts).double().mean()))
        network.train(training)
        return found

    def of(self, loss: Loss, trainee: Trainee) -> dict[str, dict[str, float | None]]:
        """The losses of a trainee's weights (w1) and of their average (w2)."""
        network = getattr(trainee.network, "module", trainee.network)
        w1 = self.measure(loss, network)
        with trainee.belay.averaged():
            return {"w1": w1, "w2": self.measure(loss, network)}


def number(x: float) -> float | None:
    """What a record has of a number: six digits, and None for what is none.

    >>> number(0.123456789), number(math.nan)
    (0.123457, None)
    """
    return float(f"{x:.6g}") if math.isfinite(x) else None
