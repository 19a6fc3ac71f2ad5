"""Several Belays on the same parameters: at most one pulls a parameter, and one at a time has its average there.

Any number may watch. A Belay is known here by its stepper, which the optimizer's hooks keep alive when the user has
dropped the Belay, as by running a cell of a notebook twice.

A second Belay that pulls is refused if it would follow the same optimizer. If it follows another one, made for the same
model later, it takes the place of the first, whose steps are refused from then on.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer

from .average import Entry
from .swap import Swap


class Member(Protocol):
    """What is known of a Belay."""

    optimizer: Optimizer | None
    swap: Swap | None
    successors: "WeakSet[Member]"  # Belays of other optimizers, made later, that pulled the same parameters

    def pulled(self) -> dict[int, str]:
        """Return the names of the parameters that the average pulls, by their ids; none after `detach()`."""

    def detach(self) -> None:
        """Follow no more."""

    def __hash__(self) -> int: ...


_members: WeakSet[Member] = WeakSet()


def has_several() -> bool:
    """Whether there is more than one Belay; for one alone nothing has to be checked."""
    return len(_members) > 1


def join(member: Member, *, replace: bool) -> None:
    """Take a Belay in; it succeeds others that pull what it pulls, or they are detached if asked to."""
    for other in _rivals(member, member.pulled()):
        if replace:
            other.detach()
        else:
            other.successors.add(member)
    _members.add(member)


def refuse_second_pull(member: Member, pulled: dict[int, str]) -> None:
    """Refuse if these parameters are pulled already at the same steps: two springs would pull twice as strongly."""
    for other in _rivals(member, pulled):
        at_the_same_steps = other.optimizer is member.optimizer is not None
        if at_the_same_steps or (member in _members and not _is_succeeded(other)):
            name = next(name for key, name in pulled.items() if key in other.pulled())
            raise ValueError(
                f"another Belay pulls parameter {name!r} already, and two springs would pull it twice; detach() the "
                "other one first, or give replace=True. Averages that only watch (Spring.ema) may be any number"
            )


def refuse_succeeded(member: Member) -> None:
    """Refuse a step of a Belay whose parameters another one pulls now."""
    if _is_succeeded(member):
        raise RuntimeError(
            "another Belay, which was made later for another optimizer, pulls these parameters now, and two springs "
            "would pull them twice; detach() one of the two"
        )


def _rivals(member: Member, pulled: dict[int, str]) -> list[Member]:
    if not pulled:
        return []
    return [other for other in _members if other is not member and pulled.keys() & other.pulled().keys()]


def _is_succeeded(member: Member) -> bool:
    """Whether another Belay, made later, pulls what this one pulls; one that was detached pulls no more."""
    return any(not member.pulled().keys().isdisjoint(other.pulled()) for other in member.successors)


def refuse_among(member: Member, parameters: Iterable[Tensor], what: str) -> None:
    """Refuse something that reads or writes weights while another Belay has its average in their place."""
    held = {id(entry.w1): (entry.name, swap.average.name) for swap, entry in _held_by_others(member)}
    for p in parameters if held else ():
        if id(p) in held:
            name, average = held[id(p)]
            raise RuntimeError(
                f"{what} inside averaged({average!r}) of another Belay, which has its average in place of the weights "
                f"{name!r}; leave that block first"
            )


def own_tensors() -> dict[int, Tensor]:
    """Return models' own weights and buffers where averages are in their place now, by the ids of those."""
    swaps = [member.swap for member in _members if member.swap is not None]
    found: dict[int, Tensor] = {}
    for swap in sorted(swaps, key=lambda swap: -swap.number):  # the first has the model's own buffers, others its own
        found |= swap.own_tensors()
    return found


def own_weights(*, but: Member) -> dict[int, Tensor]:
    """Return models' own weights where averages of Belays other than this one are in their place now."""
    found: dict[int, Tensor] = {}
    for member in _members:
        if member is not but and member.swap is not None:
            found |= member.swap.own_weights()
    return found


def _held_by_others(member: Member) -> Iterator[tuple[Swap, Entry]]:
    for other in _members:
        if other is not member and other.swap is not None:
            for entry in other.swap.average.entries.values():
                yield other.swap, entry
