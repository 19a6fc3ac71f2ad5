"""What a snapshot takes of a Belay: copies of tensors on the host, and the story of each.

Copying is all that is done in the step. On a GPU the copies go to pinned memory while the host goes on; what reads them
waits for `Content.ready`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchbelay.belay import Belay, modules
from torchbelay.belay.aliases import aliased
from torchbelay.belay.average import MAIN, Average
from torchbelay.belay.overlap import has_memory, overlaps, place, sharing_memory
from torchbelay.belay.shard import is_sharded, local, with_local
from torchbelay.physics.warnings import warn

from .folder import Snapshot, Told, file_name
from .names import Names
from .session import Session
from .stories import text_of, told_of

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
        self.given = False  # whether the main average ever moved at a rate that was given for one step
        # averages whose method was changed in a part of the run that was recorded before
        self.changed: set[str] = set()
        self.names = Names()
        self._mixed = False  # whether it was told that something is left out

    def chosen(self, averages: Sequence[str] | None) -> tuple[str, ...]:
        """Return the names of the averages to record; all, if none are given."""
        known = self.parts.averages
        if isinstance(averages, str):
            raise TypeError(f"averages={averages!r} is a text; give a list of names, as [{averages!r}]")
        found = tuple(known) if averages is None else tuple(dict.fromkeys(averages))
        if unknown := [name for name in found if name not in known]:
            raise ValueError(f"averages has {unknown[0]!r}, which is no average; choose from {', '.join(known)}")
        if not found:
            raise ValueError("averages is empty; give at least one name, or None for all")
        return found

    def recall(self, snapshots: Iterable[Snapshot], sessions: Sequence[Session], *, anew: bool) -> None:
        """Learn from the snapshots that lead to the last of these sessions what no state tells; `anew`, nothing."""
        if anew:
            self.given, self.changed = False, set()
        origins: Mapping[str, str] = {}
        for each in snapshots:  # in the order of their steps
            if each.sessions[-1] in sessions and each.sessions[-1].begin == sessions[-1].begin:
                tables = {story.table for story in each.told.stories}
                self.given |= GIVEN in tables
                self.changed |= {str(each.average)} if CHANGED in tables else set()
                origins = each.origins
        self._name(origins)

    def _name(self, origins: Mapping[str, str]) -> None:
        """Take the names that the parameters have now for theirs, but for those that had others first."""
        self.parts.follow_names(always=True)
        self.names = Names(origins)
        self.names.of(self.trained(), self.step)

    def state_dict(self) -> dict[str, Any]:
        """Return what no state of the Belay tells of its averages."""
        changed = sorted(filter(self._is_changed, self.parts.averages))
        return {"given": self.given, "changed": changed, "origins": self.names.of(self.trained(), self.step)}

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse what is no `state_dict()`; one of an earlier version tells less."""
        if not isinstance(state, Mapping):
            raise TypeError(f"state={state!r} is not a dict; give what Recorder.state_dict() returned")
        given, changed, origins = state.get("given", False), state.get("changed", []), state.get("origins", {})
        is_right = isinstance(given, bool) and isinstance(changed, list) and isinstance(origins, dict)
        if not is_right or not all(isinstance(name, str) for name in (*changed, *origins, *origins.values())):
            raise ValueError(
                f"this is not what Recorder.state_dict() returned: given={given!r} is not a bool, changed={changed!r} "
                f"is not a list of names, or origins={origins!r} are not names by names"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Know what a `state_dict()` tells."""
        self.given, self.changed = state.get("given", self.given), set(state.get("changed", self.changed))
        if "origins" in state:
            self._name(state["origins"])

    def _is_changed(self, name: str) -> bool:
        """Whether another method has made a part of an average."""
        return name in self.changed or any(part.averages.each[name].changed for part in self.parts.each)

    @property
    def era(self) -> int:
        """How often a state was loaded into the Belay."""
        return sum(part.clock.era for part in self.parts.each)

    @property
    def began(self) -> bool:
        """Whether all averages have begun."""
        return all(part.averages.began for part in self.parts.each)

    @property
    def begins(self) -> tuple[int, int]:
        """The first and the last step at which the averages may have begun, or last begun again, as they tell."""
        born = [min((e.born for e in part.averages.entries()), default=-1) for part in self.parts.each]
        if min(born) < 0:  # an optimizer without averages tells nothing, and averages that have not begun neither
            return 0, self.step
        late = all(step > part.options.start for step, part in zip(born, self.parts.each, strict=True))
        return _common(born) if late else 0, _common(born)

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
        return _common([part.clock.count for part in self.parts.each])

    def noted(self, names: Iterable[str]) -> list[Average]:
        """Return the averages whose couplings may have to be noted: those of these names, and the one that pulls."""
        names = dict.fromkeys([*names, *([MAIN] if self.pulls else [])])
        if len(self.parts.each) == 1:
            return [self.parts.first.averages.each[name] for name in names]
        told = (text_of(e.method) for name in names for e in self.parts.averages[name].entries.values())
        if not all(known for _, known in told):
            warn(
                "with several optimizers, couplings that depend on learning rates or are of your own making are not "
                "recorded: synthesize() cannot use the snapshots of such averages"
            )
        return []

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that a snapshot holds: those of the optimizers, by name."""
        held = {id(p) for p in self.parts.parameters()}
        held |= {id(e.w1) for part in self.parts.each for e in part.averages.entries()}
        named = modules.named_parameters(self.model)
        return {n: p for n, p in named.items() if id(p) in held and (p.is_floating_point() or p.is_complex())}

    def rest(self) -> dict[str, Tensor]:
        """Return the parameters that no snapshot of an average holds, because no optimizer trains them now."""
        trained = self.trained()
        same, inside = {_identity(p) for p in trained.values()}, self._under(trained)
        parameters = modules.named_parameters(self.model)
        return {n: p.detach() for n, p in parameters.items() if _identity(p) not in same and n not in inside}

    def _under(self, trained: Mapping[str, nn.Parameter]) -> dict[str, list[str]]:
        """Return what lies in the memory of trained parameters, as a part or a transpose of one: name -> theirs."""
        if self.sharded:
            return {}
        same, names = {_identity(p) for p in trained.values()}, {id(p): name for name, p in trained.items()}
        others = {n: t for n, t in _slots(self.model) if n not in trained and _identity(t) not in same}
        given = {id(t): t for t in [*trained.values(), *others.values()] if has_memory(t)}
        found: dict[int, list[str]] = {}
        for cluster in sharing_memory(given):
            owners = [names[key] for key in cluster if key in names]
            for key in cluster if owners else ():
                if key not in names:
                    found[key] = sorted(n for n in owners if overlaps(trained[n], given[key]))
        return {name: found[id(t)] for name, t in others.items() if found.get(id(t))}

    def _aliases(
        self, under: Mapping[str, list[str]], trained: Mapping[str, nn.Parameter], step: int
    ) -> dict[str, str]:
        """Return those of what lies in the memory of parameters whose averages move alike: name -> one of these."""
        if not under:
            return {}
        counts, every = self._counts(trained, step), self.belay._options.every
        told = [told_of(a, self.parts.averages[a].entries, every, trained) for a in self.parts.averages]
        alike = {n: {(counts.get(o), *(each.of(o) for each in told)) for o in owners} for n, owners in under.items()}
        mixed = [n for n, some in alike.items() if len(some) > 1]
        if mixed and not self._mixed:
            self._mixed = True
            warn(
                f"snapshots leave out {mixed[0]!r}: it lies in the memory of several parameters, whose averages move "
                "differently. Load what synthesize() makes with strict=False"
            )
        return {n: owners[0] for n, owners in under.items() if n not in mixed}

    def buffers(self, name: str | None) -> dict[str, Tensor]:
        """Return the buffers that belong to an average, or to the weights."""
        own = {} if name is None else self.parts.averages[name].buffers
        return {key: own.get(key, b) for key, b in modules.persistent_buffers(self.model).items()}

    def nbytes(self, name: str | None) -> int:
        """Return the bytes of a snapshot of an average, or of the weights, as all ranks write it together."""
        trained, slots = self.trained(), dict(_slots(self.model))
        under = self._under(trained)
        known = {**trained, **self.buffers(None), **{n: slots[n] for n in under}}
        found = {n: t.numel() * t.element_size() for n, t in known.items()}
        if name is not None:
            entries = {e.name: e for e in self.parts.averages[name].entries.values()}
            found |= {e.name: e.w2.numel() * e.dtype.itemsize for e in entries.values()}
            owned = {n: entries[owners[0]] for n, owners in under.items() if owners[0] in entries}
            found |= {n: slots[n].numel() * e.dtype.itemsize for n, e in owned.items()}
        return sum(found.values())

    def take(self, name: str | None, step: int, sessions: tuple[Session, ...]) -> Content:
        """Copy an average, or the weights if `name` is None."""
        self.parts.wait()
        self.parts.follow_names(always=True)
        trained = self.trained()
        first, slots = tied(self.model, trained), dict(_slots(self.model))
        under = self._under(trained)
        aliases = self._aliases(under, trained, step)
        own: dict[str, Tensor] = {**trained, **{n: slots[n] for n in aliases}}
        tensors = own | self._values(name, {n: slots[n] for n in aliases})
        dtypes = {n: str(t.dtype).removeprefix("torch.") for n, t in own.items() if t.dtype != tensors[n].dtype}
        buffers = {n: b for n, b in self.buffers(name).items() if n not in under and first.get(n) not in trained}
        tensors |= buffers
        about = Snapshot(
            path=Path(file_name(step, name, sharded=self._is_spread(tensors))),
            step=step,
            average=name,
            sessions=sessions,
            told=Told() if name is None else self._told(name, trained, aliases),
            pull=self._told(MAIN, trained, aliases) if self.pulls else Told(),
            counts=self._counts(trained, step, aliases),
            copied=frozenset(buffers),
            tied=first,
            dtypes=dtypes,
            order=tuple(slots),
            origins=self.names.of(trained, step),
        )
        return Content({key: host_copy(t) for key, t in tensors.items()}, about, events(tensors))

    def _is_spread(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether ranks write a snapshot of these tensors together."""
        return self.parts.slices is not None or any(map(is_sharded, tensors.values()))

    def _values(self, name: str | None, aliases: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values of an average, by the names of its parameters and of what lies in their memory."""
        if name is None:
            return {}
        entries = self.parts.averages[name].entries.values()
        found = {e.name: e.value for e in entries}
        if aliases:
            shown = aliased(modules.tensors(self.model), {id(e.w1): e.value for e in entries})
            found |= {n: shown[id(t)].value for n, t in aliases.items() if id(t) in shown}
        return found

    def _told(self, name: str, trained: Iterable[str], aliases: Mapping[str, str]) -> Told:
        entries = self.parts.averages[name].entries
        owned = {n: replace(entries[owner], name=n) for n, owner in aliases.items() if owner in entries}
        found = told_of(name, entries | owned, self.belay._options.every, [*trained, *aliases])
        table = GIVEN if name == MAIN and self.given else CHANGED if self._is_changed(name) else None
        if table is None:
            return found
        return Told(tuple(story._replace(table=table) for story in found.stories), found.other)

    def _counts(
        self, trained: Mapping[str, nn.Parameter], step: int, aliases: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, int]:
        """Return the steps of tensors whose own optimizer has taken another number of them."""
        names = {id(p): name for name, p in trained.items()}
        found: dict[str, int] = {}
        for part in self.parts.each:
            if part.clock.count != step:
                held = (names[id(p)] for p in part.averages.parameters.all if id(p) in names)
                found |= dict.fromkeys(held, part.clock.count)
        return found | {n: found[owner] for n, owner in aliases.items() if owner in found}


def _common(counts: Sequence[int]) -> int:
    """Return the count of optimizers that step in turn; else that of the one that took the most steps."""
    return min(counts) if max(counts) - min(counts) <= 1 else max(counts)


def tied(model: nn.Module, trained: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return the further names of parameters and buffers that have several: name -> the trained one, or the first."""
    first: dict[object, str] = {_identity(p): name for name, p in trained.items()}
    found: dict[str, str] = {}
    for name, tensor in _slots(model):
        if (other := first.setdefault(_identity(tensor), name)) != name:
            found[name] = other
    return found


def _identity(tensor: Tensor) -> object:
    """Return what is equal for tensors that are one, also for two Parameters that were tied by `b.data = a.data`."""
    return place(tensor) if not is_sharded(tensor) and has_memory(tensor) else id(tensor)


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


def events(tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """Return what happens when all copies that were begun so far are complete."""
    devices = {local(t).device for t in tensors.values() if local(t).is_cuda}
    events = []
    for device in devices:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return tuple(events)
