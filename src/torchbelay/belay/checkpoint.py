"""A Belay's state as plain tensors and numbers, and the check of a state before anything is changed.

format, step, began             numbers: FORMAT, the count of steps, and 0 or 1 (for several optimizers see joint.py)
ahead                           0; 1 in states of format 1 after a step that raised, which are refused
options                         what must agree, by name
made_with                       the same facts and more as names, for torch.distributed.checkpoint
averages
    NAME                        "average", or the name of a spectator
        weights, velocities1, velocities2, buffers      tensors by the parameter's or buffer's name
        weights_low                                     with bits=24: the second plane, whose first is `weights`
        own_buffers                                     0 if `buffers` holds zeros that are never read, else 1; for
                                                        averaged buffers a list of [name, method, age, memory]
        initial                                         with keep_initial=True: w0 that no average before this one has
        methods, ages, memories                         by the parameter's name; methods as `physics.identity` has them

Format 1 is read too. There a method is its repr, and own_buffers is never a list. A state has the same names in both
formats: torch.distributed.checkpoint does not read a directory in which one of them is missing.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from torchbelay.physics.identity import describe_or_sample, difference, same, sampled_steps, why_untold
from torchbelay.physics.method import Method, Remembers
from torchbelay.physics.warnings import warn

from . import checks
from .average import Average, Entry, WholeAverage, key_of
from .buffers import follower, is_averaged
from .checks import OR_CHANGE, check_age, check_memory, damaged, equal, fits, flag, named, same_names, whole
from .cohort import Cohort, inertias
from .options import Options
from .shard import local, part_for

FORMAT = 2
SLOTS = {"weights": "w2", "velocities1": "v1", "velocities2": "v2"}  # what a checkpoint calls an entry's tensors
LOW = "weights_low"
# What may be empty: torch's conversion of a distributed checkpoint to a file leaves such dicts out.
EMPTY: dict[str, Any] = {"velocities1": {}, "velocities2": {}, LOW: {}, "buffers": {}, "memories": {}}

Memories = Mapping[int, tuple[float, ...]]  # by a method's id: what it remembered before a step that is under way
Homes = Mapping[str, tuple[Tensor, torch.dtype]]  # by name: a buffer of the model, and the dtype of its average
Row = list[Any]  # of an averaged buffer: its name, method, age and memory


class Swapped(Protocol):
    """A swap: an average is in the model at present, and the model's weights are in its place."""

    average: WholeAverage

    def value(self, entry: Entry, average: str) -> Tensor:
        """Return w2 of an entry of the average of that name, wherever it is."""

    def changed_buffers(self) -> bool:
        """Whether a buffer was written to since the swap."""

    def buffers(self) -> dict[str, Tensor]:
        """Return copies of the buffers as they are in the model now."""

    def own_buffers(self) -> dict[str, Tensor]:
        """Return the model's own buffers, by name."""


# Saving ---------------------------------------------------------------------------------------------------------------


def saved(average: Average, swap: Swapped | None, step: int, memories: Memories) -> dict[str, Any]:
    """Return an average without its buffers as tensors and numbers, laid out the same whatever has happened so far."""
    entries = average.entries.values()
    weights = {e.name: e.w2.detach() for e in entries}  # while somebody holds them, no weights are put in their place
    if swap is not None and swap.average.name == average.name:  # what lies in the model will not stay there
        weights = {e.name: swap.value(e, average.name).clone() if e.low is None else e.w2 for e in entries}
    texts = _texts_by_id(e.method for e in entries)
    for key, (method, text) in average.told.items():
        if texts.get(key, text) != text:
            before, now = difference(text, texts[key])
            warn(
                f"the method {type(method).__qualname__} has changed since it was given to Belay, from {before} to "
                f"{now}: a Belay with the method as it was takes this state only by load_state_dict(state, "
                "strict=False). What changes in a run needs a name that begins with an underscore, and a function in a "
                "method must depend on its arguments alone"
            )
    low = {e.name: e.low for e in entries if e.low is not None}
    return {
        "weights": weights,
        **({LOW: low} if low else {}),
        "velocities1": {e.name: e.v1 for e in entries if e.v1 is not None},
        "velocities2": {e.name: e.v2 for e in entries if e.v2 is not None},
        "methods": {e.name: texts[id(e.method)] for e in entries},
        "ages": {e.name: step - e.born for e in entries},
        "memories": {e.name: _memory(e.method, memories) for e in entries if isinstance(e.method, Remembers)},
    }


