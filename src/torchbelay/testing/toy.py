"""The toy model that somebody's averaging code is tried on, and what weights and average do meanwhile."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .comparison import abridge, widen
from .reading import BrokenError, UnreadableError, named_tensors, read_average

Factory = Callable[[nn.Module], tuple[Callable[[], object], Callable[[], object]]]

TOO_LARGE = 1e6  # values beyond this lose the digits that the numbers are computed from


class NoFactoryError(BrokenError, TypeError):
    """A factory that does not return `(update, read)`."""


class Toy(nn.Module):
    """A model of a matrix and a vector with `size` elements each: every element is an experiment of its own."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(1, size, dtype=dtype, device="cpu")
        with torch.no_grad():
            for p in self.layer.parameters():
                p.copy_(torch.linspace(0.5, 1.5, size, dtype=torch.float64).reshape(p.shape))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, for code that runs the model."""
        out: Tensor = self.layer(x)
        return out


class Run:
    """Somebody's averaging code on one model."""

    def __init__(self, factory: Factory, model: nn.Module) -> None:
        torch.manual_seed(0)  # code that draws random numbers draws the same ones in every run
        self.model, self.updates = model, 0
        self.keeps_graph = self.read_writes = False
        made: Any = self._call("factory(model)", lambda: factory(model))
        if not (isinstance(made, tuple | list) and len(made) == 2 and all(map(callable, made))):
            raise NoFactoryError(
                f"factory(model) returned {type(made).__name__}; it must return (update, read): a function that is "
                "called after every change of the weights, and one that returns the average"
            )
        self._update, self._read = made

    def step(self, moves: Mapping[str, Tensor]) -> None:
        """Add moves to the named tensors of the model, then call `update()`."""
        self.change(moves)
        self.updates += 1
        self._call(f"update() number {self.updates}", self._update)

    def change(self, moves: Mapping[str, Tensor]) -> None:
        """Add moves to the named tensors of the model."""
        named = named_tensors(self.model)
        with torch.no_grad():
            for name, move in moves.items():
                t = named[name]
                t.add_(move.expand(t.numel()).reshape(t.shape).to(t))

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the model's tensors in double precision."""
        return {name: widen(t) for name, t in named_tensors(self.model).items()}

    def average(self) -> dict[str, Tensor]:
        """Return copies of the average by name; weights that `read()` has changed are put back."""
        before = {name: t.detach().clone() for name, t in named_tensors(self.model).items()}
        returned = self._call(f"read() after {self.updates} updates", self._read)
        found = self._call("read()", lambda: read_average(returned, self.model))
        self.keeps_graph |= any(_has_history(t, self.updates) for t in found.values())
        copies = {name: t.detach().clone() for name, t in found.items()}
        with torch.no_grad():
            for name, t in named_tensors(self.model).items():
                if not torch.equal(t, before[name]):
                    self.read_writes = True
                    t.copy_(before[name])
        return copies

    def _call(self, what: str, function: Callable[[], Any]) -> Any:
        try:
            with torch.enable_grad():  # as after `optimizer.step()` in a training loop
                return function()
        except BrokenError:
            raise
        except (Exception, SystemExit) as error:  # some libraries exit if they cannot copy a model
            said = " ".join(str(error).split())[:200].rstrip(".")
            raise BrokenError(f"{what} raised {type(error).__name__}" + (said and f": {said}")) from error


def _has_history(t: Tensor, updates: int) -> bool:
    """Whether a tensor's graph of autograd has grown by a node per update, beyond the few that `read()` makes."""
    seen: set[object] = set()
    rest = [t.grad_fn]
    while rest and len(seen) <= max(updates, 10):
        node = rest.pop()
        if node is not None and node not in seen:
            seen.add(node)
            rest += [next_node for next_node, _ in node.next_functions]
    return len(seen) > max(updates, 10)


@dataclass(frozen=True)
class Trace:
    """Weights and average after 0, 1, 2, … updates."""

    states: Tensor  # [updates + 1, weights or average, averaged parameters, elements]
    names: tuple[str, ...]  # the averaged parameters
    dtype: torch.dtype  # of the average
    began: int  # updates before the average could be read; until then `states` has the weights in its place
    run: Run


def record(factory: Factory, model: nn.Module, moves: Tensor) -> Trace:
    """Move all parameters of a model by moves[0], moves[1], …, update after each, and record both states.

    A record ends early if a value becomes too large to compute with.
    """
    run = Run(factory, model)
    parameters = [name for name, _ in model.named_parameters()]
    states: list[Tensor] = []
    names: tuple[str, ...] = ()
    dtype, began, why = torch.float64, 0, ""
    for step in range(len(moves) + 1):
        if step:
            run.step(dict.fromkeys(parameters, moves[step - 1]))
        try:
            average = run.average()
            if not names and not all(t.isfinite().all() for t in average.values()):  # 0/0 before the first update
                raise UnreadableError("read() returned values that are not finite")
        except BrokenError as error:
            if names:
                raise
            began, why, average = step + 1, str(error), {}
        if average and not names:
            names = tuple(name for name in parameters if name in average)
            dtype = average[names[0]].dtype
        if missing := [name for name in names if name not in average]:
            raise BrokenError(f"read() after {step} updates has no {abridge(missing)} any more")
        w1 = run.weights()
        w2 = {name: widen(average[name]) if name in names else w1[name] for name in parameters}
        state = torch.stack([torch.stack([w[name].flatten() for name in parameters]) for w in (w1, w2)])
        if not state.abs().max() < TOO_LARGE:
            break
        states.append(state)
    if not names:
        raise BrokenError(f"the average could not be read after any of {run.updates} updates: {why}")
    if len(states) < 3:
        raise BrokenError(f"weights or average are beyond {TOO_LARGE:g} after {len(states)} updates")
    averaged = [parameters.index(name) for name in names]
    return Trace(torch.stack(states)[:, :, averaged], names, dtype, began, run)
