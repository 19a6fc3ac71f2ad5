"""Train many small networks at once in one batched program, through the library as users have it.

Every lane (an arm at a learning rate) is one parameter of one torch optimizer and holds the networks of all seeds, each
flattened into a row. There is one parameter group per learning rate, and a `Belay` on the optimizer gives each lane its
own method. Adam works element by element and a batched product network by network, so networks do not affect one
another. A seed's networks start with the same weights and train on the same batches in every lane: only the method and
its learning rate differ.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from torchbelay.belay import Belay
from torchbelay.lab.arms import Lane
from torchbelay.physics.method import Method

Batch = tuple[Tensor, Tensor]  # inputs and targets, (seeds, batch, …)


@dataclass(frozen=True)
class Shape:
    """A perceptron with SiLU between its layers, as a row of numbers: a layer's weights (in × out), then its bias."""

    sizes: tuple[int, ...]  # inputs, hidden widths, outputs

    @property
    def numbers(self) -> int:
        """The length of the row."""
        return sum((i + 1) * o for i, o in pairwise(self.sizes))

    def initial(self, generator: torch.Generator) -> Tensor:
        """Return a row that is initialized as torch's Linear layers are: uniform within ±1/√inputs."""
        parts = [torch.rand((i + 1) * o, generator=generator) * 2 - 1 for i, o in pairwise(self.sizes)]
        return torch.cat([part / math.sqrt(i) for part, i in zip(parts, self.sizes, strict=False)])

    def layers(self, rows: Tensor) -> list[Tensor]:
        """Return views of rows (networks, numbers): weights (networks, in, out), bias (networks, 1, out), and so on."""
        views, at = [], 0
        for i, o in pairwise(self.sizes):
            for inner in (i, 1):
                views.append(rows[:, at : at + inner * o].view(len(rows), inner, o))
                at += inner * o
        return views

    def forward(self, layers: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return outputs (networks, batch, out) for inputs (networks, batch, in)."""
        for weight, bias in zip(layers[:-2:2], layers[1:-2:2], strict=True):
            x = silu(torch.baddbmm(bias, x, weight))
        return torch.baddbmm(layers[-1], x, layers[-2])


@dataclass
class TrainedNetworks:
    """The weights, averages and losses after training, each (lanes, seeds, …)."""

    w1: Tensor
    averages: dict[str, Tensor]  # by name; w1 itself in lanes that a spectator does not watch
    loss: Tensor  # of w1 on its own batches, mean of the last tenth of the run

    @classmethod
    def join(cls, parts: Sequence["TrainedNetworks"]) -> "TrainedNetworks":
        """Join parts that have the same lanes and different seeds."""
        averages = {name: torch.cat([part.averages[name] for part in parts], dim=1) for name in parts[0].averages}
        w1, loss = (torch.cat(each, dim=1) for each in zip(*((part.w1, part.loss) for part in parts), strict=True))
        return cls(w1, averages, loss)


class Networks(nn.Module):
    """All networks at their start, ready to step.

    A spectator is a further average that watches the lanes for which its function returns a method.
    """

    def __init__(
        self,
        shape: Shape,
        lanes: Sequence[Lane],
        starts: Tensor,
        spectators: Mapping[str, Callable[[Lane], Method | None]] | None = None,
    ) -> None:
        """Place all networks at their starts, (seeds, numbers): a seed's networks start alike in every lane."""
        super().__init__()
        spectators = spectators or {}
        self.shape, self.lanes = shape, lanes
        self.names = ("average", *spectators)
        self.w = starts.expand(len(lanes), *starts.shape).clone()
        self.grad = torch.zeros_like(self.w)
        self.rows = nn.ParameterList(nn.Parameter(row) for row in self.w)
        groups: dict[float, list[nn.Parameter]] = {}
        for lane, row, grad in zip(lanes, self.rows, self.grad, strict=True):
            row.grad = grad
            groups.setdefault(lane.actual_lr, []).append(row)
        self.optimizer = torch.optim.Adam([{"params": rows, "lr": lr} for lr, rows in groups.items()], fused=True)
        watching = {name: self._rule(method) for name, method in spectators.items()}
        self.belay = Belay(self, self.optimizer, self._rule(lambda lane: lane.arm.method), spectators=watching)
        # Layers share memory with the parameters, so their gradients are those of the parameters.
        self._layers = [layer.detach().requires_grad_() for layer in shape.layers(self.w.flatten(0, 1))]
        self._grads = shape.layers(self.grad.flatten(0, 1))

    def _rule(self, method: Callable[[Lane], Method | None]) -> Callable[[str, Tensor], Method | None]:
        return lambda name, _: method(self.lanes[int(name.split(".")[-1])])

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Take one optimizer step in all networks on a batch per seed; return the losses (lanes, seeds) before it."""
        outputs = self.shape.forward(self._layers, x.expand(len(self.lanes), *x.shape).flatten(0, 1))
        losses = (outputs.view(len(self.lanes), *y.shape) - y).square().mean((-1, -2))
        torch._foreach_copy_(self._grads, torch.autograd.grad(losses.sum(), self._layers))
        self.optimizer.step()
        return losses.detach()

    def average(self, name: str = "average") -> Tensor:
        """Return an average, (lanes, seeds, numbers)."""
        with self.belay.averaged(name):
            return self.w.clone()


def train(
    networks: Networks, batches: Iterable[Batch], *, steps: int, tick: Callable[[int], object]
) -> TrainedNetworks:
    """Take `steps` steps, one per batch."""
    losses = torch.zeros(networks.w.shape[:2], dtype=torch.float64)
    last = math.ceil(steps / 10)
    for step, (x, y) in enumerate(batches, 1):
        loss = networks.step(x, y)
        if step > steps - last:
            losses += loss / last
        tick(1)
        if step == steps:
            break
    averages = {name: networks.average(name) for name in networks.names}
    return TrainedNetworks(networks.w.clone(), averages, losses)


@torch.no_grad()
def compute_outputs(shape: Shape, rows: Tensor, x: Tensor) -> Tensor:
    """Return the outputs of networks (networks, numbers) for their own inputs, or for shared ones (batch, in)."""
    return shape.forward(shape.layers(rows), x.expand(len(rows), *x.shape[-2:]))
