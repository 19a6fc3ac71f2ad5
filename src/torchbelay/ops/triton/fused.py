"""An optimizer's update and the coupling in one pass over memory.

Its step counts and the numbers that follow from them (bias corrections, step sizes) are found by a small launch of
their own, in float64.
"""

from collections.abc import Sequence
from math import inf, log
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from torchbelay.ops.backend import Count, Move, is_capturing

from . import kernels, launch
from .backend import follow, pulls, says, swings
from .numbers import Numbers
from .table import Mirror, State, Table

RULES = {name: getattr(kernels, name.upper()) for name in ("adam", "adamw", "sgd", "momentum", "nesterov")}
WINDOW = 32

_gradient, _dtype, _address = attrgetter("grad"), attrgetter("dtype"), Tensor.data_ptr


Hyper = tuple[float | Tensor, float, float, float, float]  # a learning rate may be a tensor on the device


def row(hyper: Hyper) -> list[float]:
    """A group's numbers (lr, betas or momentum and dampening, eps, weight decay) as the kernel wants them."""
    lr, beta1, beta2, eps, decay = hyper
    return [0.0 if isinstance(lr, Tensor) else lr, beta1, _log(beta1), beta2, _log(beta2), eps, decay]


def _log(x: float) -> float:
    return log(x) if x > 0 else -inf


def is_usual(p: Tensor) -> bool:
    """Whether the gradient, if there is one, is laid out like its weights."""
    g = p.grad
    return g is None or (
        g.layout == p.layout == torch.strided
        and g.dtype == p.dtype
        and (g.is_contiguous() if p.is_contiguous() else g.stride() == p.stride())
    )


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
        self._next = 0
        kinds = {p.dtype for p in parameters}
        plain = len(kinds) == 1 and all(p.is_contiguous() for p in parameters)
        self._plain = kinds.pop() if plain else None
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

    def gradients(self) -> list[int] | None:
        """Addresses of the gradients, 0 for none; None if something is not as the pass expects it.

        Autograd lays gradients out like their weights, and optimizer states stay in place, unless somebody puts others
        there. Looking at all of them would cost more than the rest of the step: gradients are looked at when one of
        them is in a new place, and WINDOW parameters with their states at every step, in turn.
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
        if found != self._laid_out and not self._alike():
            return None
        end = min(self._next + WINDOW, len(parameters))
        for i in range(self._next, end):
            if not self.states[i].is_current() or not is_usual(parameters[i]):
                return None
        self._laid_out, self._next = found, end % len(parameters)
        return found

    def _alike(self) -> bool:
        """Whether all gradients are laid out like their weights; quickly, where these are plain."""
        if self._plain is None:
            return all(map(is_usual, self.parameters))
        grads = [g for g in map(_gradient, self.parameters) if g is not None]
        return all(map(Tensor.is_contiguous, grads)) and set(map(_dtype, grads)) <= {self._plain}

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
        own = self._hyper.get([x for group in hyper for x in row(group)])
        rates = self._rates.get([lr.data_ptr() if isinstance(lr, Tensor) else 0 for lr, *_ in hyper])
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
