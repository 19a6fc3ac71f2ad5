"""What replicas must have in common that share an average, and what a shared average cannot do."""

from collections.abc import Mapping, Sequence

import torch

from torchbelay.ops import arithmetic
from torchbelay.physics.identity import describe_or_sample

from .average import Wanted
from .options import Options
from .shard import is_sharded

Found = Sequence[Mapping[str, Sequence[Wanted]]]  # of each optimizer: what each average is to follow


def check(found: Found, *, save_with_optimizer: bool) -> None:
    """Refuse parameters that are spread over ranks already, and checkpoints that one rank would write alone."""
    for each in found:
        for wanted in each.values():
            for name, p, _, _ in wanted:
                if is_sharded(p):
                    raise ValueError(
                        f"shard is for replicas, whose parameters are whole on every rank, and {name!r} is a DTensor "
                        "(FSDP2, tensor parallel), whose average is spread like it already; leave shard out"
                    )
    if save_with_optimizer:
        raise ValueError(
            "save_with_optimizer=True does not go with shard: a rank that saves its optimizer has a slice of the "
            "averages only; save belay by torch.distributed.checkpoint, or belay.state_dict(full=True)"
        )


def refuse_live(what: str) -> None:
    """Refuse to show the memory of an average of which this rank has a slice."""
    raise ValueError(
        f"{what}() shows the memory of an average, and with shard this rank keeps a slice of it only; use averaged(), "
        "or average_state_dict(), on every rank, or leave shard out"
    )


def facts(found: Found, options: Options) -> dict[str, object]:
    """Return what the ranks must not differ in: parameters, options and methods."""
    return {
        "the parameters": {
            name: f"{tuple(p.shape)} in {p.dtype}, of group {group} in optimizer {i}"
            for i, each in enumerate(found)
            for wanted in each.values()
            for name, p, _, group in wanted
        },
        "the options": {
            "dtype": options.dtype,
            "rounding": options.rounding,
            "on_nonfinite": options.on_nonfinite,
            **options.saved(),
        },
        **methods(found),
    }


@torch.no_grad()
def weights(found: Found) -> dict[str, object]:
    """Return sums over the weights, in which the ranks must not differ: slices of other weights do not go together."""
    sums = {
        name: arithmetic.bits(p.detach()).sum(dtype=torch.int64)
        for each in found
        for wanted in each.values()
        for name, p, _, _ in wanted
    }
    numbers = torch.stack([each.cpu() for each in sums.values()]).tolist()
    cure = "let DistributedDataParallel, or broadcast(), make them equal"
    return {f"the weights (sums of their bits; {cure})": dict(zip(sums, numbers, strict=True))}


def methods(found: Found) -> dict[str, object]:
    """Return the methods of each average, by the names of the parameters."""
    told: dict[str, dict[str, str]] = {}
    texts: dict[int, str] = {}
    for each in found:
        for average, wanted in each.items():
            for name, _, method, _ in wanted:
                if id(method) not in texts:
                    texts[id(method)] = describe_or_sample(method)
                told.setdefault(average, {})[name] = texts[id(method)]
    return {f"the methods of {average!r}": some for average, some in told.items()}
