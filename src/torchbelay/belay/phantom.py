"""Steps that are none: torch.distributed.checkpoint takes one to make an optimizer's state before it loads it."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchbelay.ops.devices import is_capturing

from .shard import least, local


def is_phantom(optimizer: Optimizer, *, first: bool) -> bool:
    """Whether the coming step only makes the optimizer's state.

    Such a step has learning rate 0 in all groups and gradients that are all exactly 0, and the optimizer has no state
    yet. A warm-up that begins with learning rate 0 has gradients, and counts. Looking at gradients waits for the
    device, so it comes last; a learning rate on a device is read at the first step only.
    """
    if optimizer.state:
        return False
    groups = optimizer.param_groups
    if not groups or not all(_is_zero(group.get("lr"), waits=first) for group in groups):
        return False
    gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    if not gradients or any(g.layout != torch.strided for g in gradients):
        return False
    zero = torch.tensor(float(not any(bool(local(g).any()) for g in gradients)), dtype=torch.float32, device="cpu")
    return bool(least(zero, gradients))  # a shard may be 0 where others are not


def _is_zero(lr: object, *, waits: bool) -> bool:
    """Whether a learning rate is 0; one that is on a device is read only if that may wait."""
    if isinstance(lr, Tensor):
        return (lr.device.type == "cpu" or (waits and not is_capturing(lr.device))) and not lr.any()
    return lr == 0
