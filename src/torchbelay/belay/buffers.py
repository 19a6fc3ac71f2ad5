"""Averaged buffers: each follows the model's buffer of its name, at the rate of its own method, and never pulls it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from torchbelay.ops import arithmetic
from torchbelay.physics.coupling import Coupling
from torchbelay.physics.method import Method, Remembers

from . import modules
from .average import Average, average_dtype, key_of
from .cohort import Cohort, varies
from .options import Options
from .shard import is_sharded, local
from .validate import check_method

_AVERAGED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}


def is_averaged(buffer: Tensor) -> bool:
    """Whether a buffer can be averaged; integers, sparse tensors and floats of 8 bits are copied."""
    return buffer.dtype in _AVERAGED and buffer.layout == torch.strided


def kept_dtype(buffer: Tensor, asked: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a buffer's average: as for a weight; of one that is copied, the buffer's own."""
    return average_dtype(buffer.dtype, asked) if is_averaged(buffer) else buffer.dtype


def shown(model: nn.Module, values: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the model's buffers of which an average shows values of its own, which are given by name, and the values.

    Not those of another shape, which mean something else, and not those in whose memory a parameter lies. Values of
    these are kept, though: the memory may be shared for a while only, as until the model is moved.
    """
    named = modules.named_buffers(model) if values else {}
    found = [(b, values[name]) for name, b in named.items() if name in values and values[name].shape == b.shape]
    left_out = modules.in_weights(model, [b for b, _ in found])
    return [(b, value) for b, value in found if id(b) not in left_out]


def checkpointed(model: nn.Module, options: Options) -> dict[str, Tensor]:
    """Return the model's buffers of which a checkpoint has values, for every average."""
    if options.buffers == "ignore":
        return {}
    return modules.named_buffers(model) if options.buffers == "average" else modules.persistent_buffers(model)


def checkpointed_dtype(own: Tensor | None, buffer: Tensor, options: Options) -> torch.dtype:
    """Return the dtype in which a checkpoint has a buffer: that of the average's own, if there is one."""
    if own is not None:
        return own.dtype
    return kept_dtype(buffer, options.dtype) if options.buffers == "average" else buffer.dtype


def begun(buffer: Tensor, asked: torch.dtype | None) -> Tensor:
    """Return the average of a buffer that begins at its present value."""
    with torch.inference_mode(False), torch.no_grad():
        return buffer.detach().to(kept_dtype(buffer, asked), copy=True)


def fitted(own: Tensor, buffer: Tensor, asked: torch.dtype | None) -> Tensor | None:
    """Return the average of a buffer on the buffer's device, itself if nothing has changed; None if it cannot go on."""
    if own.shape != buffer.shape or buffer.layout != torch.strided:
        return None
    here, there = own.device, buffer.device
    if type(own) is not Tensor or type(buffer) is not Tensor:
        here, there = local(own).device, local(buffer).device
        if is_sharded(own) is not is_sharded(buffer) or local(own).shape != local(buffer).shape:
            return None
    dtype = _wide(own.dtype, buffer.dtype, asked)
    if dtype is None or (own.dtype == dtype and here == there):
        return None if dtype is None else own
    with torch.inference_mode(False), torch.no_grad():
        return own.to(there, dtype)


def overwritten(own: Mapping[str, Tensor], buffers: Mapping[str, Tensor], keep: Tensor | None) -> dict[str, Tensor]:
    """Return those of an average's buffers that fit the model's, overwritten by those unless `keep` is 0."""
    found = {}
    for name, buffer in buffers.items():
        before = own.get(name)
        if before is not None and (after := fitted(before, buffer, buffer.dtype)) is not None:
            arithmetic.overwrite_(local(after), local(buffer), keep)
            found[name] = after
    return found


@cache
def _wide(own: torch.dtype, buffer: torch.dtype, asked: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype in which an average goes on if its buffer has that one now; None if it cannot go on."""
    if own not in _AVERAGED or buffer not in _AVERAGED:
        return own if own == buffer else None
    if own.is_complex is not buffer.is_complex:
        return None
    wide = average_dtype(buffer, asked)
    return torch.promote_types(own, wide) if asked is None else wide  # a model that is converted costs no digits


def fit(
    average: Average, now: Mapping[str, Tensor], asked: torch.dtype | None, born: Callable[[], int], lr: float
) -> None:
    """Let the averaged buffers have the model's names, shapes and devices.

    A buffer that is new, or has another shape, begins at its present value. One that is gone is forgotten.
    """
    own = average.buffers
    kept = {name: fitted(own[name], b, asked) if name in own else None for name, b in now.items()}
    late = {name: now[name] for name, tensor in kept.items() if tensor is None}
    for name, buffer in late.items():
        modules.refuse_lazy(name, buffer)
    if late or len(kept) != len(own) or not average.followers.keys() <= kept.keys():
        new = followers(average, late, born() if late else 0, lr)
        average.followers = {name: c for name, c in average.followers.items() if kept.get(name) is not None} | new
    average.buffers = {name: begun(now[name], asked) if b is None else b for name, b in kept.items()}


def followers(average: Average, buffers: Mapping[str, Tensor], born: int, lr: float) -> dict[str, Cohort]:
    """Return what moves each buffer, by name; a buffer that is copied has no entry."""
    found: dict[str, Cohort] = {}
    alike: dict[object, Cohort] = {}
    for name, buffer in buffers.items():
        method = average.rule(name, buffer) if is_averaged(buffer) else None
        if method is None:
            continue
        key = key_of(method)
        if key not in alike:
            # It never pulls a buffer, whatever it does to weights.
            check_method(method, lr, pulls=True, home=None, average=average.name, every=average.every)
            alike[key] = follower(method.fresh() if isinstance(method, Remembers) else method, born, average.every)
        found[name] = alike[key]
    return found


def follower(method: Method, born: int, every: int) -> Cohort:
    """Return what moves buffers by a method; if it needs a learning rate, by that of the optimizer's first group."""
    return Cohort(method, None if varies(method) in ("never", "step") else 0, born, every)


def share(coupling: Coupling) -> float:
    """Return the share of the new value in an averaged buffer: what the average takes of w1*, or else of w1."""
    return min(1.0, max(0.0, coupling.q or coupling.b))


@dataclass
class BufferStep:
    """What one step does to the buffers of an average.

    The model's buffers are looked up when the step has been taken: a closure's forward may have replaced them.
    """

    average: Average
    slots: Mapping[str, modules.BufferSlot]
    shares: Mapping[str, float]  # by name; buffers that are copied are not among them
    asked: torch.dtype | None

    def take(self, keep: Tensor | None) -> None:
        """Move the buffers; raises for nothing that a forward can have done to them."""
        moving: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor]]] = {}
        copied: list[tuple[Tensor, Tensor]] = []
        for name, slot in self.slots.items():
            buffer, own = modules.held(slot.holder, slot.key), self.average.buffers.get(name)
            if buffer is None or own is None:
                continue
            own = fitted(own, buffer, self.asked)
            if own is None:
                del self.average.buffers[name]  # it begins again when `fit` looks next
                continue
            self.average.buffers[name] = own
            if name in self.shares:
                pair = moving.setdefault((self.shares[name], own.device, own.dtype, buffer.dtype), ([], []))
                pair[0].append(local(own))
                pair[1].append(local(buffer))
            elif name not in self.average.followers:
                copied.append((local(own), local(buffer)))
        if keep is None:
            arithmetic.copy_([own for own, _ in copied], [buffer for _, buffer in copied])
        for own, buffer in copied if keep is not None else ():
            arithmetic.overwrite_(own, buffer, keep)
        for (weight, *_), (own_ones, buffers) in moving.items():
            arithmetic.lerp_(own_ones, buffers, weight, keep)
