"""The averages of several optimizers that train one model: which parameter belongs to which of them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NoReturn, Protocol

from torch import nn
from torch.optim import Optimizer

from . import modules
from .average import Average, Entry, Wanted
from .clock import Clock


class Relative(Protocol):
    """What is known of the averages of one optimizer."""

    optimizer: Optimizer | None
    clock: Clock
    each: dict[str, Average]
    began: bool

    def held(self) -> dict[int, int]:
        """Return the parameters that the optimizer holds now, by their ids, with their groups."""

    def followed_by_main(self) -> list[Wanted]:
        """Return what the average that may pull follows, or is to follow when it begins."""


Relatives = Callable[[], Iterable[Relative]]  # the averages of all other optimizers


def nobody() -> Iterable[Relative]:
    """Return the relatives of a single optimizer's averages: none."""
    return ()


def refuse_held_twice(model: nn.Module, one: Relative, held: Mapping[int, int], others: Iterable[Relative]) -> None:
    """Refuse a parameter that the optimizer is to hold (by id) and another one holds too."""
    for other in others:
        for key in other.held():
            if key in held:
                refuse_shared(model, key, one.optimizer, other.optimizer)


def followed(others: Iterable[Relative]) -> list[Wanted]:
    """Return what the main averages of other optimizers follow, of the parameters that these hold now."""
    found: list[Wanted] = []
    for other in others:
        held = other.held()
        found += [each for each in other.followed_by_main() if id(each.parameter) in held]
    return found


def refuse_shared(model: nn.Module, key: int, *optimizers: Optimizer | None) -> NoReturn:
    """Refuse a parameter (by id) of two optimizers: its average could follow the steps of one of them only."""
    name = modules.names_by_id(model).get(key, "?")
    kinds = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
    raise ValueError(
        f"parameter {name!r} is in two optimizers, {kinds}, and its average can follow one of them: take it out of the "
        "other one, or make a Belay for each optimizer"
    )


def as_held(
    one: Relative,
    find: Callable[[], Mapping[str, list[Wanted]]],
    others: Iterable[Relative],
    begun: Callable[[Average, list[Wanted]], Average],
) -> dict[str, Average]:
    """Return averages of what an optimizer holds now, as its next step would find them; changes nothing.

    `find` returns what each is to follow, or refuses it, as the next step would: then they are as they are, for they
    must be saved all the same. `begun` returns an average, like one that is there, of parameters that are new.
    """
    try:
        wanted = find()
    except ValueError:
        if not one.began:
            raise
        return one.each
    others, found = list(others), dict[str, Average]()
    for name, each in wanted.items():
        known = _known(one, name, others) if one.began else {}
        found[name] = average = begun(one.each[name], [w for w in each if id(w.parameter) not in known])
        average.entries = {e.name: e for e in known.values()} | average.entries
        average.told, average.buffers = one.each[name].told | average.told, one.each[name].buffers
    return found


def _known(one: Relative, name: str, others: Iterable[Relative]) -> dict[int, Entry]:
    """Return the entries that an average has after `exchange`, by the ids of the parameters."""
    found, held = list(one.each[name].entries.values()), one.held()
    for other in others:
        later = one.clock.count - other.clock.count
        found += [replace(e, born=e.born + later) for e in other.each[name].entries.values()]
    return {id(e.w1): e for e in found if id(e.w1) in held}


def exchange(one: Relative, held: Mapping[int, int], others: Iterable[Relative]) -> None:
    """Let averages go on of parameters that came to an optimizer (which holds these, by id) from another, or left."""
    for other in others:
        if other.began:
            _give(other, one, held)
            _give(one, other, other.held())


def _give(giver: Relative, taker: Relative, held: Mapping[int, int]) -> None:
    """Give the entries of parameters that the taker's optimizer holds, with their ages."""
    for name, average in giver.each.items():
        moved = [e for e in average.entries.values() if id(e.w1) in held]
        if moved:
            average.give(moved, taker.each[name], later=taker.clock.count - giver.clock.count)
