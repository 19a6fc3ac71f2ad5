"""The state of a training: a network and everything that its next step depends on."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchbelay.lab.part import Record
from torchbelay.lab.records import rounded
from torchbelay.ops import arithmetic

from .batches import Batches
from .budget import Plan
from .learner import Learner, LearnerGroup
from .ranks import Ranks
from .speed import StepMode, build_loss
from .validation import Validation

AHEAD = 2  # steps that the host may be ahead of a GPU: enough to keep it busy, few enough to stop at once


class TrainingRun:
    """A network in training, with its batches, random generators and counters."""

    def __init__(self, plan: Plan, seed: int, images: Tensor, mode: StepMode, ranks: Ranks) -> None:
        self.plan, self.ranks, self.objective = plan, ranks, plan.preset.objective
        torch.manual_seed(seed)
        network = self.objective.network().to(device=ranks.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        loss = build_loss(self.objective, mode)
        self.learner = Learner(ranks.distribute(network), plan.lane, loss, capture=ranks.count == 1)
        self._learners = LearnerGroup([self.learner])
        self._batches = Batches(
            images, self.objective, plan.batch, seed=1000 + seed, rank=ranks.rank, ranks=ranks.count
        )
        torch.manual_seed((seed + 1) * 1_000_003 + ranks.rank)  # for dropout, which differs between ranks
        self._marks: deque[torch.cuda.Event] = deque()
        self._lr_scale = math.nan
        self.step = self.reported = 0
        self.wall_s = 0.0  # including the time before it was stopped and continued

    def advance(self) -> None:
        """Take a step."""
        self.step += 1
        if (scale := self.plan.lr_scale(self.step)) != self._lr_scale:
            self.learner.set_lr_scale(scale)
            self._lr_scale = scale
        self._learners.step(*self._batches.next())
        if self.ranks.device.type == "cuda":
            self._marks.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
            self._marks[-1].record()  # reached when the previous step is done
            if len(self._marks) > AHEAD:
                self._marks.popleft().synchronize()

    def finish(self) -> None:
        """Wait until all steps are done."""
        self._learners.wait()
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)

    def losses(self, validation: Validation) -> Record:
        """Return the mean loss of the steps since the last report and, on the first rank, the validation losses."""
        self.finish()
        totals = self.ranks.gather(self.learner.total_loss())
        mean = math.fsum(totals) / len(totals) / max(1, self.step - self.reported)
        self.reported = self.step
        validated = validation.losses(self.objective.loss, self.learner) if self.ranks.first else {}
        return {"loss": rounded(mean), **validated}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on; with several ranks, call it on every rank."""
        self.finish()
        learner, device = self.learner.state_dict(), self.ranks.device
        own = {"total": learner["total"].cpu(), "dice": torch.get_rng_state()}
        if device.type == "cuda":
            own["device_dice"] = torch.cuda.get_rng_state(device)
        return {
            "step": self.step,
            "reported": self.reported,
            "wall_s": self.wall_s,
            "trainee": learner,  # the key's name is part of the checkpoint format
            "batches": self._batches.generator.get_state(),
            "ranks": self.ranks.gather(own),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        own = state["ranks"][self.ranks.rank]
        self.learner.load_state_dict({**state["trainee"], "total": own["total"]})
        self._batches.generator.set_state(state["batches"].cpu())
        torch.set_rng_state(own["dice"].cpu())
        if self.ranks.device.type == "cuda":
            torch.cuda.set_rng_state(own["device_dice"].cpu(), self.ranks.device)
        self.step, self.reported, self.wall_s = state["step"], state["reported"], state["wall_s"]


def is_finite(learner: Mapping[str, Any]) -> bool:
    """Whether all weights and averages in a learner's state are finite."""
    averages = (average["weights"] for average in learner["belay"]["averages"].values())
    weights = [w for some in (learner["network"], *averages) for w in some.values()]
    return bool(arithmetic.finite([w for w in weights if w.is_floating_point()]))
