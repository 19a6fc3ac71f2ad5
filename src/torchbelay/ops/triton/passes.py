"""Moves that one launch carries out around an optimizer that steps by itself, with their numbers and addresses."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchbelay.ops.foreach import Foreach
from torchbelay.ops.lists import PreparedLists
from torchbelay.ops.step import Count, Move

from . import launch, layout
from .launch import Form
from .numbers import Numbers
from .table import Follower, StandIns, Table


class Pass:
    """Moves of one device that one launch carries out; without a table, moves that foreach carries out."""

    def __init__(
        self, moves: Sequence[Move], table: Table | None, *, stochastic: bool, foreach: Foreach | None = None
    ) -> None:
        self.groups, self.table = [move.group for move in moves], table
        self._moves, self._stochastic = moves, stochastic
        self._identity = identities(moves)
        self._foreach = foreach or Foreach()
        if table is None:
            if foreach is None:
                self._foreach.remember(self.groups)  # whose copies it keeps
            return
        copied = any(move.needs_copy for move in moves)
        rule = layout.COPIED if copied else layout.STEPPED
        rounds = stochastic and pulls(moves) and any(t.dtype == torch.bfloat16 for t in table.w1)
        self.form = Form(rule, pulls(moves), swings(moves[0]), rounds)
        self.numbers = Numbers.of(moves, "whole" if copied else "stepped", table.device)

    def renewed(self, moves: Sequence[Move]) -> "Pass":
        """Return the pass of the same tensors with the numbers of these moves."""
        if self._identity == identities(moves):
            self._moves = moves
            return self
        return Pass(moves, self.table, stochastic=self._stochastic, foreach=self._foreach)

    def begin(self, count: Count) -> "PreparedLaunch | PreparedLists | None":
        """Prepare a step; None if nothing moves in it. W1 is copied, in one launch, if a coupling needs the copy."""
        if self.table is None:
            return self._foreach.prepare(self._moves, count)
        if all(move.motion is not None and move.motion.rests for move in self._moves):
            return None
        copy = None
        if self.form.rule is layout.COPIED:
            table, _ = self.find()
            copy = torch.empty(table.copy_bytes, dtype=torch.uint8, device=table.device)
            launch.copy(table, copy)
        return PreparedLaunch(self, copy, count.on(self.table.device))

    def find(self) -> tuple[Table, StandIns]:
        """Return the table of the weights where they are now, and stand-ins for those that are laid out otherwise."""
        assert self.table is not None
        if self.table.is_there():
            return self.table, []
        table, stand_ins = self.table.elsewhere()
        if not stand_ins:
            self.table = table
        return table, stand_ins


class PreparedLaunch:
    """A step of one pass."""

    def __init__(self, of: Pass, copy: Tensor | None, count: Tensor) -> None:
        self._pass, self._copy, self._count = of, copy, count

    def finish(self, keep: Tensor | None) -> None:
        """Move everything; look for the weights, for somebody may have put other memory in their place.

        An optimizer may have done so within its step, and a user before it.
        """
        table, stand_ins = self._pass.find()
        numbers, form = self._pass.numbers, self._pass.form
        if numbers.varies:
            launch.look(numbers, self._count)
        launch.move(table, numbers, form, keep=keep, count=self._count, copy=self._copy)
        for w1, stand_in in stand_ins if form.pulls else ():
            w1.copy_(stand_in)


class PreparedPasses:
    """A step of several passes, or of none."""

    def __init__(self, steps: "list[PreparedLaunch | PreparedLists]") -> None:
        self._steps = steps

    def finish(self, keep: Tensor | None) -> None:
        """Move everything, pass by pass."""
        for step in self._steps:
            step.finish(keep)


def identities(moves: Sequence[Move]) -> list[Any]:
    """What must be the same for the numbers of moves to be used again; schedules are compared by identity."""
    return [move.schedule or move.motion for move in moves]


def swings(move: Move) -> tuple[bool, bool]:
    """Whether w1, and whether w2, has velocities."""
    motion = move.motions[-1]
    return motion.swing1 is not None, motion.swing2 is not None


def pulls(moves: Iterable[Move]) -> bool:
    """Whether any of the moves touches the weights."""
    return any(move.pulls for move in moves)


def followers(moves: Iterable[Move]) -> tuple[list[Tensor], list[list[Follower]]]:
    """Return every tensor once, with all averages that follow it, in the order of the moves."""
    rows: dict[int, tuple[Tensor, list[Follower]]] = {}
    for cohort, move in enumerate(moves):
        m = move.group
        for i, (w1, w2) in enumerate(zip(m.w1, m.w2, strict=True)):
            v1, v2 = m.v1[i] if m.v1 else None, m.v2[i] if m.v2 else None
            low, place = (m.low[i], m.places[i]) if m.low else (None, None)
            rows.setdefault(id(w1), (w1, []))[1].append(Follower(w2, v1, v2, cohort, low, place))
    return [w1 for w1, _ in rows.values()], [each for _, each in rows.values()]
