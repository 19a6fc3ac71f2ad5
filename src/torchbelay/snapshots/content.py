"""What a snapshot takes of a Belay: copies of tensors on the host, and the story of each.

Copying is all that is done in the step. On a GPU the copies go to pinned memory while the host goes on; what reads them
waits for `Content.ready`.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchbelay.belay import Belay, modules
from torchbelay.belay.average import MAIN, Average, Entry
from torchbelay.belay.cohort import Cohort, varies
from torchbelay.belay.shard import is_sharded, local, with_local
from torchbelay.physics.identity import describe
from torchbelay.physics.method import Method

from .folder import Session, Snapshot, Story, Told, file_name
from .targets import parse

GIVEN = "rates given to update()"  # a table that no history has
CHANGED = "another method before"  # likewise


class Content(NamedTuple):
    """A snapshot that is to be written: its tensors on the host, and what is to be said of it."""

    tensors: dict[str, Tensor]
    about: Snapshot
    ready: tuple[Any, ...] = ()  # events of the devices that the copies come from

    @property
    def nbytes(self) -> int:
        """The bytes that the copies take in the memory of this host."""
        return sum(local(t).numel() * t.element_size() for t in self.tensors.values())

    def wait(self) -> None:
        """Wait until the copies are complete."""
        for event in self.ready:
            event.synchronize()


class Source:
    """Takes snapshots of a Belay. It looks at the Belay's own parts, and changes nothing."""

    def __init__(self, belay: Belay) -> None:
        self.belay, self.model, self.parts = belay, belay._model, belay._parts
        self._before: dict[str, nn.Parameter] = {}  # parameters that were trained when they were last looked at
        self.given = False  # whether the main average ever moved at a rate that was given for one step
        self.changed: set[str] = (
            set()
        )  # averages whose method was changed in a part of the run that was recorded before

    @property
    def era(self) -> int:
        """How often a state was loaded into the Belay."""
        return sum(part.clock.era for part in self.parts.each)

    @property
    def began(self) -> bool:
        """Whether all averages have begun."""
        return all(part.averages.began for part in self.parts.each)

    @property
    def inside(self) -> bool:
        """Whether the model holds an average at present."""
        return self.parts.member.settled_swap() is not None

    @property
    def torn(self) -> bool:
        """Whether the last step was stopped in the middle."""
        return any(part.stepper.torn for part in self.parts.each)

    @property
    def sharded(self) -> bool:
        """Whether tensors of the model, or their averages, are spread over ranks."""
        parameters = modules.named_parameters(self.model).values()
        return self.parts.slices is not None or any(map(is_sharded, parameters))

    @property
    def pulls(self) -> bool:
        """Whether an average pulls weights."""
        return bool(self.parts.member.pulled())

    @property
    def step(self) -> int:
        """The steps that all optimizers have taken, if they step in turn; else those of the one that took the most."""
        counts = [part.clock.count for part in self.parts.each]
        return min(counts) if max(counts) - min(counts) <= 1 else max(counts)

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that a snapshot holds: those of the optimizers, by name."""
        held = {id(p) for p in self.parts.parameters()}
        held |= {id(e.w1) for part in self.parts.each for e in part.averages.entries()}
        return {name: p for name, p in modules.named_parameters(self.model).items() if id(p) in held}

    def rest(self) -> dict[str, Tensor]:
        """Return the parameters that no snapshot holds, because nothing has trained them."""
        trained = self.trained()
        return {n: p.detach() for n, p in modules.named_parameters(self.model).items() if n not in trained}

    def buffers(self, name: str | None) -> dict[str, Tensor]:
        """Return the buffers that belong to an average, or to the weights."""
        own = {} if name is None else self.parts.averages[name].buffers
        return {key: own.get(key, b) for key, b in modules.persistent_buffers(self.model).items()}

    def nbytes(self, name: str | None) -> int:
        """Return the bytes of a snapshot of an average, or of the weights, as all ranks write it together."""
        found = {n: t.numel() * t.element_size() for n, t in {**self.trained(), **self.buffers(None)}.items()}
        if name is not None:
            entries = self.parts.averages[name].entries.values()
            found |= {e.name: e.w2.numel() * e.dtype.itemsize for e in entries}
        return sum(found.values())

    def take(self, name: str | None, step: int, sessions: tuple[Session, ...]) -> Content:
        """Copy an average, or the weights if `name` is None."""
        self.parts.wait()
        trained = self.trained()
        tensors: dict[str, Tensor] = dict(trained)
        if name is not None:
            tensors |= {e.name: e.value for e in self.parts.averages[name].entries.values()}
        dtypes = {n: str(p.dtype).removeprefix("torch.") for n, p in trained.items() if p.dtype != tensors[n].dtype}
        left = {n: p for n, p in self._before.items() if n not in trained}  # they stay what they are now
        self._before |= trained
        still = {**left, **self.buffers(name)}
        tensors |= still
        about = Snapshot(
            path=Path(file_name(step, name, sharded=self._is_spread(tensors))),
            step=step,
            average=name,
            sessions=sessions,
            told=Told() if name is None else self._told(name, trained),
            pull=self._told(MAIN, trained) if self.pulls else Told(),
            counts=self._counts(trained, step),
            copied=frozenset(still),
            tied=tied(self.model),
            dtypes=dtypes,
            order=tuple(name for name, _ in _slots(self.model)),
        )
        return Content({key: host_copy(t) for key, t in tensors.items()}, about, _events(tensors))

    def _is_spread(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether ranks write a snapshot of these tensors together."""
        return self.parts.slices is not None or any(map(is_sharded, tensors.values()))

    def _told(self, name: str, trained: Iterable[str]) -> Told:
        found = told_of(name, self.parts.averages[name].entries, self.belay._options.every, trained)
        changed = name in self.changed or any(part.averages.each[name].changed for part in self.parts.each)
        table = GIVEN if name == MAIN and self.given else CHANGED if changed else None
        if table is None:
            return found
        return Told(tuple(story._replace(table=table) for story in found.stories), found.other)

    def _counts(self, trained: Mapping[str, nn.Parameter], step: int) -> dict[str, int]:
        """Return the steps of tensors whose own optimizer has taken another number of them."""
        names = {id(p): name for name, p in trained.items()}
        found: dict[str, int] = {}
        for part in self.parts.each:
            if part.clock.count != step:
                held = (names[id(p)] for p in part.averages.parameters.all if id(p) in names)
                found |= dict.fromkeys(held, part.clock.count)
        return found


