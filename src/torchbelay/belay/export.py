"""An average as the state of a plain model, and as a safetensors file."""

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from . import company, modules
from .average import WholeAverage
from .files import replacing
from .swapped_buffers import fitting


def with_average(
    model: nn.Module, average: WholeAverage, member: company.Member, take: Callable[[Tensor], Any]
) -> dict[str, Any]:
    """Return copies of an average and of the rest of its model, wherever weights and averages are at present."""
    if member.swap is not None and member.swap.average is average:
        return modules.state_dict_with(model, company.own_weights(but=member), take)
    replaced = company.own_tensors()  # wherever they are while this or another Belay has an average in the model
    replaced |= {id(e.w1): e.w2.to(e.w1.dtype) for e in average.entries.values()}
    buffers = modules.named_buffers(model)
    for key, value in fitting(average.buffers, buffers).items():
        replaced[id(buffers[key])] = value.to(buffers[key].dtype)
    return modules.state_dict_with(model, replaced, take)


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
