"""The options of `torchbelay train`, and the plan that follows from them."""

from dataclasses import dataclass
from pathlib import Path

from torchbelay.lab.part import Record

from .budget import Budget, Plan
from .folder import Folder
from .presets import Preset
from .ranks import Ranks
from .speed import StepMode


@dataclass(frozen=True)
class TrainingRequest:
    """The options of the command `torchbelay train`."""

    preset: Preset
    out: Path
    data: Path | None = None
    seed: int = 0
    budget: Budget | None = None
    lr: float | None = None
    every: int | None = None
    compile: bool = False
    device: str | None = None
    keep_going: bool = False  # even if the loss or the weights are not finite
    checkpoint_s: float = 300.0

    def options(self, ranks: Ranks) -> Record:
        """Return the options that change the numbers of a run."""
        return {
            "preset": self.preset.name,
            "budget": None if self.budget is None else self.budget.text,
            "lr": self.lr,
            "seed": self.seed,
            "every": self.every,
            "compile": self.compile,
            "device": ranks.device.type,
            "processes": ranks.count,
        }

    @property
    def mode(self) -> StepMode:
        """How steps are executed; on a CPU nothing is captured."""
        return "compiled and captured" if self.compile else "captured"


def find_plan(request: TrainingRequest, options: Record, folder: Folder) -> tuple[Plan | None, int]:
    """Return the plan and the number of steps already taken; no plan if the speed must be measured first."""
    before, budget = folder.read_options(), request.budget
    folder.refuse_other_options(options)
    images, every = None if budget is None else budget.images, request.every
    if budget is not None and budget.seconds is not None:
        if before is None:
            return None, 0
        images, every = before["resolved"]["images"], before["resolved"]["every"]  # as measured at the beginning
    plan = Plan.make(request.preset, images=images, lr=request.lr, every=every)
    folder.refuse_changed_plan(plan.describe())
    return plan, folder.step()
