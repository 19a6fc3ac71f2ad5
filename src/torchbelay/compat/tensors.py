"""Lists of averages and weights that may differ in dtype and device, as every class of this room takes them."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from torchbelay.ops import arithmetic

Device = torch.device | str | int | None
Pair = tuple[list[Tensor], list[Tensor]]

_dtype = attrgetter("dtype")
_device = attrgetter("device")


def are_averaged(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether each of these tensors has an average. Integers and booleans, such as counters and masks, are copied."""
    dtypes = list(map(_dtype, tensors))
    averaged = {dtype: dtype.is_floating_point or dtype.is_complex for dtype in set(dtypes)}
    return [averaged[dtype] for dtype in dtypes]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of an average: float32 for floating-point weights of 16 bits or less, else the weights' own.

    >>> wide(torch.bfloat16), wide(torch.float64), wide(torch.int64)
    (torch.float32, torch.float64, torch.int64)
    """
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def any_wide(averages: Sequence[Tensor]) -> bool:
    """Whether any floating-point average has the dtype that it is computed in.

    >>> any_wide([torch.ones(1, dtype=torch.bfloat16), torch.tensor(3)]), any_wide([torch.ones(1)])
    (False, True)
    """
    dtypes = set(map(_dtype, averages))
    return any(wide(dtype) == dtype and (dtype.is_floating_point or dtype.is_complex) for dtype in dtypes)


def start(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the averages that these weights begin with: copies, in a dtype that small steps do not vanish in."""
    return [w.detach().to(wide(w.dtype), copy=True) for w in weights]


def part(averages: list[Tensor], weights: list[Tensor], moving: list[bool]) -> tuple[Pair, Pair]:
    """Part two aligned lists into the tensors that move and the rest."""
    if all(moving):  # the usual case, and fast
        return (averages, weights), ([], [])
    pairs = list(zip(moving, averages, weights, strict=True))
    moved, rest = [pair for pair in pairs if pair[0]], [pair for pair in pairs if not pair[0]]
    return ([a for _, a, _ in moved], [w for _, _, w in moved]), ([a for _, a, _ in rest], [w for _, _, w in rest])


def follow_(averages: Sequence[Tensor], weights: Sequence[Tensor], share: float) -> None:
    """Move every average by `share` of its way to its weight. Integers and booleans are copied.

    For averages and weights of one dtype and device this is torch's own foreach lerp.

    >>> averages = [torch.tensor([0.0]), torch.tensor(3)]
    >>> follow_(averages, [torch.tensor([8.0], dtype=torch.bfloat16), torch.tensor(7)], 0.25)
    >>> averages
    [tensor([2.]), tensor(7)]
    """
    (averages, weights), (copies, sources) = part(list(averages), list(weights), are_averaged(averages))
    copy_(copies, sources)
    if list(map(_device, averages)) != list(map(_device, weights)):
        weights = [w.to(a.device) for w, a in zip(weights, averages, strict=True)]
    with torch.no_grad():
        if list(map(_dtype, averages)) != list(map(_dtype, weights)) and averages[0].device.type == "cpu":
            for average, weight in zip(averages, weights, strict=True):  # what one needs meanwhile stays in the cache
                arithmetic.lerp_([average], [weight], share)
        else:
            arithmetic.lerp_(averages, weights, share)


def copy_(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Overwrite `to` with `source`, of any dtype and device, as `to.data.copy_` does: autograd does not see it."""
    arithmetic.copy_([t.data for t in to], [s.detach() for s in source])


def relocated(
    averages: Sequence[Tensor], device: Device, dtype: torch.dtype | None, non_blocking: bool = False
) -> list[Tensor]:
    """Return tensors on a device and in a dtype; None leaves either as it is. Only floating-point ones are cast."""
    return [
        t.to(device=device, dtype=dtype if t.is_floating_point() else None, non_blocking=non_blocking) for t in averages
    ]


def check_count(name: str, given: int, expected: int, cure: str) -> None:
    """Refuse a list that cannot belong to another one, before anything moves."""
    if given != expected:
        raise ValueError(f"{name} has {given} tensors, and {expected} are averaged; {cure}")


def check_list(name: str, given: Any) -> None:
    """Refuse what is not a list of tensors, in a state dict."""
    if not isinstance(given, list) or not all(isinstance(t, Tensor) for t in given):
        raise ValueError(f"{name} must be a list of tensors, not {type(given).__name__}; this is another kind of state")


def check_shapes(name: str, given: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Refuse a list of the right length for another model, whose tensors torch would broadcast."""
    for i, (g, e) in enumerate(zip(given, expected, strict=True)):
        if g.shape != e.shape:
            raise ValueError(
                f"{name}[{i}] has the shape {tuple(g.shape)}, and the average {tuple(e.shape)}; load the state of an "
                "average of these parameters"
            )


def check_decay(name: str, decay: float) -> float:
    """Return a decay; refuse one that is not between 0 and 1."""
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"{name}={decay!r} must be between 0 and 1")
    return decay
