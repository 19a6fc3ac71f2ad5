"""A Belay's state as entries of an optimizer's state: how it is packed, found and taken out again.

`optimizer_state.py` has the layout.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any
from urllib.parse import quote

from torch import Tensor

from .checkpoint import LOW, SLOTS
from .checks import damaged

KEY = "torchbelay"
PREFIX = f"{KEY}/"
TENSORS = (*SLOTS, LOW, "initial", "buffers")  # the kinds of tensors in a Belay's state

State = dict[str, Any]


def numbers(state: State) -> State:
    """Return a Belay's state without tensors, and with what parameters have in common written once.

    torch.distributed.checkpoint may write this text once for each parameter.
    """
    found = {key: state[key] for key in ("format", "step", "ahead", "began", "options")}
    found["averages"] = averages = {}
    for name, saved in state["averages"].items():
        of = {
            each: (method, saved["ages"][each], tuple(saved["memories"].get(each, ())))
            for each, method in saved["methods"].items()
        }
        kinds = [kind for kind, _ in Counter(of.values()).most_common()]
        place = {kind: i for i, kind in enumerate(kinds)}
        others = {each: place[kind] for each, kind in of.items() if place[kind]}
        averages[name] = {"kinds": kinds, "others": others, "own_buffers": saved["own_buffers"]}
    return found


def unpacked(text: Any, tensors: Mapping[str, Tensor]) -> tuple[State, float | None]:
    """Return the state of a Belay, and how many steps the optimizer had taken by its own count, if it has one."""
    try:
        state: State = json.loads(text)
        steps = state.pop("optimizer_steps")
        for name, saved in state["averages"].items():
            kinds, others = saved.pop("kinds"), saved.pop("others")
            saved |= {kind: {} for kind in TENSORS}
            saved |= {"methods": {}, "ages": {}, "memories": {}}
            for kind, each, tensor in named_tensors(tensors, quote(name, safe="")):
                saved[kind][each] = tensor
            for each in saved["weights"]:
                parts = kinds[others.get(each, 0)]
                saved["methods"][each], saved["ages"][each], saved["memories"][each] = parts
        return state, None if steps is None else float(steps)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as problem:
        raise damaged(problem) from problem


def named_tensors(tensors: Mapping[str, Tensor], average: str) -> Iterator[tuple[str, str, Tensor]]:
    """Yield kind, name and tensor of what belongs to an average, whose name is quoted."""
    for key, tensor in tensors.items():
        found, kind, name = key.removeprefix(PREFIX).split("/", 2)
        if found == average:
            yield kind, name, tensor


def steps_of(state: State) -> float | None:
    """Return how many steps an optimizer has counted, for the first parameter for which it does; None for none."""
    for key in (key for group in state["param_groups"] for key in group["params"]):
        entries = state["state"].get(key)
        steps = entries.get("step") if isinstance(entries, Mapping) else None
        if isinstance(steps, Tensor) and steps.numel() == 1 and not steps.is_meta:
            return float(steps)
        if isinstance(steps, int | float):
            return float(steps)
    return None


# What an optimizer's state holds ------------------------------------------------------------------------------------


def _is_ours(key: object) -> bool:
    return isinstance(key, str) and (key == KEY or key.startswith(PREFIX))


def is_carried(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer's state carries averages."""
    return any(KEY in group for group in state["param_groups"])


def carried(state: State) -> tuple[list[Any], dict[str, Any]]:
    """Return the texts and the tensors that an optimizer's state carries."""
    texts = [group[KEY] for group in state["param_groups"] if KEY in group]
    entries = [each for each in state["state"].values() if isinstance(each, Mapping)]
    return texts, {key: value for each in entries for key, value in each.items() if _is_ours(key)}


def without(state: State) -> State:
    """Return an optimizer's state without the averages; a parameter that has nothing else has no state."""
    own: dict[Any, Any] = {}
    for index, entries in state["state"].items():
        if isinstance(entries, Mapping) and any(map(_is_ours, entries)):
            left = {key: value for key, value in entries.items() if not _is_ours(key)}
            own |= {index: left} if left else {}
        else:
            own[index] = entries
    groups = [{key: value for key, value in group.items() if not _is_ours(key)} for group in state["param_groups"]]
    return {**state, "state": own, "param_groups": groups}


def given(held: list[str]) -> tuple[list[Any], dict[str, Any]] | None:
    """Return what a state carries from which torch.distributed.checkpoint makes the one that is loaded now, if it does.

    If it is to unflatten that state, it keeps only the entries that the live state of the optimizer has, and loses the
    averages. If that state is full, it adds those that the optimizer has now. What it was given is in its frame.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_load_optim_state_dict":
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != "torch.distributed.checkpoint.state_dict":
        return None
    given = frame.f_locals.get("state_dict")
    if not isinstance(given, Mapping) or not given:  # a rank to which another one broadcasts
        return None
    if "param_groups" in given:
        return None if is_carried(given) else ([], {})
    texts: list[Any] = []
    tensors: dict[str, Any] = {}
    for key, value in given.items():
        head, _, ours = key.partition(f".{KEY}")
        section, _, name = head.partition(".")
        if key == head or not _is_ours(KEY + ours) or name not in held:
            continue
        if section == "state":
            tensors[KEY + ours] = value
        elif not ours:
            texts.append(value)
    return texts, tensors
