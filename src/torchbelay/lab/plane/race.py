"""Train from many starts, at many learning rates, with many methods at once, as rows of one tensor.

Runs go through the library as users have it. Every lane (an arm at a learning rate) is one parameter of a torch
optimizer and holds all starts. There is one parameter group per learning rate, and a `Belay` on the optimizer gives
each lane its own method. SGD and Adam work element by element, so rows do not affect one another. The parameters are
views of one tensor, so the gradient of all rows is one computation.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchbelay.belay import Belay
from torchbelay.lab.arms import MOMENTUM, Lane
from torchbelay.lab.threads import one_thread

from .functions import Function

FAR = 1e6  # a row has diverged if a weight is this far from the minimum: it will not come back
LATEST_ARRIVAL = 0.9  # a row has converged if it arrives by this share of the run

INNER: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=MOMENTUM),
    "Adam": torch.optim.Adam,
    "Adam without momentum": partial(torch.optim.Adam, betas=(0.0, 0.999)),
}


@dataclass
class Outcome:
    """The result of every row: tensors of (lanes, starts), for w1 and for w2 (w1 again in lanes without an average)."""

    loss: tuple[Tensor, Tensor]  # at the end; inf if it is not a number
    worst: tuple[Tensor, Tensor]  # the largest loss of the run
    arrived: tuple[Tensor, Tensor]  # the step after which the loss stays under the tolerance; `steps + 1`: never
    diverged: Tensor  # the step at which w1 was too far; `steps + 1`: never
    steps: int

    def converged(self, which: int = 1) -> Tensor:
        """Whether a row stays under the tolerance in the last tenth of the run, and never diverged."""
        return (self.arrived[which] <= LATEST_ARRIVAL * self.steps) & ~self.lost

    @property
    def lost(self) -> Tensor:
        """Whether a row diverged."""
        return self.diverged <= self.steps


class Race(nn.Module):
    """All lanes at their starts, ready to step."""

    def __init__(self, functions: Sequence[Function], starts: Tensor, lanes: Sequence[Lane]) -> None:
        """Place all lanes at their starts, (functions, starts, 2): each function has starts of its own."""
        super().__init__()
        self.functions, self.lanes = functions, lanes
        self.w = starts.to(torch.float64).expand(len(lanes), *starts.shape).clone()
        self.grad = torch.zeros_like(self.w)
        self.rows = nn.ParameterList(nn.Parameter(row) for row in self.w)
        for parameter, grad in zip(self.rows, self.grad, strict=True):
            parameter.grad = grad
        self.optimizers: list[torch.optim.Optimizer] = []
        self.belays: list[Belay] = []
        for inner, make in INNER.items():
            if groups := self._groups(inner):
                optimizer = make(groups, foreach=True)
                self.optimizers.append(optimizer)
                if any(lane.arm.method for lane in lanes if lane.arm.inner == inner):
                    self.belays.append(
                        Belay(self, optimizer, lambda name, _: lanes[int(name.split(".")[-1])].arm.method)
                    )

    def _groups(self, inner: str) -> list[dict[str, Any]]:
        groups: dict[float, list[nn.Parameter]] = {}
        for lane, row in zip(self.lanes, self.rows, strict=True):
            if lane.arm.inner == inner:
                groups.setdefault(lane.actual_lr, []).append(row)
        return [{"params": params, "lr": lr} for lr, params in groups.items()]

    @torch.no_grad()
    def step(self) -> None:
        """Take one optimizer step in all rows."""
        for i, function in enumerate(self.functions):
            function.gradient_(self.w[:, i], out=self.grad[:, i])
        for optimizer in self.optimizers:
            optimizer.step()

    @torch.no_grad()
    def w2(self) -> Tensor:
        """Return the averages; w1 itself in lanes without one."""
        return self._averaged(list(self.belays))

    def _averaged(self, belays: list[Belay]) -> Tensor:
        if not belays:
            return self.w.clone()
        with belays[0].averaged():
            return self._averaged(belays[1:])

    @torch.no_grad()
    def losses(self, w: Tensor) -> Tensor:
        """Return the losses, (lanes, functions, starts); NaN counts as infinite."""
        per_function = [function(w[:, i]) for i, function in enumerate(self.functions)]
        return torch.stack(per_function, dim=1).nan_to_num_(nan=torch.inf, posinf=torch.inf)


def random_starts(
    function: Function, count: int, generator: torch.Generator, half_width: float | None = None
) -> Tensor:
    """Return starts spread evenly over the square around the minimum: (count, 2)."""
    unit = torch.rand(count, 2, generator=generator, dtype=torch.float64) * 2 - 1
    return unit * (function.half_width if half_width is None else half_width)


def tolerance(function: Function, starts: Tensor) -> float:
    """Return the loss under which a row has arrived: a share of the median loss of the starts."""
    return function.goal * float(function(starts).median())


@one_thread()
def run(
    functions: Sequence[Function],
    starts: Tensor,
    lanes: Sequence[Lane],
    *,
    steps: int,
    tolerances: Sequence[float],
    observed: Container[int],
    tick: Callable[[int], object] = lambda n: None,
    watch: Callable[[int, Tensor, Tensor], object] | None = None,
) -> list[Outcome]:
    """Train all lanes from all starts; return one outcome per function.

    Losses are computed after the steps in `observed` and after the last step. `watch(step, w1, w2)` is called at the
    same steps with the weights and averages, (lanes, functions, starts, 2).
    """
    race = Race(functions, starts, lanes)
    within = torch.tensor(tolerances, dtype=torch.float64)[:, None]
    never = torch.full(race.w.shape[:-1], steps + 1)
    diverged, arrived = never, [never, never]
    worst = [torch.zeros(never.shape, dtype=torch.float64) for _ in range(2)]
    losses: list[Tensor] = []
    for step in range(steps + 1):
        if step:
            race.step()
            tick(1)
        if step not in observed and step != steps:
            continue
        points = (race.w, race.w2())
        if watch is not None:
            watch(step, *points)
        losses = [race.losses(w) for w in points]
        worst = [torch.maximum(high, loss) for high, loss in zip(worst, losses, strict=True)]
        arrived = [
            torch.where(loss <= within, since.clamp_max(step), never)
            for since, loss in zip(arrived, losses, strict=True)
        ]
        near = race.w.abs().amax(-1) < FAR  # false for NaN
        diverged = torch.where(near, diverged, diverged.clamp_max(step))
    return [
        Outcome(
            (losses[0][:, i], losses[1][:, i]),
            (worst[0][:, i], worst[1][:, i]),
            (arrived[0][:, i], arrived[1][:, i]),
            diverged[:, i],
            steps,
        )
        for i in range(len(functions))
    ]
