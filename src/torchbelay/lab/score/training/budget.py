"""The length of a run: a budget of time or of images, and the schedule and masses that follow from it."""

import math
import re
from dataclasses import dataclass
from typing import Any

from torchbelay.lab.arms import Lane
from torchbelay.lab.part import LabError

from .presets import Preset

SYNTAX = "a time, as 90s, 10m or 1.5h, or a number of images, as 500kimg or 2Mimg"
REPORTS = 50  # per run, unless --every is given
REPORT_SHARE = 0.1  # the share of a budget of time that reports may take
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "img": 1, "kimg": 1000, "Mimg": 1_000_000}


@dataclass(frozen=True)
class Budget:
    """The most that a run may take: seconds, or images.

    >>> Budget.parse("1.5h").seconds, Budget.parse("500kimg").images
    (5400.0, 500000)
    """

    text: str
    seconds: float | None = None
    images: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Parse a budget; "10M" is refused because it could mean minutes or images."""
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([A-Za-z]+)", text.strip())
        if match is None or match[2] not in _UNITS:
            raise LabError(f"--budget {text!r} is not understood; give {SYNTAX}")
        amount = float(match[1]) * _UNITS[match[2]]
        if not 0 < amount < math.inf:
            raise LabError(f"--budget {text!r} is not a positive length; give {SYNTAX}")
        return cls(text, images=round(amount)) if match[2].endswith("img") else cls(text, seconds=amount)


@dataclass(frozen=True)
class Speed:
    """The measured speed of a machine, in seconds."""

    step_s: float  # per step
    report_s: float  # per report


@dataclass(frozen=True)
class Plan:
    """A run with all its numbers."""

    preset: Preset
    steps: int
    lane: Lane
    every: int  # steps between two reports

    @classmethod
    def make(
        cls, preset: Preset, *, images: int | None = None, lr: float | None = None, every: int | None = None
    ) -> "Plan":
        """Return the plan of a preset for its own number of images, or for another, rounded to whole steps."""
        if lr is not None and not 0 < lr < math.inf:
            raise LabError(f"--lr {lr:g} is not a learning rate; give a number above 0")
        if every is not None and every < 1:
            raise LabError(f"--every {every} is not a number of steps; give 1 or more")
        steps = preset.steps if images is None else max(1, round(images / preset.batch))
        if steps < (least := fewest_steps(preset)):
            raise LabError(
                f"{steps:,} steps are too few for {preset.name}: at that length its average would jump past the "
                f"weights (κ ≥ 1); the smallest budget is {least * preset.batch}img ({least:,} steps)"
            )
        return cls(preset, steps, preset.lane(steps / preset.steps, lr), every or math.ceil(steps / REPORTS))

    @classmethod
    def fit_time(
        cls, seconds: float, speed: Speed, preset: Preset, *, lr: float | None = None, every: int | None = None
    ) -> "Plan":
        """Return the plan that takes `seconds` at that speed; if reports are slow, it has fewer of them."""
        given = every
        if every is not None:
            steps = int(seconds / (speed.step_s + speed.report_s / max(1, every)))
        else:
            reports = max(1, min(REPORTS, int(REPORT_SHARE * seconds / speed.report_s)))
            steps = max(1, int((seconds - reports * speed.report_s) / speed.step_s))
            every = math.ceil(steps / reports)
        if steps < (least := fewest_steps(preset)):
            raise LabError(
                f"{seconds:g} s are {max(0, steps):,} steps here, too few for {preset.name}: at that length its "
                f"average would jump past the weights (κ ≥ 1); give {_seconds_for(least, speed, given)}s or more"
            )
        return cls.make(preset, images=steps * preset.batch, lr=lr, every=every)

    @property
    def batch(self) -> int:
        """Images per step."""
        return self.preset.batch

    @property
    def images(self) -> int:
        """The number of images that the run sees, repetitions included."""
        return self.steps * self.batch

    def lr_scale(self, step: int) -> float:
        """Return the factor on the learning rate at a step, counted from 1: it grows to 1 over the ramp."""
        ramp = self.preset.ramp * self.steps
        return min(1.0, step / ramp) if ramp else 1.0

    def describe(self) -> dict[str, Any]:
        """Return the numbers of the plan, as written to a run's options.json."""
        lane, preset = self.lane, self.preset
        return {
            "dataset": preset.dataset,
            **preset.objective.describe(),
            **lane.options(),
            "beta1": lane.beta1,
            "steps": self.steps,
            "batch": self.batch,
            "images": self.images,
            "ramp": preset.ramp,
            "every": self.every,
        }


def _seconds_for(steps: int, speed: Speed, every: int | None) -> int:
    """Return whole seconds from which on `Plan.fit_time` finds at least `steps` steps, reports included."""
    if every is not None:
        takes = steps * (speed.step_s + speed.report_s / max(1, every))
    else:  # one report of any length, or several that take at most their share
        bare = steps * speed.step_s
        takes = max(bare + speed.report_s, bare / (1 - REPORT_SHARE))
    return math.ceil(takes * (1 + 1e-9))  # a margin for rounding


def fewest_steps(preset: Preset) -> int:
    """Return the fewest steps at which the preset's average is valid: κ1 + κ2, which goes as 1/T, must be below 1."""
    kappa = preset.spring.kappa1 + preset.spring.kappa2
    return math.floor(kappa * preset.steps * (1 + 1e-9)) + 1
