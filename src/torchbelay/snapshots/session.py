"""Sessions: which stretches of training lead to the snapshots of a folder.

A Recorder writes in a session, and begins another one if a state is loaded or averages begin again. Those that lead to
the present step are a chain, from the oldest to the newest.
"""

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, NamedTuple

import torch


class Session(NamedTuple):
    """What one Recorder wrote, from its start, a resume or a `reset()` on: its name, and the steps taken before it."""

    name: str  # begins with a number that is larger than those of all sessions before
    start: int
    begin: int = 0  # the steps that were taken before the averages began, or last began again

    @property
    def generation(self) -> int:
        """The number in the name."""
        return int(self.name.partition("-")[0])


def read_sessions(found: Any) -> tuple[Session, ...]:
    """Return sessions that were written as lists."""
    try:
        sessions = tuple(Session(str(name), *map(int, steps)) for name, *steps in found)
        if any(session.generation < 0 for session in sessions):  # a name without a number is refused, too
            raise ValueError("a name begins with a number")
        return sessions
    except (TypeError, ValueError) as problem:
        raise ValueError(f"sessions={found!r} are not lists of a name and steps") from problem


def belongs(session: Session, step: int, sessions: Iterable[Session]) -> bool:
    """Whether a step of a session belongs to a run that consists of these sessions.

    >>> run = [Session("0-a", 0), Session("2-c", 1500)]
    >>> [belongs(run[0], step, run) for step in (1000, 1500, 2000)], belongs(Session("1-b", 1000), 1200, run)
    ([True, True, False], False)
    """
    chain = list(sessions)
    for each, following in zip_longest(chain, chain[1:]):
        if each == session:
            return each.start <= step and (following is None or step <= following.start)
    return False


def agreed(sessions: tuple[Session, ...], group: Any) -> tuple[Session, ...]:
    """Return the sessions of the group's first rank, for each rank has drawn a name; without a group, these."""
    if group is None:
        return sessions
    found: list[Any] = [sessions]
    torch.distributed.broadcast_object_list(found, group_src=0, group=group)
    first: tuple[Session, ...] = found[0]
    return first
