"""A Belay's state as plain tensors and numbers, and the check of a state before anything is changed.

format, step, ahead, began      numbers: FORMAT, the count of steps, and 0 or 1
options                         what must agree, by name
made_with                       the same facts and more as names, for torch.distributed.checkpoint
averages
    NAME                        "average", or the name of a spectator
        weights, velocities1, velocities2, buffers      tensors by the parameter's or buffer's name
        own_buffers                                     0 if `buffers` holds zeros that are never read
        methods, ages, memories                         by the parameter's name
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from torchbelay.physics.method import Remembers

from .average import Average, Entry, describe
from .cohort import inertias
from .options import Options
from .shard import local, part_for, why_not_like

FORMAT = 1
LARGEST = 1 << 63  # what a count on a device can be
SLOTS = {"weights": "w2", "velocities1": "v1", "velocities2": "v2"}  # what a checkpoint calls an entry's tensors


class Swapped(Protocol):
    """A swap: an average is in the model at present, and the model's weights are in its place."""

    average: Average

    def value(self, entry: Entry, average: str) -> Tensor:
        """Return w2 of an entry of the average of that name, wherever it is."""

    def changed_buffers(self) -> bool:
        """Whether a buffer was written to since the swap."""

    def buffers(self) -> dict[str, Tensor]:
        """Return copies of the buffers as they are in the model now."""


def saved(
    average: Average,
    buffers: Mapping[str, Tensor],
    swap: Swapped | None,
    step: int,
    memories: Mapping[int, tuple[float, ...]],
) -> dict[str, Any]:
    """Return an average as tensors and numbers, laid out the same whatever has happened so far.

    If an average has no buffers of its own, zeros stand for them. They are never read, but
    torch.distributed.checkpoint loads only into tensors that exist.
    """
    tensors = {kind: dict(average.tensors(slot)) for kind, slot in SLOTS.items()}
    own = bool(average.buffers)
    if swap is not None and swap.average is average:  # what lies in the model will not stay there
        tensors["weights"] = {e.name: swap.value(e, average.name).clone() for e in average.entries.values()}
        if swap.changed_buffers():
            changed, own = swap.buffers(), True
            buffers = {name: changed[name] for name in buffers}
    kept = {name: b if own else torch.zeros_like(b) for name, b in buffers.items()}
    return {**tensors, "buffers": kept, "own_buffers": int(own), **numbers(average, step, memories)}


def made_with(averages: Mapping[str, Mapping[str, Any]], options: Options) -> dict[str, int]:
    """Return what must be the same in the Belay that loads a state, as names.

    torch.distributed.checkpoint reads into an average, and casts, before Belay can check what it read. But first it
    makes sure that every name exists: so another method, dtype or option is refused before anything has changed.
    """
    facts = [f"{name}={value}" for name, value in options.saved().items()]
    for name, average in averages.items():
        for each, method in average["methods"].items():
            dtype = str(average["weights"][each].dtype).removeprefix("torch.")
            facts.append(f"{name!r}: {method} in {dtype}")
    return dict.fromkeys(facts, 1)


def numbers(average: Average, step: int, memories: Mapping[int, tuple[float, ...]]) -> dict[str, dict[str, Any]]:
    """Return all of an average that is not a tensor, by parameter name; `memories` (by id) overrule a method's own."""
    entries = average.entries.values()
    return {
        "methods": {e.name: describe(e.method) for e in entries},
        "ages": {e.name: step - e.born for e in entries},
        "memories": {
            e.name: list(memories.get(id(e.method), e.method.memory))
            for e in entries
            if isinstance(e.method, Remembers)
        },
    }


