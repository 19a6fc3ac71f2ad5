"""The model's own weights and buffers beside its averages: for checkpoints in which the model is the average.

They ride in the state of the optimizer if `Parts.weights_ride` says so. A state that has them is loaded with them, by
any Belay.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from . import company, modules
from .average import MAIN
from .checks import fits, same_names
from .part import Part
from .shard import local, part_for

State = dict[str, Any]
Named = dict[str, dict[str, Tensor]]  # tensors by kind, "weights" or "buffers", and name


def by_kind(tensors: Iterable[tuple[str, str, Tensor]]) -> Named:
    """Return tensors that come with their kinds and names."""
    found: Named = {}
    for kind, name, tensor in tensors:
        found.setdefault(kind, {})[name] = tensor
    return found


def _homes(model: nn.Module, part: Part, state: State) -> Named:
    """Return the model's tensors that the average is put in place of; a state of this part has names of weights."""
    parameters = modules.named_parameters(model)
    buffers = {} if part.options.buffers == "ignore" else modules.persistent_buffers(model)
    return {"weights": {name: parameters[name] for name in state["averages"][MAIN]["weights"]}, "buffers": buffers}


def taken(model: nn.Module, part: Part, state: State) -> Named:
    """Return them as they are; copies of those that an average is in place of now."""
    elsewhere = company.own_tensors()
    return {
        kind: {
            name: modules.copied(elsewhere[id(home)]) if id(home) in elsewhere else home.detach()
            for name, home in some.items()
        }
        for kind, some in _homes(model, part, state).items()
    }


def check(model: nn.Module, part: Part, state: State, own: Named) -> None:
    """Refuse what does not fit the model; another dtype is cast, as the model's own `load_state_dict()` does."""
    homes = _homes(model, part, state)
    for kind, some in own.items():
        same_names(f"model's own {kind}", some, homes.get(kind, {}))
        for name, tensor in some.items():
            home = homes[kind][name]
            fits(f"the model's own {name!r}", tensor.to(home.dtype) if isinstance(tensor, Tensor) else tensor, home)


def write(model: nn.Module, part: Part, state: State, own: Named) -> None:
    """Write what fits into the model."""
    homes = _homes(model, part, state)
    for kind, some in own.items():
        for name, tensor in some.items():
            local(homes[kind][name]).copy_(part_for(tensor, homes[kind][name]))
