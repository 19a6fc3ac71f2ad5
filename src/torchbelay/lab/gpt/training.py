"""Train one network after the other: the same program for every arm, rate and seed.

There is one network, whose weights are set anew for each run, so that it is compiled, and on a GPU captured, once. The
captured part is the gradient; the optimizer steps and the averages follow outside, as in an ordinary loop.
"""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ContextManager, NamedTuple  # noqa: UP035 - the name for a type

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchbelay.belay import Belay
from torchbelay.curvature import measure_curvatures
from torchbelay.curvature.lanczos import MeasurementError
from torchbelay.lab.part import Record
from torchbelay.lab.records import rounded

from .arms import Arm
from .corpus import Corpus, Split, unigram_loss, windows
from .network import ByteGPT, Shape, decayed, loss_of, seeded

CLIP = 1.0  # the largest norm of a gradient
BETA2 = 0.95
WARM = 3  # passes before the capture, in which libraries choose their algorithms
PRODUCTS = 10  # of the Hessian and a vector, by which the curvature is measured
LOOKS = (0.1, 1 / 3, 2 / 3, 1.0)  # shares of a run after which the curvature is measured


@dataclass(frozen=True)
class Protocol:
    """The sizes and numbers of the study."""

    shape: Shape = field(default_factory=Shape)
    batch: int = 64
    steps: int = 1500
    warmup: int = 100
    rate: float = 0.01  # c of the averages, which remember about 100 steps
    lrs: tuple[float, ...] = (3e-4, 5.8e-4, 1.1e-3, 2.1e-3, 4.1e-3, 8e-3)
    tuned_on: int = 2  # seeds
    judged_on: int = 5  # others
    windows: int = 1024  # of held-out text
    corpus: int = 120_000_000  # bytes, at most

    @property
    def looks(self) -> tuple[int, ...]:
        """Return the steps after which the curvature is measured."""
        return tuple(round(share * self.steps) for share in LOOKS)


class _Begun(NamedTuple):
    """A run that has begun."""

    optimizer: Optimizer
    belay: Belay
    starts: Tensor  # of the text of every batch, and of one more


def _named(arm: Arm, lr: float, seed: int) -> Record:
    """Return what tells a run from others, as its record has it."""
    return {"arm": arm.name, "theta": arm.theta, "lr": lr, "seed": seed}