def rows(followers: Mapping[str, Cohort], step: int, memories: Memories) -> list[Row]:
    """Return what moves averaged buffers; as a list it is one value, as `own_buffers` was in format 1."""
    texts = _texts_by_id(c.method for c in followers.values())
    return [[name, texts[id(c.method)], step - c.born, _memory(c.method, memories)] for name, c in followers.items()]


def _texts_by_id(methods: Iterable[Method]) -> dict[int, str]:
    """Return what a checkpoint says of each method, which many tensors share."""
    return {key: describe_or_sample(method) for key, method in {id(method): method for method in methods}.items()}


def _memory(method: Method, memories: Memories) -> list[float]:
    return list(memories.get(id(method), method.memory)) if isinstance(method, Remembers) else []


def made_with(averages: Mapping[str, Mapping[str, Any]], options: Options) -> dict[str, int]:
    """Return what must be the same in the Belay that loads a state, as names.

    torch.distributed.checkpoint reads into an average, and casts, before Belay can check what it read. But first it
    makes sure that every name exists: so another method, dtype or option is refused before anything has changed.
    """
    facts = dict.fromkeys(options.facts(), 1)
    for name, average in averages.items():
        own = average["own_buffers"] if isinstance(average["own_buffers"], list) else []
        low = average.get(LOW, {})
        kinds = {each: "24 bits" if each in low else _named(w2) for each, w2 in average["weights"].items()}
        pairs = [(method, kinds[each]) for each, method in average["methods"].items()]
        pairs += [(method, _named(average["buffers"][each])) for each, method, *_ in own]
        for method, kind in dict.fromkeys(pairs):
            facts[f"{name!r}: {method} in {kind}"] = 1
    return facts


