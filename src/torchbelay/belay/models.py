"""What is averaged as one model: a module, several modules, or tensors without a module."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

_CLASH = (
    "give each model a prefix of its own, as Belay(nn.ModuleDict({'first': ..., 'second': ...}), ...), or each a Belay"
)


class Several(nn.Module):
    """Several models, whose tensors keep the names that each model has for them, as the stages of a pipeline."""

    def __init__(self, models: list[nn.Module]) -> None:
        super().__init__()
        for i, model in enumerate(models):
            self.add_module(str(i), model)


class Loose(nn.Module):
    """Tensors without a module; unlike a module's own, their names may have dots."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._parameters.update(tensors)  # type: ignore[arg-type]  # a plain tensor will do


def as_model(model: object) -> nn.Module:
    """Return one module for what the user gave: a module, or an iterable of modules."""
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, Mapping) and model and all(isinstance(each, Tensor) for each in model.values()):
        raise TypeError(
            f"model={type(model).__name__} is a state dict, whose tensors no optimizer steps; pass the model itself"
        )
    if isinstance(model, Mapping):
        raise TypeError(
            f"model={type(model).__name__} is not a module: give list(models.values()), which keeps the names that "
            "each has, or nn.ModuleDict(models), which puts the keys before them"
        )
    if not isinstance(model, Iterable) or isinstance(model, str | Tensor):
        raise TypeError(f"model={type(model).__name__} is not a torch.nn.Module; pass the module that is trained")
    models: list[Any] = list(model)
    if not models:
        raise ValueError("model is an empty sequence: there is nothing to average; pass the modules that are trained")
    for i, each in enumerate(models):
        if isinstance(each, Tensor | tuple):
            raise TypeError(
                f"model[{i}] is not a module but a {type(each).__name__}: for tensors without a module use "
                "Belay.from_parameters(...)"
            )
        if not isinstance(each, nn.Module):
            raise TypeError(f"model[{i}]={type(each).__name__} is not a torch.nn.Module; pass modules alone")
        if any(each is other for other in models[:i]):
            raise ValueError(f"model[{i}], {type(each).__name__}, is in the sequence twice; pass each module once")
    return Several(models)


def as_loose(parameters: object) -> Loose:
    """Return a module for an iterable of tensors, or of pairs of a name and a tensor."""
    if isinstance(parameters, nn.Module):
        raise TypeError(f"params={type(parameters).__name__} is a module; use Belay(model, optimizer, method)")
    if isinstance(parameters, Mapping):
        raise TypeError(f"params={type(parameters).__name__} is not a list of pairs; give its items()")
    if not isinstance(parameters, Iterable) or isinstance(parameters, str | Tensor):
        raise TypeError(
            f"params={type(parameters).__name__} is not an iterable of tensors, or of pairs of a name and a tensor; "
            "give model.parameters() or model.named_parameters()"
        )
    found: dict[str, Tensor] = {}
    for i, each in enumerate(parameters):
        pair = each if isinstance(each, tuple | list) else (str(i), each)
        if len(pair) != 2 or not isinstance(pair[0], str) or not isinstance(pair[1], Tensor):
            raise TypeError(
                f"params[{i}], {type(each).__name__}, is neither a tensor nor a pair of a name and a tensor"
            )
        name, tensor = pair
        if name in found:
            raise ValueError(f"params has the name {name!r} twice; give each tensor a name of its own")
        if any(tensor is other for other in found.values()):
            raise ValueError(f"params[{i}] is a tensor that came before already; give each tensor once")
        found[name] = tensor
    if not found:
        raise ValueError("params is empty: there is nothing to average; a generator can be used once only")
    return Loose(found)


def as_given(model: nn.Module) -> Any:
    """Return what the user gave, with any iterable as a list."""
    if isinstance(model, Loose):
        return list(model._parameters.values())
    return each_of(model) if isinstance(model, Several) else model


def each_of(model: nn.Module) -> list[nn.Module]:
    """Return the models that are averaged as one."""
    return [m for m in model._modules.values() if m is not None] if isinstance(model, Several) else [model]


def refuse_clash(name: str) -> None:
    """Refuse a name that two models have for different things: an export has one place for it."""
    raise ValueError(f"two models have a tensor with the name {name!r}, and an export has one place for it: {_CLASH}")
