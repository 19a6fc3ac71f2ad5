"""An optimizer's update and the coupling in one pass over memory: w1, its gradient, the optimizer's state, the averages.

The optimizer's own step counts and the numbers that follow from them (bias corrections, step sizes) are found by a small
launch of their own, in float64.
"""

from collections.abc import Sequence
from math import inf, log
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..around import Count, Move, is_capturing
from . import kernels
from .around import follow, moved, on, pulls, says, swings
from .numbers import Numbers
from .table import Mirror, State, Table, addresses, fits

RULES = {
    name: getattr(kernels, name.upper()) for name in ("adam", "adamw", "sgd", "momentum", "nesterov")
}
TILE = 256

_gradient, _address, _is_contiguous = attrgetter("grad"), Tensor.data_ptr, Tensor.is_contiguous


class Hyper(NamedTuple):
    """A group's numbers; for SGD the betas are momentum and dampening. A learning rate may be a tensor on the device."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    decay: float

    def row(self) -> list[float]:
        """As the kernel wants them."""
        lr = 0.0 if isinstance(self.lr, Tensor) else self.lr
        return [lr, self.beta1, _log(self.beta1), self.beta2, _log(self.beta2), self.eps, self.decay]


def _log(x: float) -> float:
    return log(x) if x > 0 else -inf


class Fused:
    """The pass for these parameters, their states and the moves of their averages."""

    def __init__(
        self, rule: str, parameters: list[Tensor], states: list[State], moves: Sequence[Move], *, stochastic: bool
    ) -> None:
        self._rule = RULES[rule]
        self.rule, self.parameters, self.states = rule, parameters, states
        self._lists = [move.lists for move in moves]
        tensors, followers = follow(moves)
        of = {id(t): each for t, each in zip(tensors, followers, strict=True)}
        self._table = Table(parameters, [of.get(id(p), []) for p in parameters], states, none=len(moves))
        self._device = self._table.device
        self._swings = swings(moves[0])
        self._stochastic = stochastic and any(t.dtype == torch.bfloat16 for t in parameters)
        self._said: list[Any] = []
        self._state_addresses = self._states_are_at()
        self._contiguous = all(p.is_contiguous() for p in parameters)
        self._stateless = [i for i, state in enumerate(states) if rule != "sgd" and state.first is None]
        self._laid_out: list[int] = []  # addresses of gradients that are known to be laid out like their weights
        groups = 1 + max(state.group for state in states)
        self._gradients = Mirror(len(parameters), torch.int64, self._device)
        self._hyper = Mirror(groups * int(kernels.HYPER), torch.float64, self._device)
        self._rates = Mirror(groups, torch.int64, self._device)
        self._shares = torch.empty(len(parameters) * int(kernels.SHARE), device=self._device)
        self._captured: list[object] = []

    def _states_are_at(self) -> list[int]:
        # One tensor of each: what moves an optimizer's state about in memory moves all of a parameter's.
        return addresses([state.first for state in self.states if state.first is not None])

    def is_current(self, moves: Sequence[Move]) -> bool:
        """Whether weights, states and averages are the tensors that they were, where they were."""
        return (
            [move.lists for move in moves] == self._lists
            and swings(moves[0]) == self._swings
            and self._table.is_current()
            and self._states_are_at() == self._state_addresses
        )

    def gradients(self) -> list[int] | None:
        """Addresses of the gradients, 0 for none; None if one is not laid out like its weights."""
        grads = list(map(_gradient, self.parameters))
        try:
            found = list(map(_address, grads))
            there, weights = grads, self.parameters
        except TypeError:  # some have none
            found = [0 if g is None else g.data_ptr() for g in grads]
            there = [g for g in grads if g is not None]
            weights = [p for p, g in zip(self.parameters, grads, strict=True) if g is not None]
        except RuntimeError:  # sparse
            return None
        if any(found[i] for i in self._stateless):
            return None
        if found != self._laid_out or not self._contiguous or not all(map(_is_contiguous, there)):
            if not all(g.dtype == p.dtype and fits(p, g) for p, g in zip(weights, there, strict=True)):
                return None
            self._laid_out = found
        return found

    def run(
        self, moves: Sequence[Move], gradients: list[int], hyper: list[Hyper], *,
        keep: Tensor | None, scale: Tensor | None, count: Count,
    ) -> None:  # fmt: skip
        """Step and couple."""
        if self._said != (said := [says(move) for move in moves]):
            self._numbers, self._said = Numbers.of(moves, "whole", self._device), said
            self._scores = [move.score for move in moves]  # so that nobody else gets their ids
            self._pulls = pulls(moves)
        table, numbers, now = self._table, self._numbers, count.on(self._device)
        grads = self._gradients.get(gradients)
        own = self._hyper.get([x for group in hyper for x in group.row()])
        rates = self._rates.get([group.lr.data_ptr() if isinstance(group.lr, Tensor) else 0 for group in hyper])
        if keep is not None:
            keep = keep.to(self._device, non_blocking=True)
        if scale is not None:
            scale = scale.to(self._device, non_blocking=True)
        if is_capturing(self._device):
            self._captured.append((numbers, hyper, keep, scale))
        tiles = -(-len(self.parameters) // TILE)
        with on(self._device):
            kernels.look[(1 + tiles,)](
                now, numbers.plans, numbers.laws, numbers.rows, numbers.current,
                table.rows, len(self.parameters), own, rates, self._shares, own if keep is None else keep, grads,
                COHORTS=numbers.cohorts if numbers.varies else 0, WIDTH=triton.next_power_of_2(numbers.cohorts),
                COLUMNS=table.columns, RULE=self._rule.value, KEEP=keep is not None, TILE=TILE, num_warps=4,
            )  # fmt: skip
        moved(
            table, numbers, keep=keep, count=now, rule=self._rule, pulls=self._pulls, swings=self._swings,
            stochastic=self._stochastic, grads=grads, shares=self._shares, scale=scale, holes=0 in gradients,
        )  # fmt: skip
