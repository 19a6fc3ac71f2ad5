"""Weights that change although no step is seen: then the average is what it was at the start."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchbelay.physics.warnings import warn

from .parameters import Parameters
from .shard import local

Number = complex  # or a float


class _Numbers(NamedTuple):
    """One number of several tensors, which are named by their ids."""

    ids: list[int]
    numbers: Tensor


class Unseen:
    """Warns, once, if weights have changed and no step has been seen.

    One number of each weight is remembered, its last. A training that is not seen changes some of them, however it
    writes. This is local to a rank and costs a step nothing: it is asked before the first step alone. Not seen are
    changes after a step that was seen, and those between `load_state_dict()` and the next use of the average: weights
    may be loaded then.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._warned = False
        self.remember(parameters)

    def remember(self, parameters: Parameters) -> None:
        """Take the weights as they are now for those that belong to the averages. The numbers are kept on the host."""
        self._numbers: dict[int, Number] | None = {}
        for some in _last_numbers(parameters.all):
            self._numbers |= dict(zip(some.ids, some.numbers.tolist(), strict=True))

    def forget(self) -> None:
        """Wait for the next look: after a state was loaded, the model's own weights may follow."""
        self._numbers = None

    def look(self, parameters: Parameters, optimizer: Optimizer | None) -> None:
        """Warn if the weights are not what they were."""
        if self._numbers is None:
            self.remember(parameters)
        elif not self._warned and any(_differ(some, self._numbers) for some in _last_numbers(parameters.all)):
            self._warned = True
            warn(f"the weights have changed, but no step was seen: the average has not moved. {_cure(optimizer)}")


def _cure(optimizer: Optimizer | None) -> str:
    loaded = "If you loaded weights into the model, call reset() after that"
    if optimizer is None:
        return (
            "Belay was given optimizer=None: call before_step() and after_step() around each update (update() after it "
            f"will do for an EMA), or give it the optimizer. {loaded}"
        )
    name = type(optimizer).__name__
    return (
        f"The weights were updated by something else than {name}.step(), or its step was replaced and calls no hooks: "
        "give Belay the optimizer whose own step() is called (as the one inside SAM), or None, and call before_step() "
        f"and after_step() around each update. {loaded}"
    )


def _last_numbers(tensors: Iterable[Tensor]) -> list[_Numbers]:
    """Return the last number of what this rank has of each tensor, for all tensors of a device and dtype together."""
    alike: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
    for tensor in tensors:
        part = local(tensor.detach())
        if part.layout == torch.strided and part.numel():
            alike.setdefault((part.device, part.dtype), {})[id(tensor)] = part[(-1,) * part.ndim]
    return [_Numbers(list(some), torch.stack([*some.values()]).cpu()) for some in alike.values()]


def _differ(now: _Numbers, old: dict[int, Number]) -> bool:
    """Whether one of the numbers that are known has changed, other than by a conversion of the whole model."""
    known = [old.get(key, number) for key, number in zip(now.ids, now.numbers.tolist(), strict=True)]
    then = torch.stack([torch.full((), number, dtype=now.numbers.dtype, device="cpu") for number in known])
    return bool(((now.numbers != then) & ~(now.numbers.isnan() & then.isnan())).any())
