"""Reading an average from a file into a plain model."""

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import company, modules
from .checks import some
from .export import require
from .shard import is_sharded, part_for, with_local


@torch.inference_mode(False)
@torch.no_grad()
def load_average(path: str | os.PathLike[str], model: nn.Module) -> dict[str, str]:
    """Load an average into a model, and return what the file says of it: average, method, step and version.

    Args:
        path: a file of `Belay.save_average()`, or of `torch.save(belay.average_state_dict(), path)`, which says nothing
            of itself.
        model: the model that was averaged, wrapped (DDP, torch.compile, …) or not. No Belay is needed; if there is one,
            call its `reset()` afterwards. Names and shapes must be the same; numbers are converted to the model's
            dtypes and devices. If the file does not fit, nothing is changed.

    >>> import tempfile, torchbelay as tb
    >>> model = nn.Linear(3, 1)
    >>> belay = tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), tb.methods.ema(0.999))
    >>> path = tempfile.mkdtemp() + "/average.safetensors"
    >>> belay.save_average(path)
    >>> plain = nn.Linear(3, 1)
    >>> tb.load_average(path, plain)["step"]
    '0'
    >>> torch.equal(plain.weight, model.weight)
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__} is not a torch.nn.Module; pass the module that was averaged")
    held = company.own_tensors()
    if any(id(tensor) in held for tensor in (*model.parameters(), *model.buffers())):
        raise RuntimeError("load_average() inside averaged(): the weights come back on leaving; leave the block first")
    state, about = _read(Path(path))
    with modules.plain(model) as inner:
        here = inner.state_dict()
        _check(state, here, path)
        fitting = {name: _spread(value, here[name]) for name, value in state.items()}
        inner.load_state_dict(fitting, strict=True)
    return about


def _read(path: Path) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Return the tensors of a file, and its metadata."""
    if not path.is_file():
        raise FileNotFoundError(f"path={str(path)!r} is not a file; give the file that save_average() wrote")
    if zipfile.is_zipfile(path):  # torch.save
        state = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(state, Mapping) and {"format", "averages"} <= state.keys():
            raise ValueError(
                f"path={str(path)!r} holds the state of a Belay, which Belay.load_state_dict() takes; save the average "
                "alone by save_average()"
            )
        if not isinstance(state, Mapping):
            raise ValueError(
                f"path={str(path)!r} holds {type(state).__name__}, not a model's state; save it by save_average()"
            )
        return state, {}
    require(f"load_average({str(path)!r})", "load a file of torch.save(belay.average_state_dict(full=True), path)")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as problem:
        raise ValueError(
            f"path={str(path)!r} is neither a safetensors file nor one of torch.save, or it is damaged ({problem})"
        ) from problem


def _check(state: Mapping[str, Any], here: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Refuse a file that does not fit the model, before anything is changed."""
    missing, unexpected = sorted(here.keys() - state.keys()), sorted(state.keys() - here.keys())
    problems = [f"missing: {some(missing)}"] if missing else []
    problems += [f"unexpected: {some(unexpected)}"] if unexpected else []
    for name, value in state.items():
        own = here.get(name)
        if isinstance(value, Tensor) and isinstance(own, Tensor):
            if value.shape != own.shape:
                problems.append(f"{name!r} has the shape {tuple(value.shape)}, and {tuple(own.shape)} in the model")
            elif value.is_complex() and not own.is_complex():
                problems.append(f"{name!r} is {value.dtype}, and {own.dtype} in the model")
            elif own.is_meta:
                problems.append(f"{name!r} of the model is on the meta device: materialise the model first")
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ValueError(
            f"path={os.fspath(path)!r} does not fit the model: {'; '.join(problems[:4])}{more}. Give the model that "
            "was averaged"
        )


def _spread(value: Any, own: Any) -> Any:
    """Return a value sharded as the model's own tensor is; every rank has read the whole."""
    if not (isinstance(own, Tensor) and isinstance(value, Tensor) and is_sharded(own)):
        return value
    return with_local(own, part_for(value.to(own.dtype), own))
