"""The coupling around somebody else's optimizer: one launch for a whole model after its step, or before it, or both."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torchbelay.ops import arithmetic
from torchbelay.ops.arithmetic import Tensors
from torchbelay.ops.backend import IMPLEMENTATIONS, Count, Lists, Move, Ready, is_capturing, is_interpreted

from . import kernels, launch
from .numbers import Numbers, is_idle, splits
from .table import Follower, Table, fits


class Triton:
    """Everything in one pass where the tensors allow it; those that do not go the foreach way."""

    name = "triton"

    def __init__(self, *, strict: bool = False, stochastic: bool = False) -> None:
        self._strict, self._stochastic = strict, stochastic
        self._fits: WeakKeyDictionary[Lists, bool] = WeakKeyDictionary()
        self._passes: list[Pass] = []
        self._captured: list[object] = []  # graphs read it at every replay

    def counts(self, lists: Lists) -> bool:
        """True for what the kernels take."""
        if lists not in self._fits:
            self._fits[lists] = self._takes(lists.w1) and all(map(fits, lists.w1, lists.w2))
        return self._fits[lists]

    def used_for(self, lists: Lists) -> str:
        """Which of the two ways."""
        return self.name if self.counts(lists) else "foreach"

    def _runs_on(self, t: Tensor) -> bool:
        return t.is_cuda or (self._strict and is_interpreted())

    def _takes(self, w1: Sequence[Tensor]) -> bool:
        if all(map(self._runs_on, w1)):
            return True
        if self._strict:
            where = next(t.device for t in w1 if not t.is_cuda)
            raise ValueError(
                f"impl='triton' runs on a GPU, and weights are on {where}; move the model there first, or use "
                "impl='auto'"
            )
        return False

    def prepare(self, moves: Sequence[Move], count: Count) -> Ready:
        """Copy w1 where a coupling cannot do without, all of it in one launch."""
        if not all(known.is_current() for known in self._passes):  # weights were moved in memory
            self._fits.clear()
            self._passes = []
        together = self._together(moves)
        if [known.lists for known in self._passes] == [[move.lists for move in some] for some in together]:
            self._passes = [known.renewed(some) for known, some in zip(self._passes, together, strict=True)]
        else:
            self._passes = [self._pass(some) for some in together]
        if any(each.table is not None and is_capturing(each.table.device) for each in self._passes):
            self._captured.append(self._passes)
        return _Ready([each.begin(some, count) for each, some in zip(self._passes, together, strict=True)])

    def _together(self, moves: Sequence[Move]) -> list[list[Move]]:
        """Moves that follow each other and that one launch can do."""
        alike = groupby(moves, key=lambda m: (self.counts(m.lists), m.lists.w1[0].device, swings(m)))
        return [list(some) for _, some in alike]

    def _pass(self, moves: list[Move]) -> "Pass":
        table = Table(*follow(moves), none=len(moves)) if self.counts(moves[0].lists) else None
        if table is None and self._stochastic and pulls(moves):
            for w in moves[0].lists.w1:
                if w.dtype == torch.bfloat16:
                    raise ValueError(
                        f"rounding='stochastic' needs weights that kernels can take, and one of shape {tuple(w.shape)} "
                        f"on {w.device} with strides {w.stride()} is none; use rounding='nearest'"
                    )
        return Pass(moves, table, stochastic=self._stochastic)

    def exchange_(self, x: Tensors, y: Tensors) -> None:
        """In one launch and without a scratch buffer, where the tensors allow it."""
        usual = [self._runs_on(s) and fits(s, t) and s.dtype == t.dtype for s, t in zip(x, y, strict=True)]
        pairs = [pair for pair, yes in zip(zip(x, y, strict=True), usual, strict=True) if yes]
        others = [pair for pair, yes in zip(zip(x, y, strict=True), usual, strict=True) if not yes]
        devices = {s.device for s, _ in pairs}
        tables = [launch.exchange_table([pair for pair in pairs if pair[0].device == device]) for device in devices]
        arithmetic.exchange_([s for s, _ in others], [t for _, t in others])  # all that may fail has been done by now
        for table in tables:
            launch.exchange(table)

    def fused(self, rule: str, parameters: list[Tensor], states: list[Any], moves: Sequence[Move]) -> "Any | None":
        """The same in one pass with an optimizer, or None where that cannot be."""
        from .fused import Fused

        alike = len(self._together(moves)) == 1 and self.counts(moves[0].lists)
        alike = alike and all(p.device == parameters[0].device and fits(p) for p in parameters)
        for p, state in zip(parameters, states, strict=True):
            moments = [t for t in (state.first, state.second) if t is not None]
            alike = alike and fits(p, *moments) and all(t.dtype == p.dtype for t in moments)
        return Fused(rule, parameters, states, moves, stochastic=self._stochastic) if alike else None


def swings(move: Move) -> tuple[bool, bool]:
    """Whether either mass has velocities."""
    first = move.motions[-1]
    return first.swing1 is not None, first.swing2 is not None


def says(move: Move) -> tuple[Any, ...]:
    """What must be the same for the numbers of a move to be used again; scores are compared by identity."""
    return (id(move.score),) if move.score else (move.motion,)


class _Ready(NamedTuple):
    steps: list[Ready]

    def before(self, keep: Tensor | None) -> None:
        for step in self.steps:
            step.before(keep)

    def after(self, keep: Tensor | None) -> None:
        for step in self.steps:
            step.after(keep)


class Pass:
    """Moves that one launch carries out, and their numbers and addresses on the device."""

    def __init__(self, moves: list[Move], table: Table | None, *, stochastic: bool) -> None:
        self.lists, self.table = [move.lists for move in moves], table
        self._said = [says(move) for move in moves]
        self._scores = [move.score for move in moves]  # so that nobody else gets their ids
        self._stochastic = stochastic
        if table is None:
            return
        self.swings = swings(moves[0])
        self.pulls = pulls(moves)
        every = [splits(move.motions) for move in moves]
        self.rule = kernels.COPIED if None in every else kernels.STEPPED
        leads = any(split.before for found in every for split in found or ())
        self.numbers = Numbers.of(moves, "after" if self.rule is kernels.STEPPED else "whole", table.device)
        self.ahead = Numbers.of(moves, "before", table.device) if leads and self.rule is kernels.STEPPED else None
        self.stochastic = stochastic and any(t.dtype == torch.bfloat16 for t in table.w1)

    def renewed(self, moves: list[Move]) -> "Pass":
        """The same tensors with the numbers of now."""
        if self._said == [says(move) for move in moves]:
            return self
        return Pass(moves, self.table, stochastic=self._stochastic)

    def is_current(self) -> bool:
        """Whether the weights are where they were."""
        return self.table is None or self.table.is_current()

    def begin(self, moves: list[Move], count: Count) -> Ready:
        """Prepare for a step in which the moves say what they said."""
        if self.table is None:
            return IMPLEMENTATIONS["foreach"].prepare(moves, count)
        known = [move.motion for move in moves]
        if all(m is not None and is_idle(m.coupling) and not m.swings for m in known):
            return _Ready([])
        copy = None
        if self.rule is kernels.COPIED:
            copy = torch.empty(self.table.copy_bytes, dtype=torch.uint8, device=self.table.device)
            launch.copy(self.table, copy)
        return _Launch(self, self.table, copy, count.on(self.table.device))


class _Launch:
    def __init__(self, of: Pass, table: Table, copy: Tensor | None, count: Tensor) -> None:
        self.of, self.table, self.copy, self.count = of, table, copy, count

    def before(self, keep: Tensor | None) -> None:
        if self.of.ahead is not None:
            launch.look(self.of.ahead, self.count)
            launch.move(self.table, self.of.ahead, keep=keep, count=self.count)

    def after(self, keep: Tensor | None) -> None:
        launch.look(self.of.numbers, self.count)
        launch.move(
            self.table,
            self.of.numbers,
            keep=keep,
            count=self.count,
            copy=self.copy,
            rule=self.of.rule,
            pulls=self.of.pulls,
            swings=self.of.swings,
            stochastic=self.of.stochastic and self.of.pulls,
        )


def pulls(moves: Iterable[Move]) -> bool:
    """Whether any of them moves the weights."""
    return any(motion.coupling.pulls or motion.swing1 is not None for move in moves for motion in move.motions)


def follow(moves: Iterable[Move]) -> tuple[list[Tensor], list[list[Follower]]]:
    """Every tensor once, with all that follow it, in the order of the moves."""
    rows: dict[int, tuple[Tensor, list[Follower]]] = {}
    for cohort, move in enumerate(moves):
        m = move.lists
        for i, (w1, w2) in enumerate(zip(m.w1, m.w2, strict=True)):
            v1, v2 = m.v1[i] if m.v1 else None, m.v2[i] if m.v2 else None
            rows.setdefault(id(w1), (w1, []))[1].append(Follower(w2, v1, v2, cohort))
    return [w1 for w1, _ in rows.values()], [each for _, each in rows.values()]
