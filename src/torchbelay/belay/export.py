"""An average as the state of a plain model, and as a safetensors file."""

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from torchbelay._version import __version__
from torchbelay.physics.identity import describe
from torchbelay.physics.readouts import Readout

from . import company, modules
from .average import Entry, WholeAverage, average_dtype
from .buffers import shown
from .files import replacing
from .readout import Reading
from .shard import is_sharded, local, with_local


def with_average(
    model: nn.Module,
    average: WholeAverage,
    member: company.Member,
    take: Callable[[Tensor], Any],
    reading: Reading | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Return copies of an average, or of a reading of it, and of the rest of its model, wherever they are now.

    Floating-point tensors get `dtype`, if given, and are not rounded to the model's before.
    """
    replaced = replacement(model, average, member, reading, rounded=dtype is None)
    if dtype is None:
        return modules.state_dict_with(model, replaced, take)
    return modules.state_dict_with(model, replaced, lambda t: take(_cast(t, dtype)))


def replacement(
    model: nn.Module,
    average: WholeAverage,
    member: company.Member,
    reading: Reading | None = None,
    *,
    rounded: bool = True,
) -> dict[int, Tensor]:
    """Return what the model's slots must hold instead of what they hold now, by id, so that the average is in them.

    The tensors have the dtypes of the model's, or, unless `rounded`, those in which the average is kept.
    """
    swap, asked = member.swap, None if reading is None else reading.readout
    if swap is not None and swap.average is average and swap.readout in (None, asked):
        # the buffers in the model are the average's, and its readings have the same
        if rounded and swap.readout == asked:
            return company.own_weights(but=member)
        own = company.own_weights(but=member) | swap.own_weights()
        return own | _values(average, member, own, reading, rounded=rounded)
    replaced = company.own_tensors()  # wherever they are while this or another Belay has an average in the model
    replaced |= _values(average, member, replaced, reading, rounded=rounded)
    for buffer, value in shown(model, average.buffers):
        replaced[id(buffer)] = value.to(buffer.dtype) if rounded else value
    return replaced


def _values(
    average: WholeAverage, member: company.Member, own: Mapping[int, Tensor], reading: Reading | None, *, rounded: bool
) -> dict[int, Tensor]:
    """Return an average, or a reading of it, by parameters' ids; `own` has weights that are elsewhere now."""
    swap, entries = member.swap, average.entries.values()
    w2 = {id(e.w1): e.value if swap is None else swap.value(e, average.name) for e in entries}
    if reading is None:
        return {id(e.w1): w2[id(e.w1)].to(e.w1.dtype) if rounded else w2[id(e.w1)] for e in entries}
    parts = {id(e.w1): _empty(e, rounded=rounded) for e in entries}
    reading.write(parts, w1=lambda e: own.get(id(e.w1), e.w1), w2=lambda e: w2[id(e.w1)])
    return {id(e.w1): _spread(w2[id(e.w1)], parts[id(e.w1)]) for e in entries}


def _spread(w2: Tensor, part: Tensor) -> Tensor:
    """Return a tensor that is spread over ranks as the average is, with this local part."""
    return with_local(w2 if w2.dtype == part.dtype or not is_sharded(w2) else w2.to(part.dtype), part)


def _empty(e: Entry, *, rounded: bool) -> Tensor:
    """Return memory for the local part of a mixture, on the device of the average."""
    return torch.empty_like(e.part, dtype=(e.w1 if rounded else e).dtype, device=local(e.w2).device)


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    if not (t.is_floating_point() or t.is_complex()):
        return t
    return t.detach().to(average_dtype(t.dtype, dtype))


def about(average: WholeAverage, readout: Readout | None, *, step: int, start: int) -> dict[str, str]:
    """Return what a file says of the average that it holds."""
    methods = dict.fromkeys(label(e.method) for e in average.entries.values())
    read = {} if readout is None else {"readout": label(readout)}
    return {
        "average": average.name,
        "method": "; ".join(methods) or f"none before step {start}",
        **read,
        "step": str(step),
        "torchbelay": __version__,
    }


def label(thing: object) -> str:
    """Return a method or readout as a text for readers; the name of its class if a checkpoint could not tell it."""
    try:
        return describe(thing)
    except ValueError:
        return type(thing).__qualname__


def require(what: str, instead: str) -> None:
    """Refuse, before anything is gathered, written or read, if safetensors is not installed."""
    if find_spec("safetensors") is None:
        raise ImportError(f"{what} needs the package safetensors: pip install safetensors; or, without it, {instead}")


def write(path: str | os.PathLike[str], state: Mapping[str, Any], about: Mapping[str, str]) -> None:
    """Write a model's state, all of it or nothing."""
    from safetensors.torch import save_file

    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{key!r} of the model is {type(value).__name__}, and a safetensors file holds only tensors; use "
                "torch.save(belay.average_state_dict(full=True), path)"
            )
    seen: set[int] = set()
    tensors = {}
    for key, value in state.items():
        tied = value.numel() > 0 and value.data_ptr() in seen  # the format has no tied weights: copy
        seen.add(value.data_ptr())
        tensors[key] = value.clone() if tied else value.contiguous()
    with replacing(path) as temporary:
        try:
            save_file(tensors, temporary, {"format": "pt", **about})
        except (KeyError, TypeError) as problem:
            dtypes = sorted({str(t.dtype) for t in tensors.values()})
            raise ValueError(
                f"safetensors cannot hold one of {', '.join(dtypes)} ({problem}); use "
                "torch.save(belay.average_state_dict(full=True), path)"
            ) from problem
