"""Random models, optimizers and Belays for the fuzz over events, each Belay with its account."""

import copy
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import torchbelay as tb
from helpers.events.account import LAWS, PULLING, WATCHING, Account, Law, LawOf
from torchbelay import optim

PARTS = ("conv", "vector", "scalar", "norm", "table", "tied", "frozen")


class Net(nn.Module):
    """A square matrix, and any of these: a convolution, a vector, a number, buffers, tied and frozen weights."""

    def __init__(self, parts: Collection[str]) -> None:
        super().__init__()
        self.square = nn.Linear(3, 3, dtype=torch.float32)
        if "conv" in parts:
            self.conv = nn.Conv2d(2, 3, 2, dtype=torch.float32)
        if "vector" in parts:
            self.vector = nn.Parameter(torch.randn(4, dtype=torch.float32))
        if "scalar" in parts:
            self.scalar = nn.Parameter(torch.randn((), dtype=torch.float32))
        if "norm" in parts:
            self.norm = nn.BatchNorm1d(3, dtype=torch.float32)
        if "table" in parts:
            self.register_buffer("table", torch.randn(2, 3, dtype=torch.float32))
            self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
            self.register_buffer("cache", torch.randn(3, dtype=torch.float32), persistent=False)
        if "tied" in parts:
            self.again = self.square
        if "frozen" in parts:
            self.frozen = nn.Linear(2, 2, dtype=torch.float32).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.to(self.square.weight.dtype), self.square.weight, self.square.bias)


# Optimizers --------------------------------------------------------------------------------------------------------


