"""What tensors hold that lie in the memory of others, if those others are replaced, as weights by their averages."""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from .overlap import Ground, end, has_memory, place, sharing_memory
from .shard import is_sharded, local


class Alias(NamedTuple):
    """What a tensor must hold because another one, in whose memory it lies, is replaced."""

    value: Tensor
    is_view: bool  # it lies in the memory of what replaces the other one; if not, it was made just now


@torch.no_grad()
def aliased(model: Iterable[Tensor], replaced: Mapping[int, Tensor]) -> dict[int, Alias]:
    """Return what tensors of a model must hold, by id, if others of its tensors are replaced (by id).

    Those are tensors that lie in the memory of what is replaced. They get its value where they share that memory, and
    elsewhere keep what they hold.
    """
    tensors = {id(t): t for t in model if has_memory(t)}
    rank = {key: i for i, key in enumerate(tensors)}
    replaced = {key: t for key, t in replaced.items() if key in tensors and t.shape == tensors[key].shape}
    found: dict[int, Alias] = {}
    for cluster in sharing_memory({key: local(t) for key, t in tensors.items()}):
        keys = sorted(cluster, key=rank.__getitem__)
        owners = [tensors[key] for key in keys if key in replaced]
        others = [tensors[key] for key in keys if key not in replaced]
        if owners and others:
            found |= _aliases(owners, others, replaced)
    return found


def _aliases(owners: Sequence[Tensor], others: Sequence[Tensor], replaced: Mapping[int, Tensor]) -> dict[int, Alias]:
    """Return what the others in a cluster must hold, by id, if its owners are replaced."""
    same = {(is_sharded(t), place(local(t))): replaced[id(t)] for t in owners}
    plain = [t for t in owners if not (is_sharded(t) or is_sharded(replaced[id(t)]))]
    ground = Ground(plain, [t for t in others if not is_sharded(t)])
    found: dict[int, Alias] = {}
    rest: list[Tensor] = []
    for t in others:
        value = same.get((is_sharded(t), place(local(t))))
        if value is None and not is_sharded(t):
            owner = ground.owner_around(t)
            value = None if owner is None else _part(replaced[id(owner)], owner, t)
            if value is None and ground.is_owned(t):
                rest.append(t)
        if value is not None:
            found[id(t)] = Alias(value, is_view=True)
    if rest:
        found |= {key: Alias(value, is_view=False) for key, value in _composed(plain, rest, replaced).items()}
    return found


def _part(value: Tensor, owner: Tensor, alias: Tensor) -> Tensor | None:
    """Return the view of a value that corresponds to an alias inside its dense owner; None if no view does."""
    is_plain = not any(t.is_conj() or t.is_neg() for t in (owner, alias))
    if not is_plain or owner.dtype != alias.dtype or value.stride() != owner.stride():
        return None
    start = value.storage_offset() + (alias.data_ptr() - owner.data_ptr()) // owner.itemsize
    return value.detach().as_strided(alias.shape, alias.stride(), start)


def _composed(owners: Sequence[Tensor], rest: Sequence[Tensor], replaced: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return what tensors of a cluster hold, by id, if the values of the owners are written into its memory.

    That is done in other memory. Values are rounded to the dtype of what they replace if the tensors differ in dtype,
    so that the bytes mean the same as in the model.
    """
    written = [*rest, *owners]
    values = [replaced.get(id(t), t).detach() for t in written]
    dtype = reduce(torch.promote_types, (v.dtype for v in values)) if len({t.dtype for t in written}) == 1 else None
    memory = _Memory(written, dtype)
    for t, value in zip(written, values, strict=True):
        once = tuple(slice(1 if stride == 0 else None) for stride in t.stride())  # expanded
        memory.view(t)[once].copy_(_turned(value, t)[once])
    return {id(t): _turned(memory.view(t), t) for t in rest}


class _Memory:
    """Memory like that which tensors lie in. With a `dtype` it has elements of that instead of theirs."""

    def __init__(self, tensors: Sequence[Tensor], dtype: torch.dtype | None) -> None:
        first = min(tensors, key=Tensor.data_ptr)
        storage = first.untyped_storage().data_ptr()
        self._start = storage + (first.data_ptr() - storage) // 16 * 16  # so that every dtype is aligned
        self._dtype = dtype
        size = max(self._range(t)[1] for t in tensors)
        self._bytes = torch.empty(size, dtype=torch.uint8, device=first.device)

    def _range(self, t: Tensor) -> tuple[int, int]:
        size = t.itemsize if self._dtype is None else self._dtype.itemsize
        return (t.data_ptr() - self._start) // t.itemsize * size, (end(t) - self._start) // t.itemsize * size

    def view(self, t: Tensor) -> Tensor:
        """Return the part that corresponds to a tensor, as the bits that it has there."""
        first, last = self._range(t)
        return self._bytes[first:last].view(self._dtype or t.dtype).as_strided(t.shape, t.stride())


def _turned(value: Tensor, t: Tensor) -> Tensor:
    """Return the bits that a tensor has in memory if it holds this value, and the value if it has these bits."""
    if t.is_conj():
        value = value.conj()
    return torch._neg_view(value) if t.is_neg() else value
