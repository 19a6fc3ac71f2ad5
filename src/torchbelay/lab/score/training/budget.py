"""How long a run is: a budget of time or of images, and the schedule and masses that follow from it."""

import math
import re
from dataclasses import dataclass
from typing import Any

from torchbelay.lab.arms import Lane
from torchbelay.lab.part import LabError

from .presets import Preset

SYNTAX = "a time, as 90s, 10m or 1.5h, or a number of images, as 500kimg or 2Mimg"
REPORTS = 50  # of a run, if nobody says how many
REPORTING = 0.1  # the share of a budget of time that they may take
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "img": 1, "kimg": 1000, "Mimg": 1_000_000}


@dataclass(frozen=True)
class Budget:
    """What a run may take: seconds, or images.

    >>> Budget.parse("1.5h").seconds, Budget.parse("500kimg").images
    (5400.0, 500000)
    """

    text: str
    seconds: float | None = None
    images: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Read one; "10M" is refused, for it could mean either."""
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([A-Za-z]+)", text.strip())
        if match is None or match[2] not in _UNITS:
            raise LabError(f"--budget {text!r} is not understood; give {SYNTAX}")
        amount = float(match[1]) * _UNITS[match[2]]
        if not 0 < amount < math.inf:
            raise LabError(f"--budget {text!r} is no length; give {SYNTAX}")
        return cls(text, images=round(amount)) if match[2].endswith("img") else cls(text, seconds=amount)


@dataclass(frozen=True)
class Speed:
    """What was measured of a machine."""

    step_s: float
    report_s: float


@dataclass(frozen=True)
class Plan:
    """A run with all its numbers."""

    preset: Preset
    steps: int
    lane: Lane
    every: int  # steps between two reports

    @classmethod
    def of(
        cls, preset: Preset, *, images: int | None = None, lr: float | None = None, every: int | None = None
    ) -> "Plan":
        """The preset's run, or one of as many images, rounded to whole steps."""
        if lr is not None and not 0 < lr < math.inf:
            raise LabError(f"--lr {lr:g} is no learning rate; give a number above 0")
        if every is not None and every < 1:
            raise LabError(f"--every {every} is no number of steps; give 1 or more")
        steps = preset.steps if images is None else max(1, round(images / preset.batch))
        if steps < (least := smallest(preset)):
            raise LabError(
                f"{steps:,} steps are too few for {preset.name}: scaled to them its average would jump past the "
                f"weights (κ ≥ 1); the smallest budget is {least * preset.batch}img ({least:,} steps)"
            )
        return cls(preset, steps, preset.lane(steps / preset.steps, lr), every or math.ceil(steps / REPORTS))

    @classmethod
    def within(
        cls, seconds: float, speed: Speed, preset: Preset, *, lr: float | None = None, every: int | None = None
    ) -> "Plan":
        """The run that takes so long at that speed; where reports are slow, there are fewer of them."""
        asked = every
        if every is not None:
            steps = int(seconds / (speed.step_s + speed.report_s / max(1, every)))
        else:
            reports = max(1, min(REPORTS, int(REPORTING * seconds / speed.report_s)))
            steps = max(1, int((seconds - reports * speed.report_s) / speed.step_s))
            every = math.ceil(steps / reports)
        if steps < (least := smallest(preset)):
            raise LabError(
                f"{seconds:g} s are {max(0, steps):,} steps here, too few for {preset.name}: scaled to them its "
                f"average would jump past the weights (κ ≥ 1); give {_enough(least, speed, asked)}s or more"
            )
        return cls.of(preset, images=steps * preset.batch, lr=lr, every=every)

    @property
    def batch(self) -> int:
        """Images a step."""
        return self.preset.batch

    @property
    def images(self) -> int:
        """That the run sees."""
        return self.steps * self.batch

    def lr_scale(self, step: int) -> float:
        """What the learning rate is multiplied by at a step, counted from 1: it grows over the ramp."""
        ramp = self.preset.ramp * self.steps
        return min(1.0, step / ramp) if ramp else 1.0

    def describe(self) -> dict[str, Any]:
        """Its numbers, as the options of a run have them."""
        lane, preset = self.lane, self.preset
        return {
            "dataset": preset.dataset,
            **preset.objective.describe(),
            **lane.options(),
            "steps": self.steps,
            "batch": self.batch,
            "images": self.images,
            "ramp": preset.ramp,
            "every": self.every,
        }


def _enough(steps: int, speed: Speed, every: int | None) -> int:
    """Whole seconds from which on `Plan.within` finds at least so many steps, whatever the reports take of them."""
    if every is not None:
        takes = steps * (speed.step_s + speed.report_s / max(1, every))
    else:  # one report, however long it takes; or more, which take up to their share
        bare = steps * speed.step_s
        takes = max(bare + speed.report_s, bare / (1 - REPORTING))
    return math.ceil(takes * (1 + 1e-9))  # more than rounding can take away again


def smallest(preset: Preset) -> int:
    """The fewest steps at which the preset's average is one: κ1 + κ2, which goes as 1/T, must stay below 1."""
    kappa = preset.spring.kappa1 + preset.spring.kappa2
    return math.floor(kappa * preset.steps * (1 + 1e-9)) + 1
