"""One average of a model: which tensors it follows, how, and since when."""

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchbelay.ops.arithmetic import Swing
from torchbelay.ops.backend import Motion, Score
from torchbelay.physics.coupling import Coupling, Inertia
from torchbelay.physics.method import Method, Remembers
from torchbelay.physics.spring import Spring

from .shard import is_sharded, local, with_local

MAIN = "average"  # the one average that may pull; spectators have names of their own

LONGEST = 1 << 16  # steps of a period that are worth writing down in advance

Rule = Callable[[str, Tensor], Method | None]
Found = tuple[str, Tensor, Method, int]  # name, parameter, method, group of the optimizer


def as_rule(method: Method | Rule) -> Rule:
    """A method for each parameter, of one method for all or of the user's own function."""
    if isinstance(method, type):
        raise TypeError(f"method={method.__name__} is a class; give an instance of it, as {method.__name__}(...)")
    if isinstance(method, Method):
        return lambda name, tensor: method
    if callable(method):
        return method
    raise TypeError(
        f"method={method!r} is neither an averaging method (an object with coupling(step, lr), as Spring) nor a "
        "function (name, parameter) -> method or None"
    )


def describe(method: Method) -> str:
    """What a checkpoint says of a method: the call that makes it."""
    kind = type(method)
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__repr__ is object.__repr__ else repr(method)