def tied(model: nn.Module) -> dict[str, str]:
    """Return the further names of parameters and buffers that have several: name -> the first name."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, tensor in _slots(model):
        if (other := first.setdefault(id(tensor), name)) != name:
            found[name] = other
    return found


def _slots(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a model's state dict, in its order."""
    for prefix, _, module in modules.walk(model):
        for slots in (module._parameters, module._buffers):
            for key, tensor in slots.items():
                if tensor is None or (slots is module._buffers and key in module._non_persistent_buffers_set):
                    continue
                yield prefix + key, tensor


def host_copy(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, row by row; of a sharded tensor, of its local part."""
    part = local(tensor.detach())
    copy = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=part.is_cuda)
    copy.copy_(part, non_blocking=True)
    return with_local(tensor.detach(), copy) if is_sharded(tensor) else copy


def _events(tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """Return what happens when all copies that were begun so far are complete."""
    devices = {local(t).device for t in tensors.values() if local(t).is_cuda}
    events = []
    for device in devices:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return tuple(events)


# Stories ------------------------------------------------------------------------------------------------------------


def text_of(method: Method) -> tuple[str, bool]:
    """Return a method as a text, and whether the text alone tells all of its couplings."""
    try:
        text = describe(method)
    except ValueError:
        return type(method).__qualname__, False
    if not type(method).__module__.startswith("torchbelay.physics."):  # a class of the user's may have any name
        return text, False
    return text, _numbered(method) and _can_be_read(text)


@cache
def _can_be_read(text: str) -> bool:
    """Whether a text makes its method again; asked once, for reading a text takes a millisecond of a step."""
    try:
        parse(text)
    except ValueError:
        return False
    return True


def _numbered(method: Method) -> bool:
    """Whether the number of a step is all that its coupling depends on."""
    return varies(method) in ("never", "step")


def told_of(average: str, entries: Mapping[str, Entry], every: int, trained: Iterable[str]) -> Told:
    """Return how the average of each parameter came about."""
    texts = {id(m): text_of(m) for m in {id(e.method): e.method for e in entries.values()}.values()}
    stories: dict[Story, int] = {}
    other: dict[str, int] = {}
    for e in entries.values():
        text, known = texts[id(e.method)]
        table = None if known else _table_name(average, text, 0 if _numbered(e.method) else e.group, e.born)
        number = stories.setdefault(Story(text, e.born, every, table), len(stories))
        if number:
            other[e.name] = number
    return Told(tuple(stories), other | dict.fromkeys(set(trained) - entries.keys(), -1))


def _table_name(average: str, text: str, group: int, born: int) -> str:
    return f"{average}: {text} of group {group} since step {born}"


def untold(average: Average) -> dict[str, Cohort]:
    """Return the tables of couplings that an average needs, each with a cohort that moves by them."""
    found: dict[str, Cohort] = {}
    for cohort in average.cohorts:
        text, known = text_of(cohort.method)
        if not known:
            found.setdefault(_table_name(average.name, text, cohort.group or 0, cohort.born), cohort)
    return found
