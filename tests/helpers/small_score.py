"""A model and images so small that training them takes no time."""

import torch
from torch import Tensor

from torchbelay.lab.arms import Arm, Lane
from torchbelay.lab.score.data import Images
from torchbelay.lab.score.models.ncsn import NCSN
from torchbelay.lab.score.models.noise_levels import Levels
from torchbelay.lab.score.studies import Group, belay, ema, matched
from torchbelay.physics.spring import Spring

SPRING = Spring(k=1.0, m1=20.0, m2=5.0)
MODEL = NCSN(features=4, levels=Levels(1.0, 0.1, 3, 1, 1e-3))
ARMS: tuple[Arm, ...] = (ema(SPRING.matched_ema().decay), matched(SPRING), belay(SPRING))


def images(count: int = 24) -> Images:
    """Digits of a kind: bright squares at random places."""
    generator = torch.Generator().manual_seed(0)
    made = torch.zeros(count, 1, 28, 28, dtype=torch.uint8)
    for picture, (row, column) in zip(
        made, torch.randint(4, 16, (count, 2), generator=generator).tolist(), strict=True
    ):
        picture[:, row : row + 8, column : column + 8] = 255
    return Images("mnist", train=made[: count // 2], test=made[count // 2 :])


def group(**changes: object) -> Group:
    """Three arms at two rates."""
    lanes = tuple(Lane(arm, lr) for lr in (1e-3, 3e-3) for arm in ARMS)
    options: dict[str, object] = {"objective": MODEL, "lanes": lanes, "steps": 6, "batch": 4, "points": 2, "samples": 6}
    return Group(study="rates", dataset="mnist", seed=0, **(options | changes))  # type: ignore[arg-type]


class Brightness:
    """Features that anybody can compute: the mean of each quarter."""

    identity = "brightness"

    def features(self, pictures: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(pictures.float(), 14).flatten(1)
