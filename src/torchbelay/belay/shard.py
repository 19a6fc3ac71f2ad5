"""Sharded models (FSDP2, HSDP, tensor parallel): the local part of a DTensor, and what the ranks must agree about.

An average is sharded like its parameter. A step works on the local parts alone and needs no communication. Only what
concerns the whole (a norm, a non-finite number anywhere, a full copy) is a collective.

Nothing of torch.distributed is imported here: a tensor cannot be sharded by a class that has not been imported.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .traffic import chunk

_FLATTENED = {"_fsdp_flattened", "_is_flat_param"}  # what FSDP1 marks an original parameter by, and a flat one


def loaded(where: str, name: str) -> Any:
    """Return a class if its module has been imported; else (), of which nothing is an instance."""
    return getattr(sys.modules.get(where), name, ())


def is_sharded(t: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return isinstance(t, loaded("torch.distributed.tensor", "DTensor"))


def local(t: Tensor) -> Tensor:
    """Return the local part of a sharded tensor, the same object each time; any other tensor is returned as it is."""
    return t._local_tensor if is_sharded(t) else t  # type: ignore[attr-defined]


def with_local(t: Tensor, part: Tensor) -> Tensor:
    """Return a tensor that is sharded like `t`, with this local part of the same dtype and shape."""
    if not is_sharded(t):
        return part
    names, about = t.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: getattr(t, name) for name in names} | {"_local_tensor": part}
    return type(t).__tensor_unflatten__(parts, about, t.shape, t.stride())  # type: ignore[attr-defined,no-any-return]


def offset(t: Tensor) -> tuple[int, ...]:
    """Return where the local part of a sharded tensor begins in the whole tensor; zeros on a rank that has no part."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, start = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)  # type: ignore[attr-defined]
    return start or (0,) * t.dim()


def matching(whole: Tensor, like: Tensor) -> Tensor:
    """Return the part of a tensor that belongs to the local part of `like`, which is spread like it or is its average.

    If `like` alone is spread over ranks, the part is a view of the tensor.
    """
    if is_sharded(whole) or not is_sharded(like):
        return local(whole)
    part = whole.detach()
    sizes, place = like.device_mesh.shape, like.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    for ranks, rank, how in zip(sizes, place, like.placements, strict=True):  # type: ignore[attr-defined]
        if how.is_shard():
            part = part.narrow(how.dim, *chunk(part.shape[how.dim], ranks, rank))
    return part


def same_size(w1: Tensor, w2: Tensor) -> bool:
    """Whether a parameter and its average have one shape, on this rank."""
    if is_sharded(w2) and not is_sharded(w1):
        return w1.shape == w2.shape
    return local(w1).shape == local(w2).shape


def reshard(model: nn.Module) -> None:
    """Let every FSDP module that shards this model hold its shards, not the full weights that it gathered last.

    The root module keeps gathered weights until the next backward. Until then it computes with the old weights whatever
    is written to the shards, and its parameters are not those of the optimizer. The root may be above the model.
    """
    kind = loaded("torch.distributed.fsdp", "FSDPModule")
    if not kind or not kind.__subclasses__():  # fully_shard makes a class for every class that it shards
        return
    for module in (*model.modules(), *_roots_above(model, kind)):
        if isinstance(module, kind):
            module.reshard()


