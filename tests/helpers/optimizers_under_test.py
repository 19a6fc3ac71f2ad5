"""Every optimizer of torch, the methods with their formulas written out, and a run of one with the other."""

import copy
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import torchbelay as tb
from helpers.problems import (
    EMBEDDING,
    FULL_BATCH,
    MATRICES,
    MLP,
    Problem,
    advance,
    bf16,
    dtype_of,
    everything,
    f32,
    f64,
)
from torchbelay.ops import reference

# Every optimizer, and a problem that it can solve. Weight decay and momentum are on if the optimizer has them.


@dataclass(frozen=True)
class Case:
    arguments: dict[str, Any]
    problem: Problem = MLP
    closure: bool = False  # cannot step without one
    # Its update turns the last bit of a weight into many: whole runs of two programs drift apart, single steps do not.
    magnifies: bool = False
    # torch's own load_state_dict casts its state to a 16-bit parameter's dtype: no resume of it is exact to the bit.
    forgets_16_bits: bool = False


CASES = {
    "ASGD": Case({"lr": 0.05, "lambd": 0.01, "t0": 5, "weight_decay": 0.01}, forgets_16_bits=True),
    "Adadelta": Case({"lr": 0.5, "rho": 0.8, "weight_decay": 0.01}),
    "Adafactor": Case({"lr": 0.05, "weight_decay": 0.01}),
    "Adagrad": Case({"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.01}),
    "Adam": Case({"lr": 0.02, "weight_decay": 0.01, "amsgrad": True}),
    "AdamW": Case({"lr": 0.02, "weight_decay": 0.1}),
    "Adamax": Case({"lr": 0.02, "weight_decay": 0.01}),
    "LBFGS": Case({"lr": 0.5, "max_iter": 3, "history_size": 4}, FULL_BATCH, closure=True, magnifies=True),
    "Muon": Case({"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}, MATRICES, magnifies=True),
    "NAdam": Case({"lr": 0.02, "weight_decay": 0.01}, forgets_16_bits=True),
    "RAdam": Case({"lr": 0.02, "weight_decay": 0.01}),
    "RMSprop": Case({"lr": 0.01, "momentum": 0.8, "weight_decay": 0.01, "centered": True}),
    "Rprop": Case({"lr": 0.01}),
    "SGD": Case({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "SparseAdam": Case({"lr": 0.05}, EMBEDDING),
}

in_torch = [
    name
    for name, kind in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(kind, Optimizer) and kind is not Optimizer
]


def optimizers(which: Callable[[Case], bool] = lambda case: True) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [name for name in in_torch if name in CASES and which(CASES[name])])


every_optimizer = optimizers()


def make(name: str, model: nn.Module, **more: Any) -> Optimizer:
    return getattr(torch.optim, name)(model.parameters(), **CASES[name].arguments | more)


# The methods, each with its formulas. State = (w1, w2, v1, v2) of one parameter, before the step; t counts from 1.

State = tuple[Tensor, Tensor, Tensor, Tensor]


class Oracle(NamedTuple):
    method: Any
    formula: Callable[[State, Tensor, int], State]
    largest: float  # coefficient: the terms of a sum may be this much larger than the weights
    pulls: bool = True


def four(numbers: Callable[[int], tuple[float, float, float, float]]) -> Callable[[State, Tensor, int], State]:
    def formula(state: State, u: Tensor, t: int) -> State:
        w1, w2, *velocities = state
        a, b, p, q = numbers(t)
        return *reference.couple(w1, w2, u, a=a, b=b, p=p, q=q), *velocities

    return formula


def swing(state: State, u: Tensor, t: int) -> State:
    return reference.algorithm1_with_velocities(*state, u, k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0)


ORACLES = {
    "belay": Oracle(tb.Spring(k=1.0, m1=10.0, m2=20.0), four(lambda t: (1 / 20, 1 / 40, 19 / 20, 0.0)), 1),
    "ema": Oracle(tb.Spring.ema(decay=0.9), four(lambda t: (0.0, 0.1, 1.0, 0.1)), 1, pulls=False),
    "velocities": Oracle(tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0), swing, 2),
    "lookahead": Oracle(
        tb.methods.lookahead(k=3, alpha=0.5), four(lambda t: (0.0, 0.0, 1.0, 0.0) if t % 3 else (0.5,) * 4), 1
    ),
    "schedule_free": Oracle(tb.methods.schedule_free(0.9), four(lambda t: (-9 / t, 10 / t, 0.1 + 0.9 / t, 1 / t)), 10),
}
every_method = pytest.mark.parametrize("how", ORACLES)
every_dtype = pytest.mark.parametrize("dtype", [f64, f32, bf16], ids=str)


def attach(how: str, model: nn.Module, optimizer: Optimizer, **options: Any) -> tb.Belay:
    """Belay, with the warnings that this combination must give, and no others."""
    with ExitStack() as expected:
        if ORACLES[how].pulls and dtype_of(model) == bf16:
            expected.enter_context(pytest.warns(tb.BelayWarning, match="16 bits wide.*float32 master weights"))
        if ORACLES[how].pulls and isinstance(optimizer, torch.optim.LBFGS):
            expected.enter_context(pytest.warns(tb.BelayWarning, match=r"LBFGS.*Use .*Spring\.ema"))
        return tb.Belay(model, optimizer, ORACLES[how].method, **options)


class Run:
    """A model, its optimizer and, if asked for, a Belay."""

    def __init__(
        self,
        name: str,
        how: str | None,
        dtype: torch.dtype = f32,
        *,
        seed: int = 7,
        device: str = "cpu",
        options: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        self.name, self.case = name, CASES[name]
        self.model = self.case.problem.model(dtype, seed).to(device)
        self.optimizer = make(name, self.model, **arguments)
        self.belay = None if how is None else attach(how, self.model, self.optimizer, **options or {})

    def train(self, steps: range, *, closure: bool = False) -> None:
        advance(self.model, self.optimizer, self.case.problem, steps, closure=closure or self.case.closure)

    def plainly(self) -> dict[str, Any]:
        """All that the model and the optimizer hold."""
        return everything(model=self.model, optimizer=self.optimizer)

    def everything(self) -> dict[str, Any]:
        return everything(model=self.model, optimizer=self.optimizer, belay=self.belay)

    def twin(self) -> "Run":
        """The same, bit for bit, in a model and an optimizer that never saw a Belay."""
        other = Run(self.name, None, dtype_of(self.model))
        other.model.load_state_dict(self.model.state_dict())
        for mine, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
            if mine in self.optimizer.state:
                other.optimizer.state[theirs] = copy.deepcopy(self.optimizer.state[mine])
        return other
