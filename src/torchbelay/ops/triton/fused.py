"""An optimizer's update and the coupling in one pass over memory.

The optimizer's step counts and the numbers that follow from them (bias corrections, step sizes) are found by a small
launch of their own, in float64.
"""

from collections.abc import Sequence
from math import inf, log
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from torchbelay.ops.step import Count, Hyper, Move

from . import launch, layout
from .launch import Form, Update
from .numbers import Numbers
from .passes import followers, identities, pulls, swings
from .table import Mirror, State, Table

RULES = {name: getattr(layout, name.upper()) for name in ("adam", "adamw", "sgd", "momentum", "nesterov")}
WINDOW = 32

_gradient, _dtype, _address = attrgetter("grad"), attrgetter("dtype"), Tensor.data_ptr


def row(hyper: Hyper) -> list[float]:
    """Return a group's numbers (lr, betas or momentum and dampening, eps, weight decay) as the kernel reads them."""
    lr, beta1, beta2, eps, decay = hyper
    log1, log2 = (log(beta) if beta > 0 else -inf for beta in (beta1, beta2))
    return [0.0 if isinstance(lr, Tensor) else lr, beta1, log1, beta2, log2, eps, decay]


def are_usual(parameters: Sequence[Tensor]) -> bool:
    """Whether every gradient that exists is laid out like its weights."""
    for p in parameters:
        g = p.grad
        if g is not None and not (
            g.layout == p.layout == torch.strided
            and g.dtype == p.dtype
            and (g.is_contiguous() if p.is_contiguous() else g.stride() == p.stride())
        ):
            return False
    return True


class FusedStep:
    """The pass for these parameters, their optimizer states and the moves of their averages."""

    def __init__(
        self, rule: str, parameters: list[Tensor], states: list[State], moves: Sequence[Move], *,
        stochastic: bool, captured: list[object],
    ) -> None:  # fmt: skip
        self.rule, self.parameters, self._states = rule, parameters, states
        self._captured = captured  # what graphs read at every replay: it must outlive this pass
        self._groups = [move.group for move in moves]
        tensors, each = followers(moves)
        of = {id(t): some for t, some in zip(tensors, each, strict=True)}
        self.table = Table(parameters, [of.get(id(p), []) for p in parameters], states, none=len(moves))
        self._device = self.table.device
        self._swings = swings(moves[0])
        self._stochastic = stochastic and any(t.dtype == torch.bfloat16 for t in parameters)
        self._moves: Sequence[Move] | None = None
        self._identity: list[Any] = []
        self._next = 0
        kinds = {p.dtype for p in parameters}
        plain = len(kinds) == 1 and all(p.is_contiguous() for p in parameters)
        self._plain = kinds.pop() if plain else None
        self._stateless = [i for i, state in enumerate(states) if rule != "sgd" and state.first is None]
        self._laid_out: list[int] = []  # addresses of gradients that are known to be laid out like their weights
        groups = 1 + max(state.group for state in states)
        self._gradients = Mirror(len(parameters), torch.int64, self._device)
        self._hyper = Mirror(groups * int(layout.HYPER), torch.float64, self._device)
        self._rates = Mirror(groups, torch.int64, self._device)
        self._shares = torch.empty(len(parameters) * int(layout.SHARE), device=self._device)

    def fits(self, rule: str, parameters: list[Tensor], moves: Sequence[Move]) -> bool:
        """Whether this pass does the step: the same rule, parameters and groups, where they were."""
        if rule != self.rule or parameters is not self.parameters or not self.table.is_current():
            return False
        if moves is self._moves:
            return True
        return [move.group for move in moves] == self._groups and swings(moves[0]) == self._swings

    def gradients(self) -> list[int] | None:
        """Return the addresses of the gradients, 0 for none; None if something is not as the pass expects it.

        Autograd lays gradients out like their weights, and optimizer states stay in place, unless a user puts others
        there. Looking at all of them would cost more than the rest of the step. So gradients are looked at when one of
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
        if found != self._laid_out and not self._are_laid_out():
            return None
        end = min(self._next + WINDOW, len(parameters))
        if not (State.are_current(self._states[self._next : end]) and are_usual(parameters[self._next : end])):
            return None
        self._laid_out, self._next = found, end % len(parameters)
        return found

    def _are_laid_out(self) -> bool:
        """Whether all gradients are laid out like their weights; a quick look if the weights are plain."""
        if self._plain is None:
            return are_usual(self.parameters)
        grads = [g for g in map(_gradient, self.parameters) if g is not None]
        return all(map(Tensor.is_contiguous, grads)) and set(map(_dtype, grads)) <= {self._plain}

    def run(
        self, moves: Sequence[Move], gradients: list[int], hyper: list[Hyper], *,
        keep: Tensor | None, scale: Tensor | None, count: Count, capturing: bool,
    ) -> None:  # fmt: skip
        """Step and couple."""
        if moves is not self._moves:
            self._take_numbers(moves)
        now = count.on(self._device)
        grads = self._gradients.get(gradients, capturing)
        own = self._hyper.get([x for group in hyper for x in row(group)], capturing)
        rates = self._rates.get([lr.data_ptr() if isinstance(lr, Tensor) else 0 for lr, *_ in hyper], capturing)
        if keep is not None:
            keep = keep.to(self._device, non_blocking=True)
        if scale is not None:
            scale = scale.to(self._device, non_blocking=True)
        if capturing:
            self._captured.append((self, self._numbers, hyper, keep, scale))
        update = Update(grads, self._shares, scale, 0 in gradients)
        launch.look_and_count(
            self._numbers, now, self.table, self._form.rule, hyper=own, rates=rates, update=update, keep=keep
        )
        launch.move(self.table, self._numbers, self._form, keep=keep, count=now, update=update)

    def _take_numbers(self, moves: Sequence[Move]) -> None:
        if self._identity != (identity := identities(moves)):
            self._numbers, self._identity = Numbers.of(moves, "whole", self._device), identity
            self._form = Form(RULES[self.rule], pulls(moves), self._swings, self._stochastic)
        self._moves = moves
