"""The short trainings that contracts are checked on, all from the same weights and the same batches."""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchbelay.belay import Belay, modules, planes
from torchbelay.belay.average import MAIN
from torchbelay.belay.checkpoint import LOW
from torchbelay.belay.options import OptionArguments
from torchbelay.belay.rules import Rule
from torchbelay.physics.method import Method

from .comparison import State, abridge, can_average, differences, leaves, local, snapshot

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]
Averaging = Method | Rule  # what `Belay` takes as its method


class Skip(Exception):  # noqa: N818  # not an error of the program
    """A contract cannot be checked on this training; the message says why."""


class InjectedFault(Exception):  # noqa: N818
    """The exception that contracts raise on purpose."""


def mean_square(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean square of all numbers that the model returns, or the model's own `.loss`."""
    match batch:
        case Mapping():
            out = model(**batch)
        case tuple():
            out = model(*batch)
        case _:
            out = model(batch)
    own = getattr(out, "loss", None)
    if isinstance(own, Tensor):
        return own
    found = [t for _, t in leaves("", out) if isinstance(t, Tensor) and can_average(t)]
    if not found:
        raise ValueError(f"the model returned {type(out).__name__}, with no number to minimise in it; give a loss=")
    return torch.stack([t.abs().square().mean().float() for t in found]).sum()


@dataclass(eq=False)
class Run:
    """One training: a model, its optimizer and, if a method is given, a `Belay`."""

    bench: "Bench"
    model: nn.Module
    optimizer: Optimizer
    belay: Belay | None

    def train(self, steps: Iterable[int], *, failing: bool = False) -> None:
        """Take these steps."""
        for step in steps:
            self.step(step, failing=failing)

    def step(self, step: int, *, failing: bool = False) -> None:
        """Train on the batch of a step; if `failing`, the optimizer's step raises once and is then repeated."""
        torch.manual_seed(1000 + step)
        self.model.train()
        batch = self.bench.batches(step)

        def evaluate() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.bench.loss(self.model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        arguments: tuple[Any, ...] = (evaluate,)
        if not self.bench.closure:
            evaluate()
            arguments = ()
        if failing:
            handle = self.optimizer.register_step_pre_hook(_fail)
            try:
                self.optimizer.step(*arguments)
            except InjectedFault:
                pass
            finally:
                handle.remove()
        self.optimizer.step(*arguments)

    @property
    def attached(self) -> Belay:
        """The `Belay` of a training that has one."""
        assert self.belay is not None
        return self.belay

    def named(self) -> dict[str, nn.Parameter]:
        """Return the model's parameters by the names that averages use."""
        return modules.named_parameters(self.model)

    def average(self) -> dict[str, Any]:
        """Return the saved form of the main average: weights, velocities1, velocities2, ages, …; weights as values."""
        state: dict[str, Any] = self.attached.state_dict()["averages"][MAIN]
        low = state.get(LOW, {})
        weights = {n: planes.joined(w2, low[n]) if n in low else w2 for n, w2 in state["weights"].items()}
        return state | {"weights": weights}

    def kept(self, weight: Tensor, average: Tensor) -> Tensor:
        """Return what an average keeps of a weight that it begins at."""
        kept = weight.detach().to(average.device, average.dtype)
        return kept if self.attached._options.bits is None else planes.joined(*planes.split(kept))

    def gradients(self) -> State:
        """Return the gradients by name."""
        return {f"gradient/{name}": local(p.grad) for name, p in self.named().items() if p.grad is not None}

    def state(self, *parts: str) -> State:
        """Return copies of all that these parts hold; by default model, optimizer and `Belay`."""
        chosen = parts or ("model", "optimizer", *(["belay"] if self.belay is not None else []))
        return {
            name: snapshot(leaf)
            for part in chosen
            for name, leaf in leaves(part, getattr(self, part).state_dict())
            if not callable(leaf)
        }


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether a step cannot be taken without an argument."""
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError:
        return True
    return False


def _fail(*_: object) -> None:
    raise InjectedFault


@dataclass(eq=False)
class Bench:
    """The maker of short trainings, all from the same weights."""

    model_factory: Callable[[], nn.Module]
    optimizer_factory: Callable[[nn.Module], Optimizer]
    batches: Callable[[int], Batch]
    loss: Loss
    method: Averaging
    steps: int
    closure: bool
    options: OptionArguments
    repeats: str | None = None  # the reason why bits cannot be compared, if any
    resumes: str | None = None  # the reason why the training does not resume from a checkpoint without Belay, if any
    plain: State = field(default_factory=dict)  # model, optimizer and gradients at the end, without Belay
    finished: State = field(default_factory=dict)  # everything at the end, with the method
    _example: Run | None = None
    _start: dict[str, Any] | None = None
    _made: list[nn.Module] = field(default_factory=list)

    def model(self, seed: int = 0) -> nn.Module:
        """Return a new model; with seed 0 its weights are always the same."""
        torch.manual_seed(seed)
        model = self.model_factory()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model_factory() returned {type(model).__name__}; it must return a torch.nn.Module")
        if any(model is other for other in self._made):
            raise ValueError("model_factory() returned the same model twice; it must make a new one at every call")
        self._made = [*self._made[-1:], model]
        if seed == 0:
            if self._start is None:
                self._start = copy.deepcopy(model.state_dict())
            else:
                model.load_state_dict(self._start)
        return model

    def run(self, method: Averaging | None = None, *, seed: int = 0) -> Run:
        """Return a new training, with a `Belay` if a method is given."""
        model = self.model(seed)
        optimizer = self.optimizer_factory(model)
        if not self.closure and _needs_closure(optimizer):
            raise ValueError(
                f"closure={self.closure!r}: {type(optimizer).__name__}.step() cannot be called without a closure; give "
                "closure=True, and the optimizer evaluates the loss itself"
            )
        belay = None if method is None else Belay(model, optimizer, method, **self.options)
        return Run(self, model, optimizer, belay)

    def finish(self, method: Averaging | None = None, *, failing: bool = False) -> Run:
        """Return a new training after all its steps."""
        run = self.run(method)
        run.train(range(self.steps), failing=failing)
        return run

    def example(self) -> Run:
        """Return the one finished training with the method that contracts share; only the last ones may change it."""
        if self._example is None:
            self._example = self.finish(self.method)
            self.finished = self._example.state()
        return self._example

    def forget_example(self) -> None:
        """Let the next contract make a new example, after a failure that may have changed this one."""
        self._example = None

    def look(self) -> None:
        """Find out, without any `Belay`, whether this training moves, repeats and resumes."""
        run = self.run()
        before = run.state("model")
        run.train(range(self.steps))
        after, self.plain = run.state(), run.state() | run.gradients()
        if not differences(before, {name: after[name] for name in before}):
            raise ValueError(
                f"the training moves nothing: no weight has changed after {self.steps} steps; give a batch and a loss "
                "that train the model, and an optimizer that holds its parameters"
            )
        if endless := [n for n in before if isinstance(after[n], Tensor) and not after[n].isfinite().all()]:
            raise ValueError(
                f"the training breaks down without Belay: {abridge(endless)} is not finite after {self.steps} steps; "
                "give a smaller learning rate, or (for float16 weights) a larger eps"
            )
        again = self.finish()
        if differing := differences(after, again.state()):
            self.repeats = (
                f"the training does not repeat itself bit for bit, even without Belay ({abridge(differing)} differs); "
                "try torch.use_deterministic_algorithms(True)"
            )
            return
        half, other = self.run(), self.run(seed=1)
        half.train(self.first_half)
        other.model.load_state_dict(copy.deepcopy(half.model.state_dict()))
        other.optimizer.load_state_dict(copy.deepcopy(half.optimizer.state_dict()))
        other.train(self.second_half)
        if differing := differences(after, other.state()):
            self.resumes = (
                f"the training does not resume bit for bit, even without Belay ({abridge(differing)} differs)"
            )

    @property
    def first_half(self) -> range:
        """The steps before the stop of a training that is resumed."""
        return range(self.steps // 2)

    @property
    def second_half(self) -> range:
        """The steps after that stop."""
        return range(self.steps // 2, self.steps)

    def require_repeats(self) -> None:
        """Skip the contract if the training does not repeat itself bit for bit."""
        if self.repeats:
            raise Skip(self.repeats)
