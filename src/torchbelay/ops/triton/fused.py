"""An optimizer's update and the coupling in one pass over memory.

The optimizer's step counts and the numbers that follow from them (bias corrections, step sizes) are found by a small
launch of their own, in float64.
"""

from collections.abc import Callable, Sequence
from math import inf, log
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from torchbelay.ops.facts import Fact
from torchbelay.ops.step import Count, Hyper, Move

from . import launch, layout
from .launch import Form, Update
from .numbers import Numbers
from .passes import followers, identities, pulls, swings
from .table import Mirror, State, Table

RULES = {name: getattr(layout, name.upper()) for name in ("adam", "adamw", "sgd", "momentum", "nesterov")}

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
        self.rule, self.parameters = rule, parameters
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
        kinds = {p.dtype for p in parameters}
        plain = len(kinds) == 1 and all(p.is_contiguous() for p in parameters)
        self._plain = kinds.pop() if plain else None
        self._are_usual = Fact(self._look_at)
        self._stateless = [i for i, state in enumerate(states) if rule != "sgd" and state.first is None]
        groups = 1 + max(state.group for state in states)
        self._gradients = Mirror(len(parameters), torch.int64, self._device)
        self._hyper = Mirror(groups * int(layout.HYPER), torch.float64, self._device)
        self._rates = Mirror(groups, torch.int64, self._device)
        self._shares = torch.empty(len(parameters) * int(layout.SHARE), dtype=torch.float32, device=self._device)

    def fits(self, rule: str, parameters: list[Tensor], moves: Sequence[Move]) -> bool:
        """Whether this pass does the step: the same rule, parameters and groups, where they were."""
        if rule != self.rule or parameters is not self.parameters or not self.table.is_current():
            return False
        if moves is self._moves:
            return True
        return [move.group for move in moves] == self._groups and swings(moves[0]) == self._swings

    def gradients(self) -> list[int] | None:
        """Return the addresses of the gradients, 0 for none; None if one of them is not laid out like its weights."""
        gradients = list(map(_gradient, self.parameters))
        try:
            try:
                found = list(map(_address, gradients))
            except TypeError:  # some have none
                found = [0 if g is None else g.data_ptr() for g in gradients]
                gradients = [g for g in gradients if g is not None]
        except RuntimeError:  # sparse
            return None
        if any(found[i] for i in self._stateless):
            return None
        if self._plain is None and len(gradients) < len(found):  # it matters which weights have none
            return found if are_usual(self.parameters) else None
        return found if self._are_usual(gradients) else None

    def _look_at(self, gradients: Sequence[Tensor]) -> bool:
        """Whether these, the gradients that exist, are laid out like their weights."""
        if self._plain is None:
            return are_usual(self.parameters)
        return all(map(Tensor.is_contiguous, gradients)) and set(map(_dtype, gradients)) <= {self._plain}

    def prepare(
        self, moves: Sequence[Move], gradients: list[int], hyper: list[Hyper], *,
        keep: Tensor | None, scale: Tensor | None, count: Count, capturing: bool,
    ) -> Callable[[], None]:  # fmt: skip
        """Bring the numbers of a step to the device, and return what steps and couples."""
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

        def run() -> None:
            launch.look_and_count(
                self._numbers, now, self.table, self._form.rule, hyper=own, rates=rates, update=update, keep=keep
            )
            launch.move(self.table, self._numbers, self._form, keep=keep, count=now, update=update)

        return run

    def _take_numbers(self, moves: Sequence[Move]) -> None:
        if self._identity != (identity := identities(moves)):
            self._numbers, self._identity = Numbers.of(moves, "whole", self._device), identity
            self._form = Form(RULES[self.rule], pulls(moves), self._swings, self._stochastic)
        self._moves = moves
