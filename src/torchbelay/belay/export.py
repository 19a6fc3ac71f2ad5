"""Writing an average as a safetensors file."""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from .files import replacing


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
