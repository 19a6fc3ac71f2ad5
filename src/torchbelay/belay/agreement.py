"""What the ranks of a group must agree about before they work together: one small exchange, and all refuse or none."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import torch

from .shard import loaded

Facts = Mapping[str, object]  # by what is compared: a value, or a mapping of names to values


def group_of(what: str, given: Any) -> Any:
    """Return the process group that an argument, called `what`, stands for: a ProcessGroup, or a mesh of one dimension.

    Refuses what is none, a group that this rank is not part of, and a program that has not begun to talk to others.
    """
    distributed = torch.distributed
    mesh = loaded("torch.distributed.device_mesh", "DeviceMesh")
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError(
            f"{what}={_short(given)} needs processes that know each other; call torch.distributed.init_process_group() "
            "first, and start the program by torchrun"
        )
    if isinstance(given, mesh):
        if given.ndim != 1:
            raise ValueError(
                f"{what} is a DeviceMesh of {given.ndim} dimensions, and must have one; give one of them, as "
                f"mesh[{_dimension(given)!r}]"
            )
        if given.get_coordinate() is None:
            raise ValueError(_not_a_member(what))
        return given.get_group()
    if given is distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(_not_a_member(what))
    if not isinstance(given, distributed.ProcessGroup):
        raise TypeError(
            f"{what}={_short(given)} is neither a process group nor a DeviceMesh; give torch.distributed.group.WORLD, "
            "or what torch.distributed.new_group() or init_device_mesh() returned"
        )
    if distributed.get_rank(given) < 0:
        raise ValueError(_not_a_member(what))
    return given


@contextmanager
def agreement(group: Any | None) -> Iterator[dict[str, object]]:
    """Let the ranks of a group do in the block what may be refused: if one rank refuses, all do.

    So the block must change nothing. It puts facts into the dict, in which the ranks must not differ. Without a group
    it is a block as any other.
    """
    facts: dict[str, object] = {}
    if group is None:
        yield facts
        return
    try:
        yield facts
    except Exception as problem:
        agree(group, facts, problem)
        raise
    agree(group, facts)


def agree(group: Any, facts: Facts, problem: Exception | None = None) -> None:
    """Raise on every rank of the group if the ranks differ in their facts, or if one of them has a problem.

    A collective: every rank must call, with the problem that it has found by itself, if it has. That rank raises its
    own error. The others raise a ValueError that names the rank, or what differs. Facts are compared by their texts.
    Ranks that agree exchange one digest; only ranks that do not send their facts.
    """
    trouble = None if problem is None else f"{type(problem).__name__}: {problem}"
    told = {key: _texts(value) for key, value in facts.items()}
    digests = _everybody(group, (sha256(repr(told).encode()).digest(), trouble is None))
    if all(fine for _, fine in digests) and len({digest for digest, _ in digests}) == 1:
        return
    found = _everybody(group, (told, trouble))
    if problem is not None:
        raise problem
    ranks = torch.distributed.get_process_group_ranks(group)
    for rank, (_, theirs) in zip(ranks, found, strict=True):
        if theirs is not None:
            raise ValueError(f"rank {rank} could not go on, so no rank of the group does; there: {theirs}")
    raise ValueError(_difference(ranks, [told for told, _ in found]))


def _everybody(group: Any, mine: Any) -> list[Any]:
    found = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, mine, group=group)
    return found


def _texts(value: object) -> dict[str, str]:
    """Return a fact as texts by name; one that has no names has the empty name."""
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, Mapping) else {"": str(value)}


def _difference(ranks: list[int], told: list[dict[str, dict[str, str]]]) -> str:
    """Say what the first difference is between the first rank and another one."""
    first = told[0]
    for rank, other in zip(ranks[1:], told[1:], strict=True):
        for key in (*first, *(key for key in other if key not in first)):
            here, there = first.get(key, {}), other.get(key, {})
            for name in (*here, *(name for name in there if name not in here)):
                if here.get(name) != there.get(name):
                    what = f"{name!r} is " if name else ""
                    return (
                        f"the ranks disagree about {key}: {what}{_named(here, name)} on rank {ranks[0]} and "
                        f"{_named(there, name)} on rank {rank}; build Belay alike on every rank of the group"
                    )
            if list(here) != list(there):
                return (
                    f"the ranks disagree about the order of {key}: {_short(list(here))} on rank {ranks[0]}, "
                    f"{_short(list(there))} on rank {rank}; build Belay alike on every rank of the group"
                )
    return "the ranks disagree; build Belay alike on every rank of the group"


def _named(texts: Mapping[str, str], name: str) -> str:
    return _cut(texts[name]) if name in texts else "missing"


def _short(value: object) -> str:
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "…"


def _dimension(mesh: Any) -> str:
    return str((mesh.mesh_dim_names or ("dp",))[0])


def _not_a_member(what: str) -> str:
    rank = torch.distributed.get_rank()
    return f"{what} is a group that this process, rank {rank}, is not part of; build Belay on the ranks of the group"
