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
from .average import WholeAverage
from .files import replacing
from .readout import Reading
from .shard import local, with_local
from .swapped_buffers import fitting


def with_average(
    model: nn.Module,
    average: WholeAverage,
    member: company.Member,
    take: Callable[[Tensor], Any],
    reading: Reading | None = None,
) -> dict[str, Any]:
    """Return copies of an average, or of a reading of it, and of the rest of its model, wherever they are now."""
    swap, asked = member.swap, None if reading is None else reading.readout
    if swap is not None and swap.average is average and swap.readout == asked:
        return modules.state_dict_with(model, company.own_weights(but=member), take)
    if swap is not None and swap.average is average and swap.readout is None and reading is not None:
        # the buffers in the model are the average's, and its readings have the same
        own = company.own_weights(but=member) | swap.own_weights()
        return modules.state_dict_with(model, own | _read(average, member, own, reading), take)
    replaced = company.own_tensors()  # wherever they are while this or another Belay has an average in the model
    if reading is None:
        replaced |= {id(e.w1): e.w2.to(e.w1.dtype) for e in average.entries.values()}
    else:
        replaced |= _read(average, member, replaced, reading)
    buffers = modules.named_buffers(model)
    for key, value in fitting(average.buffers, buffers).items():
        replaced[id(buffers[key])] = value.to(buffers[key].dtype)
    return modules.state_dict_with(model, replaced, take)


def _read(
    average: WholeAverage, member: company.Member, own: Mapping[int, Tensor], reading: Reading
) -> dict[int, Tensor]:
    """Return a reading of an average as new tensors, by parameters' ids; `own` has weights that are elsewhere now."""
    swap, entries = member.swap, average.entries.values()
    parts = {id(e.w1): torch.empty_like(local(e.w1), device=local(e.w2).device) for e in entries}
    reading.write(
        parts,
        w1=lambda e: own.get(id(e.w1), e.w1),
        w2=lambda e: e.w2 if swap is None else swap.value(e, average.name),
    )
    return {id(e.w1): with_local(e.w1.detach(), parts[id(e.w1)]) for e in entries}


def about(average: WholeAverage, readout: Readout | None, *, step: int, start: int) -> dict[str, str]:
    """Return what a file says of the average that it holds."""
    methods = dict.fromkeys(_label(e.method) for e in average.entries.values())
    read = {} if readout is None else {"readout": _label(readout)}
    return {
        "average": average.name,
        "method": "; ".join(methods) or f"none before step {start}",
        **read,
        "step": str(step),
        "torchbelay": __version__,
    }


def _label(thing: object) -> str:
    """Return a method or readout as a text for readers; the name of its class if a checkpoint could not tell it."""
    try:
        return describe(thing)
    except ValueError:
        return type(thing).__qualname__


def require() -> None:
    """Refuse, before anything is gathered or written, if safetensors is not installed."""
    if find_spec("safetensors") is None:
        raise ImportError(
            "save_average() needs the package safetensors: pip install safetensors; or, without it, "
            "torch.save(belay.average_state_dict(full=True), path)"
        )


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
