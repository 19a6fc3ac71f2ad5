"""The buffers of a model while an average is in it: what the model's own were, and what became of them inside.

A buffer is written in place, so that it stays where it is, and only if it differs. If it cannot be written (it was made
under inference_mode, or it is expanded), another tensor takes its slot. A buffer in whose memory a parameter lies is
left to whoever writes to that parameter.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchbelay.ops import arithmetic

from . import modules
from .shard import local

Slot = tuple[Any, str]  # a module's buffers, and the name of one of them
Change = tuple[object, object]  # a device or dtype, and what it became


@dataclass(eq=False)
class Buffer:
    """A buffer of the model, a copy of it, and the slots that hold it: several if modules share it."""

    name: str
    tensor: Tensor | None
    own: Tensor | None  # the copy
    persistent: bool
    slots: list[Slot] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.value = self.own  # what the buffer holds in the block if nobody changes it
        self.put = self.tensor  # what is in the slots when the block begins
        self.version = self.put_version = _version(self.tensor)
        self.rides = False  # a parameter lies in its memory, and brings it along

    def now(self) -> Tensor | None:
        """Return the tensor in the slots; None if there is none, or no slot any more."""
        return next((holder[key] for holder, key in self._present()), None)

    def hold(self, tensor: Tensor | None) -> None:
        """Let the slots hold this tensor; a slot that a module has given up stays so."""
        for holder, key in self._present():
            if holder[key] is not tensor:
                holder[key] = tensor

    def _present(self) -> list[Slot]:
        return [(holder, key) for holder, key in self.slots if key in holder]

    def write(self, to: Tensor, value: Tensor) -> None:
        """Write a value to a tensor in place; if that is impossible, a copy takes its slots."""
        if not _is_written(to, value) and self.now() is to:
            self.hold(value.to(local(to).device, to.dtype, copy=True))


class Buffers:
    """All buffers of a model, with copies of them as they are when this is made."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._each = model, list[Buffer]()
        known: dict[int, Buffer] = {}
        for name, holder, key, persistent in modules.buffer_slots(model):
            tensor = holder[key]
            if tensor is None or id(tensor) not in known:
                modules.refuse_lazy(name, tensor)
                own = None if tensor is None else modules.copied(tensor)
                known[id(tensor)] = Buffer(name, tensor, own, persistent)
                self._each.append(known[id(tensor)])
            known[id(tensor)].slots.append((holder, key))
        riding = self._riding(each.tensor for each in self._each)
        for each in self._each:
            each.rides = id(each.tensor) in riding

    def _riding(self, tensors: Iterable[Tensor | None]) -> set[int]:
        return modules.in_weights(self._model, (t for t in tensors if t is not None))

    def own(self) -> dict[str, Tensor]:
        """Return the model's own values, by name."""
        return {each.name: each.own for each in self._each if each.own is not None}

    def own_by_id(self) -> dict[int, Tensor]:
        """Return the model's own values, by the ids of the tensors that are in their place now; not what rides."""
        pairs = [(each.now(), each.own) for each in self._each]
        riding = self._riding(now for now, _ in pairs)
        return {id(now): own for now, own in pairs if now is not None and own is not None and id(now) not in riding}

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Let the model hold these values, by name, instead of its own."""
        moving = [each for each in self._each if each.name in values and not each.rides]
        wanted = [(each, each.tensor, values[each.name]) for each in moving]
        given = [(each, tensor, value) for each, tensor, value in wanted if tensor is not None]
        differs = _differ([(tensor, value, False) for _, tensor, value in given])
        for (each, tensor, value), new in zip(given, differs, strict=True):
            if new:
                each.value = value
                each.write(tensor, value)
        for each in self._each:
            each.put = each.now()
            each.put_version = _version(each.put)

    def changed(self) -> dict[str, Tensor]:
        """Return copies of what was written to or replaced since `put`, by name.

        Except buffers that are not persistent and were replaced: a module may remember, beside such a buffer, what it
        is good for, so the new one belongs to the module and not to the average.
        """
        found: list[tuple[str, Tensor, Tensor, bool, bool]] = []
        for each in self._each:
            now, value = None if each.rides else each.now(), each.value
            if now is not None and value is not None and (each.persistent or now is each.put):
                written = now is each.put and _version(now) != each.put_version
                value = value if each.put is None else value.to(each.put.dtype)  # as it was put into the model
                found.append((each.name, now, value, written, written or now is not each.put))
        differs = _differ([(now, value, touched) for _, now, value, _, touched in found])
        pairs = zip(found, differs, strict=True)
        return {name: modules.copied(now) for (name, now, _, written, _), new in pairs if written or new}

    def all(self) -> dict[str, Tensor]:
        """Return copies of all buffers as they are in the model now; the model's own for those that it gave up."""
        now = modules.named_buffers(self._model)
        return self.own() | {name: modules.copied(buffer) for name, buffer in now.items()}

    def restore(self, changes: set[Change]) -> None:
        """Give the model its own values, converted if its parameters were; `changes` are those of parameters.

        What a module keeps for itself and has replaced stays as it is. This may be repeated.
        """
        writes: list[tuple[Buffer, Tensor, Tensor, bool]] = []
        for each in self._each:
            now, tensor, own = each.now(), each.tensor, each.own
            if tensor is not None and own is not None:
                writes.append((each, tensor, own, _version(tensor) != each.version))
                if now is not None and _is_converted(tensor, now, changes):
                    writes.append((each, now, own, True))
                    continue
            if now is not tensor and (each.persistent or now is each.put):
                each.hold(tensor)
        riding = self._riding(tensor for _, tensor, _, _ in writes)  # now: the model may have been moved or cast
        writes = [each for each in writes if id(each[1]) not in riding]
        differs = _differ([(tensor, own, touched) for _, tensor, own, touched in writes])
        for (each, tensor, own, _), new in zip(writes, differs, strict=True):
            if new:
                each.write(tensor, own)


