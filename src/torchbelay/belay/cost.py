"""What an average takes on each rank, and what it sends, in the modes that torchbelay knows: plain numbers, no tensors.

All of it is for one average of a method without velocities. A spectator takes as much memory again and sends nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal, get_args

from torchbelay.ops import workers

from . import traffic
from .traffic import Shape

Mode = Literal["ddp", "ddp-sharded", "fsdp2", "zero3", "workers"]
MODES: tuple[Mode, ...] = get_args(Mode)
WEIGHT = 4  # bytes of a float32 weight


@dataclass(frozen=True)
class Sent:
    """What one rank sends on one occasion, around a ring of all ranks, and in how many messages."""

    bytes: float = 0.0
    messages: int = 0


NOTHING = Sent()


@dataclass(frozen=True)
class Cost:
    """What a mode stores on a rank, and what it sends."""

    stored: int  # bytes, on the rank that keeps the most
    watching: Sent  # in a step of a method that leaves the weights alone, as EMA
    pulling: Sent  # in a step of a method that pulls the weights, as BELAY; with workers, at a sync
    evaluating: Sent  # on entering `averaged()`, or making a state dict of every rank's part


def cost_of(mode: Mode, shapes: Sequence[Shape], ranks: int, *, bits: int = 32) -> Cost:
    """Return what one average of float32 parameters with these shapes takes and sends.

    >>> cost_of("fsdp2", [(1024, 1024)], ranks=8).stored == 4 * 1024 * 1024 // 8
    True
    >>> cost_of("ddp", [(1024, 1024)], ranks=8, bits=24).stored == 3 * 1024 * 1024
    True
    """
    itemsize, weights = bits // 8, sum(prod(shape) for shape in shapes)
    if mode == "ddp":
        return Cost(weights * itemsize, NOTHING, NOTHING, NOTHING)
    if mode == "ddp-sharded":
        gather = traffic.gathered(shapes, ranks, WEIGHT)
        sent = Sent(gather.received, gather.messages) if ranks > 1 else NOTHING
        return Cost(traffic.stored(shapes, ranks, itemsize), NOTHING, sent, sent)
    if mode == "fsdp2":  # each rank moves its own shards, which DTensor cuts along the first dimension
        shards = sum(ceil(shape[0] / ranks) * prod(shape[1:]) if shape else 1 for shape in shapes)
        return Cost(shards * itemsize, NOTHING, NOTHING, NOTHING)
    if mode == "zero3":
        partition = sum(ceil(prod(shape) / ranks) for shape in shapes)
        return Cost(partition * itemsize, NOTHING, NOTHING, NOTHING)
    sync = Sent(workers.sent_bytes(weights, ranks), workers.messages(ranks))
    return Cost(workers.stored_bytes(weights, bytes_per_number=itemsize), sync, sync, NOTHING)
