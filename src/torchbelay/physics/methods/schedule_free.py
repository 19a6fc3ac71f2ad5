"""Schedule-free averaging: training without a schedule of the learning rate."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torchbelay.physics import arguments
from torchbelay.physics.brief import brief
from torchbelay.physics.coupling import Coupling
from torchbelay.physics.method import Remembers, Varies
from torchbelay.physics.scaling import Scaleless

_SMALL = 1e-280  # weights from here to 1/_SMALL are counted as they are: a sum of 1e28 of them is still a float


@dataclass(frozen=True)
class schedule_free(Scaleless, Remembers):
    """Schedule-free averaging: w1 is its y, where gradients are taken; w2 is its x, the weights to evaluate.

        a = −β·c/(1−β), b = c/(1−β), p = 1 − β + β·c, q = c

    c is the weight of this step in x: t^r·lr_max^w over the sum of these weights so far, with w = weight_lr_power and
    lr_max the largest learning rate so far. At a constant learning rate and r = 0, c = 1/t.

    When to use it: at a constant learning rate after a warm-up, if the end of the run is not known in advance. With
    AdamW as the inner optimizer, give AdamW betas=(0.0, β2): β here takes the place of its momentum.
    AdamW still keeps its `exp_avg` then. The base iterate z = (y − β·x)/(1 − β) is not stored: in float32 the rounding
    of y counts 1/(1 − β) times in it, so that early steps are less exact than those of the authors' package.

    Reference: Defazio et al., "The road less scheduled", 2024.

    >>> schedule_free(0.5).coupling(2, 0.1)
    Coupling(a=-0.5, b=1.0, p=0.75, q=0.5)
    """

    beta: float = 0.9
    r: float = 0.0
    weight_lr_power: float = 2.0

    varies: ClassVar[Varies] = "lr"
    remembers: ClassVar[int] = 5  # step, largest lr, sum of weights; and the last two before this step

    __repr__ = brief

    def __post_init__(self) -> None:
        arguments.keep(self, "beta", low=0, high=1, open_low=False)
        arguments.keep(self, "r", low=0, open_low=False)
        arguments.keep(self, "weight_lr_power", low=0, open_low=False)

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling; if `lr` changes, call once per step and in order."""
        lr = arguments.number("lr", lr, low=0, open_low=False)  # its power is a weight
        if self.memory and self.memory[0] == step:  # called again for the same step
            lr_max, total = self.memory[3:]
        else:
            past = self.past(step)
            lr_max, total = past[:2] if past is not None else (lr, self._constant_total(step - 1, lr))
        best = max(lr_max, lr)
        weight, carried = self._weight(step, best), self._carried(total, step, lr_max, best)
        if weight is None:  # it is the unit of the sum
            weight = 1.0
        self.remember((step, best, carried + weight, lr_max, total))
        c = weight / (carried + weight) if carried + weight else 0.0
        beta = self.beta
        return Coupling(-beta * c / (1 - beta), c / (1 - beta), 1 - beta + beta * c, c)

    # A sum of weights is in units of its last weight, if no float holds that weight. Else it is the sum itself.

    def _weight(self, step: int, lr: float) -> float | None:
        """Return t^r·lr^w, or None if it or a factor is too large or too small for a float."""
        if lr == 0 and self.weight_lr_power:
            return 0.0
        try:
            by_step, by_lr = float(step) ** self.r, lr**self.weight_lr_power
        except OverflowError:
            return None
        weight = float(by_step * by_lr)
        return weight if all(_SMALL < x < 1 / _SMALL for x in (by_step, by_lr, weight)) else None

    def _carried(self, total: float, step: int, lr_max: float, best: float) -> float:
        """Return the sum of the weights before a step, in the unit of the sum after it."""
        before, now = self._weight(step - 1, lr_max), self._weight(step, best)
        if total == 0 or (before is not None and now is not None):
            return total
        growth = (lr_max / best) ** self.weight_lr_power if self.weight_lr_power else 1.0
        ratio = ((step - 1) / step) ** self.r * growth  # of the two weights: at most 1
        return float(total / (before or 1.0) * ratio * (now or 1.0))

    def _constant_total(self, steps: int, lr: float) -> float:
        """Return the sum of the weights of the first `steps` steps at a constant learning rate."""
        counted = math.fsum((t / steps) ** self.r for t in range(1, steps + 1)) if self.r else float(steps)
        weight = self._weight(steps, lr)
        return counted if weight is None else counted * weight
