"""Weights that change although no step is seen: then the average is what it was at the start."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchbelay.ops.devices import is_capturing
from torchbelay.physics.warnings import warn

from .hooks import in_a_step
from .shard import local
from .team import Team

Number = complex  # or a float


class Averaged(Protocol):
    """Averages of parameters."""

    began: bool
    team: Team | None

    def followed(self) -> list[tuple[str, Tensor]]:
        """Return the name and the tensor of every parameter that is averaged, or will be."""


class _Numbers(NamedTuple):
    """One number of several tensors, which are named by their ids."""

    ids: list[int]
    numbers: Tensor


_ROUNDING = 0.01  # of the largest number: a smaller change may be that of a cast, or of weights moved there and back


class Unseen:
    """Warns, once, if weights have changed and no step has been seen, or if they have when the first step comes.

    One number of each weight is remembered, its last. A training that is not seen changes some of them, however it
    writes. This is local to a rank and costs later steps nothing: it is asked until the first step alone; from then on
    `Takeover` is. Not seen are changes between `load_state_dict()` and the next use of the average: weights may be
    loaded then.
    """

    def __init__(self, averages: Averaged) -> None:
        self._warned = False
        self._expected = in_a_step()  # weights may change before the first step that is seen
        self.remember(averages)

    def remember(self, averages: Averaged) -> None:
        """Take the weights as they are now for those that belong to the averages. The numbers are kept on the host."""
        self._numbers: dict[int, Number] | None = {}
        for some in _last_numbers(_weights(averages)):
            self._numbers |= dict(zip(some.ids, some.numbers.tolist(), strict=True))

    def forget(self) -> None:
        """Wait for the next look: after a state was loaded, the model's own weights may follow."""
        self._numbers, self._expected = None, True

    def look(self, averages: Averaged, optimizer: Optimizer | None, is_seen: Callable[[], bool]) -> None:
        """Warn if the weights are not what they were, unless another thread is taking the first step, or just has."""
        if self._numbers is None:
            self.remember(averages)
        elif not self._warned and any(_differ(some, self._numbers) for some in _last_numbers(_weights(averages))):
            if is_seen():
                return
            self._warned = True
            warn(f"the weights have changed, but no step was seen: the average has not moved. {_cure(optimizer)}")

    def look_before_the_first(self, averages: Averaged) -> None:
        """Warn if the first step is to be taken from other weights than those at which the averages began."""
        if self._numbers is None or self._warned or self._expected or not averages.began:
            return
        if averages.team is not None:  # workers may begin at weights of their own
            return
        held = _weights(averages)
        if any(map(is_capturing, {p.device for p in held})):  # the host cannot ask a device then
            return
        if any(_differ(some, self._numbers, _ROUNDING) for some in _last_numbers(held)):
            self._warned = True
            warn(
                "the weights have changed since the averages began at them, and before the first step: the averages "
                "start from what the weights were. If you loaded or initialised weights, call reset() after that, or "
                "make Belay later"
            )


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


def _weights(averages: Averaged) -> list[Tensor]:
    """Return what is averaged, or will be: the optimizer may hold tensors that cannot be computed with."""
    return [weight for _, weight in averages.followed()]


def _last_numbers(tensors: Iterable[Tensor]) -> list[_Numbers]:
    """Return the last number of what this rank has of each tensor, for all tensors of a device and dtype together."""
    alike: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
    for tensor in tensors:
        part = local(tensor.detach())
        if part.layout == torch.strided and part.numel():
            alike.setdefault((part.device, part.dtype), {})[id(tensor)] = part[(-1,) * part.ndim]
    return [_Numbers(list(some), torch.stack([*some.values()]).cpu()) for some in alike.values()]


def _differ(now: _Numbers, old: dict[int, Number], rounding: float = 0.0) -> bool:
    """Whether one of the numbers that are known has changed, other than by a conversion of the whole model.

    A change of less than `rounding` of the largest of them is none.
    """
    known = [old.get(key, number) for key, number in zip(now.ids, now.numbers.tolist(), strict=True)]
    if not now.numbers.is_complex():  # complex weights may have been made real
        known = [number.real for number in known]
    then = torch.stack([torch.full((), number, dtype=now.numbers.dtype, device="cpu") for number in known])
    changed = (now.numbers != then) & ~(now.numbers.isnan() & then.isnan())
    if rounding:
        changed &= ~((now.numbers - then).abs() <= rounding * then.abs().max())
    return bool(changed.any())
