"""Checks of the single parts of a state: names, counts, flags, tensors. Each refuses what does not fit."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from torchbelay.physics.method import Remembers

from .shard import why_not_like

LARGEST = 1 << 63  # what a count on a device can be
OR_CHANGE = "or take what has changed by load_state_dict(state, strict=False)"


def without_strict(problem: ValueError) -> str:
    """Return an error without the cure strict=False, for a user whose framework calls load_state_dict()."""
    return str(problem).replace(f" ({OR_CHANGE})", "").replace(f", {OR_CHANGE}", "")


def damaged(problem: Exception) -> ValueError:
    """Return the error for a state in which something could not be read."""
    return ValueError(f"this state of a Belay is damaged: {type(problem).__name__} at {problem}")


def check_age(what: str, age: Any, step: int) -> None:
    """Refuse an age that is not a count, or more than the steps that were taken."""
    whole(f"the age of {what}", age)
    if age > step:
        raise ValueError(f"the age of {what} in this state of a Belay is damaged: {age} of {step} steps")


def check_memory(what: str, memory: Any, method: Remembers) -> None:
    """Refuse what is not the memory of a method."""
    numbers = isinstance(memory, list) and all(
        isinstance(x, int | float) and not isinstance(x, bool) and x >= 0 for x in memory
    )
    if not numbers or len(memory) not in (0, method.remembers):
        raise ValueError(f"the memory of {what} is damaged: {memory!r}, not {method.remembers} numbers")


def whole(what: str, value: Any) -> None:
    """Refuse what is not a count."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < LARGEST:
        raise ValueError(f"{what} in this state of a Belay is damaged: {value!r} is not a count")


def equal(saved: Any, here: int | str | None) -> bool:
    """Whether the two are the same; a damaged state may hold anything, even tensors, whose == returns a tensor."""
    return type(saved) is type(here) and bool(saved == here)


def named(what: str, saved: Any) -> Mapping[str, Any]:
    """Return a part of a state that must be a dict; refuse any other."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"{what} in this state of a Belay is damaged: {type(saved).__name__} is no dict")
    return saved


def flag(what: str, value: Any) -> None:
    """Refuse a part of a state that is neither 0 nor 1."""
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError(f"{what} in this state of a Belay is damaged: {value!r} is neither 0 nor 1")


def fits(what: str, saved: Any, here: Tensor, *, spread: Tensor | None = None) -> None:
    """Refuse what cannot be copied to a tensor that is spread over ranks like `spread`."""
    if not isinstance(saved, Tensor):
        raise ValueError(f"{what} is damaged: {type(saved).__name__} is not a tensor")
    if saved.shape != here.shape:
        raise ValueError(
            f"the shape of {what} differs: {tuple(saved.shape)} in the checkpoint, {tuple(here.shape)} here"
        )
    if saved.dtype != here.dtype:
        raise ValueError(
            f"the dtype of {what} differs: {saved.dtype} in the checkpoint, {here.dtype} here; build Belay with "
            f"dtype={saved.dtype} (a silent cast would lose what the average knows), {OR_CHANGE}"
        )
    if saved.is_meta or saved.layout != here.layout:
        raise ValueError(f"{what} is damaged: it has no values that could be copied")
    reason = why_not_like(saved, here if spread is None else spread)
    if reason is not None:
        raise ValueError(
            f"{what} does not fit: {reason}; save and load by torch.distributed.checkpoint, or one file per rank"
        )


def same_names(what: str, saved: Any, here: Iterable[str]) -> None:
    """Refuse names that are not those of this model."""
    named(what, saved)
    missing, unexpected = sorted(set(here) - set(saved)), sorted(set(saved) - set(here))
    if missing or unexpected:
        parts = [
            f"{label}: {some(names)}" for label, names in (("missing", missing), ("unexpected", unexpected)) if names
        ]
        raise ValueError(f"the {what} in the checkpoint differ from this model's; {'; '.join(parts)} ({OR_CHANGE})")


def same_averages(saved: Any, here: Iterable[str]) -> None:
    """Refuse spectators that a Belay has and a checkpoint has not, or the reverse."""
    named("averages", saved)
    missing, unexpected = sorted(set(here) - set(saved)), sorted(set(saved) - set(here))
    parts = [
        f"{one} has the {'spectator' if len(names) == 1 else 'spectators'} {some(names)}, and {other} has not"
        for one, other, names in (
            ("this Belay", "the checkpoint", missing),
            ("the checkpoint", "this Belay", unexpected),
        )
        if names
    ]
    if parts:
        raise ValueError(f"{'; '.join(parts)}; build Belay with the checkpoint's spectators, {OR_CHANGE}")


def some(names: list[str]) -> str:
    """Return the first of many names, for a message."""
    shown = ", ".join(map(repr, names[:4]))
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
