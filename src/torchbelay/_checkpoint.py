"""A Belay's state as plain tensors and numbers, and the check of one before anything is changed."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ._average import Average, Entry, describe, inertias
from .options import Options
from .physics.method import Remembers

FORMAT = 1
SLOTS = {"weights": "w2", "velocities1": "v1", "velocities2": "v2"}  # what a checkpoint calls an entry's tensors


def numbers(average: Average, step: int) -> dict[str, dict[str, Any]]:
    """All of an average that is not a tensor, by parameter name."""
    entries = average.entries.values()
    return {
        "methods": {e.name: describe(e.method) for e in entries},
        "ages": {e.name: step - e.born for e in entries},
        "memories": {e.name: list(e.method.memory) for e in entries if isinstance(e.method, Remembers)},
    }


def check(
    state: Mapping[str, Any],
    options: Options,
    expected: Mapping[str, Mapping[str, Entry]],
    buffers: Mapping[str, Tensor],
) -> None:
    """Refuse a state that does not fit `expected` (entries by average and name) and the model's buffers.

    A state from before the averages started holds none, and fits.
    """
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise ValueError("this is not the state of a Belay: it needs what Belay.state_dict() returned (format 1)")
    try:
        _check_options(state["options"], options)
        _same_names("averages", state["averages"], expected)
        _whole("step", state["step"])
        _whole("ahead", state["ahead"])
        begun = {name for name in expected if state["averages"][name]["weights"]}
        if begun and begun != set(expected):
            raise ValueError(
                f"this state of a Belay is damaged: only {_some(sorted(begun))} of its averages hold weights"
            )
        for name, entries in expected.items():
            if name in begun:
                _check_average(name, state["averages"][name], entries)
                for each, tensor in state["averages"][name]["buffers"].items():
                    _fits(f"buffer {each!r} in average {name!r}", tensor, buffers[each])
    except (KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"this state of a Belay is damaged: {type(problem).__name__} at {problem}") from problem


def restore(average: Average, saved: Mapping[str, Any], step: int) -> None:
    """Write a checked state into an average's tensors and counts."""
    methods: dict[tuple[Any, ...], Remembers] = {}
    for e in average.entries.values():
        for kind, slot in SLOTS.items():
            if e.name in saved[kind]:
                getattr(e, slot).copy_(saved[kind][e.name])
        e.born = step - saved["ages"][e.name]
        if isinstance(e.method, Remembers):
            memory = tuple(saved["memories"][e.name])
            key = (describe(e.method), e.group, e.born, memory)
            if key not in methods:
                methods[key] = e.method.fresh()
                methods[key].remember(memory)
            e.method = methods[key]  # type: ignore[assignment]  # fresh() of a method is one
    average.buffers = {name: tensor.detach().clone() for name, tensor in saved["buffers"].items()}
    average.regroup()


def _check_options(saved: Mapping[str, Any], options: Options) -> None:
    for name, now in options.saved().items():
        if saved[name] != now:
            raise ValueError(
                f"{name} differs: {saved[name]!r} in the checkpoint, {now!r} here; build Belay with "
                f"{name}={saved[name]!r}"
            )


def _check_average(name: str, saved: Mapping[str, Any], entries: Mapping[str, Entry]) -> None:
    where = f"average {name!r}"
    for kind in ("weights", "ages", "methods"):
        _same_names(f"{kind} of {where}", saved[kind], entries)
    swinging = [
        (kind, slot, {e.name for e in entries.values() if inertias(e.method)[i] is not None})
        for i, (kind, slot) in enumerate(list(SLOTS.items())[1:])
    ]
    for e in entries.values():
        if saved["methods"][e.name] != describe(e.method):
            raise ValueError(
                f"the method of {e.name!r} in {where} differs: {saved['methods'][e.name]} in the checkpoint, "
                f"{describe(e.method)} here; build Belay with the checkpoint's method"
            )
        _fits(f"{e.name!r} in {where}", saved["weights"][e.name], e.w2)
        _whole(f"the age of {e.name!r}", saved["ages"][e.name])
        if isinstance(e.method, Remembers):
            memory = saved["memories"][e.name]
            numbers = isinstance(memory, list) and all(isinstance(x, int | float) for x in memory)
            if not numbers or len(memory) not in (0, e.method.remembers):
                raise ValueError(
                    f"the memory of {e.name!r} in {where} is damaged: {memory!r}, not {e.method.remembers} numbers"
                )
    for kind, slot, names in swinging:
        _same_names(f"{kind} of {where}", saved[kind], names)
        for each in names:
            _fits(f"{kind} of {each!r} in {where}", saved[kind][each], getattr(entries[each], slot))


def _whole(what: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{what} in this state of a Belay is damaged: {value!r} is not a count")


def _fits(what: str, saved: Any, here: Tensor) -> None:
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


def _same_names(what: str, saved: Iterable[str], here: Iterable[str]) -> None:
    missing, unexpected = sorted(set(here) - set(saved)), sorted(set(saved) - set(here))
    if missing or unexpected:
        parts = [
            f"{label}: {_some(names)}" for label, names in (("missing", missing), ("unexpected", unexpected)) if names
        ]
        raise ValueError(f"the {what} in the checkpoint differ from this model's; {'; '.join(parts)}")


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:4]))
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