def _roots_above(model: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    """Return the FSDP modules, of all in this process, that contain a part of the model but are not in it."""
    # A module does not know what it is part of, and torch has no other list of its FSDP modules.
    known = loaded("torch.distributed._composable_state", "_module_state_mapping")
    if known == () and not isinstance(model, kind) and any(map(is_sharded, model.parameters())):
        raise RuntimeError(
            f"the model, {type(model).__name__}, is sharded, and this version of torch does not tell by which module; "
            "give Belay the module on which fully_shard() was called last"
        )
    inside = set(model.modules())
    others = [module for module in list(known) if isinstance(module, kind) and module not in inside]
    return [module for module in others if not inside.isdisjoint(module.modules())]


def is_flattened(model: nn.Module) -> bool:
    """Whether FSDP1 has made flat pieces of the weights, which do not know what they are part of.

    FSDP1 does not do that if it shards nothing and keeps the original parameters. A module from inside FSDP1 counts as
    flattened: its parameters are marked, but only the wrapper around it knows how they are sharded.
    """
    kind = loaded("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
    wrappers = [module for module in model.modules() if isinstance(module, kind)]
    if any(each.sharding_strategy.name != "NO_SHARD" or not each._use_orig_params for each in wrappers):
        return True
    whole = {id(p) for each in wrappers for p in each.parameters()}
    return any(_FLATTENED & {*vars(p)} and id(p) not in whole for p in model.parameters())


# Checkpoints and exports ------------------------------------------------------------------------------------------


def is_first_rank() -> bool:
    """Whether this process is the one that gets what is gathered; true for a process that is alone."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def gathered(t: Tensor) -> Tensor | None:
    """Return the whole tensor in the first rank's host memory, None on other ranks; a collective if it is sharded."""
    whole = t.detach()
    if is_sharded(t):
        if 0 not in t.device_mesh.mesh:  # type: ignore[attr-defined]
            raise ValueError(
                f"a tensor of shape {tuple(t.shape)} is spread over ranks without rank 0, where full=True gathers; "
                "take average_state_dict() on each rank, or save state_dict() by torch.distributed.checkpoint"
            )
        there = local(whole).to(t.device_mesh.device_type)  # type: ignore[attr-defined]  # where the ranks talk
        whole = with_local(whole, there).full_tensor()  # type: ignore[attr-defined]
    return whole.to("cpu", copy=True) if is_first_rank() else None


def why_not_like(t: Tensor, like: Tensor) -> str | None:
    """Return why `t`, of the same shape, cannot be written to `like` without communication; None if it can."""
    if is_sharded(t) and not is_sharded(like):
        return "it is spread over ranks in the checkpoint and not here"
    if not is_sharded(like):
        return None
    if is_sharded(t):
        if (t.device_mesh, t.placements) != (like.device_mesh, like.placements):  # type: ignore[attr-defined]
            return "it is spread over ranks in another way in the checkpoint"
        # A mesh that was saved by torch.save knows the rank that saved it.
        saved, here = _part(t), _part(like)
        return None if saved == here else f"it is part {saved} in the checkpoint, of another rank, and part {here} here"
    if any(type(placement).__name__ not in ("Shard", "Replicate") for placement in like.placements):  # type: ignore[attr-defined]
        return f"it is whole in the checkpoint, and {like.placements} here"  # type: ignore[attr-defined]
    return None


def _part(t: Tensor) -> tuple[int, ...]:
    """Return which part of the whole a sharded tensor holds: its place in the mesh, along the sharded dimensions."""
    place = t.device_mesh.get_coordinate() or ()  # type: ignore[attr-defined]
    return tuple(i for i, how in zip(place, t.placements, strict=False) if not how.is_replicate())  # type: ignore[attr-defined]


def part_for(t: Tensor, like: Tensor) -> Tensor:
    """Return the part of `t` that belongs in the local part of `like`; `why_not_like` has been asked before."""
    if is_sharded(t) or not is_sharded(like):
        return local(t)
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return local(distribute_tensor(t.detach().to(mesh.device_type), mesh, placements, src_data_rank=None))


# What the ranks must agree about ------------------------------------------------------------------------------------


def summed(values: Tensor, over: Tensor) -> Tensor:
    """Return sums of numbers over all ranks that hold a part of `over`, each part counted once; a collective."""
    for dim, placement in enumerate(over.placements) if is_sharded(over) else ():  # type: ignore[attr-defined]
        if not placement.is_replicate():
            values = _reduced(values, over.device_mesh, dim, "SUM")  # type: ignore[attr-defined]
    return values


def spread_like(t: Tensor) -> object:
    """Return a key that is equal for tensors whose parts are summed over the same ranks."""
    return (t.device_mesh, t.placements) if is_sharded(t) else None  # type: ignore[attr-defined]


def least(value: Tensor, tensors: Iterable[Tensor]) -> Tensor:
    """Return the least of a number over all ranks that share any of the tensors; a collective if any is sharded."""
    meshes = dict.fromkeys(t.device_mesh for t in tensors if is_sharded(t))  # type: ignore[attr-defined]
    for mesh in meshes:
        for dim in range(mesh.ndim):
            value = _reduced(value, mesh, dim, "MIN")
    return value


def _reduced(value: Tensor, mesh: Any, dim: int, op: str) -> Tensor:
    there = value.to(mesh.device_type, copy=True)  # averages may be in host memory, the ranks talk elsewhere
    torch.distributed.all_reduce(there, getattr(torch.distributed.ReduceOp, op), group=mesh.get_group(dim))
    return there.to(value.device, non_blocking=value.device.type != "cpu")
