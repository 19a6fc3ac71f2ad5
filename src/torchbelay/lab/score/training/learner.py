"""A network in training, with its optimizer and its average. On a GPU its step is captured once and then replayed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ContextManager  # noqa: UP035 - the name for a type

import torch
from torch import Tensor, nn

from torchbelay.belay import Belay
from torchbelay.lab.arms import Lane
from torchbelay.lab.part import LabError
from torchbelay.lab.score.models.objective import Draws
from torchbelay.optim import Adam

Loss = Callable[[nn.Module, Tensor, Draws], Tensor]  # an Objective's, compiled or not

BETA2 = 0.999  # Adam's
WARM = 3  # steps before a capture, in which libraries choose algorithms, and optimizer and average create their state


def precision(device: torch.device) -> ContextManager[Any]:
    """Return the context of the forward pass: bfloat16 on a GPU, float32 on a CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


@contextmanager
def deterministic() -> Iterator[None]:
    """Restrict cuDNN to algorithms that give the same numbers every time."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


class Learner:
    """One network, trained by Adam with the average of its lane.

    `network` must already be on its device. A captured step reads the tensors that it was captured with: every later
    step must pass the same tensors, with new contents.
    """

    def __init__(self, network: nn.Module, lane: Lane, loss: Loss, *, capture: bool) -> None:
        self.network, self.lane, self.loss = network, lane, loss
        self.device = next(network.parameters()).device
        on_gpu = self.device.type == "cuda"
        lr = torch.tensor(lane.actual_lr, device=self.device) if on_gpu else lane.actual_lr
        betas = (lane.beta1, BETA2)
        self.optimizer = Adam(network.parameters(), lr=lr, betas=betas, eps=lane.eps, capturable=on_gpu)
        if lane.arm.method is None:
            raise LabError(f"the arm {lane.arm.name!r} has no average; take w1 of an EMA's run instead")
        self.belay = Belay(network, self.optimizer, lane.arm.method, spectators=dict(lane.arm.spectators) or None)
        self._capture, self.taken = capture and on_gpu, 0  # steps
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._total = torch.zeros((), device=self.device)

    def set_lr_scale(self, scale: float) -> None:
        """Set the learning rate to `scale` times that of the lane."""
        lr = self.optimizer.param_groups[0]["lr"]
        if isinstance(lr, Tensor):
            self.wait()  # a step that is not done may still read it
            lr.fill_(scale * self.lane.actual_lr)
        else:
            self.optimizer.param_groups[0]["lr"] = scale * self.lane.actual_lr

    def step(self, pixels: Tensor, draws: Draws) -> None:
        """Take a step, on the learner's own stream; call `wait()` before using its results."""
        self.taken += 1
        if self._stream is None:
            self._step(pixels, draws)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            if self._capture and self.taken == WARM + 1:
                self._graph = torch.cuda.CUDAGraph()
                self.optimizer.zero_grad(set_to_none=True)
                with torch.cuda.graph(self._graph, stream=self._stream):
                    self._step(pixels, draws)
            if self._graph is None:
                self._step(pixels, draws)
            else:
                self._graph.replay()

    def _step(self, pixels: Tensor, draws: Draws) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with precision(self.device):
            loss = self.loss(self.network, pixels, draws).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self._total += loss.detach()

    def wait(self) -> None:
        """Make later work on the current stream wait for the steps taken."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    @property
    def lost(self) -> bool:
        """Whether the average is not finite: then the weights are not finite either, and no later step repairs them."""
        return not all(bool(each.isfinite().all()) for each in self.belay.average_state_dict().values())

    def total_loss(self) -> float:
        """Return the sum of the losses of all steps since the last call."""
        total = float(self._total)
        self._total.zero_()
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on, except batches and the generators of the device."""
        network = getattr(self.network, "module", self.network)  # unwraps DistributedDataParallel
        return {
            "network": network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "belay": self.belay.state_dict(),
            "total": self._total.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; only before the step is captured."""
        getattr(self.network, "module", self.network).load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.belay.load_state_dict(state["belay"])
        self._total.copy_(state["total"])


class LearnerGroup:
    """Learners that see the same batches, side by side on one device: a small network alone leaves a GPU idle."""

    def __init__(self, members: list[Learner]) -> None:
        self.members = members
        self.running = members
        self._static: tuple[Tensor, Draws] | None = None

    def step(self, pixels: Tensor, draws: Draws) -> None:
        """Take a step with all running learners on a batch."""
        for learner in self.running:
            learner.wait()  # the previous step may still read the previous batch
        if self._static is None:
            self._static = _clone(pixels, draws)  # later batches are copied into it, so nothing else may share it
        else:
            _copy(self._static, (pixels, draws))
        for learner in self.running:
            learner.step(*self._static)

    def drop_lost(self) -> None:
        """Take no more steps with lost learners: their steps would cost as much as any."""
        self.wait()
        self.running = [learner for learner in self.running if not learner.lost]

    def wait(self) -> None:
        """Make later work on the current stream wait for all steps taken."""
        for learner in self.members:
            learner.wait()


def _clone(pixels: Tensor, draws: Draws) -> tuple[Tensor, Draws]:
    augment = None if draws.augment is None else draws.augment.clone()
    return pixels.clone(), Draws(draws.sigma.clone(), draws.noise.clone(), augment)


def _copy(to: tuple[Tensor, Draws], new: tuple[Tensor, Draws]) -> None:
    to[0].copy_(new[0])
    to[1].sigma.copy_(new[1].sigma)
    to[1].noise.copy_(new[1].noise)
    if to[1].augment is not None and new[1].augment is not None:
        to[1].augment.copy_(new[1].augment)