@dataclass(eq=False)
class Entry:
    """A parameter w1, its average w2, and what moves them. Velocities only where the regime has them."""

    name: str
    w1: Tensor
    w2: Tensor
    v1: Tensor | None
    v2: Tensor | None
    method: Method  # shared by what was adopted together, never with another run: it may remember learning rates
    group: int  # of the optimizer
    born: int  # optimizer steps taken before this parameter's first

    def effective_lr_scale(self, step: int, lr: float, every: int) -> float:
        """The share of the learning rate that is left, in the mean over `every` steps, after so many steps."""
        if every == 1 and hasattr(self.method, "effective_lr_scale"):
            return float(self.method.effective_lr_scale)
        age = max(every, (step - self.born) // every * every)
        coupling = compounded(copy(self.method), age, lr, every)  # a copy: asking must not be remembered
        plain = 1 / (1 + coupling.theta)  # what the centre of mass sees of a step that nothing couples
        return ((every - 1) * plain + coupling.effective_lr_scale) / every


@dataclass(eq=False)
class Cohort:
    """Entries that move alike, as the lists that the operations want."""

    w1: list[Tensor]
    w2: list[Tensor]
    v1: list[Tensor]
    v2: list[Tensor]
    method: Method
    group: int | None  # of the optimizer; None, of all groups, where the method does not ask for a learning rate
    born: int
    _constant: Motion | None = None
    _scores: dict[int, Score | None] = field(default_factory=dict)

    @property
    def varies(self) -> str:
        """On what the coupling depends."""
        return varies(self.method)

    @property
    def regime(self) -> str:
        """What kind of motion this is; of a method that is no spring, its name."""
        return self.method.regime if isinstance(self.method, Spring) else type(self.method).__name__

    def motion(self, step: int, lr: float, every: int) -> Motion | None:
        """What the optimizer's step number `step` does to these tensors; None where it is not their turn."""
        age = step - self.born
        if age % every:
            return None
        if self._constant is not None:
            return self._constant
        coupling = compounded(self.method, age, lr, every)
        inertia1, inertia2 = inertias(self.method)
        motion = Motion(coupling, _swing(self.v1, inertia1), _swing(self.v2, inertia2))
        if self.varies == "never":
            self._constant = motion
        return motion

    def score(self, every: int) -> Score | None:
        """All motions in advance, if neither the learning rate nor anybody's memory has a say in them."""
        if every not in self._scores:
            self._scores[every] = self._score(every)
        return self._scores[every]

    def _score(self, every: int) -> Score | None:
        law = getattr(self.method, "law", None)
        if self.varies == "never":
            coupling = compounded(self.method, every, 0.0, every)
            rest = Motion(Coupling(0.0, 0.0, 1.0, 0.0))
            motion = Motion(coupling, *map(_swing, (self.v1, self.v2), inertias(self.method)))
            return Score((*[rest] * (every - 1), motion))
        if every > 1 or self.varies != "step":
            return None
        if law is not None:
            return Score((Motion(self.method.coupling(1, 0.0)),), law)
        period = getattr(self.method, "period", None)
        if period is None or period > LONGEST:
            return None
        return Score(tuple(Motion(self.method.coupling(t, 0.0)) for t in range(1, period + 1)))


def varies(method: Method) -> str:
    """On what a method's coupling depends; one that does not say is asked every time."""
    return str(getattr(method, "varies", "unsaid"))


def compounded(method: Method, age: int, lr: float, every: int) -> Coupling:
    """The coupling of step `age`, or of the last `every` steps as one."""
    total = method.coupling(age - every + 1, lr)
    for step in range(age - every + 2, age + 1):
        total = total.then(method.coupling(step, lr))
    return total


def inertias(method: Method) -> tuple[Inertia | None, Inertia | None]:
    """How the velocities of the two masses move; only springs have any."""
    return (method.inertia1, method.inertia2) if isinstance(method, Spring) else (None, None)


def _swing(v: list[Tensor], inertia: Inertia | None) -> Swing | None:
    return None if inertia is None else Swing(v, inertia)


class Average:
    """All entries of one average, and its own buffers where it has them.

    Of tensors that are spread over ranks an entry has the whole, a cohort the parts that are here. Averages are where
    their parameters are, or, with `hosted`, in host memory.
    """

    def __init__(self, name: str, rule: Rule, *, pulls: bool, hosted: bool = False) -> None:
        self.name, self.rule, self.pulls, self.hosted = name, rule, pulls and not hosted, hosted
        self._shards: list[tuple[Tensor, Tensor]] = []
        self.entries: dict[str, Entry] = {}
        self.cohorts: list[Cohort] = []
        self.buffers: dict[str, Tensor] = {}

    def adopt(
        self,
        found: Iterable[Found],
        *,
        born: int,
        dtype: torch.dtype | None,
        device: str | None = None,
    ) -> None:
        """Take in parameters at their own values; on "meta" their shapes only."""
        own: dict[tuple[int, int], Method] = {}
        for name, w1, method, group in found:
            fresh = own.setdefault((id(method), group), method.fresh() if isinstance(method, Remembers) else method)
            wide = average_dtype(w1, dtype)
            if device == "meta":
                w2 = torch.empty(w1.shape, dtype=wide, device="meta")
            else:
                w2 = self._kept(w1.detach().to(self._home(w1), wide, copy=True), w1)
            v1, v2 = (None if inertia is None else self._at_rest(w2, w1) for inertia in inertias(method))
            self.entries[name] = Entry(name, w1, w2, v1, v2, fresh, group, born)
        if device is None:
            self.regroup()

    def _at_rest(self, w2: Tensor, w1: Tensor) -> Tensor:
        """Velocities for the average of a parameter."""
        zeros = torch.zeros_like(w2)
        return zeros if w2.is_meta else self._kept(zeros, w1)

    def _home(self, w1: Tensor) -> torch.device:
        """Where the average of a parameter is."""
        return torch.device("cpu") if self.hosted else local(w1).device

    def _kept(self, tensor: Tensor, w1: Tensor) -> Tensor:
        """The same at home, in memory that a GPU can copy from and to while the host does other things."""
        there = self._home(w1)
        if local(tensor).device != there:
            tensor = tensor.to(there)
        if self.hosted and local(w1).is_cuda and torch.cuda.is_available() and not local(tensor).is_pinned():
            tensor = with_local(tensor, local(tensor).pin_memory())
        return tensor

    def is_current(self) -> bool:
        """Whether the cohorts hold the memory that the weights are in; a model that is moved has other."""
        return all(self._home(c.w1[0]) == c.w2[0].device for c in self.cohorts) and all(
            local(w1) is part for w1, part in self._shards
        )

    def regroup(self) -> None:
        """Form the cohorts anew; averages follow their parameters to another device."""
        cohorts: dict[tuple[Any, ...], Cohort] = {}
        own: dict[tuple[int, int], Method] = {}
        owners: dict[int, int] = {}
        for e in self.entries.values():
            for slot in ("w2", "v1", "v2"):
                tensor = getattr(e, slot)
                if tensor is not None:
                    setattr(e, slot, self._kept(tensor, e.w1))
            if isinstance(e.method, Remembers) and owners.setdefault(id(e.method), e.group) != e.group:
                e.method = own.setdefault((id(e.method), e.group), copy(e.method))  # two groups, two learning rates
            group = None if varies(e.method) in ("never", "step") else e.group
            key = (id(e.method), group, e.born, e.w1.device, e.w1.dtype, e.w2.dtype)
            cohort = cohorts.setdefault(key, Cohort([], [], [], [], e.method, group, e.born))
            cohort.w1.append(local(e.w1))
            cohort.w2.append(local(e.w2))
            cohort.v1.extend([] if e.v1 is None else [local(e.v1)])
            cohort.v2.extend([] if e.v2 is None else [local(e.v2)])
        self.cohorts = list(cohorts.values())
        self._shards = [(e.w1, local(e.w1)) for e in self.entries.values() if is_sharded(e.w1)]

    def regrouped(self, groups: dict[int, int]) -> list[str]:
        """Note the group that each parameter (by id) is in now; let go of those in none, and return their names."""
        gone = [e.name for e in self.entries.values() if id(e.w1) not in groups]
        for name in gone:
            del self.entries[name]
        for e in self.entries.values():
            e.group = groups[id(e.w1)]
        return gone

    def rename(self, names: dict[int, str]) -> None:
        """Call every entry by the name of its parameter (by id) in `names`."""
        for e in self.entries.values():
            e.name = names[id(e.w1)]
        self.entries = {e.name: e for e in self.entries.values()}

    def clear(self) -> None:
        """Forget everything but the rule."""
        self.entries, self.cohorts, self.buffers, self._shards = {}, [], {}, []

    def restart(self, born: int) -> None:
        """Begin again at the weights as they are."""
        renewed: dict[int, Method] = {}
        for e in self.entries.values():
            local(e.w2).copy_(local(e.w1))
            for v in (e.v1, e.v2):
                if v is not None:
                    local(v).zero_()
            if isinstance(e.method, Remembers):
                e.method = renewed.setdefault(id(e.method), e.method.fresh())
            e.born = born
        self.buffers = {}
        self.regroup()

    def tensors(self, slot: str) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every entry that has one in this slot."""
        return ((e.name, getattr(e, slot)) for e in self.entries.values() if getattr(e, slot) is not None)


def parts(entries: Iterable[Entry]) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and averages, as far as they are here."""
    found = list(entries)
    return [local(e.w1) for e in found], [local(e.w2) for e in found]


def average_dtype(w: Tensor, asked: torch.dtype | None) -> torch.dtype:
    """float32 for 16-bit weights, else the weights' own; `asked` overrules, as complex for complex weights."""
    if asked is None:
        asked = torch.promote_types(w.dtype, torch.float32)
    return asked.to_complex() if w.is_complex() else asked


def buffer_weight(coupling: Coupling) -> float:
    """The share of the new value in an averaged buffer: what the average takes of w1*, or else of w1."""
    return min(1.0, max(0.0, coupling.q or coupling.b))
