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

WARM = 3  # steps before a capture: libraries choose their algorithms, optimizer and average make their state


def precision(device: torch.device) -> ContextManager[Any]:
    """bfloat16 where it is fast; on a CPU float32."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


@contextmanager
def deterministic() -> Iterator[None]:
    """Let cuDNN take only algorithms that give the same numbers every time."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


class Trainee:
    """One network, trained by Adam with the average of its lane.

    `network` is on its device already. What is captured reads the tensors that were given at that step: later ones must
    be the same, with new contents.
    """

    def __init__(self, network: nn.Module, lane: Lane, loss: Loss, *, capture: bool) -> None:
        self.network, self.lane, self.loss = network, lane, loss
        self.device = next(network.parameters()).device
        on_gpu = self.device.type == "cuda"
        lr = torch.tensor(lane.actual_lr, device=self.device) if on_gpu else lane.actual_lr
        self.optimizer = Adam(network.parameters(), lr=lr, capturable=on_gpu)
        if lane.arm.method is None:
            raise LabError(f"the arm {lane.arm.name!r} has no average; w1 of an EMA's run is what it would be")
        self.belay = Belay(network, self.optimizer, lane.arm.method)
        self._capture, self.taken = capture and on_gpu, 0  # steps
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._total = torch.zeros((), device=self.device)

    def set_lr_scale(self, scale: float) -> None:
        """A point of the schedule: this many times the learning rate of the lane."""
        lr = self.optimizer.param_groups[0]["lr"]
        if isinstance(lr, Tensor):
            self.wait()  # a step that is still being taken reads it
            lr.fill_(scale * self.lane.actual_lr)
        else:
            self.optimizer.param_groups[0]["lr"] = scale * self.lane.actual_lr

    def step(self, pixels: Tensor, draws: Draws) -> None:
        """Take a step, on a stream of its own; `wait()` before its results are used."""
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
        """Let what follows on the current stream come after the steps taken."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    @property
    def lost(self) -> bool:
        """Whether the average is no number: then the weights are none either, and never will be again."""
        return not all(bool(each.isfinite().all()) for each in self.belay.average_state_dict().values())

    def total_loss(self) -> float:
        """The sum of the steps' losses since this was last asked."""
        total = float(self._total)
        self._total.zero_()
        return total

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on but batches and device generators."""
        network = getattr(self.network, "module", self.network)  # that of DistributedDataParallel
        return {
            "network": network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "belay": self.belay.state_dict(),
            "total": self._total.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; not once the step has been captured."""
        getattr(self.network, "module", self.network).load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.belay.load_state_dict(state["belay"])
        self._total.copy_(state["total"])


class Together:
    """Trainees that see the same batches, side by side on one device: small networks leave a GPU idle."""

    def __init__(self, trainees: "list[Trainee]") -> None:
        self.trainees = trainees
        self.running = trainees
        self._static: tuple[Tensor, Draws] | None = None

    def step(self, pixels: Tensor, draws: Draws) -> None:
        """All that are running take a step on a batch."""
        for trainee in self.running:
            trainee.wait()  # until then they may still be reading the last one
        if self._static is None:
            self._static = _copy_of(pixels, draws)  # later ones are copied into it: it must be nobody else's
        else:
            _copy(self._static, (pixels, draws))
        for trainee in self.running:
            trainee.step(*self._static)

    def leave_the_lost(self) -> None:
        """Take no more steps with those that are lost: they would cost as much as any."""
        self.wait()
        self.running = [trainee for trainee in self.running if not trainee.lost]

    def wait(self) -> None:
        """Let what follows come after all steps taken."""
        for trainee in self.trainees:
            trainee.wait()


def _copy_of(pixels: Tensor, draws: Draws) -> tuple[Tensor, Draws]:
    augment = None if draws.augment is None else draws.augment.clone()
    return pixels.clone(), Draws(draws.sigma.clone(), draws.noise.clone(), augment)


def _copy(to: tuple[Tensor, Draws], new: tuple[Tensor, Draws]) -> None:
    to[0].copy_(new[0])
    to[1].sigma.copy_(new[1].sigma)
    to[1].noise.copy_(new[1].noise)
    if to[1].augment is not None and new[1].augment is not None:
        to[1].augment.copy_(new[1].augment)
