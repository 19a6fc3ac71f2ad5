"""Averages of 24 bits in two planes (`ops/planes.py`), sharded like what they are made from."""

import torch
from torch import Tensor

from torchbelay.ops import planes
from torchbelay.ops.place import Place

from .shard import is_sharded, local, offset

BITS = 24
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of weights that 24 bits are enough for


def check_bits(bits: object, dtype: object) -> None:
    """Refuse a number of bits that averages cannot have, and one beside a dtype."""
    if bits is None:
        return
    if type(bits) is not int or bits != BITS:
        raise ValueError(
            f"bits={bits!r} cannot hold an average; use bits=24, or None and a dtype (torch.bfloat16 has 16 bits, "
            "torch.float32 has 32)"
        )
    if dtype is not None:
        raise ValueError(f"bits={bits} and dtype={dtype} both say how averages are kept; leave one of them out")


def check_weights(name: str, w1: Tensor, bits: int | None) -> None:
    """Refuse weights of which an average of 24 bits would lose too much."""
    if bits is not None and w1.dtype not in DTYPES:
        raise ValueError(
            f"bits={bits} is for float32, bfloat16 and float16 weights, and parameter {name!r} is {w1.dtype}; leave "
            "bits out, or let the method be a function that returns None for this parameter, and average it by a "
            "second Belay"
        )


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the planes of a tensor's values, rounded to the nearest, on its device and spread over ranks as it is."""
    high, low = (torch.empty_like(values, dtype=kind) for kind in (torch.bfloat16, torch.uint8))
    if not values.is_meta:
        write(high, low, values)
    return high, low


def write(high: Tensor, low: Tensor, values: Tensor) -> None:
    """Overwrite planes with values of any dtype and device, rounded to the nearest; all of them are spread alike."""
    for own, new in zip((high, low), planes.split(local(values).detach().to(torch.float32)), strict=True):
        local(own).copy_(new)


def joined(high: Tensor, low: Tensor) -> Tensor:
    """Return the values of planes as a new float32 tensor, spread over ranks as they are."""
    values = torch.empty_like(high, dtype=torch.float32)
    local(values).copy_(planes.joined(local(high), local(low)))
    return values


def are_planes(high: object, low: object) -> bool:
    """Whether these are two planes of one average, with values."""
    return (
        isinstance(high, Tensor)
        and isinstance(low, Tensor)
        and (high.dtype, low.dtype) == (torch.bfloat16, torch.uint8)
        and high.shape == low.shape
        and local(high).shape == local(low).shape
        and not (high.is_meta or low.is_meta)
        and high.layout == low.layout == torch.strided
    )


def place(name: str, w1: Tensor) -> Place:
    """Return where the local part of a parameter is in the whole of it."""
    return Place(name, (*w1.shape,), offset(w1), (*local(w1).shape,)) if is_sharded(w1) else Place.of(name, w1.shape)
