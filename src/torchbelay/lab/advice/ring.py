"""Runs of the ring's score models, with Adam; losses are squared distances to the exact denoiser."""

from collections.abc import Sequence

import torch

from torchbelay.lab.arms import Arm, Lane
from torchbelay.lab.part import Settings
from torchbelay.lab.ring.mixture import FEATURES, Ring
from torchbelay.lab.ring.networks import Networks, Shape
from torchbelay.lab.ring.study import batches, excess_loss

from .trial import Run, Setting, Train, marks

NAME = "ring"
SHAPE = Shape((FEATURES, 24, 24, 2))
BATCH, TRIPLES = 32, 1024


def trainer(settings: Settings, steps: int) -> Train:
    """Return the function that trains one network per setting, all from the same start on the same batches."""
    ring, reported = Ring(), marks(steps)
    validation, test = (ring.triples((TRIPLES,), _generator(settings, 1000 + i)) for i in range(2))

    def train(chosen: Sequence[Setting], seed: int) -> list[Run]:
        if not chosen:
            return []
        generator = _generator(settings, seed)
        networks = Networks(
            SHAPE,
            [Lane(Arm("advice", "Adam", method), lr) for method, lr in chosen],
            SHAPE.initial(generator)[None],
        )
        reports: list[list[dict[str, float]]] = [[] for _ in chosen]
        for t, (x, y) in zip(range(1, steps + 1), batches(ring, [generator], BATCH), strict=False):
            networks.step(x, y)
            if t in reported:
                w1, w2 = (excess_loss(SHAPE, w, validation)[:, 0].tolist() for w in (networks.w, networks.average()))
                for i, (_, lr) in enumerate(chosen):
                    reports[i].append({"step": t, "lr": lr, "w1": w1[i], "w2": w2[i]})
        losses = excess_loss(SHAPE, networks.average(), test)[:, 0].tolist()
        return [Run(*each) for each in zip(reports, losses, strict=True)]

    return train


def _generator(settings: Settings, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(settings.seed * 1_000_003 + 700_000 + stream)
