"""Which parameters are averaged: those that the optimizer holds, by the names that the model gives them."""

import operator
from collections.abc import Collection
from copy import copy
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from torchbelay.physics.method import Method

from . import modules
from .averages import Average, Found
from .shard import reshard
from .validate import check_method


class Roster:
    """The parameters of every group of the optimizer as last seen; without one, all that require gradients."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._model, self._optimizer = model, optimizer
        self._held: list[list[Tensor]] = []
        self._all: list[Tensor] | None = None
        self._held = [list(group) for group in self._look()]

    def _look(self) -> list[list[Tensor]]:
        if self._optimizer is None:
            reshard(self._model)
            # what was ever trained stays, as it would in an optimizer
            known = {id(p) for group in self._held for p in group}
            return [[p for p in self._model.parameters() if p.requires_grad or id(p) in known]]
        return [group["params"] for group in self._optimizer.param_groups]

    def is_current(self) -> bool:
        """Whether the optimizer holds what it held."""
        now = self._look()
        return [len(group) for group in now] == [len(group) for group in self._held] and all(
            all(map(operator.is_, new, old)) for new, old in zip(now, self._held, strict=True)
        )

    def renewed(self) -> "Roster":
        """The same, looked at again."""
        new = copy(self)
        new._all = None
        new._held = [list(group) for group in self._look()]
        return new

    @property
    def parameters(self) -> list[Tensor]:
        """All of them; the same list every time."""
        if self._all is None:
            self._all = [p for group in self._held for p in group]
        return self._all

    def groups(self) -> dict[int, int]:
        """The group of each parameter, by its id."""
        return {id(p): group for group, parameters in enumerate(self._held) for p in parameters}

    def lr(self, group: int) -> Any:
        """What the optimizer says of a group's learning rate, if anything."""
        return None if self._optimizer is None else self._optimizer.param_groups[group].get("lr")

    def wanted(self, averages: Collection[Average], *, every: int) -> dict[str, list[Found]]:
        """What each average is to follow; refuses what cannot be averaged, changing nothing."""
        names = {id(p): name for name, p in modules.named_parameters(self._model).items()}
        found: dict[str, list[Found]] = {average.name: [] for average in averages}
        checked: dict[tuple[Any, str], Method] = {}  # equal methods become one, so that their tensors move together
        for group, parameters in enumerate(self._held):
            for index, p in enumerate(parameters):
                name = self._name(names, p, group, index)
                for average in averages if p.is_floating_point() or p.is_complex() else ():
                    method = average.rule(name, p)
                    if method is None:
                        continue
                    key = (_identity(method), average.name)
                    if key not in checked:
                        lr = float(self.lr(group) or 0.0)
                        check_method(
                            method,
                            lr,
                            pulls=average.pulls,
                            hosted=average.hosted,
                            average=average.name,
                            every=every,
                        )
                        checked[key] = method
                    found[average.name].append((name, p, checked[key], group))
        return found

    def _name(self, names: dict[int, str], p: Tensor, group: int, index: int) -> str:
        if id(p) not in names:
            raise ValueError(
                f"parameter {index} of the optimizer's group {group}, of shape {tuple(p.shape)}, is not in the model; "
                f"pass the {type(self._model).__name__} whose parameters the optimizer holds"
            )
        if p.is_meta:
            raise ValueError(
                f"parameter {names[id(p)]!r} is on the meta device; materialise the model (to_empty, then load or "
                "initialise) before averaging it"
            )
        return names[id(p)]


def _identity(method: Method) -> object:
    """What equal methods share."""
    try:
        hash(method)
    except TypeError:
        return id(method)
    return method
