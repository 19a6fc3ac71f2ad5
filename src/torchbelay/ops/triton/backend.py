"""The backend for GPUs: one launch for a whole model after the optimizer's step, or before it, or both."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torchbelay.ops import arithmetic
from torchbelay.ops.backend import PreparedStep, is_interpreted
from torchbelay.ops.step import Count, Move, TensorGroup, Tensors

from . import launch
from .fused import FusedStep
from .passes import Pass, PreparedPasses, followers, pulls, swings
from .table import Table, addresses, fits


class Triton:
    """Everything in one pass if the tensors allow it; tensors that do not are moved by foreach."""

    name = "triton"
    fuses = True
    remembers_addresses = True

    def __init__(self, *, strict: bool = False, stochastic: bool = False) -> None:
        self._strict, self._stochastic = strict, stochastic
        self._fits: WeakKeyDictionary[TensorGroup, bool] = WeakKeyDictionary()
        self._weights: dict[int, Tensor] = {}  # of the groups that kernels take, by id
        self._addresses: list[int] = []  # where these weights were
        self._moves: Sequence[Move] = ()
        self._passes: list[Pass] = []
        self._captured: list[object] = []  # graphs read these at every replay

    def is_current(self) -> bool:
        """Whether the weights are where they were when it was decided that kernels can take them."""
        return addresses(self._weights.values()) == self._addresses

    def forget(self) -> None:
        """Decide anew what kernels can take."""
        self._fits.clear()
        self._weights, self._addresses = {}, []
        self._moves, self._passes = (), []

    def follows_schedule(self, group: TensorGroup) -> bool:
        """True for what the kernels take."""
        if group not in self._fits:
            self._fits[group] = self._takes(group.w1) and all(map(fits, group.w1, group.w2))
            if self._fits[group]:
                new = [w for w in group.w1 if id(w) not in self._weights]
                self._weights |= {id(w): w for w in new}
                self._addresses += addresses(new)
        return self._fits[group]

    def used_for(self, group: TensorGroup) -> str:
        """The name of the code that moves this group."""
        return self.name if self.follows_schedule(group) else "foreach"

    def wait(self) -> None:
        """Return at once: torch's own stream keeps the order."""

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

    def prepare(self, moves: Sequence[Move], count: Count, *, capturing: bool = False) -> PreparedStep:
        """Copy w1 for couplings that cannot do without, in one launch."""
        if moves is not self._moves or not self._passes:
            self._passes, self._moves = self._passes_for(moves), moves
        if capturing:
            self._captured.append(self._passes)
        begun = [step for each in self._passes if (step := each.begin(count)) is not None]
        return begun[0] if len(begun) == 1 else PreparedPasses(begun)

    def _passes_for(self, moves: Sequence[Move]) -> list[Pass]:
        together = self._together(moves)
        if [known.groups for known in self._passes] == [[move.group for move in some] for some in together]:
            return [known.renewed(some) for known, some in zip(self._passes, together, strict=True)]
        return [self._pass(some) for some in together]

    def _together(self, moves: Sequence[Move]) -> list[list[Move]]:
        """Split the moves into runs that one launch can do."""
        alike = groupby(moves, key=lambda m: (self.follows_schedule(m.group), m.group.w1[0].device, swings(m)))
        return [list(some) for _, some in alike]

    def _pass(self, moves: list[Move]) -> Pass:
        fit = self.follows_schedule(moves[0].group)
        table = Table(*followers(moves), none=len(moves)) if fit else None
        if table is None and self._stochastic and pulls(moves):
            for w in moves[0].group.w1:
                if w.dtype == torch.bfloat16:
                    raise ValueError(
                        f"rounding='stochastic' needs weights that kernels can take, and one of shape {tuple(w.shape)} "
                        f"on {w.device} with strides {w.stride()} is none; use rounding='nearest'"
                    )
        return Pass(moves, table, stochastic=self._stochastic)

    def fuse(self, rule: str, parameters: list[Tensor], states: list[Any], moves: Sequence[Move]) -> FusedStep | None:
        """Return the moves in one pass with an optimizer's update; None if these tensors do not allow it."""
        if not self.is_current():  # the moves were made for tensors that were elsewhere, or of another layout
            return None
        alike = len(self._together(moves)) == 1 and self.follows_schedule(moves[0].group)
        alike = alike and all(p.device == parameters[0].device and fits(p) for p in parameters)
        for p, state in zip(parameters, states, strict=True):
            moments = [t for t in (state.first, state.second) if t is not None]
            alike = alike and fits(p, *moments) and all(t.dtype == p.dtype for t in moments)
        if not alike:
            return None
        return FusedStep(rule, parameters, states, moves, stochastic=self._stochastic, captured=self._captured)

    def exchange_(self, x: Tensors, y: Tensors) -> None:
        """Trade contents in one launch and without a scratch buffer, if the tensors allow it."""
        pairs = list(zip(x, y, strict=True))
        usual = [self._runs_on(s) and fits(s, t) and s.dtype == t.dtype for s, t in pairs]
        quick = [pair for pair, yes in zip(pairs, usual, strict=True) if yes]
        others = [pair for pair, yes in zip(pairs, usual, strict=True) if not yes]
        devices = {s.device for s, _ in quick}
        tables = [launch.exchange_table([pair for pair in quick if pair[0].device == device]) for device in devices]
        arithmetic.exchange_([s for s, _ in others], [t for _, t in others])  # from here on nothing can fail
        for table in tables:
            launch.exchange(table)
