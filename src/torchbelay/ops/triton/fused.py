"""An optimizer's update and the coupling in one pass over memory: w1, its gradient, the optimizer's state, the averages.

The optimizer's own step counts and the numbers that follow from them (bias corrections, step sizes) are found by a small
launch of their own, in float64.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf, log
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..around import Count, Move, is_capturing
from . import kernels, launch
from .around import follow, pulls, says, swings
from .numbers import Numbers
from .table import Mirror, State, Table

RULES = {
    name: getattr(kernels, name.upper()) for name in ("adam", "adamw", "sgd", "momentum", "nesterov")
}
WINDOW = 32

_gradient, _address = attrgetter("grad"), Tensor.data_ptr


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


def _moments(state: State) -> tuple[int, ...]:
    return tuple(0 if t is None else t.data_ptr() for t in state[:3])


def _alike(grad: Tensor, p: Tensor) -> bool:
    return grad.is_contiguous() if p.is_contiguous() else grad.stride() == p.stride()


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
        self._moments = list(map(_moments, states))
        self._kept = [t.untyped_storage() for state in states for t in state[:3] if t is not None]
        self._next = 0
        self._stateless = [i for i, state in enumerate(states) if rule != "sgd" and state.first is None]
        self._laid_out: list[int] = []  # addresses of gradients that are known to be laid out like their weights
        groups = 1 + max(state.group for state in states)
        self._gradients = Mirror(len(parameters), torch.int64, self._device)
        self._hyper = Mirror(groups * int(kernels.HYPER), torch.float64, self._device)
        self._rates = Mirror(groups, torch.int64, self._device)
        self._shares = torch.empty(len(parameters) * int(kernels.SHARE), device=self._device)
        self._captured: list[object] = []

    def is_current(self, moves: Sequence[Move]) -> bool:
        """Whether weights and averages are the tensors that they were, where they were."""
        return (
            [move.lists for move in moves] == self._lists
            and swings(moves[0]) == self._swings
            and self._table.is_current()
        )

    def gradients(self, state: Callable[[int], State]) -> list[int] | None:
        """Addresses of the gradients, 0 for none; None if something is not as the pass expects it.

        Gradients are laid out like their weights, unless somebody put others there, and optimizer states stay in
        place, unless somebody moves them. Looking at all of them would cost more than the rest of the step, so it is
        done when a gradient is in a new place, and else for WINDOW parameters a step, in turn.
        """
        parameters = self.parameters
        try:
            found = list(map(_address, map(_gradient, parameters)))
        except TypeError:  # some have none
            found = [0 if p.grad is None else p.grad.data_ptr() for p in parameters]
        except RuntimeError:  # sparse
            return None
        if any(found[i] for i in self._stateless):
            return None
        if found != self._laid_out:
            window: Iterable[int] = range(len(parameters))
        else:
            window = range(self._next, min(self._next + WINDOW, len(parameters)))
        self._next = window[-1] + 1 if window[-1] + 1 < len(parameters) else 0
        for i in window:
            p, known, now = parameters[i], self.states[i], state(i)
            if any(map(is_not, known, now)) or self._moments[i] != _moments(now):
                return None
            grad = p.grad
            if grad is not None and not (grad.dtype == p.dtype and grad.layout == p.layout and _alike(grad, p)):
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
        launch.look_and_count(
            numbers, now, table, self._rule, hyper=own, rates=rates, shares=self._shares, keep=keep, grads=grads
        )
        launch.move(
            table, numbers, keep=keep, count=now, rule=self._rule, pulls=self._pulls, swings=self._swings,
            stochastic=self._stochastic, grads=grads, shares=self._shares, scale=scale, holes=0 in gradients,
        )  # fmt: skip
