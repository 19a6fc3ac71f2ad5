"""The backend for GPUs: one launch for a whole model after the optimizer's step, or before it, or both."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from torchbelay.ops.backend import PreparedStep, is_interpreted
from torchbelay.ops.foreach import Foreach
from torchbelay.ops.step import Count, Move, TensorGroup, Tensors
from torchbelay.ops.trade import ListTrade, Trade

from . import launch
from .fused import FusedStep
from .passes import Pass, PreparedPasses, followers, pulls, swings
from .table import Known, Table, fits, fits_planes


class Triton:
    """Everything in one pass if the tensors allow it; tensors that do not are moved by foreach."""

    name = "triton"
    fuses = True

    def __init__(self, *, strict: bool = False, stochastic: bool = False) -> None:
        self._strict, self._stochastic = strict, stochastic
        self._fits: dict[TensorGroup, bool] = {}
        self._known = Known([])  # the weights of the groups that kernels take
        self._others = Foreach()  # which moves the rest
        self._moves: Sequence[Move] = ()
        self._passes: list[Pass] = []
        self._captured: list[object] = []  # graphs read these at every replay

    def remember(self, groups: Iterable[TensorGroup]) -> None:
        """Decide what kernels can take, and remember where it is; of the rest, devices and dtypes."""
        self._moves, self._passes = (), []
        self._fits = {group: self._can_take(group) for group in groups}
        self._known = Known([*{id(w): w for group, yes in self._fits.items() if yes for w in group.w1}.values()])
        self._others.remember(group for group, yes in self._fits.items() if not yes)

    def is_current(self) -> bool:
        """Whether the weights are what they were when that was decided; passes look where they are."""
        return self._known.are_alike() and self._others.is_current()

    def follows_schedule(self, group: TensorGroup) -> bool:
        """True for what the kernels take."""
        return self._fits[group] if group in self._fits else self._can_take(group)

    def _can_take(self, group: TensorGroup) -> bool:
        takes = self._takes(group.w1) and all(map(fits, group.w1, group.w2))
        return takes and all(map(fits_planes, group.w1, group.low, group.places) if group.low else ())

    def used_for(self, group: TensorGroup) -> str:
        """The name of the code that moves this group."""
        return self.name if self.follows_schedule(group) else "foreach"

    def wait(self) -> None:
        """Return at once: torch's own stream keeps the order."""

    def release(self) -> None:
        """Give up copies of weights on a CPU; the allocator of the GPU keeps memory itself."""
        self._moves, self._passes = (), []

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
            tables = [each.find() for each in self._passes if each.table is not None]
            self._captured.append((self._passes, tables))
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
        if not self.is_current():  # the moves were made for tensors on another device, or of another layout
            return None
        alike = len(self._together(moves)) == 1 and self.follows_schedule(moves[0].group)
        alike = alike and all(p.device == parameters[0].device and fits(p) for p in parameters)
        for p, state in zip(parameters, states, strict=True):
            moments = [t for t in (state.first, state.second) if t is not None]
            alike = alike and fits(p, *moments) and all(t.dtype == p.dtype for t in moments)
        if not alike:
            return None
        return FusedStep(rule, parameters, states, moves, stochastic=self._stochastic, captured=self._captured)

    def trade(self, x: Tensors, y: Tensors) -> Trade:
        """Trade contents in one launch and without a scratch buffer, if the tensors allow it."""
        pairs = list(zip(x, y, strict=True))
        usual = [self._runs_on(s) and fits(s, t) and s.dtype == t.dtype for s, t in pairs]
        quick = [pair for pair, yes in zip(pairs, usual, strict=True) if yes]
        others = [pair for pair, yes in zip(pairs, usual, strict=True) if not yes]
        devices = {s.device for s, _ in quick}
        tables = [launch.exchange_table([pair for pair in quick if pair[0].device == device]) for device in devices]
        return KernelTrade(tables, ListTrade([s for s, _ in others], [t for _, t in others]))


class KernelTrade:
    """A trade in one launch per device, and of what kernels do not take by way of a scratch buffer."""

    def __init__(self, tables: list[Table], others: ListTrade) -> None:
        self._tables, self._others = tables, others
        self._traded = [False] * len(tables)

    def go(self) -> None:
        """Trade what is not traded yet."""
        self._others.go()  # first: it needs memory
        self._launch(there=True)

    def back(self) -> None:
        """Trade what is traded once more."""
        self._launch(there=False)
        self._others.back()

    def _launch(self, *, there: bool) -> None:
        for i, table in enumerate(self._tables):
            if self._traded[i] is not there:
                # In one line: whatever interrupts, the table is traded and noted, or neither.
                _, self._traded[i] = launch.exchange(table), there
