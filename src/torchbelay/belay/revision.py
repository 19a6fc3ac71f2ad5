"""A change of mind: a state of another Belay is made to fit this one.

What is kept: an average's values and its age, so that warm-ups do not begin again. A method that was changed begins
without memory of past learning rates, and velocities that it did not have begin at 0. `change.py` does the same for a
live average.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchbelay.physics.identity import describe_or_sample, difference
from torchbelay.physics.method import Remembers

from .average import MAIN, Average, Entry
from .buffers import is_averaged
from .checkpoint import EMPTY, FORMAT, LOW, SLOTS, Homes, is_same_method, is_state, options_of
from .checks import damaged, equal, flag, named, some
from .cohort import inertias
from .options import Options
from .planes import BITS, are_planes, joined, split

Saved = Mapping[str, Any]


def revised(
    state: Any, options: Options, expected: Mapping[str, Average], homes: Mapping[str, Homes], notes: list[str]
) -> Any:
    """Return a state that fits these averages, as far as it can be made to; `notes` get what was changed, in words.

    An average that is new begins at the checkpoint's main one, a parameter that is new at the weights. Shapes are not
    changed: the check of a state refuses those that differ.
    """
    if not is_state(state):
        return state
    try:
        flag("began", state["began"])
        found = _options_that_differ(state["options"], options, began=bool(state["began"]))
        gone = sorted(named("averages", state["averages"]).keys() - expected.keys())
        found += [f"the spectator(s) {some(gone)} of the checkpoint are dropped"] if gone else []
        notes += [note for note in found if note not in notes]  # several optimizers have these in common
        averages = {
            name: _Revision(state, average, homes[name], options, notes).made() for name, average in expected.items()
        }
        if options.keep_initial:
            _add_initial(averages, state["averages"], expected, notes)
        made = {"format": FORMAT, "options": options.saved(), "averages": averages}
    except (KeyError, TypeError, AttributeError) as problem:
        raise damaged(problem) from problem
    return {**state, **made}


def _options_that_differ(saved: Any, options: Options, *, began: bool) -> list[str]:
    different = {name: pair for name, pair in options_of(saved, options).items() if not equal(*pair)}
    notes = [f"{name} was {was!r} and is {now!r} from now on" for name, (was, now) in different.items()]
    if "start" in different:
        notes.append("the averages have begun and go on" if began else "the averages have not begun yet")
    return notes


def _add_initial(
    made: dict[str, dict[str, Any]], saved: Saved, expected: Mapping[str, Average], notes: list[str]
) -> None:
    """Add the weights at which averages began, each in the first average that has the parameter.

    Those that the checkpoint does not have are taken to be the average's present values.
    """
    found = {name: w0 for each in saved.values() for name, w0 in named("initial", each.get("initial", {})).items()}
    seen: set[str] = set()
    for average, about in made.items():
        entries = [e for e in expected[average].entries.values() if e.name not in seen]
        new = sorted(e.name for e in entries if e.name not in found)
        values = {e.name: found[e.name] if e.name in found else _value(about, e.name) for e in entries}
        about["initial"] = {e.name: _cast(values[e.name], e.dtype) for e in entries}
        seen |= {e.name for e in entries}
        if new:
            notes.append(f"the initial weights of {some(new)} are taken to be those of {average!r} now")


class _Revision:
    """One average of a state, made to fit an average that is here."""

    def __init__(self, state: Saved, average: Average, homes: Homes, options: Options, notes: list[str]) -> None:
        self._average, self._homes, self._notes = average, homes, notes
        self._version, self._began = state["format"], state["began"]
        self._is_new = average.name not in state["averages"]
        self._found = EMPTY | dict(state["averages"][MAIN if self._is_new else average.name])
        for part in (*SLOTS, LOW, "methods", "ages", "memories", "buffers"):
            named(f"{part} of average {average.name!r}", self._found[part])
        if not isinstance(self._found["own_buffers"], list):
            flag("own_buffers", self._found["own_buffers"])
        if equal(state["options"].get("bits"), BITS) and self._found["weights"].keys() != self._found[LOW].keys():
            raise KeyError(LOW)
        self._same_buffers = equal(state["options"]["buffers"], options.buffers)
        self._buffers = options.buffers

    def made(self) -> dict[str, Any]:
        """Return the average as a checkpoint has it."""
        entries, found = self._average.entries, self._found
        planes = {e.name: self._planes(e) for e in entries.values()}
        low = {name: low for name, (_, low) in planes.items() if low is not None}
        unchanged = {e.name for e in entries.values() if self._is_unchanged(e.name, e.method)}
        remembering = [e.name for e in entries.values() if isinstance(e.method, Remembers)]
        saved = {
            "weights": {name: w2 for name, (w2, _) in planes.items()},
            **({LOW: low} if low else {}),
            **{kind: self._velocities(i, kind) for i, kind in enumerate(list(SLOTS)[1:])},
            "methods": {e.name: describe_or_sample(e.method) for e in entries.values()},
            "ages": {name: 0 if self._is_new else found["ages"].get(name, 0) for name in entries},
            "memories": {name: found["memories"][name] if name in unchanged else [] for name in remembering},
            **self._made_buffers(),
        }
        self._describe(unchanged)
        return saved | ({"changed": True} if self._changed else {})

    def _planes(self, e: Entry) -> tuple[Tensor, Tensor | None]:
        """Return the average of a parameter as it is kept here: one tensor, or two planes."""
        found = _value(self._found, e.name) if e.name in self._found["weights"] else e.w1.detach()
        value = _cast(found, e.dtype)
        if e.low is None or not isinstance(value, Tensor) or value.dtype != e.dtype:
            return value, None
        return split(value)

    def _velocities(self, i: int, kind: str) -> dict[str, Tensor]:
        found = {} if self._is_new else self._found[kind]
        return {
            e.name: _cast(found[e.name], e.dtype)
            if e.name in found
            else torch.zeros_like(e.w1, dtype=e.dtype, requires_grad=False)
            for e in self._average.entries.values()
            if inertias(e.method)[i] is not None
        }

    def _is_unchanged(self, name: str, method: Any) -> bool:
        saved = {} if self._is_new else self._found["methods"]
        return name in saved and is_same_method(saved[name], method, self._version)

    def _describe(self, unchanged: set[str]) -> None:
        """Note what has changed, and what each part begins from."""
        label, found, entries = repr(self._average.name), self._found, self._average.entries
        new = sorted(entries.keys() - found["weights"].keys())
        gone = sorted(found["weights"].keys() - entries.keys())
        if self._is_new:
            self._note(f"{label} is new and begins at the checkpoint's {MAIN!r}, at age 0")
        elif gone:
            self._note(f"{label} averages the parameter(s) {some(gone)} no more")
        if new:
            self._note(f"{label} begins at the weights as they are, at age 0, for the parameter(s) {some(new)}")
        changed = [e for e in entries.values() if not self._is_new and e.name not in unchanged and e.name not in new]
        self._changed = bool(changed)
        for was, now in dict.fromkeys(
            difference(found["methods"][e.name], describe_or_sample(e.method)) for e in changed
        ):
            self._note(f"the method of {label} was {was} and is {now} from now on: values and ages go on")
        for kind in list(SLOTS)[1:]:
            if any(e.name not in found[kind] for e in changed if inertias(e.method)[kind == "velocities2"] is not None):
                self._note(f"the {kind} of {label} begin at 0")
        kinds = [
            (
                "24 bits" if e.name in found[LOW] else found["weights"][e.name].dtype,
                e.dtype if e.low is None else "24 bits",
            )
            for e in entries.values()
            if e.name not in new
        ]
        for there, here in dict.fromkeys(kinds):
            if there != here:
                self._note(f"{label} was kept in {there} and is kept in {here} from now on")

    def _note(self, text: str) -> None:
        text = text if self._began else f"{text} (it has not begun yet)"
        if text not in self._notes:
            self._notes.append(text)

    # Buffers -----------------------------------------------------------------------------------------------------

    def _made_buffers(self) -> dict[str, Any]:
        """Return buffers that fit the model's: the checkpoint's, or those that the model has."""
        known = self._found["buffers"] if self._same_buffers and self._found["own_buffers"] != 0 else {}
        fitting = {
            name for name, (b, _) in self._homes.items() if name in known and known[name].shape == b.shape
        }  # fmt: skip
        if self._same_buffers and not self._is_new and known and fitting != self._homes.keys() | known.keys():
            missing = sorted((self._homes.keys() | known.keys()) - fitting)
            self._note(f"the buffer(s) {some(missing)} of {self._average.name!r} begin as the model has them")
        if self._buffers == "average":
            values = {
                name: _cast(known[name], dtype) if name in fitting else b.detach().to(dtype)
                for name, (b, dtype) in self._homes.items()
            }
            return {"buffers": values, "own_buffers": self._rows(fitting)}
        own = bool(fitting) and fitting == self._homes.keys() and not self._is_new
        blank = {name: torch.zeros_like(b, dtype=dtype) for name, (b, dtype) in self._homes.items()}
        values = {name: _cast(known[name], dtype) for name, (_, dtype) in self._homes.items()} if own else blank
        return {"buffers": values, "own_buffers": int(own)}

    def _rows(self, fitting: set[str]) -> list[list[Any]]:
        """Return what moves averaged buffers: methods that did not change go on, each buffer at its age."""
        found = self._found["own_buffers"]
        if isinstance(found, list) and not all(isinstance(row, list) and len(row) == 4 for row in found):
            raise TypeError("own_buffers")
        known = {row[0]: row for row in found} if isinstance(found, list) else {}
        first = next(iter(self._found["ages"].values()), 0)  # in format 1 buffers had the age of the first parameter
        rows = []
        for name, cohort in self._average.followers.items():
            _, text, age, memory = known.get(name, (name, "", first, []))
            goes_on = name in fitting and not self._is_new
            remembers = goes_on and isinstance(cohort.method, Remembers)
            same = remembers and is_same_method(text, cohort.method, self._version)
            rows.append([name, describe_or_sample(cohort.method), age if goes_on else 0, memory if same else []])
        return rows


def _value(saved: Saved, name: str) -> Any:
    """Return the average of a parameter in a state, in whatever dtype it was kept; of 24 bits, in float32."""
    high = saved["weights"][name]
    if name not in saved.get(LOW, {}):
        return high
    low = saved[LOW][name]
    if not are_planes(high, low):
        raise ValueError(f"the average of {name!r} in this state of a Belay is damaged: its two planes do not fit")
    return joined(high, low)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a tensor in another dtype; what cannot be cast is left to the check of the state."""
    if not isinstance(value, Tensor) or not is_averaged(value) or value.is_complex() is not dtype.is_complex:
        return value
    return value.to(dtype)
