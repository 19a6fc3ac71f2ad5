"""The averages of several optimizers that train one model: which parameter belongs to which of them."""

from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn, Protocol

from torch import nn
from torch.optim import Optimizer

from . import modules
from .average import Average
from .clock import Clock


class Relative(Protocol):
    """What is known of the averages of one optimizer."""

    optimizer: Optimizer | None
    clock: Clock
    each: dict[str, Average]
    began: bool

    def held(self) -> dict[int, int]:
        """Return the parameters that the optimizer holds now, by their ids, with their groups."""


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


def refuse_shared(model: nn.Module, key: int, *optimizers: Optimizer | None) -> NoReturn:
    """Refuse a parameter (by id) of two optimizers: its average could follow the steps of one of them only."""
    name = modules.names_by_id(model).get(key, "?")
    kinds = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
    raise ValueError(
        f"parameter {name!r} is in two optimizers, {kinds}, and its average can follow one of them: take it out of the "
        "other one, or make a Belay for each optimizer"
    )


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