def check(
    state: Mapping[str, Any],
    options: Options,
    expected: Mapping[str, Mapping[str, Entry]],
    buffers: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Refuse a state that does not fit `expected` (entries by average and name) and the buffers of each average."""
    if not isinstance(state, Mapping) or not _equal(state.get("format"), FORMAT):
        raise ValueError("this is not the state of a Belay: it needs what Belay.state_dict() returned (format 1)")
    try:
        _check_options(state["options"], options)
        _same_names("averages", state["averages"], expected)
        _whole("step", state["step"])
        for flag in ("ahead", "began"):
            _flag(flag, state[flag])
        for name, entries in expected.items():
            saved = state["averages"][name]
            if not _named("weights", saved["weights"]):
                raise ValueError(f"this state of a Belay is damaged: its average {name!r} holds no weights")
            _check_average(name, saved, entries, step=state["step"])
            _flag("own_buffers", saved["own_buffers"])
            _same_names(f"buffers of average {name!r}", saved["buffers"], buffers[name])
            for each, tensor in saved["buffers"].items():
                _fits(f"buffer {each!r} in average {name!r}", tensor, buffers[name][each])
    except (KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"this state of a Belay is damaged: {type(problem).__name__} at {problem}") from problem


def restore(average: Average, saved: Mapping[str, Any], step: int) -> None:
    """Write a checked state into an average's tensors and counts."""
    methods: dict[tuple[Any, ...], Remembers] = {}
    for e in average.entries.values():
        for kind, slot in SLOTS.items():
            if e.name in saved[kind]:
                own = getattr(e, slot)
                local(own).copy_(part_for(saved[kind][e.name], own))
        e.born = step - saved["ages"][e.name]
        if isinstance(e.method, Remembers):
            memory = tuple(saved["memories"][e.name])
            key = (describe(e.method), e.group, e.born, memory)
            if key not in methods:
                methods[key] = e.method.fresh()
                methods[key].remember(memory)
            e.method = methods[key]  # type: ignore[assignment]  # fresh() of a method is one
    buffers = saved["buffers"].items() if saved["own_buffers"] else ()
    average.buffers = {name: tensor.detach().clone() for name, tensor in buffers}
    average.regroup()


def _check_options(saved: Mapping[str, Any], options: Options) -> None:
    for name, now in options.saved().items():
        if not _equal(_named("options", saved)[name], now):
            raise ValueError(
                f"{name} differs: {saved[name]!r} in the checkpoint, {now!r} here; build Belay with "
                f"{name}={saved[name]!r}"
            )


def _check_average(name: str, saved: Mapping[str, Any], entries: Mapping[str, Entry], *, step: int) -> None:
    where = f"average {name!r}"
    for kind in ("weights", "ages", "methods"):
        _same_names(f"{kind} of {where}", saved[kind], entries)
    swinging = [
        (kind, slot, {e.name for e in entries.values() if inertias(e.method)[i] is not None})
        for i, (kind, slot) in enumerate(list(SLOTS.items())[1:])
    ]
    for e in entries.values():
        if not _equal(saved["methods"][e.name], describe(e.method)):
            raise ValueError(
                f"the method of {e.name!r} in {where} differs: {saved['methods'][e.name]} in the checkpoint, "
                f"{describe(e.method)} here; build Belay with the checkpoint's method"
            )
        _fits(f"{e.name!r} in {where}", saved["weights"][e.name], e.w2, spread=e.w1)
        _whole(f"the age of {e.name!r}", saved["ages"][e.name])
        if saved["ages"][e.name] > step:
            raise ValueError(
                f"the age of {e.name!r} in this state of a Belay is damaged: {saved['ages'][e.name]} of {step} steps"
            )
        if isinstance(e.method, Remembers):
            memory = saved["memories"][e.name]
            numbers = isinstance(memory, list) and all(isinstance(x, int | float) and 0 <= x < LARGEST for x in memory)
            if not numbers or len(memory) not in (0, e.method.remembers):
                raise ValueError(
                    f"the memory of {e.name!r} in {where} is damaged: {memory!r}, not {e.method.remembers} numbers"
                )
    for kind, slot, names in swinging:
        _same_names(f"{kind} of {where}", saved[kind], names)
        for each in names:
            entry = entries[each]
            _fits(f"{kind} of {each!r} in {where}", saved[kind][each], getattr(entry, slot), spread=entry.w1)


def _whole(what: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < LARGEST:
        raise ValueError(f"{what} in this state of a Belay is damaged: {value!r} is not a count")


def _equal(saved: Any, here: int | str) -> bool:
    """Whether the two are the same; a damaged state may hold anything, even tensors, whose == returns a tensor."""
    return type(saved) is type(here) and bool(saved == here)


def _named(what: str, saved: Any) -> Mapping[str, Any]:
    if not isinstance(saved, Mapping):
        raise ValueError(f"{what} in this state of a Belay is damaged: {type(saved).__name__} is no dict")
    return saved


def _flag(what: str, value: Any) -> None:
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError(f"{what} in this state of a Belay is damaged: {value!r} is neither 0 nor 1")


def _fits(what: str, saved: Any, here: Tensor, *, spread: Tensor | None = None) -> None:
    if not isinstance(saved, Tensor):
        raise ValueError(f"{what} is damaged: {type(saved).__name__} is not a tensor")
    if saved.shape != here.shape:
        raise ValueError(
            f"the shape of {what} differs: {tuple(saved.shape)} in the checkpoint, {tuple(here.shape)} here"
        )
    if saved.dtype != here.dtype:
        raise ValueError(
            f"the dtype of {what} differs: {saved.dtype} in the checkpoint, {here.dtype} here; build Belay with "
            f"dtype={saved.dtype} (a silent cast would lose what the average knows)"
        )
    if saved.is_meta or saved.layout != here.layout:
        raise ValueError(f"{what} is damaged: it has no values that could be copied")
    reason = why_not_like(saved, here if spread is None else spread)
    if reason is not None:
        raise ValueError(f"{what} does not fit: {reason}; save and load by torch.distributed.checkpoint instead")


def _same_names(what: str, saved: Any, here: Iterable[str]) -> None:
    _named(what, saved)
    missing, unexpected = sorted(set(here) - set(saved)), sorted(set(saved) - set(here))
    if missing or unexpected:
        parts = [
            f"{label}: {_some(names)}" for label, names in (("missing", missing), ("unexpected", unexpected)) if names
        ]
        raise ValueError(f"the {what} in the checkpoint differ from this model's; {'; '.join(parts)}")


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:4]))
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