def precision(device: torch.device) -> ContextManager[Any]:
    """Return the context of the forward pass: bfloat16 on a GPU, float32 on a CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


class Trainer:
    """Trains networks of one shape on one corpus."""

    def __init__(self, how: Protocol, corpus: Corpus, device: torch.device) -> None:
        self.how, self.device = how, device
        train, tune, judge = (each.to(device) for each in (corpus.train, corpus.tune, corpus.judge))
        self.corpus = replace(corpus, train=train, tune=tune, judge=judge)
        self.network = ByteGPT(how.shape).to(device)
        self._text = torch.zeros(how.batch, how.shape.context, dtype=torch.long, device=device)
        self._following = torch.zeros_like(self._text)
        self._loss = torch.zeros((), device=device)
        held_out: tuple[Split, ...] = ("tune", "judge")
        self._frequencies = {split: unigram_loss(train, self.corpus.held_out(split)) for split in held_out}
        self._gradient: Callable[[], None] = self._pass
        self._forward: Callable[[Tensor, Tensor], Tensor] = self._eager
        if device.type == "cuda":
            self._forward = torch.compile(self._eager, dynamic=False)
            self._gradient = self._captured()

    def _eager(self, text: Tensor, following: Tensor) -> Tensor:
        return loss_of(self.network(text), following)

    def _pass(self) -> None:
        for p in self.network.parameters():
            p.grad = None
        with precision(self.device):
            loss = self._forward(self._text, self._following)
        loss.backward()  # type: ignore[no-untyped-call]
        self._loss.copy_(loss.detach())

    def _captured(self) -> Callable[[], None]:
        """Capture the gradient as a CUDA graph; a replay writes it to the same tensors."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM):
                self._pass()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._pass()
        return graph.replay

    def run(self, arm: Arm, lr: float, seed: int, split: Split) -> Record:
        """Train once; return the losses of the weights and of all averages on a held-out split."""
        how, begun = self.how, self._begin(arm, lr, seed)
        last = torch.zeros((), device=self.device)
        for step in self._steps(begun, arm, lr):
            if step > how.steps - how.warmup:
                last += self._loss / how.warmup
        losses, fresh = {"w1": self._held_out(split)}, None
        for name in ("average", *arm.spectators):
            with begun.belay.averaged(name):
                losses["w2" if name == "average" else name] = self._held_out(split)
                if name == "average":
                    fresh = losses["w2"] if split == "judge" else self._held_out("judge")
        begun.belay.detach()
        return {
            "kind": "run",
            **_named(arm, lr, seed),
            "split": split,
            "train": rounded(float(last)),
            "losses": losses,
            "fresh": fresh,  # w2's loss on the text for judging, which the figure shows and nothing is chosen by
        }

    def trace(self, arm: Arm, lr: float, seed: int, looks: Collection[int]) -> Record:
        """Train once; return the curvature after some of the steps, on the text that comes next."""
        begun, found = self._begin(arm, lr, seed), []
        for step in self._steps(begun, arm, lr):
            if step in looks:
                self._load_batch(begun.starts[step])
                found.append([step, self._sharpness(begun.optimizer)])
        begun.belay.detach()
        return {"kind": "curvature", **_named(arm, lr, seed), "products": PRODUCTS, "curvatures": found}

    def _begin(self, arm: Arm, lr: float, seed: int) -> _Begun:
        """Set the network's first weights, and attach the averages of an arm."""
        rate = self.how.rate
        self.network.load_state_dict(seeded(self.how.shape, seed).state_dict())
        optimizer = torch.optim.AdamW(
            decayed(self.network), lr=lr, betas=(arm.beta1, BETA2), fused=self.device.type == "cuda" or None
        )
        spectators = {name: make(rate) for name, make in arm.spectators.items()}
        belay = Belay(self.network, optimizer, arm.method(rate), spectators=spectators or None)
        return _Begun(optimizer, belay, self._starts(seed))

    def _steps(self, begun: _Begun, arm: Arm, lr: float) -> Iterator[int]:
        """Train; yield after every step how many have been taken."""
        how = self.how
        for step in range(1, how.steps + 1):
            for group in begun.optimizer.param_groups:
                group["lr"] = lr * arm.lr_at(step, how.steps, how.warmup)
            self._load_batch(begun.starts[step - 1])
            self._gradient()
            nn.utils.clip_grad_norm_(self.network.parameters(), CLIP)
            begun.optimizer.step()
            yield step

    def _starts(self, seed: int) -> Tensor:
        """Draw where the text of every batch of a run starts; all go to the device at once, so that no step waits."""
        source = torch.Generator().manual_seed(10_000 + seed)
        last = len(self.corpus.train) - self.how.shape.context
        drawn = [torch.randint(last, (self.how.batch,), generator=source) for _ in range(self.how.steps + 1)]
        return torch.stack(drawn).to(self.device)

    def _load_batch(self, starts: Tensor) -> None:
        text, following = windows(self.corpus.train, starts, self.how.shape.context)
        self._text.copy_(text)
        self._following.copy_(following)

    @torch.no_grad()
    def _held_out(self, split: Split) -> float | None:
        """Return the loss on windows that are spread evenly over a split; None if the run is lost.

        A run is lost if it predicts no better than the frequencies of bytes do.
        """
        text, context = self.corpus.held_out(split), self.how.shape.context
        starts = torch.linspace(0, len(text) - context - 1, self.how.windows, device=self.device).long()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for some in torch.split(starts, self.how.batch):
            with precision(self.device):
                total += self._forward(*windows(text, some, context)).double() * len(some)
        loss = float(total) / self.how.windows
        return rounded(loss) if math.isfinite(loss) and loss < self._frequencies[split] else None

    def _sharpness(self, optimizer: Optimizer) -> float | None:
        """Return the eigenvalue of largest size of the Hessian in the units of Adam's steps; None if there is none.

        Its product with the learning rate is the x of the theorems on stability. It is measured in float32.
        """
        some = slice(0, max(1, self.how.batch // 4))
        text, following = self._text[some], self._following[some]
        try:
            found = measure_curvatures(
                self.network, lambda: self._eager(text, following), optimizer=optimizer, products=PRODUCTS
            )
        except MeasurementError:  # the run has diverged
            return None
        return rounded(max(found.largest, found.lowest, key=abs))
