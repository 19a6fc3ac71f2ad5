"""Another optimizer that takes over the weights in the middle of a run: the average does not move with its steps."""

from collections.abc import Iterator
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchbelay.physics.warnings import warn

from .hooks import is_stepping
from .parameters import Parameters

_FEW = 10  # steps of others that are nothing unusual


class Averaged(Protocol):
    """Averages of parameters, which an optimizer may get and lose."""

    parameters: Parameters


class Takeover:
    """Counts the steps of other optimizers on the averaged weights, and warns, once, if they go on and on.

    torch calls one hook of this file after the step of any optimizer, fused ones included. Steps of others between two
    steps of the own optimizer are usual if they have occurred before. Steps inside a step of the own optimizer belong
    to it: it may have others that work for it. Writes to the weights without an optimizer are not seen.
    """

    def __init__(self, optimizer: Optimizer | None, averages: Averaged) -> None:
        self._optimizer, self._averages = optimizer, averages
        self._count, self._usual, self._other, self._warned = 0, 0, "", False
        self._held: list[Tensor] = []
        self._ids: frozenset[int] = frozenset()

    def watch(self) -> None:
        """Count from now on, unless steps are taken by hand: users may do so now and then."""
        if self._optimizer is None:
            return
        _watching[:] = [*(each for each in _watching if each() is not None), ref(self)]
        _known.clear()
        if not _handles:
            _handles.append(register_optimizer_step_post_hook(_count))

    def end(self) -> None:
        """Count no more; without anybody who counts, torch's optimizers are as they were."""
        _watching[:] = [each for each in _watching if each() not in (None, self)]
        _known.clear()
        if not _watching:
            while _handles:
                _handles.pop().remove()

    def begin_step(self) -> None:
        """Learn how many steps others take between two steps of the own optimizer, and count from 0."""
        self._usual, self._count = max(self._usual, self._count), 0

    def forget(self) -> None:
        """Count from 0: the average belongs to the weights as they are now."""
        self._count = 0

    def shares(self, optimizer: Optimizer) -> bool:
        """Whether another optimizer has one of the parameters."""
        return optimizer is not self._optimizer and not self._own().isdisjoint(map(id, _parameters(optimizer)))

    def count(self, optimizer: Optimizer) -> None:
        """Count a step of another optimizer, if it has a gradient for one of the parameters: else it moves none."""
        own = self._own()
        moves = any(p.grad is not None and id(p) in own for p in _parameters(optimizer))
        if moves and self._optimizer is not None and not is_stepping(self._optimizer):
            self._count += 1
            self._other = type(optimizer).__name__

    def _own(self) -> frozenset[int]:
        """Return the ids of the parameters of the own optimizer."""
        held = self._averages.parameters.all
        if held is not self._held:
            self._held, self._ids = held, frozenset(map(id, held))
        return self._ids

    def look(self) -> None:
        """Warn if others have stepped more often than ever between two steps of the own optimizer."""
        if self._warned or self._count <= _FEW + 2 * self._usual:
            return
        self._warned = True
        own = type(self._optimizer).__name__
        warn(
            f"another optimizer ({self._other}) has stepped the weights {self._count} times since the last step of the "
            f"{own} that this Belay follows, and the average has not moved since then. If that optimizer trains them "
            "now, make a Belay for it, and give it this one's state by load_state_dict(). If you have put the weights "
            "back, there is nothing to do"
        )


_watching: list[ref[Takeover]] = []
_handles: list[Any] = []  # the hook of torch, while anybody counts
_known: dict[int, tuple[ref[Optimizer], list[int], list[ref[Takeover]]]] = {}  # who counts the steps of an optimizer


def _count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():  # another optimizer is being compiled: stay out of its graph
        return
    lists = [id(group["params"]) for group in optimizer.param_groups]
    known = _known.get(id(optimizer))
    if known is None or known[0]() is not optimizer or known[1] != lists:
        for key in [key for key, (gone, *_) in _known.copy().items() if gone() is None]:
            _known.pop(key, None)  # threads may do so at once
        sharing = [each for each in _watching if (one := each()) is not None and one.shares(optimizer)]
        known = _known[id(optimizer)] = ref(optimizer), lists, sharing
    for each in known[2]:
        if (one := each()) is not None:
            one.count(optimizer)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])