def _named(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def taken(state: Any, take: Callable[[Tensor], Any]) -> Any:
    """Return a state with what `take` makes of its tensors, one after the other."""
    if isinstance(state, Tensor):
        return take(state)
    return {key: taken(value, take) for key, value in state.items()} if isinstance(state, Mapping) else state


# Loading --------------------------------------------------------------------------------------------------------------


def checked(
    state: Mapping[str, Any], options: Options, expected: Mapping[str, Average], buffers: Mapping[str, Homes]
) -> dict[str, Mapping[str, Any]]:
    """Return what a state has of each average; refuse one that does not fit the averages and their buffers."""
    if not is_state(state):
        raise ValueError(
            f"this is not the state of a Belay: it needs what Belay.state_dict() returned (format 1 or {FORMAT})"
        )
    try:
        _check_options(state["options"], options)
        checks.same_averages(state["averages"], expected)
        whole("step", state["step"])
        for each in ("ahead", "began"):
            flag(each, state[each])
        if state["ahead"]:
            raise ValueError(
                "this state was saved by version 0.1.0 after a step that raised, and averages that follow the weights "
                "before a step (lagged ones) had moved for it already; this version does not go on from there: load an "
                "earlier state, or set state['ahead'] = 0 and let these averages take that one step twice"
            )
        found: dict[str, Mapping[str, Any]] = {}
        for name, average in expected.items():
            found[name] = saved = EMPTY | state["averages"][name]
            if not named("weights", saved["weights"]) and average.entries:
                raise ValueError(f"this state of a Belay is damaged: its average {name!r} holds no weights")
            _check_average(average, saved, state["step"], state["format"])
            _check_buffers(average, saved, buffers[name], state["format"], averaged=options.buffers == "average")
            if isinstance(saved["own_buffers"], list):
                _check_rows(average, saved["own_buffers"], state["step"])
        return found
    except (KeyError, TypeError, AttributeError) as problem:
        raise damaged(problem) from problem


def is_state(state: object) -> bool:
    """Whether this is the state of a Belay, in a format that is known."""
    return isinstance(state, Mapping) and any(equal(state.get("format"), known) for known in (1, FORMAT))


def warn_of_untold(averages: Iterable[Average]) -> None:
    """Warn, before a state is loaded into averages, of methods that it cannot hold all of: each once."""
    notes: dict[str | None, None] = {}
    for average in averages:
        methods = [*(e.method for e in average.entries.values()), *(c.method for c in average.followers.values())]
        for method in {id(method): method for method in methods}.values():
            notes[_note_of_untold(average.name, method)] = None
    for note in filter(None, notes):
        warn(note)


def _note_of_untold(name: str, method: Method) -> str | None:
    part = why_untold(method)
    if part is None:
        return None
    steps = sampled_steps(method)
    known = f"couplings of {len(steps)} steps up to {steps[-1]}" if len(steps) > 1 else "one coupling"
    known = known if steps else "no coupling"
    return (
        f"a checkpoint cannot hold all of the method of {name!r} ({part}): it has {known}. That the method is the same "
        "in everything else is not checked. A schedule of torchbelay.schedules, or a small dataclass with __call__, is "
        "compared as a whole"
    )


def restore(average: Average, saved: Mapping[str, Any], step: int) -> None:
    """Write a checked state, all but its buffers, into an average's tensors and counts."""
    methods: dict[tuple[Any, ...], Any] = {}
    for e in average.entries.values():
        for kind, slot in (SLOTS if e.low is None else SLOTS | {LOW: "low"}).items():
            if e.name in saved[kind]:
                own = getattr(e, slot)
                local(own).copy_(part_for(saved[kind][e.name], own))
        e.born = step - saved["ages"][e.name]
        if isinstance(e.method, Remembers):
            memory = tuple(saved["memories"][e.name])
            key = (key_of(e.method), e.group, e.born, memory)
            if key not in methods:
                methods[key] = _remembering(e.method, memory)
            e.method = methods[key]
    average.regroup()


def restored_followers(average: Average, saved: Mapping[str, Any], step: int) -> dict[str, Cohort]:
    """Return what moves averaged buffers from now on. In format 1 they had the age of the first parameter."""
    found: dict[str, Cohort] = {}
    alike: dict[tuple[Any, ...], Cohort] = {}
    known = saved["own_buffers"] if isinstance(saved["own_buffers"], list) else []
    first = next(iter(saved["ages"].values()), 0)
    numbers = {name: (age, tuple(memory)) for name, _, age, memory in known}
    for name, cohort in average.followers.items():
        age, memory = numbers.get(name, (first, ()))
        key = (key_of(cohort.method), age, memory)
        if key not in alike:
            method = _remembering(cohort.method, memory) if isinstance(cohort.method, Remembers) else cohort.method
            alike[key] = follower(method, step - age, average.every)
        found[name] = alike[key]
    return found


def _remembering(method: Any, memory: tuple[float, ...]) -> Any:
    new = method.fresh()
    new.remember(memory)
    return new


def _check_options(saved: Mapping[str, Any], options: Options) -> None:
    for name, (found, now) in options_of(saved, options).items():
        if not equal(found, now):
            cure = f"a group of {found!r} workers" if name == "workers" else f"{name}={found!r}"
            raise ValueError(
                f"{name} differs: {found!r} in the checkpoint, {now!r} here; build Belay with {cure}, {OR_CHANGE}"
            )


def options_of(saved: Any, options: Options) -> dict[str, tuple[Any, int | str | None]]:
    """Return the options of a state and those that are here, by name; states of older versions do not have them all."""
    usual: dict[str, Any] = {"keep_initial": False, "workers": 1, "bits": None}
    found = usual | dict(named("options", saved))
    return {name: (found[name], now) for name, now in (usual | options.saved()).items()}


def _check_average(average: Average, saved: Mapping[str, Any], step: int, version: int) -> None:
    where, entries = f"average {average.name!r}", average.entries
    for kind in ("weights", "ages", "methods"):
        same_names(f"{kind} of {where}", saved[kind], entries)
    texts: dict[int, tuple[str, ...]] = {}
    for e in entries.values():
        if id(e.method) not in texts:
            texts[id(e.method)] = _texts(e.method, version)
        _check_method(f"{e.name!r} in {where}", saved["methods"][e.name], texts[id(e.method)])
        fits(f"{e.name!r} in {where}", saved["weights"][e.name], e.w2, spread=e.spread)
        check_age(f"{e.name!r}", saved["ages"][e.name], step)
        if isinstance(e.method, Remembers):
            check_memory(f"{e.name!r} in {where}", saved["memories"][e.name], e.method)
    same_names(f"{LOW} of {where}", saved[LOW], [e.name for e in entries.values() if e.low is not None])
    for e in entries.values():
        if e.low is not None:
            fits(f"{LOW} of {e.name!r} in {where}", saved[LOW][e.name], e.low, spread=e.spread)
    for i, (kind, slot) in enumerate(list(SLOTS.items())[1:]):
        swinging = {e.name for e in entries.values() if inertias(e.method)[i] is not None}
        same_names(f"{kind} of {where}", saved[kind], swinging)
        for each in swinging:
            entry = entries[each]
            fits(f"{kind} of {each!r} in {where}", saved[kind][each], getattr(entry, slot), spread=entry.spread)


def _check_buffers(average: Average, saved: Mapping[str, Any], buffers: Homes, version: int, *, averaged: bool) -> None:
    """Refuse buffers that do not fit.

    Averaged ones may be cast up, and in format 1 they had the model's dtype. Others keep the dtype that they had when
    `update_bn` found them, whatever the model's has become.
    """
    if not (averaged and isinstance(saved["own_buffers"], list)):
        flag("own_buffers", saved["own_buffers"])
    same_names(f"buffers of average {average.name!r}", saved["buffers"], buffers)
    for name, tensor in saved["buffers"].items():
        buffer, dtype = buffers[name]
        here = buffer if buffer.dtype == dtype else torch.empty(buffer.shape, dtype=dtype, device="meta")
        casts = isinstance(tensor, Tensor) and is_averaged(tensor) and _casts(tensor.dtype, dtype, version, averaged)
        if casts:
            here = torch.empty(buffer.shape, dtype=tensor.dtype, device="meta")
        fits(f"buffer {name!r} in average {average.name!r}", tensor, here, spread=buffer)


def _casts(found: torch.dtype, here: torch.dtype, version: int, averaged: bool) -> bool:
    """Whether values of one dtype may stand for those of another."""
    if found.is_complex is not here.is_complex or not (here.is_floating_point or here.is_complex):
        return False
    return not averaged or version == 1 or torch.promote_types(found, here) == here


def _check_rows(average: Average, found: list[Any], step: int) -> None:
    """Refuse what a state says of averaged buffers, if that differs from what would move them here."""
    where = f"average {average.name!r}"
    if not all(isinstance(row, list) and len(row) == 4 and isinstance(row[0], str) for row in found):
        raise ValueError(f"own_buffers of {where} in this state of a Belay is damaged: {found!r}")
    same_names(f"averaged buffers of {where}", {row[0]: row for row in found}, average.followers)
    for name, text, age, memory in found:
        method = average.followers[name].method
        _check_method(f"buffer {name!r} in {where}", text, _texts(method, FORMAT))
        check_age(f"buffer {name!r}", age, step)
        if isinstance(method, Remembers):
            check_memory(f"buffer {name!r} in {where}", memory, method)
        elif memory != []:
            raise ValueError(f"the memory of buffer {name!r} in {where} is damaged: {memory!r}, not an empty list")


def _texts(method: Method, version: int) -> tuple[str, ...]:
    """Return what a checkpoint of this format may call a method."""
    kind: Any = type(method)
    plain = f"{kind.__module__}.{kind.__qualname__}" if kind.__repr__ is object.__repr__ else repr(method)
    text = describe_or_sample(method)
    return (text, plain) if version == 1 else (text,)


def is_same_method(found: Any, method: Method, version: int) -> bool:
    """Whether a state of this format tells this method."""
    return _is_told(found, _texts(method, version))


def _is_told(found: Any, texts: tuple[str, ...]) -> bool:
    return isinstance(found, str) and any(same(found, text) for text in texts)


def _check_method(what: str, found: Any, texts: tuple[str, ...]) -> None:
    if not _is_told(found, texts):
        saved, here = difference(found, texts[0])
        raise ValueError(
            f"the method of {what} differs: {saved} in the checkpoint, {here} here; build Belay with the checkpoint's "
            f"method and call belay.change(method) after loading, {OR_CHANGE}"
        )
