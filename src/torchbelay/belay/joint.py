"""Several optimizers in one state: it is joined when it is saved, and split when it is loaded.

A state of several optimizers has one key more than that of one:

optimizers      a list of [steps, began, names]: the steps of an optimizer, whether its averages have begun, and the
                names of the parameters that it trains

Its `step` is the largest count, and `began` is 2 if only some averages have begun. What a parameter needs is its age,
so a state fits any optimizers that train the same parameters, in whatever way they share them. A parameter that came
from another optimizer may be older than its optimizer's count; the count is raised to its age when the state is loaded.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .checks import damaged, named
from .options import Options

_BUFFERS = ("buffers", "own_buffers")  # what a state has of an average that is not by parameter
_SOME = 2  # of `began`: neither 0 nor 1, so that what follows a single optimizer refuses it


class Trained(NamedTuple):
    """What one optimizer has done, and the parameters that it trains."""

    steps: int
    began: bool
    names: Sequence[str]


def joined(averages: Sequence[Mapping[str, Any]], trained: Sequence[Trained]) -> dict[str, Any]:
    """Return what a state has of averages of several optimizers; buffers are those of the first."""
    first, *others = averages
    found = {name: dict(saved) for name, saved in first.items()}
    for each in others:
        for name, saved in each.items():
            found[name] |= {kind: found[name].get(kind, {}) | saved[kind] for kind in saved if kind not in _BUFFERS}
    begun = {each.began for each in trained}
    return {
        "step": max(each.steps for each in trained),
        "began": int(begun.pop()) if len(begun) == 1 else _SOME,
        "averages": found,
        "optimizers": [[each.steps, int(each.began), list(each.names)] for each in trained],
    }


def split(state: Any, names: Sequence[Sequence[str]], options: Sequence[Options]) -> list[Any]:
    """Return a state for each optimizer, which trains the parameters of these names; those of none go to the first.

    What is damaged is refused, here or by the check of each state.
    """
    if not isinstance(state, Mapping) or (len(names) == 1 and "optimizers" not in state):
        _refuse_some(state)
        return [state] * len(names)
    try:
        known = _known(state)
        owners = {name: i for i, some in enumerate(names) for name in some}
        return [_share(state, i, owners, _trained(state, i, names[i], known), each) for i, each in enumerate(options)]
    except (KeyError, TypeError, AttributeError) as problem:
        raise damaged(problem) from problem


def _known(state: Mapping[str, Any]) -> list[Trained]:
    """Return what a state says of its optimizers; one that says nothing has one."""
    if "optimizers" not in state:
        return []
    if not isinstance(state["step"], int):
        raise TypeError("step")
    found = state["optimizers"]
    rows: list[Any] = found if isinstance(found, list) and found else [found]
    for row in rows:
        if not (
            isinstance(row, list)
            and len(row) == 3
            and all(isinstance(number, int) and number >= 0 for number in row[:2])
            and row[0] <= state["step"]
            and row[1] < _SOME
            and isinstance(row[2], list)
            and all(isinstance(name, str) for name in row[2])
        ):
            raise ValueError(f"optimizers in this state of a Belay is damaged: {row!r}")
    return [Trained(steps, bool(began), names) for steps, began, names in rows]


def _trained(state: Mapping[str, Any], i: int, names: Sequence[str], known: list[Trained]) -> Trained:
    """Return what an optimizer has done that trains these parameters: as many steps as any of them has seen."""
    if not known:
        return Trained(state["step"], state["began"], names)
    rows = {name: row for row in known for name in row.names}
    found = [rows[name] for name in names if name in rows] or [known[i % len(known)]]
    if len({row.began for row in found}) > 1:
        _refuse_some({"began": _SOME})
    steps = max(*(row.steps for row in found), *_ages(state, names, most=sum(row.steps for row in known)))
    return Trained(max(steps, *_ages_of_buffers(state)) if i == 0 else steps, found[0].began, names)


def _refuse_some(state: Any) -> None:
    """Refuse averages of which some have begun and others have not, if one optimizer trains them all."""
    if isinstance(state, Mapping) and type(state.get("began")) is int and state["began"] == _SOME:
        raise ValueError(
            "in this state the averages of some optimizers have begun and those of others have not, and here one "
            "optimizer trains both; give Belay the optimizers that it had, or save after all have taken `start` steps"
        )


def _ages(state: Mapping[str, Any], names: Sequence[str], *, most: int) -> list[int]:
    """Return the ages of parameters; none has seen more steps than all optimizers took, unless it is damaged."""
    found = [saved["ages"].get(name) for saved in state["averages"].values() for name in names]
    return [0, *(age for age in found if isinstance(age, int) and age <= most)]  # what is damaged is found later


def _ages_of_buffers(state: Mapping[str, Any]) -> list[int]:
    """Return the ages of averaged buffers, which may have followed another optimizer than the one that is first now."""
    averages = named("averages", state["averages"])
    found = [named(f"average {name!r}", saved)["own_buffers"] for name, saved in averages.items()]
    rows = [row for each in found if isinstance(each, list) for row in each]
    if not all(isinstance(row, list) and len(row) == 4 and isinstance(row[2], int) for row in rows):
        raise TypeError("own_buffers")
    ages = [row[2] for row in rows]
    return [0, *(age for age in ages if age <= state["step"])]  # one that is older is damaged, which is found later


def _share(
    state: Mapping[str, Any], i: int, owners: Mapping[str, int], trained: Trained, options: Options
) -> dict[str, Any]:
    """Return the part of a state that one optimizer's averages go on from."""
    own = {"step": trained.steps, "began": trained.began, "averages": state["averages"]}
    if isinstance(state["averages"], Mapping):
        own["averages"] = {name: _of(saved, i, owners) for name, saved in state["averages"].items()}
    if i:  # the state's own options are those of the first, whose average has the buffers; bits are those of all
        known = named("options", state["options"])
        bits = {"bits": known["bits"]} if "bits" in known else {}
        own["options"] = {name: value for name, value in options.saved().items() if name != "bits"} | bits
    return {**state, **own}


def _of(saved: Any, i: int, owners: Mapping[str, int]) -> Any:
    """Return what a state has, in one average, of the parameters of one optimizer, and for the first the buffers."""
    if not isinstance(saved, Mapping):
        return saved
    found = dict(saved) if i == 0 else dict(saved) | {"buffers": {}, "own_buffers": 0}
    for kind, values in saved.items():
        if kind not in _BUFFERS and isinstance(values, Mapping):
            found[kind] = {name: value for name, value in values.items() if owners.get(name, 0) == i}
    return found
