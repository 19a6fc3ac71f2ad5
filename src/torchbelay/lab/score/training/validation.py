"""The losses of weights on fixed triples of image, noise level and noise, the same for every run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchbelay.lab.records import rounded
from torchbelay.lab.score.models.objective import Draws, Objective

from .batches import as_pixels
from .learner import Learner, Loss, precision

if TYPE_CHECKING:
    from torchbelay.lab.score.data import Images

SEED = 271828  # of the triples; the seeds of runs are small


@dataclass(frozen=True)
class Validation:
    """Triples from the training images and from the test images."""

    triples: dict[str, tuple[Tensor, Draws]]  # "train" and "test"
    batch: int

    @classmethod
    def make(
        cls, images: "Images", objective: Objective, device: torch.device, *, count: int = 2048, batch: int = 512
    ) -> "Validation":
        """Draw `count` triples of each kind. They are drawn on the CPU, so that every device has the same ones."""
        generator = torch.Generator().manual_seed(SEED)
        triples = {}
        for name, available in (("train", images.train), ("test", images.test)):
            index = torch.randperm(len(available), generator=generator)[:count]
            draws = objective.draws(len(index), generator, augment=False)
            triples[name] = (
                as_pixels(available[index.to(available.device)]).to(device),
                Draws(draws.sigma.to(device), draws.noise.to(device)),
            )
        return cls(triples, batch)

    @torch.no_grad()
    def measure(self, loss: Loss, network: nn.Module) -> dict[str, float | None]:
        """Return the mean losses of a network; None for a loss that is not finite."""
        training = network.training
        network.eval()
        found = {}
        for name, (pixels, draws) in self.triples.items():
            with precision(pixels.device):
                parts = [
                    loss(network, pixels[i : i + self.batch], draws[i : i + self.batch])
                    for i in range(0, len(pixels), self.batch)
                ]
            found[name] = rounded(float(torch.cat(parts).double().mean()))
        network.train(training)
        return found

    def losses(self, loss: Loss, learner: Learner) -> dict[str, dict[str, float | None]]:
        """Return the losses of a learner's weights (w1), of their average (w2), and of each spectator by its name."""
        network = getattr(learner.network, "module", learner.network)
        found = {"w1": self.measure(loss, network)}
        with learner.belay.averaged():
            found["w2"] = self.measure(loss, network)
        for name, _ in learner.lane.arm.spectators:
            with learner.belay.averaged(name):
                found[name] = self.measure(loss, network)
        return found
