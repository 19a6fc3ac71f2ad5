"""Fingerprints of tensors: a number that differs if a bit does, for one reading of the memory and no copy of it.

The bits are taken as whole numbers x_i of at most 32 bits, and w_i are random odd numbers of 64 bits. Modulo 2^64

    fingerprint = Σ_j C^(n − j)·Σ_i w_i·x_ij      for the pieces j = 1 … n

One number that changes always changes it; a change of several is missed with a probability of 2^−32 or less. Sums of
whole numbers do not depend on their order. Pieces are larger on a GPU, so that its fingerprints are others.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from torchbelay.belay.shard import local

_PIECE_OF_GPU = 1 << 22  # numbers multiplied at a time: many need few launches
_PIECE = 1 << 15  # on a CPU: few stay in a cache; of more, threads would share each piece, and wait for one another
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # C: odd, its bits are those of the golden ratio
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by bytes; 8 bytes are two numbers


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor], rank: int = 0) -> Tensor:
    """Return the fingerprints of tensors, on the host; of sharded ones, those of the local parts.

    The host waits once for each device. Every rank has other fingerprints of equal values, so that the sum over all
    ranks differs if parts have traded places.

    >>> weights = torch.zeros(2, 3)
    >>> before = fingerprints([weights])
    >>> weights.data[1, 2] = 1e-30
    >>> bool(fingerprints([weights]) == before)
    False
    """
    found = torch.zeros(len(tensors), dtype=torch.int64, device="cpu")
    alike: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        alike.setdefault(local(tensor).device, []).append(i)
    for places in alike.values():
        found[places] = torch.stack([_fingerprint(local(tensors[i].detach())) for i in places]).cpu()
    return found * _signed(pow(_FACTOR, rank, 1 << 64))


def _fingerprint(tensor: Tensor) -> Tensor:
    if tensor.is_quantized:  # the memory is not seen through a view of another dtype
        tensor = tensor.int_repr()
    tensor = tensor.resolve_conj().resolve_neg()  # a view may be that of other bits
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().flatten()
    whole = flat.view(_WHOLE[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=whole.device)
    numbers = _numbers(whole.device)
    for start in range(0, len(whole), len(numbers)):
        piece = whole[start : start + len(numbers)]
        total.mul_(_FACTOR).add_((numbers[: len(piece)] * piece).sum())
    return total


def _signed(number: int) -> int:
    """Return the number of 64 bits with a sign that is equal modulo 2^64."""
    return number - (1 << 64) if number >> 63 else number


@cache
def _numbers(device: torch.device) -> Tensor:
    """Return the random odd numbers, on a device."""
    size = _PIECE if device.type == "cpu" else _PIECE_OF_GPU
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.inference_mode(False):
        found = torch.randint(-(1 << 63), (1 << 63) - 1, (size,), generator=generator, dtype=torch.int64, device="cpu")
        return (found | 1).to(device)
