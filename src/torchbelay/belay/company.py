"""Several Belays on the same parameters: at most one pulls a parameter, and one at a time has its average there.

Any number may watch. A Belay is known here by its `Member`, which its steppers hold. The hooks of its optimizers keep
them alive when the user has dropped the Belay, as by running a cell of a notebook twice. If nobody can reach its
averages any more, it is detached when the next Belay is made for the optimizer.

A second Belay that pulls is refused if it would follow the same optimizer. If it follows another one, made for the same
model later, it takes the place of the first, whose steps are refused from then on.
"""

from collections.abc import Iterable, Iterator, Mapping
from threading import RLock
from typing import Any, Protocol
from weakref import WeakSet, ref

from torch import Tensor
from torch.optim import Optimizer

from torchbelay.physics.warnings import warn

from .average import Entry, WholeAverage
from .blocks import follow_blocks
from .swap import Swap


class Stepping(Protocol):
    """What is known of a stepper: it follows one optimizer of a Belay."""

    optimizer: Optimizer | None
    steps_seen: int

    def pulled(self) -> dict[int, str]:
        """Return the names of the parameters that the average pulls, by their ids; none after `detach()`."""

    @property
    def attached(self) -> bool:
        """Whether steps are followed: `detach()` has not been called."""

    def is_of_use(self) -> bool:
        """Whether it does more than to move averages which nobody holds."""

    def settle(self) -> None:
        """End a step in which the optimizer took the averages along and was stopped before its hook."""

    def detach(self) -> None:
        """Follow no more."""


class Held(Protocol):
    """What users hold of a Belay's averages; it follows them."""

    modules: list[Any]

    def prepare(self) -> None:
        """Let modules get the parts that their models have got; raises, before anything moves, if one cannot."""

    def follow(self, *, moved: bool, part: Mapping[str, WholeAverage] | None = None) -> None:
        """Let modules be what their averages are now; `moved`: weights or averages may have been written to.

        `part`: only these parts of the averages, by name, have been.
        """

    def holds(self, average: WholeAverage) -> bool:
        """Whether somebody holds a module or a mapping of this average, or a tensor that shares its memory."""

    def shares(self, parameters: set[int]) -> bool:
        """Whether a module follows an average of a model that has one of these parameters, given by their ids."""


class Member:
    """One Belay, as its steppers and other Belays know it."""

    lock = RLock()  # one for all, which may share a model: one thread at a time puts an average there, or exports

    def __init__(self, live: Held, owner: ref[Any]) -> None:
        self.live = live
        self._owner = owner  # what the user, or something that the user has, holds for as long as averages are read
        self.swap: Swap | None = None  # its model holds an average at present
        self._moved: set[int] = set()  # the parameters, by id, whose weights the swap puts elsewhere
        self.holders: list[object] = []  # the blocks that need the average in the model
        self.successors: WeakSet[Member] = WeakSet()  # Belays of other optimizers, made later, that pulled the same
        self._steppers: list[ref[Stepping]] = []  # which hold this: a cycle would keep tensors until it is collected

    def add(self, stepper: Stepping) -> None:
        """Make known what follows one of the optimizers."""
        self._steppers.append(ref(stepper))

    def is_first(self, stepper: Stepping) -> bool:
        """Whether a stepper follows the first of the optimizers."""
        return self._steppers[0]() is stepper

    def steppers(self) -> list[Stepping]:
        """Return what follows its optimizers."""
        return [stepper for each in self._steppers if (stepper := each()) is not None]

    def optimizers(self) -> set[int]:
        """Return the ids of the optimizers that it follows."""
        return {id(stepper.optimizer) for stepper in self.steppers() if stepper.optimizer is not None}

    def pulled(self) -> dict[int, str]:
        """Return the names of the parameters that the average pulls, by their ids; none after `detach()`."""
        found: dict[int, str] = {}
        for stepper in self.steppers():
            found |= stepper.pulled()
        return found

    def detach(self) -> None:
        """Follow no more."""
        for stepper in self.steppers():
            stepper.detach()

    def is_dropped(self) -> bool:
        """Whether it follows an optimizer in vain: it does not pull, and nobody can read its averages any more."""
        if self._owner() is not None:
            return False
        steppers = self.steppers()
        return any(each.attached for each in steppers) and not any(each.is_of_use() for each in steppers)

    def settled_swap(self) -> Swap | None:
        """Return the swap of the block that the program is in; a block that could not be left is left now."""
        for stepper in self.steppers():
            stepper.settle()
        with self.lock:
            if self.swap is not None and not self.swap.is_inside:
                self.leave()
            return self.swap

    def enter(self, swap: Swap | None, *holders: object) -> None:
        """Put an average into the model, where it is until its last holder leaves; None: it is there already."""
        self.holders = [*self.holders, *holders]
        if swap is not None:
            self.swap, self._moved = swap, {id(p) for p in swap.parameters}
        follow_blocks(self)
        if swap is not None:
            swap.enter()
            self._tell()

    def set_aside(self) -> None:
        """Set weights aside that have traded places with the average: somebody is about to look at the average."""
        try:
            if self.swap is not None:
                self.swap.set_aside()
        finally:
            self._tell()

    def leave(self, holder: object = None) -> None:
        """Give the model its weights back, if it does not have them, and nobody else needs the average there.

        Without a holder, at once. May be called again if it was interrupted: a holder is forgotten last.
        """
        others = [] if holder is None else [each for each in self.holders if each is not holder]
        is_held = others or (holder is not None and len(others) == len(self.holders))  # it may have left before
        if is_held and self.swap is not None and self.swap.is_inside:
            self.holders = others
            follow_blocks(self)
            return
        if self.swap is not None:
            self.swap.undo()
            self.swap = None
        self.holders = others
        follow_blocks(self)
        if self._moved:
            self._tell()
            self._moved = set()

    def refuse_step(self) -> None:
        """Refuse an optimizer's step while an average is in the model."""
        if self.swap is None:
            return
        name = self.swap.average.name
        if self.settled_swap() is not None:
            raise RuntimeError(
                f"an optimizer step inside averaged({name!r}) would train the average and lose the weights; leave the "
                "block first"
            )
        raise RuntimeError(
            f"averaged({name!r}) raised on leaving, and some weights were still the average's: the gradients are not "
            "those of the weights, which are back now; compute the gradients again"
        )

    def refuse_step_of(self, parameters: Iterable[Tensor]) -> None:
        """Refuse the step of an optimizer of these parameters if one of them holds the average."""
        if not self._moved.isdisjoint(map(id, parameters)):
            self.refuse_step()

    def _tell(self) -> None:
        """Let modules follow that share weights with the model: those are elsewhere now."""
        for each in members():
            if each.live.modules and each.live.shares(self._moved):
                each.live.follow(moved=False)


