"""A module made like a model, part by part, without its weights; it takes over what the model becomes later.

The module is a deep copy in which every parameter is a tensor that is given, so that no weight is copied. Wrappers are
left out. A part of it is known by the part of the model that it was made from, and is held weakly: what the user drops
costs nothing more.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import is_
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from . import modules
from .models import Several

Memo = dict[int, Any]  # as copy.deepcopy takes it: what stands for an object, by the object's id


@dataclass(eq=False)
class Twin:
    """A part of a model, the module that was made from it, and what is known of the tensors of that module."""

    model: nn.Module
    made: "ref[nn.Module]"
    form: list[object]
    bonds: dict[str, Any] = field(default_factory=dict)  # what is known of its parameters, by key
    buffers: dict[str, Any] = field(default_factory=dict)  # what is known of its buffers, by key


class Replica:
    """The parts of a module, each beside the part of the model that it was made from."""

    def __init__(self, model: nn.Module, module: nn.Module) -> None:
        self._model = model
        made, parts = _by_place(module), _by_place(model)
        pairs = {id(part): (part, made[at]) for at, part in parts.items() if at in made}  # a shared part counts once
        self._twins = [Twin(part, ref(own), _form(part)) for part, own in pairs.values()]

    def is_alive(self) -> bool:
        """Whether somebody holds one of the parts."""
        return any(twin.made() is not None for twin in self._twins)

    def twins(self) -> list[tuple[Twin, nn.Module]]:
        """Return the parts that somebody still holds, with their modules; none if the module has been dropped."""
        found = [(twin, made) for twin in self._twins if (made := twin.made()) is not None]
        if len(found) < len(self._twins):
            self._twins = [twin for twin, _ in found]
        return found

    def is_current(self) -> bool:
        """Whether the model still consists of the parts that it consisted of."""
        return all(_is_same(_form(twin.model), twin.form) for twin in self._twins)

    def renew(self, memo: Memo) -> None:
        """Make anew, in place, every part whose own children, parameters, buffers or class have changed.

        Other parts stay as they are. `memo` has the module's parameters, by the ids of those of the model.
        """
        twins = self.twins()
        known = {id(twin.model): twin for twin, _ in twins}
        memo |= {id(twin.model): made for twin, made in twins}
        for twin, made in twins:
            memo |= {id(b): made._buffers[key] for key, b in twin.model._buffers.items() if key in made._buffers}
        changed = [(twin, made) for twin, made in twins if not _is_same(_form(twin.model), twin.form)]
        _leave_out_wrappers(self._model, memo)
        states = [copy.deepcopy(_state(twin.model), memo) for twin, _ in changed]
        for (twin, made), state in zip(changed, states, strict=True):
            state["training"] = made.training
            made.__class__ = type(twin.model)  # a layer that is parametrized gets a class of its own
            vars(made).clear()
            made.__setstate__(state)  # type: ignore[no-untyped-call]
        training = twins[0][1].training
        found: dict[int, Twin] = {}
        for _, _, model in modules.walk(self._model):
            each = known.get(id(model)) or self._new(model, memo, training)
            if each is not None:
                each.form = _form(model)
                found[id(model)] = each
        self._twins = list(found.values())

    def _new(self, model: nn.Module, memo: Memo, training: bool) -> Twin | None:
        made = memo.get(id(model))
        if made is None:  # it belongs to a part that nobody holds any more
            return None
        made.training = training
        return Twin(model, ref(made), [])


def pairs(twins: Iterable[tuple[Twin, nn.Module]]) -> Iterator[tuple[Twin, str, Tensor, Tensor]]:
    """Yield each part with the keys of its parameters, the model's parameter and that of the module made from it."""
    for twin, made in twins:
        for key, p in twin.model._parameters.items():
            q = modules.held(made._parameters, key)
            if p is not None and q is not None:
                yield twin, key, p, q


def replicated(model: nn.Module, memo: Memo) -> nn.Module:
    """Return a deep copy of a model without its wrappers; `memo` has what is not to be copied, by ids."""
    _leave_out_wrappers(model, memo)
    root = model if isinstance(model, Several) else next(modules.walk(model))[2]
    made: nn.Module = copy.deepcopy(root, memo)
    return made


def without_graphs(model: nn.Module) -> Memo:
    """Return what deepcopy must not meet: tensors with a graph, which modules keep beside their parameters.

    Such is the weight that `torch.nn.utils.weight_norm` computes before every forward. torch refuses to copy them.
    """
    found: Memo = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                found[id(value)] = value.detach()
    return found


def _leave_out_wrappers(model: nn.Module, memo: Memo) -> None:
    for wrapper, inner in modules.wrappers(model):
        if id(wrapper) not in memo:
            memo[id(wrapper)] = copy.deepcopy(inner, memo)


def _by_place(root: nn.Module) -> dict[tuple[str, int], nn.Module]:
    """Return modules by prefix, and by a number if several models have the same prefixes."""
    found: dict[tuple[str, int], nn.Module] = {}
    many: Counter[str] = Counter()
    for prefix, _, module in modules.walk(root):
        found[prefix, many[prefix]] = module
        many[prefix] += 1
    return found


def _state(module: nn.Module) -> dict[str, Any]:
    """Return what a module holds, and what a copy of it gets."""
    if hasattr(module, "__deepcopy__"):  # as a layer that is parametrized, which refuses __getstate__
        return dict(vars(module))
    state: dict[str, Any] = module.__getstate__()  # type: ignore[no-untyped-call]
    return state


def _form(module: nn.Module) -> list[object]:
    """Return what a module consists of; two forms are the same if they have the very same objects."""
    if isinstance(
        module, torch.jit.ScriptModule
    ):  # always the same, and its dicts are made anew when they are looked at
        return [type(module)]
    children, parameters = module._modules, module._parameters
    return [
        type(module),
        *children.keys(),
        *children.values(),
        *parameters.keys(),
        *parameters.values(),
        *module._buffers.keys(),
    ]


def _is_same(form: list[object], other: list[object]) -> bool:
    return len(form) == len(other) and all(map(is_, form, other))