class Replacing(Optimizer):
    """SGD that puts new memory in place of the weights, turned inside out if asked to."""

    def __init__(self, params: Any, lr: float, *, turning: bool = False) -> None:
        plain = {"lr": lr, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
        super().__init__(params, plain)
        self._turning = turning

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = turned(p.data - group["lr"] * p.grad, really=self._turning)


def turned(t: Tensor, *, really: bool = True) -> Tensor:
    """The same values in memory of another order."""
    return t.transpose(0, -1).contiguous().transpose(0, -1) if really and t.dim() > 1 else t


def spread(t: Tensor) -> Tensor:
    """The same values with gaps between them in memory."""
    wide = torch.zeros(*t.shape, 2, dtype=t.dtype)
    wide[..., 0] = t
    return wide[..., 0]


@dataclass(frozen=True)
class Recipe:
    """How an optimizer is made, and what must be known of it."""

    make: Callable[[Any], Optimizer] | None  # None: steps by hand
    rule: str = "sgd"
    remembers: bool = False  # it has a state, which must have the weights' dtype
    momentum: bool = False
    flat: bool = False  # torch's own fused steps take tensors as flat memory, however they are laid out
    # torch's fused SGD cannot do without a gradient, begins with momentum from uninitialised memory if its first step
    # is skipped, and gives wrong numbers in 16 bits on a CPU
    frail: bool = False


def adamw(kind: Any, beta: float = 0.9, **more: Any) -> Callable[[Any], Optimizer]:
    return lambda groups: kind(groups, lr=0.05, betas=(beta, 0.99), weight_decay=0.1, **more)


def sgd(kind: Any, **more: Any) -> Callable[[Any], Optimizer]:
    return lambda groups: kind(groups, **{"lr": 0.05, "weight_decay": 0.01} | more)


MOVING = {"momentum": 0.9, "nesterov": True}
RECIPES = {
    "SGD": Recipe(sgd(torch.optim.SGD)),
    "SGD, plain": Recipe(sgd(torch.optim.SGD, foreach=False, momentum=0.9, dampening=0.1), "sgd", True, True),
    "SGD, fused": Recipe(sgd(torch.optim.SGD, fused=True, **MOVING), "sgd", True, True, True, True),
    "AdamW": Recipe(adamw(torch.optim.AdamW, foreach=True), "adamw", True, True),
    "AdamW, plain": Recipe(adamw(torch.optim.AdamW, 0.0, foreach=False), "adamw", True),
    "AdamW, fused": Recipe(adamw(torch.optim.AdamW, fused=True), "adamw", True, True, True),
    "our AdamW": Recipe(adamw(optim.AdamW), "adamw", True, True),
    "our AdamW without momentum": Recipe(adamw(optim.AdamW, 0.0), "adamw", True),
    "our Adam": Recipe(adamw(optim.Adam), "adam", True, True),
    "our SGD": Recipe(sgd(optim.SGD), "sgd"),
    "our SGD with momentum": Recipe(sgd(optim.SGD, **MOVING), "sgd", True, True),
    "replacing": Recipe(lambda groups: Replacing(groups, 0.05)),
    "turning": Recipe(lambda groups: Replacing(groups, 0.05, turning=True)),
    "by hand": Recipe(None),
    "by hand, replacing": Recipe(None),
}
FUSED_BY_US = [name for name in RECIPES if name.startswith("our")]


# Belays ------------------------------------------------------------------------------------------------------------


class Pick:
    """A law for every name, or, if there are others, for the names of each a law of its own, or none."""

    def __init__(self, law: str, others: Mapping[str, str | None] | None = None) -> None:
        self.law, self.others = law, others or {}

    def __call__(self, name: str) -> Law | None:
        for part, law in self.others.items():
            if part in name:
                return None if law is None else LAWS[law]
        return LAWS[self.law]

    def __deepcopy__(self, memo: Any) -> "Pick":
        return self

    def laws(self) -> list[Law]:
        return [LAWS[law] for law in (self.law, *self.others.values()) if law is not None]

    @property
    def given(self) -> Any:
        """What Belay is given."""
        return LAWS[self.law].method if not self.others else self._rule

    def _rule(self, name: str, tensor: Tensor) -> Any:
        law = self(name)
        return None if law is None else law.method

    def __repr__(self) -> str:
        return f"{self.law}{self.others or ''}"


class Member:
    """A Belay, its account, and how to make another one like it."""

    def __init__(self, picks: Mapping[str, Pick], options: Mapping[str, Any]) -> None:
        self.picks, self.options = picks, options
        laws: dict[str, LawOf] = dict(picks)
        kept = {"every": 1, "start": 0, "buffers": "copy", "on_nonfinite": "ignore"}
        self.account = Account(laws, **{name: options.get(name, usual) for name, usual in kept.items()})
        self.belay: tb.Belay
        self.torn = "no"  # whether a step must be refused: "no", "maybe" (it was interrupted), "yes"
        self.good: Any = None  # the state before it was interrupted
        self.good_account = copy.deepcopy(self.account)

    def attach(self, model: nn.Module, optimizer: Optimizer | None, *, replace: bool = False) -> tb.Belay:
        first, *others = self.picks.items()
        spectators = {name: pick.given for name, pick in others}
        return tb.Belay(model, optimizer, first[1].given, spectators=spectators, replace=replace, **self.options)

    @property
    def pulls(self) -> bool:
        return any(law.pulls for law in self.picks["average"].laws())

    @property
    def kept(self) -> torch.dtype:
        """The dtype of the averages, or a narrower one: weights may be cast up later."""
        return self.options["dtype"] or torch.float32


def any_member(dice: random.Random, recipe: str, *, watches: bool, impl: str) -> Member:
    """A random Belay; `watches` if it may not pull."""
    pulling = [law for law in PULLING if law != "schedule-free" or not RECIPES[recipe].momentum]
    mains = WATCHING if watches or dice.random() < 0.3 else pulling
    picks = {"average": _any_pick(dice, mains)}
    for name in dice.sample(["short", "long"], dice.choice([0, 0, 1, 1, 2])):
        picks[name] = _any_pick(dice, WATCHING)
    laws = [law for pick in picks.values() for law in pick.laws()]
    options: dict[str, Any] = {"impl": impl}
    if all(law.thins for law in laws):
        options["every"] = dice.choice([1, 1, 2, 3])
    options["start"] = dice.choice([0, 0, 0, 0, 1, 3])
    options["buffers"] = dice.choice(["copy", "average", "average", "ignore"])
    options["on_nonfinite"] = dice.choice(["ignore", "ignore", "skip", "raise"])
    # Rounded averages that push velocities, or weights by a factor, are too rough to be compared.
    rough = [] if any(law.spring or law is LAWS["schedule-free"] for law in laws) else [torch.bfloat16]
    options["dtype"] = dice.choice([None, None, None, torch.float32, torch.float64, *rough])
    if impl != "triton" and not any(law.pulls for law in laws) and dice.random() < 0.3:
        options["device"] = "cpu"
    return Member(picks, options)


def _any_pick(dice: random.Random, laws: list[str]) -> Pick:
    law = dice.choice(laws)
    others = {part: dice.choice([None, *laws]) for part in dice.sample(["bias", "conv", "norm", "table", "vector"], 2)}
    return Pick(law, others if dice.random() < 0.3 else None)
