"""Open blocks of `averaged()`: a step inside one is refused, also that of an optimizer that no Belay follows.

Such an optimizer was made anew, or its Belay was detached. While a block is open, torch calls one hook of this file
before the step of any optimizer, in any thread. If no block is open, torch does not have the hook.
"""

import sys
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Block:
    """A block of `averaged()`, as a holder of the average: the model has it there until the block is left."""


class Holding(Protocol):
    """What has an average in the place of a model's weights."""

    holders: list[object]

    def refuse_step_of(self, parameters: Iterable[Tensor]) -> None:
        """Refuse a step if one of the parameters holds the average."""


_holding: list[Holding] = []  # whose blocks are open
_handles: list[Any] = []  # the hook of torch, while a block is open


def follow_blocks(holding: Holding) -> None:
    """Refuse steps from now on if a block is open, and else no longer. One thread at a time may call."""
    others = [each for each in _holding if each is not holding]
    _holding[:] = [*others, holding] if any(isinstance(each, Block) for each in holding.holders) else others
    if _holding and not _handles:
        # A compiled step must not take the hook into its graph. Every optimizer of torch loads the compiler, which is
        # slow; if steps are taken by hand, there may be none.
        is_loaded = "torch._dynamo" in sys.modules
        hook = torch.compiler.disable(_refuse) if is_loaded else _refuse  # type: ignore[no-untyped-call]
        _handles.append(register_optimizer_step_pre_hook(hook))
    while _handles and not _holding:
        _handles[-1].remove()
        _handles.pop()


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse the step of an optimizer that would move an average.

    A frozen parameter without a gradient does not move: a probe may be trained on an averaged backbone.
    """
    held = (p for group in optimizer.param_groups for p in group["params"])
    needs_gradients = _needs_gradients(optimizer, (*args[1:], *kwargs.values()))  # the first is the optimizer
    moving = [p for p in held if p.grad is not None or (p.requires_grad and not needs_gradients)]
    for each in _holding.copy():  # one whose block could not be left is left now
        each.refuse_step_of(moving)


def _needs_gradients(optimizer: Optimizer, given: Iterable[object]) -> bool:
    """Whether the step moves only parameters that have a gradient now.

    This holds for torch's optimizers and ours, unless a closure or another hook gives gradients to more parameters.
    """
    is_known = type(optimizer).__module__.startswith(("torch.optim.", "torchbelay."))
    return is_known and not optimizer._optimizer_step_pre_hooks and all(each is None for each in given)
