"""Several workers that train weights of their own and share one average: what they agree about, and what is refused.

`ops/workers.py` moves the average at a sync. Here is the rest: all workers build a Belay alike, begin at the same
average, and go on from the same step. What one worker refuses, all refuse, so that none waits for another.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchbelay.ops import arithmetic
from torchbelay.physics.identity import describe_or_sample
from torchbelay.physics.method import Method
from torchbelay.physics.warnings import warn
from torchbelay.physics.workers import gathering, share_of_each

from .agreement import agreement, group_of
from .shard import is_sharded, loaded, local

if TYPE_CHECKING:
    from .average import Entry, Wanted


class Team:
    """The workers of a process group, as one of them sees them."""

    def __init__(self, group: Any) -> None:
        self.group = group_of("workers", group)
        self.count = torch.distributed.get_world_size(self.group)
        self.apart: str | None = None  # a parameter that began elsewhere than the first worker's

    def check(self, model: nn.Module, wanted: Iterable["Wanted"]) -> None:
        """Refuse methods that workers cannot share, and models whose ranks exchange gradients or parts of weights."""
        found = list(wanted)
        for method in {id(each.method): each.method for each in found}.values():
            check_method(method, self.count)
        ranks = {*torch.distributed.get_process_group_ranks(self.group)}
        here = torch.distributed.get_rank()
        for module in model.modules():
            if isinstance(module, loaded("torch.nn.parallel", "DistributedDataParallel")):
                others = {*torch.distributed.get_process_group_ranks(module.process_group)} & ranks - {here}
                if others:
                    raise ValueError(
                        f"model is wrapped in DistributedDataParallel together with rank {min(others)} of workers=: "
                        "they exchange gradients at every step and hold the same weights, so no spring between them "
                        "would ever move. Give the plain model, or a DDP group of ranks that belong to one worker"
                    )
        for each in found:
            if is_sharded(each.parameter):
                others = {int(rank) for rank in each.parameter.device_mesh.mesh.flatten()} & ranks - {here}  # type: ignore[attr-defined]
                if others:
                    raise ValueError(
                        f"parameter {each.name!r} is sharded over rank {min(others)} of workers= too: a worker must "
                        "have a whole model. Give a mesh of two dimensions, as mesh['workers'] here and mesh['shard'] "
                        "to fully_shard"
                    )


def all_or_none(team: Team | None) -> AbstractContextManager[dict[str, object]]:
    """Let all workers do what follows, or none, if they agree about facts; without a team, a process alone does it."""
    return agreement(None if team is None else team.group)


def group_of_either(shard: Any, workers: Any) -> Any | None:
    """Return the process group of `shard=` or of `workers=`, if one of them is given; refuses both."""
    if shard is not None and workers is not None:
        raise ValueError(
            "shard= and workers= exclude each other: replicas that share an average hold the same weights, and workers "
            "do not; leave one of them out"
        )
    given, what = (shard, "shard") if workers is None else (workers, "workers")
    return None if given is None else group_of(what, given)


# Beginning ------------------------------------------------------------------------------------------------------------


def share(team: Team | None, entries: Iterable["Entry"]) -> None:
    """Let the averages of these entries be those of the first worker, on all workers; a collective."""
    if team is None or team.count == 1:
        return
    alike: dict[tuple[torch.device, torch.dtype], list[Entry]] = {}
    for e in entries:
        alike.setdefault((local(e.w2).device, e.w2.dtype), []).append(e)
    first = torch.distributed.get_process_group_ranks(team.group)[0]
    for some in alike.values():
        mine = [local(e.w2) for e in some]
        vector = torch.cat([t.reshape(-1) for t in mine])
        torch.distributed.broadcast(vector, src=first, group=team.group)
        parts = torch.split(vector, [t.numel() for t in mine])
        theirs = [part.view(t.shape) for part, t in zip(parts, mine, strict=True)]
        changed = [e.name for e, yes in zip(some, arithmetic.differ(mine, theirs), strict=True) if yes]
        team.apart = changed[0] if changed else team.apart
        arithmetic.copy_(mine, theirs)


def forget_beginning(team: Team | None) -> None:
    """Forget how the averages began: a state was loaded, in which workers may be apart."""
    if team is not None:
        team.apart = None


def warn_if_apart(team: Team) -> None:
    """Warn, once, before a step of a worker that began with other weights than the first one."""
    if team.apart is not None:
        name, team.apart = team.apart, None
        warn(
            f"this worker began with other weights than the first one ({name!r} differs), and the average with those "
            "of the first: seed all workers alike before they make their models, or let all load the same weights"
        )


# What must be the same ------------------------------------------------------------------------------------------------


def common_facts(
    team: Team | None, model: nn.Module, wanted: Sequence[Iterable["Wanted"]], options: Mapping[str, object]
) -> dict[str, object]:
    """Return what all workers must agree about; refuses what they cannot share. Nothing without a team.

    `wanted` is what the average is to follow of each optimizer.
    """
    if team is None:
        return {}
    numbered = [(i, each) for i, some in enumerate(wanted) for each in some]
    found = [each for _, each in numbered]
    team.check(model, found)
    texts = {id(each.method): describe_or_sample(each.method) for each in found}
    return {
        "the number of workers": team.count,
        "options": options,
        "the parameters": {
            each.name: f"{tuple(local(each.parameter).shape)} in {each.parameter.dtype}, of group {each.group} in "
            f"optimizer {i}"
            for i, each in numbered
        },
        "the methods": {each.name: texts[id(each.method)] for each in found},
    }


def loaded_facts(team: Team | None, states: Iterable[Mapping[str, Any]]) -> dict[str, object]:
    """Return what must be the same in the states that workers load, beside the steps: averages, bit for bit."""
    if team is None:
        return {}
    averages = [average for state in states for average in state["averages"].values()]
    return {
        f"{what} of the state": {name: _checksum(t) for each in averages for name, t in each[what].items()}
        for what in ("weights", "velocities2")
    }


# What is refused ------------------------------------------------------------------------------------------------------


def refuse_spectators(team: Team | None, names: Iterable[str]) -> None:
    """Refuse averages beside the main one, which is the first of these names."""
    _, *spectators = names
    if team is not None and spectators:
        raise ValueError(
            f"spectators={spectators} do not go with workers=: each worker would have its own; make a second Belay for "
            "them, without workers="
        )


def check_method(method: Method, workers: int) -> None:
    """Refuse a method that workers cannot share."""
    kind = gathering(method)
    if kind is None:
        raise ValueError(
            f"workers={workers} does not go with {method!r}, which says nothing of several workers: use methods.easgd, "
            "belay or a Spring (each worker on a spring), or methods.diloco or lookahead (their mean at a sync). To "
            "average the weights of one worker, make a second Belay without workers="
        )
    if kind == "spring" and (getattr(method, "inertia1", None) or getattr(method, "inertia2", None)):
        raise ValueError(
            f"workers={workers} does not go with velocities, which {method!r} has; leave c1 and c2 out, or use "
            "methods.diloco, whose average has momentum"
        )
    if kind == "spring" and not getattr(method, "rhythm", False):
        coupling = method.coupling(1, 1e-12)
        if coupling.a == 0:
            raise ValueError(
                f"workers={workers} with {method!r} would let every worker go its own way, for the average does not "
                "pull; give m1 a finite value, or use methods.lookahead(k=..., alpha=1.0), the mean of all workers"
            )
    if kind not in ("spring", "mean"):
        raise ValueError(f"gathering={kind!r} of {method!r} is unknown; it is 'spring' or 'mean'")
    sync = method.coupling(getattr(method, "period", 1), 1e-12)
    if kind == "mean" and sync.b and not sync.meets:
        raise ValueError(
            f"{method!r} says that workers meet (gathering='mean'), and at a sync its weights and average do not: "
            f"a + b = {sync.rate:.4g}; they do if a + b = 1, p = 1 − a and q = b"
        )
    share_of_each(method, sync, workers)


def _checksum(t: Tensor) -> int:
    """Return a number that differs if a bit does, for all practical purposes."""
    bits = arithmetic.bits(local(t.detach())).reshape(-1).to(torch.int64)
    places = torch.arange(1, bits.numel() + 1, device=bits.device)
    return int((bits * (2 * places + 1)).sum())  # modulo 2^64
