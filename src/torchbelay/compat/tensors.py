"""Lists of averages and weights that may differ in dtype and device, as every class of this room takes them."""

from collections.abc import Mapping, Sequence
from operator import attrgetter, ne
from typing import Any

import torch
from torch import Tensor

from torchbelay.ops import arithmetic

Device = torch.device | str | int | None
Pair = tuple[list[Tensor], list[Tensor]]

OF_THESE = "load the state of an average of these parameters"  # the cure for a state dict

_dtype = attrgetter("dtype")
_device = attrgetter("device")
_shape = attrgetter("shape")


def are_averaged(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether each of these tensors has an average. Integers and booleans, such as counters and masks, are copied."""
    return _are_averaged(list(map(_dtype, tensors)))


def _are_averaged(dtypes: list[torch.dtype]) -> list[bool]:
    averaged = {dtype: dtype.is_floating_point or dtype.is_complex for dtype in set(dtypes)}
    if all(averaged.values()):  # the usual case, and fast
        return [True] * len(dtypes)
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
    dtypes = list(map(_dtype, averages))
    (averages, weights), (copies, sources) = part(list(averages), list(weights), _are_averaged(dtypes))
    if copies:
        copy_(copies, sources)
        dtypes = list(map(_dtype, averages))
    if list(map(_device, averages)) != list(map(_device, weights)):
        weights = [w.to(a.device) for w, a in zip(weights, averages, strict=True)]
    if share == 0 or not averages:
        return
    with torch.no_grad():
        if dtypes == list(map(_dtype, weights)):  # arithmetic.lerp_ would look at them all once more
            torch._foreach_lerp_(averages, weights, share)
        elif averages[0].device.type == "cpu":
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


def check_alike(name: str, given: Sequence[Tensor], expected: Sequence[Tensor], cure: str) -> None:
    """Refuse a list of another length, or of other shapes, than the averages, before anything moves."""
    check_count(name, len(given), len(expected), cure)
    check_shapes(name, given, expected, cure)


def check_state(given: Any, what: str) -> None:
    """Refuse what is not a dict, as a state dict."""
    if not isinstance(given, Mapping):
        raise TypeError(f"state_dict={type(given).__name__} is not a dict; give what state_dict() of {what} returned")


def check_list(name: str, given: Any) -> None:
    """Refuse what is not a list of tensors, in a state dict."""
    if not isinstance(given, list) or not all(isinstance(t, Tensor) for t in given):
        raise ValueError(f"{name} must be a list of tensors, not {type(given).__name__}; this is another kind of state")


def check_shapes(
    name: str, given: Sequence[Tensor], expected: Sequence[Tensor], cure: str, other: str = "the average"
) -> None:
    """Refuse a list of the right length for another model, before anything moves.

    torch would broadcast some of its tensors, and move others before it fails.
    """
    if not any(map(ne, map(_shape, given), map(_shape, expected))):  # at every update: no list is made
        return
    for i, (g, e) in enumerate(zip(given, expected, strict=True)):
        if g.shape != e.shape:
            raise ValueError(f"{name}[{i}] has the shape {tuple(g.shape)}, and {other} {tuple(e.shape)}; {cure}")


def check_decay(name: str, decay: float) -> float:
    """Return a decay; refuse what is not a number between 0 and 1."""
    try:
        fits = bool(0.0 <= decay <= 1.0)
    except (TypeError, RuntimeError):  # None, a text, a tensor of many numbers
        fits = False
    if not fits:
        raise ValueError(f"{name}={decay!r} must be a number between 0 and 1")
    return decay
