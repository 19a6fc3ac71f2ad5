"""The buffers of a live module: its own memory, into which every step writes those of the average or of the model."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from torchbelay.ops import arithmetic

from . import modules
from .aliases import Alias
from .replica import Twin, pairs
from .shard import local

Slot = tuple[dict[str, Any], str]  # a module's buffers, and the key of one of them


class Kind(NamedTuple):
    """Where and of which dtype a buffer is."""

    device: torch.device
    dtype: torch.dtype


class Known:
    """A buffer as it was the last time."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._kind, self._shape = ref(tensor), _kind(tensor), tensor.shape

    def is_replaced_by(self, tensor: Tensor) -> bool:
        """Whether another buffer has taken its place, other than by a move or a cast."""
        return tensor is not self._tensor() and (tensor.shape != self._shape or _kind(tensor) == self._kind)


class BufferBond:
    """What is known of one buffer of the module, from the last time."""

    def __init__(self) -> None:
        self._asked: Kind | None = None  # what it was made to be; if it is another now, the user has moved or cast it
        self._known: tuple[Known, Known] | None = None
        self._is_apart = False

    def wanted(self, now: Tensor | None, there: Kind) -> Kind:
        """Return what the module's buffer, which is `now`, must be if the model's is `there`."""
        if now is not None and self._asked is not None and _kind(now) != self._asked:
            return _kind(now)
        self._asked = there
        return there

    def is_apart(self, buffer: Tensor, now: Tensor | None) -> bool:
        """Whether the model's buffer, or the module's, was replaced since the module was made."""
        if self._known is not None and now is not None:
            self._is_apart |= self._known[0].is_replaced_by(buffer) or self._known[1].is_replaced_by(now)
        return self._is_apart

    def remember(self, buffer: Tensor, now: Tensor) -> None:
        """Take both as they are now."""
        self._known = Known(buffer), Known(now)


class BufferValues(NamedTuple):
    """What the buffers of a module are to hold; those that are in none of these hold what the model's hold."""

    averages: Mapping[int, Tensor]  # all by the ids of the model's buffers
    own: Mapping[int, Tensor]  # the model's, if others are in their place now
    aliases: Mapping[int, Alias]  # of those that lie in the memory of averages

    def of(self, buffer: Tensor) -> tuple[Tensor, bool]:
        """Return the value of one of the model's buffers, and whether it is an average."""
        if (alias := self.aliases.get(id(buffer))) is not None:
            return alias.value, True
        if (value := self.averages.get(id(buffer))) is not None:
            return value, True
        return self.own.get(id(buffer), buffer), False


def renew_buffers(
    model: nn.Module,
    twins: list[tuple[Twin, nn.Module]],
    values: BufferValues,
    home: torch.device | None,
    *,
    everything: bool = True,
) -> list[tuple[Tensor, Tensor]]:
    """Write values to the module's buffers, or, unless `everything`, to those alone that are aliases of weights.

    Returns what was written to, with the values. A buffer of the model that is a parameter too is that parameter of the
    module, which holds its value already.

    A buffer that is not persistent and was replaced, in the model or in the module, belongs to its module: that may
    remember beside it what it is good for.
    """
    parameters: dict[int, Tensor | None] = {id(p): None for p in modules.parameters(model)}
    parameters |= {id(p): q for _, _, p, q in pairs(twins)}
    renewed: dict[int, Tensor] = {}
    owners: dict[int, int] = {}
    writes: list[tuple[Slot, Tensor]] = []
    written: list[tuple[Slot, Tensor]] = []
    for twin, slots, key, buffer in _buffers(twins):
        if id(buffer) in parameters:
            slots[key] = slots[key] if (own := parameters[id(buffer)]) is None else own
            continue
        if not everything and id(buffer) not in values.aliases:
            continue
        value, is_averaged = values.of(buffer)
        bond: BufferBond = twin.buffers.setdefault(key, BufferBond())
        is_transient = key in twin.model._non_persistent_buffers_set and not is_averaged
        if is_transient and bond.is_apart(buffer, slots[key]):
            continue
        now, there = slots[key], Kind(local(buffer).device if home is None else home, buffer.dtype)
        kind = bond.wanted(now, there)
        alone = owners.setdefault(id(now), id(buffer)) == id(buffer)  # the model may have ceased to share it
        if now is None or now.shape != value.shape or _kind(now) != kind or not alone:
            slots[key] = renewed.setdefault(id(buffer), value.detach().to(*kind, copy=True))
        else:
            writes.append(((slots, key), value))
        written.append(((slots, key), value))
        if is_transient:
            bond.remember(buffer, slots[key])
    _write(writes)
    return [(slots[key], value) for (slots, key), value in written]


def _buffers(twins: list[tuple[Twin, nn.Module]]) -> Iterator[tuple[Twin, dict[str, Any], str, Tensor]]:
    """Yield the model's buffers, each with the slot of the module that it belongs to."""
    for twin, made in twins:
        for key, buffer in twin.model._buffers.items():
            if key not in made._buffers:
                continue
            if buffer is not None:
                yield twin, made._buffers, key, buffer
            elif key not in twin.model._non_persistent_buffers_set:
                made._buffers[key] = None


def _write(writes: list[tuple[Slot, Tensor]]) -> None:
    """Write values in place; if one cannot be written to (expanded, or made under inference_mode), replace it."""
    try:
        arithmetic.copy_([local(slots[key]) for (slots, key), _ in writes], [local(value) for _, value in writes])
    except RuntimeError:
        for (slots, key), value in writes:
            try:
                local(slots[key]).copy_(local(value))
            except RuntimeError:
                slots[key] = value.detach().to(*_kind(slots[key]), copy=True)


def _kind(tensor: Tensor) -> Kind:
    return Kind(local(tensor).device, tensor.dtype)
