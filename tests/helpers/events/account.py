"""An independent account of averages, in float64 and out of place: what the fuzz over events holds Belay to.

It knows formulas and plain numbers, and nothing of how the library groups, prepares or moves tensors.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchbelay as tb

Numbers = tuple[float, float, float, float]  # a, b, p, q
Weights = Mapping[int, Tensor]  # in float64, by the ids of their parameters

# Methods -----------------------------------------------------------------------------------------------------------


class Law(NamedTuple):
    """A method, and its four numbers written out once more; `memory` is what it knows of past learning rates."""

    method: Any
    numbers: Callable[[int, float, list[float]], Numbers]
    pulls: bool = False
    thins: bool = True  # goes with every > 1
    spring: dict[str, float] | None = None  # with velocities


def watching(rate: Callable[[int], float], *, lagged: bool = False) -> Callable[[int, float, list[float]], Numbers]:
    return lambda t, lr, memory: (0.0, rate(t), 1.0, 0.0 if lagged else rate(t))


def free_of_schedules(beta: float) -> Callable[[int, float, list[float]], Numbers]:
    def numbers(t: int, lr: float, memory: list[float]) -> Numbers:
        best, total = memory or (0.0, 0.0)
        weight = max(best, lr) ** 2
        memory[:] = [max(best, lr), total + weight]
        c = weight / (total + weight)
        return -beta * c / (1 - beta), c / (1 - beta), 1 - beta + beta * c, c

    return numbers


def syncing(k: int, s: float) -> Callable[[int, float, list[float]], Numbers]:
    return lambda t, lr, memory: (0.0, 0.0, 1.0, 0.0) if t % k else (1 - s, s, s, s)


SWINGING = {"k": 1.0, "m1": 10.0, "m2": 20.0, "c1": 5.0, "c2": 10.0}
TRAILING = {"k": 1.0, "m1": inf, "m2": 20.0, "c2": 10.0}
LAWS = {
    "belay": Law(tb.Spring(k=1.0, m1=10.0, m2=20.0), lambda *_: (1 / 20, 1 / 40, 19 / 20, 0.0), pulls=True),
    "belay, after": Law(
        tb.Spring(k=1.0, m1=10.0, m2=20.0, follow="after"), lambda *_: (1 / 20, 1 / 40, 19 / 20, 1 / 40), pulls=True
    ),
    "velocities": Law(tb.Spring(**SWINGING), lambda *_: (0.05, 0.025, 0.95, 0.0), True, False, SWINGING),
    "lookahead": Law(tb.methods.lookahead(k=2, alpha=0.5), syncing(2, 0.5), True, False),
    "schedule-free": Law(tb.methods.schedule_free(0.5), free_of_schedules(0.5), True, False),
    "ema": Law(tb.Spring.ema(decay=0.9), watching(lambda t: 0.1)),
    "lagged": Law(tb.methods.ema(0.8, follow="before"), watching(lambda t: 0.2, lagged=True)),
    "warm": Law(tb.methods.ema(0.99, warmup="ratio"), watching(lambda t: max(0.01, 9 / (10 + t)))),
    "swa": Law(tb.methods.swa(), watching(lambda t: 1 / t)),
    "rhythmic swa": Law(tb.methods.swa(every=3), watching(lambda t: 0.0 if t % 3 else 3 / t), False, False),
    "trailing": Law(tb.Spring(**TRAILING), watching(lambda t: 1 / 40, lagged=True), False, False, TRAILING),
}
PULLING = [name for name, law in LAWS.items() if law.pulls]
WATCHING = [name for name, law in LAWS.items() if not law.pulls]

FIRST = 0  # no id of any object
LawOf = Callable[[str], Law | None]  # by the name of a parameter or a buffer


def together(law: Law, age: int, every: int, lr: float, memory: list[float]) -> Numbers:
    """The last `every` steps as one: each closes a part of the distance that the one before has left."""
    if every == 1:
        return law.numbers(age, lr, memory)
    a = b = q = 0.0
    for t in range(age - every + 1, age + 1):
        one, two, _, q = law.numbers(t, lr, memory)
        left = 1 - a - b
        a, b = a + one * left, b + two * left
    return a, b, 1 - a, b if q else 0.0


# The account of one Belay ------------------------------------------------------------------------------------------


@dataclass
class Follower:
    """What follows one parameter or buffer."""

    law: Law | None
    w2: Tensor
    of: Tensor | None = None  # the parameter, held so that its id stays its own
    v1: Tensor | None = None
    v2: Tensor | None = None
    age: int = 0
    memory: list[float] = field(default_factory=list)
    # Kernels that move all averages at once follow weights of 16 bits before these are rounded.
    rough: torch.dtype | None = None

    def __deepcopy__(self, memo: Any) -> "Follower":
        return copy.copy(self)  # tensors are replaced, never written to

    def numbers(self, every: int, lr: float) -> Numbers | None:
        """Grow a step older, and return its numbers; None if it is not a step to couple at."""
        self.age += 1
        if self.law is None or self.age % every:
            return None
        self.memory = list(self.memory)
        return together(self.law, self.age, every, lr, self.memory)

    def move(self, w1: Tensor, u: Tensor, numbers: Numbers) -> Tensor:
        """Move, and return where the weights go."""
        a, b, p, q = numbers
        away = self.w2 - w1
        new1, new2 = w1 + a * away + p * u, self.w2 - b * away + q * u
        if self.law is not None and self.law.spring is not None:
            k, m1, m2, c2 = (self.law.spring[name] for name in ("k", "m1", "m2", "c2"))
            if self.v1 is not None:
                c1, alpha = self.law.spring["c1"], 1 - k / (2 * m1)
                new1 = new1 + (1 - c1 / (2 * m1)) * self.v1
                self.v1 = self.v1 + k / m1 * away - c1 / m1 * self.v1 + 2 * alpha * u
            assert self.v2 is not None
            new2 = new2 + (1 - c2 / (2 * m2)) * self.v2
            self.v2 = self.v2 - k / m2 * away - c2 / m2 * self.v2
        self.w2 = new2
        return new1


@dataclass
class AverageAccount:
    law_of: LawOf
    weights: dict[int, Follower] = field(default_factory=dict)
    buffers: dict[str, Follower] = field(default_factory=dict)  # averaged ones
    # Of buffers="copy": those that were written inside averaged(). A step drops them, or, if it may not count, replaces
    # them by the model's as they are then (`renewed`).
    own: dict[str, Tensor] = field(default_factory=dict)
    renewed: dict[str, Tensor] = field(default_factory=dict)


class Account:
    """What every number of a Belay is expected to be."""

    def __init__(self, laws: Mapping[str, LawOf], *, every: int, start: int, buffers: str, on_nonfinite: str) -> None:
        self.every, self.start, self.buffers, self.on_nonfinite = every, start, buffers, on_nonfinite
        self.averages = {name: AverageAccount(law_of) for name, law_of in laws.items()}
        self.count, self.began = 0, False

    def begin_when_due(self, trained: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        if not self.began and self.count >= self.start:
            self.began = True
            self.adopt(trained, buffers)

    def restart(self, buffers: Mapping[str, Tensor]) -> None:
        """Begin again at the weights and buffers as they are."""
        for average in self.averages.values():
            average.weights = {key: _new(each) for key, each in average.weights.items()}
            average.buffers, average.own, average.renewed = {}, {}, {}
        self.fit(buffers)

    def adopt(self, trained: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Follow what is trained now: parameters that come late begin at their present values."""
        if not self.began:
            return
        for average in self.averages.values():
            kept = {id(p) for p in trained.values()}
            average.weights = {key: each for key, each in average.weights.items() if key in kept}
            for name, p in trained.items():
                law = average.law_of(name)
                if law is not None and id(p) not in average.weights:
                    average.weights[id(p)] = _new(Follower(law, p, p))
        self.fit(buffers)

    def follow(self, present: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Forget parameters that the model no longer has, and let averaged buffers be those of the model."""
        self.fit(buffers)
        kept = {id(p) for p in present.values()}
        for average in self.averages.values():
            average.weights = {key: each for key, each in average.weights.items() if key in kept}

    def fit(self, buffers: Mapping[str, Tensor]) -> None:
        """Let averaged buffers be those of the model; one that is new, or another kind of thing, begins anew."""
        if self.buffers != "average" or not self.began:
            return
        for average in self.averages.values():
            known, average.buffers = average.buffers, {}
            for name, b in buffers.items():
                own = known.get(name)
                if own is None or own.w2.shape != b.shape or own.w2.is_floating_point() != b.is_floating_point():
                    law = average.law_of(name) if b.is_floating_point() else None
                    own = Follower(law, exactly(b))
                average.buffers[name] = own

    def step(
        self, before: Weights, stepped: Weights, seen: Weights, lr: Mapping[int, float], buffers: Mapping[str, Tensor]
    ) -> dict[int, Tensor]:
        """Return where the weights are expected; `seen` are the weights after the pull, which other averages follow.

        `lr` has the learning rate of each parameter, and under FIRST that of the first group, which buffers go by.
        """
        expected = dict(stepped)
        for name, average in self.averages.items():
            for key, each in average.weights.items():
                numbers = each.numbers(self.every, lr[key])
                target = stepped if name == "average" else seen
                if numbers is not None:
                    new1 = each.move(before[key], target[key] - before[key], numbers)
                    if name == "average":
                        expected[key] = new1
        self._step_buffers(buffers, float(lr[FIRST]))
        self.count += 1
        return expected

    def _step_buffers(self, now: Mapping[str, Tensor], lr: float) -> None:
        for average in self.averages.values():
            for name, each in average.buffers.items():
                numbers = each.numbers(self.every, lr)
                if name in now and each.law is None:
                    each.w2 = exactly(now[name])
                elif name in now and numbers is not None:
                    each.w2 = each.w2 + (numbers[3] or numbers[1]) * (exactly(now[name]) - each.w2)
            own = average.renewed | average.own
            average.renewed = {n: exactly(b) for n, b in now.items() if n in own and own[n].shape == b.shape}
            average.own = {}

    def written_inside(self, name: str, buffers: Mapping[str, Tensor]) -> None:
        """Note buffers that were written while this average was in the model: they are the average's."""
        average = self.averages[name]
        for each, value in buffers.items():
            if self.buffers == "average":
                average.buffers[each].w2 = exactly(value)
            elif self.buffers == "copy":
                average.own[each] = exactly(value)

    def saved(self, persistent: Mapping[str, Tensor]) -> None:
        """Go through a checkpoint: it has all buffers that the model's own has, the average's or else the model's."""
        for average in self.averages.values():
            now = {name: exactly(b) for name, b in persistent.items()}
            average.own = {n: average.own.get(n, b) for n, b in now.items()} if average.own else {}

    def own_buffers(self, name: str, now: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the buffers that go with an average, of the model's names and shapes."""
        average = self.averages[name]
        own = {each: f.w2 for each, f in average.buffers.items()} if self.buffers == "average" else average.own
        found = {each: exactly(b) for each, b in now.items()}
        return found | {each: own[each] for each, b in now.items() if each in own and own[each].shape == b.shape}


def exactly(t: Tensor) -> Tensor:
    """A copy in float64; integers as they are."""
    return t.detach().to(torch.float64, copy=True) if t.is_floating_point() else t.detach().clone()


def _new(each: Follower) -> Follower:
    """What follows the same parameter from now on."""
    assert each.law is not None
    assert each.of is not None
    w2, spring = exactly(each.of), each.law.spring or {}
    still = torch.zeros_like(w2)
    return Follower(each.law, w2, each.of, still if "c1" in spring else None, still if "c2" in spring else None)


# Optimizers --------------------------------------------------------------------------------------------------------


def updated(rule: str, w: Tensor, g: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[Tensor, Any]:
    """Return the weights after a step of SGD, Adam or AdamW, and the optimizer's state, from those before it."""
    lr, decay = float(group["lr"]), group["weight_decay"]
    if rule == "adamw":
        w = w * (1 - lr * decay)
    else:
        g = g + decay * w
    if rule == "sgd":
        mu = group["momentum"]
        first = state.get("momentum_buffer")
        buffer = g if first is None else mu * first + (1 - group["dampening"]) * g
        if not mu:
            return w - lr * g, {}
        return w - lr * (g + mu * buffer if group["nesterov"] else buffer), {"momentum_buffer": buffer}
    one, two = group["betas"]
    t = float(state.get("step", 0)) + 1
    m = one * state.get("exp_avg", torch.zeros_like(w)) + (1 - one) * g
    v = two * state.get("exp_avg_sq", torch.zeros_like(w)) + (1 - two) * g * g
    w = w - lr * (m / (1 - one**t)) / ((v / (1 - two**t)).sqrt() + group["eps"])
    return w, {"exp_avg": m, "exp_avg_sq": v}
