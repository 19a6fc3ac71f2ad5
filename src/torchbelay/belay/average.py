"""One average of a model: an entry for each parameter that it follows, and its own buffers."""

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchbelay.physics.identity import describe_or_sample
from torchbelay.physics.method import Method, Remembers
from torchbelay.physics.workers import Workers, gathering, share_of_each

from . import planes
from .cohort import Cohort, compounded, inertias, varies
from .initial import Initial
from .overlap import Memory
from .rules import Rule
from .shard import is_sharded, local, matching, same_size, with_local
from .slices import Slices

MAIN = "average"  # the one average that may pull; spectators have names of their own


class Wanted(NamedTuple):
    """A parameter that an average is to follow."""

    name: str
    parameter: Tensor
    method: Method
    group: int  # of the optimizer


def key_of(method: Method) -> object:
    """Return what equal methods share, so that their tensors can move together."""
    try:
        hash(method)
    except TypeError:
        return id(method)
    return method


@dataclass(eq=False)
class Entry:
    """A parameter w1, its average w2, and what moves them. Velocities exist only if the regime has them."""

    name: str
    w1: Tensor
    w2: Tensor
    v1: Tensor | None
    v2: Tensor | None
    low: Tensor | None  # the second plane of an average of 24 bits, whose first is w2
    method: Method  # shared by what was adopted together, never with another run: it may remember learning rates
    group: int  # of the optimizer
    born: int  # optimizer steps taken before this parameter's first
    memory: Memory | None = None  # of w1, when it was last seen to be what a weight is computed from

    @property
    def value(self) -> Tensor:
        """The average: w2, or, if it is kept in 24 bits, a new float32 tensor."""
        return self.w2 if self.low is None else planes.joined(self.w2, self.low)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the average's values."""
        return self.w2.dtype if self.low is None else torch.float32

    def put(self, values: Tensor) -> None:
        """Overwrite the average with values, local ones if it is spread over ranks."""
        if self.low is None:
            local(self.w2).copy_(local(values))
        else:
            planes.write(self.w2, self.low, values)

    @property
    def part(self) -> Tensor:
        """The part of w1 whose average is on this rank."""
        return self.part_of(self.w1)

    def part_of(self, weights: Tensor) -> Tensor:
        """Return that part of other weights in the place of w1, which are whole, or local if the model is sharded."""
        return local(weights) if is_sharded(self.w1) else matching(weights, self.w2)

    @property
    def spread(self) -> Tensor:
        """The tensor that is spread over ranks as the average is; the average may be without values."""
        return self.w1 if is_sharded(self.w1) else self.w2

    def effective_lr_scale(self, lr: float, step: int, every: int, workers: int = 1) -> float:
        """Return the share of the learning rate that is left at that step, in the mean over `every` steps."""
        if workers > 1 and gathering(self.method) == "spring":
            steps = max(every, getattr(self.method, "period", 1))
            coupling = self.method.coupling(steps, lr)
            pair = Workers(share_of_each(self.method, coupling, workers, every), workers).pair
            return ((steps - 1) / (1 + pair.theta) + pair.effective_lr_scale) / steps
        if every == 1 and hasattr(self.method, "effective_lr_scale"):
            return float(self.method.effective_lr_scale)
        age = max(every, (step - self.born) // every * every)
        coupling = compounded(copy(self.method), age, lr, every)  # a copy: this question must not be remembered
        plain = 1 / (1 + coupling.theta)  # what the centre of mass sees of a step that nothing couples
        return ((every - 1) * plain + coupling.effective_lr_scale) / every


class WholeAverage(Protocol):
    """What is known of an average of the whole model, whether one optimizer trains it or several."""

    name: str
    buffers: dict[str, Tensor]

    @property
    def entries(self) -> dict[str, Entry]:
        """The entries of all parameters, by name."""

    @property
    def cohorts(self) -> list[Cohort]:
        """The tensors that move alike."""

    def refuse_other_shapes(self) -> None:
        """Refuse weights that have another shape now: their average would be broadcast to them, or torn."""

    def gather(self) -> None:
        """Let all replicas have the weights of which each has written its slice; nothing if they share no average."""


class Average:
    """All entries of one average, and its own buffers if it has any.

    An entry holds whole tensors, a cohort the local parts of tensors that are sharded over ranks. Averages are kept
    beside their parameters, or on the device `home`, in a dtype or in 24 bits. Replicas that share them keep slices.
    """

    def __init__(
        self,
        name: str,
        rule: Rule,
        *,
        pulls: bool,
        home: torch.device | None = None,
        every: int = 1,
        workers: int = 1,
        initial: Initial | None = None,
        slices: Slices | None = None,
        bits: int | None = None,
    ) -> None:
        self.name, self.rule, self.pulls, self.home, self.every = name, rule, pulls and home is None, home, every
        self.initial = Initial(kept=False) if initial is None else initial
        self.slices, self.bits, self.workers = slices, bits, workers
        self._shards: list[tuple[Tensor, Tensor]] = []
        self.entries: dict[str, Entry] = {}
        self.told: dict[int, tuple[Method, str]] = {}  # by id: a method, and what it was when it was taken in
        self.cohorts: list[Cohort] = []
        self.buffers: dict[str, Tensor] = {}
        self.followers: dict[str, Cohort] = {}  # what moves averaged buffers, by name; a new dict after every change
        self.changed = False  # whether another method has made a part of its values

    def adopt(
        self, wanted: Iterable[Wanted], *, born: int, dtype: torch.dtype | None, device: str | None = None
    ) -> None:
        """Take in parameters at their own values; on the device "meta" only their shapes."""
        own: dict[tuple[int, int], Method] = {}
        for name, w1, method, group in wanted:
            fresh = own.setdefault((id(method), group), method.fresh() if isinstance(method, Remembers) else method)
            wide = average_dtype(w1.dtype, dtype)
            w2, low = self._begun(w1, wide, device)
            self.entries[name] = entry = Entry(name, w1, w2, None, None, low, fresh, group, born)
            entry.v1, entry.v2 = (None if inertia is None else self.at_rest(entry) for inertia in inertias(method))
            self.tell(fresh)
        if device is None:
            self.regroup()

    def tell(self, method: Method) -> None:
        """Note what a method is when it is taken in: who saves one that changes later is warned."""
        if id(method) not in self.told:
            self.told[id(method)] = method, describe_or_sample(method)

    def like(self, rule: Rule) -> "Average":
        """Return an average without entries that differs in nothing but its rule."""
        kept = {"home": self.home, "every": self.every, "workers": self.workers, "slices": self.slices}
        return Average(self.name, rule, pulls=self.pulls, bits=self.bits, **kept)  # type: ignore[arg-type]

    def at_rest(self, e: Entry) -> Tensor:
        """Return velocities of 0 for the average of a parameter."""
        zeros = torch.zeros_like(e.w2, dtype=e.dtype)
        return zeros if e.w2.is_meta else self._placed(zeros, e.w1)

    def _begun(self, w1: Tensor, dtype: torch.dtype, device: str | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the average of a parameter that begins at its weights: one tensor, or the two planes of 24 bits."""
        values = self._shaped(w1, dtype) if device == "meta" else self._copied(w1, dtype)
        if self.bits is None:
            return values, None
        w2, low = planes.split(values)
        return (w2, low) if device == "meta" else (self._placed(w2, w1), self._placed(low, w1))

    def _copied(self, w1: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values at which the average of a parameter begins."""
        if self.slices is None:
            return self._placed(w1.detach().to(self._home(w1), dtype, copy=True), w1)
        part = self.slices.slice_of(w1.detach())
        return self._placed(self.slices.spread(part.to(self._home(w1), dtype, copy=True), w1), w1)

    def _shaped(self, w1: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an average of a parameter without values."""
        shaped = torch.empty(w1.shape, dtype=dtype, device="meta")
        return shaped if self.slices is None else self.slices.spread(self.slices.slice_of(shaped), w1)

    def _home(self, w1: Tensor) -> torch.device:
        """Return the device that the average of a parameter is kept on."""
        return local(w1).device if self.home is None else self.home

    def _placed(self, tensor: Tensor, w1: Tensor) -> Tensor:
        """Return the tensor at its home and laid out like its parameter, so that kernels can take both as flat memory.

        In host memory it is pinned, so that a GPU copies while the host goes on.
        """
        there = self._home(w1)
        if local(tensor).device != there:
            tensor = tensor.to(there) if self.slices is None else with_local(tensor, local(tensor).to(there))
        if not is_sharded(w1) and local(tensor).stride() != (part := matching(w1, tensor)).stride():
            laid_out = torch.empty_like(part, dtype=tensor.dtype, device=there)
            if local(tensor).stride() != laid_out.stride():
                tensor = with_local(tensor, laid_out.copy_(local(tensor)))
        if there.type == "cpu" and local(w1).is_cuda and torch.cuda.is_available() and not local(tensor).is_pinned():
            tensor = with_local(tensor, local(tensor).pin_memory())
        return tensor

    def is_current(self) -> bool:
        """Whether the cohorts hold the local parts of sharded weights; other weights they hold themselves."""
        return all(local(w1) is part for w1, part in self._shards)

    def regroup(self) -> None:
        """Form the cohorts anew; averages follow their parameters to another device or layout."""
        self.refuse_other_shapes()
        cohorts: dict[tuple[Any, ...], Cohort] = {}
        own: dict[tuple[int, int], Method] = {}
        owners: dict[int, int] = {}
        if self.slices is not None:
            self.slices.follow()
        for position, e in enumerate(self.entries.values()):
            for slot in ("w2", "low", "v1", "v2"):
                tensor = getattr(e, slot)
                if tensor is not None:
                    setattr(e, slot, self._placed(tensor, e.w1))
            self.initial.follow(e)
            if isinstance(e.method, Remembers) and owners.setdefault(id(e.method), e.group) != e.group:
                e.method = own.setdefault((id(e.method), e.group), copy(e.method))  # two groups, two learning rates
            group = None if varies(e.method) in ("never", "step") else e.group
            part = local(e.w1) if self.slices is None else self.slices.view(e.w1)
            # Kernels take no slices of columns, and take all of a cohort or nothing.
            strided = self.slices is not None and part.stride() != local(e.w2).stride()
            key = (id(e.method), group, e.born, e.w1.device, e.w1.dtype, e.w2.dtype, strided)
            cohort = cohorts.setdefault(key, Cohort(e.method, group, e.born, self.every, self.workers))
            cohort.w1.append(part)
            cohort.w2.append(local(e.w2))
            cohort.order.append(position)
            cohort.v1.extend([] if e.v1 is None else [local(e.v1)])
            cohort.v2.extend([] if e.v2 is None else [local(e.v2)])
            if e.low is not None:
                cohort.low.append(local(e.low))
                cohort.places.append(planes.place(e.name, e.spread))
        self.cohorts = list(cohorts.values())
        self._shards = [(e.w1, local(e.w1)) for e in self.entries.values() if is_sharded(e.w1)]

    def refuse_other_shapes(self) -> None:
        """Refuse weights that have another shape now: their average would be broadcast to them, or torn."""
        for e in self.entries.values():
            if not same_size(e.w1, e.w2):
                raise RuntimeError(
                    f"the parameter {e.name!r} has the shape {tuple(e.w1.shape)} now, and its average "
                    f"{tuple(e.w2.shape)}: give it back its shape, or begin again at it by reset()"
                )

    def gather(self) -> None:
        """Let all replicas have the weights of which each has written its slice; nothing if they share no average."""
        if self.slices is not None:
            self.slices.share([e.w1.detach() for e in self.entries.values()])

    def _forget(self, w1: Tensor) -> None:
        """Keep nothing of a parameter that the average follows no more."""
        self.initial.forget(w1)
        if self.slices is not None:
            self.slices.forget(w1)

    def drop(self, lost: Iterable[Entry]) -> None:
        """Follow the parameters of these entries no more; other averages' entries are ignored."""
        for e in lost:
            if self.entries.get(e.name) is e:
                self._forget(self.entries.pop(e.name).w1)

    def assign_groups(self, groups: dict[int, int]) -> list[str]:
        """Note the group that each parameter (by id) is in now; drop those in none, and return their names."""
        gone = [e.name for e in self.entries.values() if id(e.w1) not in groups]
        for name in gone:
            self._forget(self.entries.pop(name).w1)
        for e in self.entries.values():
            e.group = groups[id(e.w1)]
        return gone

    def give(self, entries: list[Entry], other: "Average", *, later: int) -> None:
        """Let the average of another optimizer go on with some entries; its count is `later` steps ahead of ours."""
        self.refuse_other_shapes()
        other.refuse_other_shapes()
        own: dict[int, Method] = {}
        for e in entries:
            if isinstance(e.method, Remembers):  # from now on it sees other learning rates than those that stay
                e.method = own.setdefault(id(e.method), copy(e.method))
            e.born += later
            other.entries[e.name] = e
            other.tell(e.method)
            del self.entries[e.name]
        self.regroup()
        other.regroup()

    def rename(self, names: dict[int, str]) -> None:
        """Call every entry by the name of its parameter (by id) in `names`."""
        if [names[id(e.w1)] for e in self.entries.values()] == list(self.entries):
            return
        for e in self.entries.values():
            e.name = names[id(e.w1)]
        self.entries = {e.name: e for e in self.entries.values()}
        if self.bits is not None:  # names decide how its numbers are rounded
            self.regroup()

    def clear(self) -> None:
        """Forget everything but the rule."""
        for e in self.entries.values():
            self._forget(e.w1)
        self.entries, self.cohorts, self._shards = {}, [], []
        self.buffers, self.followers, self.changed = {}, {}, False

    def restart(self, born: int) -> None:
        """Begin again at the weights as they are."""
        renewed: dict[int, Method] = {}
        for e in self.entries.values():
            if not same_size(e.w1, e.w2):
                e.w2, e.low = self._begun(e.w1, e.dtype)
                e.v1, e.v2 = (None if v is None else self.at_rest(e) for v in (e.v1, e.v2))
            e.put(e.part)
            self.initial.renew(e)
            for v in (e.v1, e.v2):
                if v is not None:
                    local(v).zero_()
            if isinstance(e.method, Remembers):
                e.method = renewed.setdefault(id(e.method), e.method.fresh())
            e.born = born
        self.buffers, self.followers, self.changed = {}, {}, False
        self.regroup()

    def follows(self, wanted: Iterable[Wanted]) -> bool:
        """Whether the average has these very parameters, under these names."""
        return {e.name: id(e.w1) for e in self.entries.values()} == {w.name: id(w.parameter) for w in wanted}


def average_dtype(weights: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """Return float32 for 16-bit weights, else the weights' own; `asked` overrules, as complex for complex weights."""
    if asked is None:
        asked = torch.promote_types(weights, torch.float32)
    return asked.to_complex() if weights.is_complex else asked
