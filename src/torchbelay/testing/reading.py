"""What `read()` of somebody's averaging code returned, as tensors by the names of the model."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .comparison import abridge

WANTED = "a state dict, a mapping name -> tensor, a module, or tensors in the order of model.parameters()"

# How keys spell the names of a model: as they are, or as some modules register their shadow buffers.
_SPELLINGS: tuple[Callable[[str], str], ...] = (
    lambda name: name,
    lambda name: name.replace(".", ""),
    lambda name: name.replace(".", "_"),
)


class BrokenError(Exception):
    """Averaging code that raises, or whose average cannot be read; the message says when and how."""


class UnreadableError(BrokenError):
    """An average that cannot be told from what `read()` returned; the message says why."""


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model; a tied one under each of its names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def read_average(returned: Any, model: nn.Module) -> dict[str, Tensor]:
    """Return the average by the names of the model, from any of the shapes in `WANTED`.

    >>> model = nn.Linear(1, 2)
    >>> read_average({"module.weight": torch.ones(2, 1), "module.bias": torch.zeros(2), "steps": 3}, model).keys()
    dict_keys(['weight', 'bias'])
    >>> read_average((p for p in model.parameters()), model).keys()
    dict_keys(['weight', 'bias'])
    >>> read_average(None, model)
    Traceback (most recent call last):
    ...
    torchbelay.testing.reading.UnreadableError: read() returned NoneType; it must return a state dict, ...
    """
    match returned:
        case nn.Module():
            return _from_mapping(named_tensors(returned), model)
        case Mapping():
            return _from_mapping(returned, model)
        case Tensor() | str() | bytes():
            pass
        case Iterable():
            return _from_sequence(list(returned), model)
    raise UnreadableError(f"read() returned {type(returned).__name__}; it must return {WANTED}")


def _from_mapping(entries: Mapping[Any, Any], model: nn.Module) -> dict[str, Tensor]:
    tensors = {key: t for key, value in entries.items() if (t := _as_tensor(value)) is not None}
    parameters, names = dict(model.named_parameters()), named_tensors(model)
    spellings = [(spell, _prefix([spell(name) for name in parameters], tensors)) for spell in _SPELLINGS]
    read = [
        {name: tensors[key] for name in names if (key := prefix + spell(name)) in tensors}
        for spell, prefix in spellings
    ]
    if found := max(read, key=len):  # the first of those that find most
        return _fitting(found, names)
    inner = [value for value in entries.values() if isinstance(value, Mapping | list | tuple | nn.Module)]
    if len(inner) == 1:  # such as {"decay": 0.99, "shadow_params": [...]}
        return read_average(inner[0], model)
    raise UnreadableError(
        f"read() returned a mapping with the keys {abridge(list(map(str, entries))) or '(none)'}, and no name of the "
        f"model is among them ({abridge(list(names))})"
    )


def _prefix(names: list[str], tensors: Mapping[Any, Tensor]) -> str:
    """Return what all keys have before the names of the parameters."""
    found = {key[: -len(name)] for name in names for key in map(str, tensors) if key.endswith(f".{name}")}
    if len(found) > 1 and not any(name in tensors for name in names):
        raise UnreadableError(
            f"read() returned several tensors of one name, below {abridge(sorted(found))}; return the average's alone"
        )
    return found.pop() if found and not any(name in tensors for name in names) else ""


def _from_sequence(values: list[Any], model: nn.Module) -> dict[str, Tensor]:
    parameters, names = dict(model.named_parameters()), named_tensors(model)
    if values and all(isinstance(value, tuple) and len(value) == 2 for value in values):  # named_parameters()
        return _from_mapping(dict(values), model)
    tensors = [t for value in values if (t := _as_tensor(value)) is not None]
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    for chosen in (parameters, trained, names):
        if len(tensors) == len(values) == len(chosen) > 0:
            return _fitting(dict(zip(chosen, tensors, strict=True)), names)
    kinds = abridge(sorted({type(value).__name__ for value in values})) if values else "nothing"
    raise UnreadableError(
        f"read() returned {len(values)} values ({kinds}) for a model of {len(parameters)} parameters; "
        f"it must return {WANTED}"
    )


def _fitting(found: dict[str, Tensor], names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors if they have the shapes of the model's; else raise."""
    for name, t in found.items():
        if t.shape != names[name].shape:
            raise UnreadableError(
                f"read() returned a tensor of the shape {tuple(t.shape)} for {name!r} of shape "
                f"{tuple(names[name].shape)}; return the average of each tensor in its own shape"
            )
    return found


def _as_tensor(value: Any) -> Tensor | None:
    """Return a tensor or an array as a tensor; None if it is neither."""
    if isinstance(value, Tensor):
        return value
    return torch.as_tensor(value) if hasattr(value, "__array__") else None
