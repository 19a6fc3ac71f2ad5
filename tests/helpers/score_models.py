"""Score models and images so small that training them takes a second.

STUDY_MODEL, STUDY_ARMS and study_group() are for the report's studies, which train several arms side by side.
NCSN_PRESET and EDM_PRESET are for `torchbelay train`, which trains one network; helpers/score_command.py runs them.
"""

from dataclasses import replace

import torch
from torch import Tensor

from torchbelay.lab.arms import Arm, Lane
from torchbelay.lab.score.data import Images
from torchbelay.lab.score.models.edm import EDM
from torchbelay.lab.score.models.ncsn import NCSN
from torchbelay.lab.score.models.noise_levels import Levels
from torchbelay.lab.score.models.unet import UNetShape
from torchbelay.lab.score.studies import Group, belay, equal, matched
from torchbelay.lab.score.training.presets import Preset
from torchbelay.physics.spring import Spring


def squares(shape: tuple[int, int, int], *, train: int = 24, test: int = 8) -> Images:
    """Bright squares on a dark ground, at random places."""
    generator = torch.Generator().manual_seed(9)
    pixels = torch.zeros(train + test, *shape, dtype=torch.uint8)
    side = shape[1] // 2
    for picture in pixels:
        top, left = torch.randint(side, (2,), generator=generator).tolist()
        picture[:, top : top + side, left : left + side] = 230
    return Images("mnist", pixels[:train], pixels[train:])


# For studies ----------------------------------------------------------------------------------------------------------

STUDY_SPRING = Spring(k=1.0, m1=20.0, m2=5.0)
STUDY_MODEL = NCSN(features=4, levels=Levels(1.0, 0.1, 3, 1, 1e-3))
STUDY_ARMS: tuple[Arm, ...] = (equal(STUDY_SPRING), matched(STUDY_SPRING), belay(STUDY_SPRING))


def study_images() -> Images:
    """Images for STUDY_MODEL, twelve of each kind."""
    return squares(STUDY_MODEL.shape, train=12, test=12)


def study_group(**changes: object) -> Group:
    """Three arms at two rates, six steps."""
    lanes = tuple(Lane(arm, lr) for lr in (1e-3, 3e-3) for arm in STUDY_ARMS)
    sizes = {"steps": 6, "batch": 4, "points": 2, "samples": 6}
    options: dict[str, object] = {"objective": STUDY_MODEL, "lanes": lanes} | sizes
    return Group(study="rates", dataset="mnist", seed=0, **(options | changes))  # type: ignore[arg-type]


class Brightness:
    """Stands for FID's network; the features are the mean brightness of each quarter."""

    identity = "brightness"

    def features(self, pictures: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(pictures.float(), 14).flatten(1)


# For the command ------------------------------------------------------------------------------------------------------

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


def preset_images(preset: Preset) -> Images:
    """Images of the size that a preset needs."""
    return squares(preset.objective.shape)
