"""Score models so small that a run takes a second, and the command with them.

    python tests/helpers/tiny_score.py train tiny-ncsn --out RUN

is `torchbelay train` with these presets and a handful of made-up images. TINY_PAUSE is a pause after each step, in
seconds, TINY_AGREE how often several processes agree whether to stop; after the step TINY_STOP comes a SIGTERM. In the
folder TINY_MARKS a file is made for each step, at its end but before the pause, and for each signal that was noticed.
"""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchbelay import cli
from torchbelay.lab.score import data
from torchbelay.lab.score.data import Images
from torchbelay.lab.score.models.edm import EDM
from torchbelay.lab.score.models.ncsn import NCSN
from torchbelay.lab.score.models.noise_levels import Levels
from torchbelay.lab.score.models.unet import UNetShape
from torchbelay.lab.score.studies import belay
from torchbelay.lab.score.training import train
from torchbelay.lab.score.training.presets import PRESETS, Preset
from torchbelay.physics.spring import Spring

NCSN_PRESET = Preset(
    "tiny-ncsn",
    "a tiny NCSNv2",
    "mnist",
    NCSN(features=8, levels=Levels(first=1.0, last=0.1, count=3, steps=1, epsilon=1e-4)),
    Spring(k=1.0, m1=40.0, m2=10.0),
    belay,
    lr=1e-3,
    batch=4,
    images=40,
    paper="nothing",
)
EDM_PRESET = replace(
    NCSN_PRESET,
    name="tiny-edm",
    about="a tiny EDM with dropout and augmentation",
    objective=EDM(
        (1, 8, 8),
        UNetShape(channels=16, multipliers=(1, 2), blocks=1, attention=(4,), dropout=0.13),
        augment=0.12,
        steps=2,
    ),
    batch=8,
    images=128,
    ramp=0.25,
)
TINY = {preset.name: preset for preset in (NCSN_PRESET, EDM_PRESET)}


def made_up(shape: tuple[int, int, int], *, train: int = 24, test: int = 8) -> Images:
    """Bright squares on a dark ground, at random places."""
    generator = torch.Generator().manual_seed(9)
    pixels = torch.zeros(train + test, *shape, dtype=torch.uint8)
    side = shape[1] // 2
    for picture in pixels:
        top, left = torch.randint(side, (2,), generator=generator).tolist()
        picture[:, top : top + side, left : left + side] = 230
    return Images("mnist", pixels[:train], pixels[train:])


def of(preset: Preset) -> Images:
    return made_up(preset.objective.shape)


def main(argv: list[str]) -> int:
    """The command, with the tiny presets."""
    torch.set_num_threads(1)
    PRESETS.update(TINY)
    preset = next((PRESETS[word] for word in argv if word in PRESETS), NCSN_PRESET)
    data.load = lambda name, path: of(preset)  # type: ignore[assignment]
    train.AGREE = int(os.environ.get("TINY_AGREE", train.AGREE))
    pause, stop = (float(os.environ.get(name, "0")) for name in ("TINY_PAUSE", "TINY_STOP"))
    take = train.Run.advance

    marks, notice = os.environ.get("TINY_MARKS"), train.Stop._notice

    def mark(name: str) -> None:
        if marks:
            Path(marks, name).touch()

    def noticed(stop: train.Stop, *arguments: Any) -> None:
        notice(stop, *arguments)
        mark("signal")

    def advance(run: train.Run) -> None:
        take(run)
        mark(f"step{run.step}")
        time.sleep(pause)
        if run.step == stop and run.ranks.first:
            signal.raise_signal(signal.SIGTERM)

    train.Run.advance, train.Stop._notice = advance, noticed  # type: ignore[method-assign]
    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
