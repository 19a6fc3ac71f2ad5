"""What a module that follows an average must be, compared with what Belay exports."""

from typing import Any

import torch
from torch import Tensor, nn

import torchbelay as tb
from helpers.problems import same


def assert_is(module: nn.Module, belay: tb.Belay, name: str = "average", *, buffers: bool = True) -> None:
    """Every tensor of the module is bit for bit the average's, in the model's dtype and under the model's name."""
    exported, found = belay.average_state_dict(name), module.state_dict()
    assert list(found) == list(exported)
    kept = {key for key, _ in module.named_buffers(remove_duplicate=False)} if not buffers else set()
    wrong = [key for key in found if key not in kept and not same(found[key], exported[key])]
    assert not wrong, wrong
    assert not any(p.requires_grad for p in module.parameters())


def shared(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors begin at the same place of the same memory."""
    return x.data_ptr() == y.data_ptr() and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def shares_average(module: nn.Module, belay: tb.Belay, name: str = "average") -> bool:
    """Whether every averaged parameter of the module lies in the average's own memory."""
    parameters = dict(module.named_parameters())
    return all(shared(parameters[key], tensor) for key, tensor in belay.tensors(name).items())


def values_of(tensors: Any) -> dict[str, Tensor]:
    """Copies of what a mapping holds."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def output(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return module(x)