def fitting(values: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values of buffers that still have this shape; a buffer of another shape means something else."""
    return {
        name: value for name, value in values.items() if name in buffers and buffers[name].shape == value.shape
    }  # fmt: skip


def _version(t: Tensor | None) -> int | None:
    """Return how often a tensor was written to; None if torch does not count."""
    return None if t is None or t.is_inference() else t._version


def _is_written(to: Tensor, value: Tensor) -> bool:
    """Write a value in place, if that is possible."""
    if to.shape != value.shape:
        return False
    try:
        local(to).copy_(local(value))
    except RuntimeError:
        return False
    return True


def _is_converted(old: Tensor, new: Tensor, changes: set[Change]) -> bool:
    """Whether a tensor has taken the place of another because the model was moved or cast, as its parameters show."""
    found = {(old.device, new.device), (old.dtype, new.dtype)}
    found = {(was, now) for was, now in found if was != now}
    return bool(found) and found <= changes and old.shape == new.shape


def _differ(pairs: list[tuple[Tensor, Tensor, bool]]) -> list[bool]:
    """Whether each tensor differs from a value, in its own dtype and on its own device.

    If their bits cannot be compared (sparse, quantised and meta tensors), a tensor differs if it was touched.
    """
    found = [touched or tensor.shape != value.shape for tensor, value, touched in pairs]
    plain = [i for i, (t, value, _) in enumerate(pairs) if _has_bits(t) and _has_bits(value) and t.shape == value.shape]
    parts = [(_resolved(local(pairs[i][0])), _resolved(local(pairs[i][1]))) for i in plain]
    x, y = [t for t, _ in parts], [value.to(t.device, t.dtype) for t, value in parts]
    for i, differs in zip(plain, arithmetic.differ(x, y), strict=True):
        found[i] = differs
    return found


def _resolved(t: Tensor) -> Tensor:
    """Return a tensor whose bits are its values: those of a conjugate or negative view are not."""
    return t.resolve_conj().resolve_neg()


def _has_bits(t: Tensor) -> bool:
    return t.layout == torch.strided and not t.is_quantized and not t.is_meta