_members: list[ref[Member]] = []  # no set: a thread could not look at it while another one makes a Belay


def members() -> list[Member]:
    """Return all Belays."""
    return [member for each in _members.copy() if (member := each()) is not None]


def has_several() -> bool:
    """Whether there is more than one Belay; for one alone nothing has to be checked."""
    return len(_members) > 1


def join(member: Member, *, replace: bool) -> None:
    """Take a Belay in; it succeeds others that pull what it pulls, or they are detached if asked to.

    The warning about dropped ones comes first: if it is an error, those that pull are as they were.
    """
    _detach_dropped(member)
    for other in _rivals(member, member.pulled()):
        if replace:
            other.detach()
        else:
            other.successors.add(member)
    _members.append(ref(member, _members.remove))


def _detach_dropped(member: Member) -> None:
    """Detach Belays of the same optimizers that were dropped without it, and warn: each costs memory and time."""
    own = member.optimizers()
    dropped = [other for other in members() if not own.isdisjoint(other.optimizers()) and other.is_dropped()]
    for other in dropped:
        other.detach()
    if dropped:
        warn(
            "an earlier Belay of this optimizer was dropped without detach(), as by a cell that ran again. Nobody can "
            "read its average any more, and it is detached now; the new average begins at the weights as they are. To "
            "go on with an average, keep its Belay; to begin again, call reset(), or detach() before you make another"
        )


def refuse_second_pull(member: Member, pulled: dict[int, str]) -> None:
    """Refuse if these parameters are pulled already at the same steps: two springs would pull twice as strongly."""
    for other in _rivals(member, pulled):
        at_the_same_steps = not member.optimizers().isdisjoint(other.optimizers())
        if at_the_same_steps or (member in members() and not _is_succeeded(other, other.pulled())):
            name = next(name for key, name in pulled.items() if key in other.pulled())
            raise ValueError(
                f"another Belay pulls parameter {name!r} already, and two springs would pull it twice; detach() the "
                "other one first, or give replace=True. Averages that only watch (Spring.ema) may be any number"
            )


def refuse_succeeded(member: Member, stepper: Stepping) -> None:
    """Refuse a step whose parameters another Belay pulls now."""
    if member.successors and _is_succeeded(member, stepper.pulled()):
        raise RuntimeError(
            "another Belay, which was made later for another optimizer, pulls these parameters now, and two springs "
            "would pull them twice; detach() one of the two"
        )


def _rivals(member: Member, pulled: dict[int, str]) -> list[Member]:
    if not pulled:
        return []
    return [other for other in members() if other is not member and pulled.keys() & other.pulled().keys()]


def _is_succeeded(member: Member, pulled: dict[int, str]) -> bool:
    """Whether another Belay, made later, pulls what this one pulls; one that was detached pulls no more."""
    return any(not pulled.keys().isdisjoint(other.pulled()) for other in member.successors)


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
    found: dict[int, Tensor] = {}
    # The first has the model's own buffers, and others have its own.
    for swap in sorted(_swaps(), key=lambda swap: -swap.number):
        found |= swap.own_tensors()
    return found


def own_weights(*, but: Member) -> dict[int, Tensor]:
    """Return models' own weights where averages of Belays other than this one are in their place now."""
    found: dict[int, Tensor] = {}
    for swap in _swaps(but=but):
        found |= swap.own_weights()
    return found


def _held_by_others(member: Member) -> Iterator[tuple[Swap, Entry]]:
    for swap in _swaps(but=member):
        for entry in swap.average.entries.values():
            yield swap, entry


def _swaps(*, but: Member | None = None) -> list[Swap]:
    """Return the swaps of all Belays, or of all others, that have an average in a model now."""
    found = [member.swap for member in members() if member is not but]  # once: another thread may leave its block
    return [swap for swap in found if swap is not None]
