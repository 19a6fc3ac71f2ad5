"""An average as a folder that `from_pretrained` loads, for models that have `save_pretrained`.

Transformers, diffusers and PEFT each write what they write, by their own method: config, safetensors, adapters. While
that runs, the model's slots hold the average. No weight is written, and no module is called.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from . import folders, modules, shard
from .models import Loose, Several

_OURS = ("state_dict", "save_directory", "is_main_process", "push_to_hub", "distributed_checkpoint")
_CARD = "README.md"  # PEFT updates the one that it finds


def check(model: nn.Module, how: Mapping[str, Any]) -> None:
    """Refuse a model or arguments with which no folder could be written, before anything is gathered."""
    if isinstance(model, Several | Loose):
        raise TypeError(
            "save_pretrained() is for one model, and this Belay averages several, or tensors without one; use "
            "save_average(path), or a Belay for each model"
        )
    inner = next(modules.walk(model))[2]
    kind = type(inner).__name__
    if not callable(getattr(inner, "save_pretrained", None)):
        raise TypeError(
            f"model={kind} has no save_pretrained(), as models of Transformers, diffusers and PEFT have; use "
            "save_average(path), and tb.load_average(path, model)"
        )
    for name in _OURS:
        if name in how:
            raise TypeError(
                f"{name}={how[name]!r}: save_pretrained() of Belay decides that itself; leave it out"
                + (", and upload the folder afterwards" if name == "push_to_hub" else "")
            )
    if getattr(getattr(inner, "config", None), "distributed_config", None) is not None:
        raise ValueError(
            f"model={kind} was spread over ranks by Transformers itself, whose save_pretrained() gathers it on all "
            "ranks together; call model.save_pretrained(folder) inside averaged(), on every rank"
        )


def gathered(
    model: nn.Module, replaced: Mapping[int, Tensor], take: Callable[[Tensor], Tensor | None]
) -> dict[int, Tensor]:
    """Return what the slots must hold, by id; sharded tensors are gathered on the first rank, which is a collective."""
    found = dict(replaced)
    for tensor in (*modules.named_parameters(model).values(), *modules.named_buffers(model).values()):
        value = found.get(id(tensor), tensor)
        if shard.is_sharded(value):
            whole = take(value)
            if whole is not None:
                found[id(tensor)] = whole
    return found


def save(model: nn.Module, folder: str | os.PathLike[str], replaced: dict[int, Tensor], how: Mapping[str, Any]) -> None:
    """Let the model write itself with other tensors in its slots, all of it or nothing."""
    with folders.filling(folder) as new:
        card = folders.destination(folder) / _CARD
        if card.is_file():
            shutil.copyfile(card, new / _CARD)
        with modules.plain(model) as inner, modules.slots_hold(inner, replaced):
            inner.save_pretrained(new, **how)  # type: ignore[operator]
        if not any(path.name != _CARD for path in new.iterdir()):
            raise OSError(f"{type(inner).__name__}.save_pretrained() wrote nothing; folder={os.fspath(folder)!r}")
