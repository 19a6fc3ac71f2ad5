"""Which parameters are averaged: those that the optimizer holds, by the names that the model gives them."""

import operator
from collections.abc import Collection
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchbelay.physics.method import Method

from . import modules
from .average import Average, Wanted, key_of
from .models import Loose, Several
from .planes import check_weights
from .shard import reshard
from .validate import check_method

Names = dict[int, str]  # of parameters, by their ids


class Parameters:
    """The parameters of every group of the optimizer as last seen; without an optimizer, all that require gradients."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._model, self._optimizer = model, optimizer
        self.given_lr: float | None = None  # of a step that is taken by hand
        self._held: list[list[Tensor]] = []
        self._held = [list(group) for group in self._look()]
        self.all = [p for group in self._held for p in group]  # the same list for as long as the same are held

    def _look(self) -> list[list[Tensor]]:
        if self._optimizer is not None:
            return [group["params"] for group in self._optimizer.param_groups]
        if isinstance(self._model, Loose):
            return [list(self._model.parameters())]
        reshard(self._model)
        known = {id(p) for group in self._held for p in group}  # what was once trained stays, as in an optimizer
        return [[p for p in self._model.parameters() if p.requires_grad or id(p) in known]]

    def is_current(self) -> bool:
        """Whether the optimizer holds the parameters that it held."""
        now = self._look()
        if len(now) != len(self._held):
            return False
        for new, old in zip(now, self._held, strict=True):
            if len(new) != len(old) or not all(map(operator.is_, new, old)):
                return False
        return True

    def renewed(self) -> "Parameters":
        """Return the parameters as they are now."""
        new = copy(self)
        new._held = [list(group) for group in self._look()]
        new.all = [p for group in new._held for p in group]
        return new

    def groups(self) -> dict[int, int]:
        """Return the group of each parameter, by its id."""
        return {id(p): group for group, parameters in enumerate(self._held) for p in parameters}

    def number_of_groups(self) -> int:
        """Return how many groups the optimizer has."""
        return len(self._held)

    def lr(self, group: int) -> float | None:
        """Return the learning rate of a group; None if the optimizer, or `before_step(lr=...)`, gives none."""
        lr = self.given_lr if self._optimizer is None else self._optimizer.param_groups[group].get("lr")
        return None if lr is None else float(lr)

    def wanted(self, averages: Collection[Average], names: Names | None = None) -> dict[str, list[Wanted]]:
        """Return what each average is to follow; refuses what cannot be averaged, and changes nothing.

        `names` are those of the model's parameters, by id, if they are known: many optimizers ask for them at once.
        """
        names = modules.names_by_id(self._model) if names is None else names
        found: dict[str, list[Wanted]] = {average.name: [] for average in averages}
        checked: dict[tuple[Any, str], Method] = {}  # equal methods become one, so that their tensors move together
        for group, parameters in enumerate(self._held):
            for index, p in enumerate(parameters):
                if id(p) not in names and isinstance(self._model, Loose):
                    continue  # the tensors that were given are averaged, and no others
                if id(p) not in names:
                    raise ValueError(self._why_unnamed(averages, p, group, index))
                name = self._name(names, p)
                for average in averages if p.is_floating_point() or p.is_complex() else ():
                    method = average.rule(name, p)
                    if method is None:
                        continue
                    _refuse_sparse(name, p)
                    _refuse_narrow(name, p)
                    check_weights(name, p, average.bits)
                    key = (key_of(method), average.name)
                    if key not in checked:
                        check_method(
                            method,
                            0.0 if self._optimizer is None else self.lr(group) or 0.0,
                            pulls=average.pulls,
                            home=average.home,
                            average=average.name,
                            every=average.every,
                        )
                        checked[key] = method
                    found[average.name].append(Wanted(name, p, checked[key], group))
        return found

    def _why_unnamed(self, averages: Collection[Average], p: Tensor, group: int, index: int) -> str:
        for entry in (e for average in averages for e in average.entries.values()):
            if entry.w1 is p:
                return why_lost(entry.name)
        if not modules.named_parameters(self._model):
            return f"the model, {type(self._model).__name__}, has no parameters; pass the one that the optimizer trains"
        where = "in none of the models" if isinstance(self._model, Several) else "not in the model"
        return (
            f"parameter {index} of the optimizer's group {group}, of shape {tuple(p.shape)}, is {where}; {self._cure()}"
        )

    def _cure(self) -> str:
        """Return what to pass so that the model has all parameters that the optimizer holds."""
        known, kind = modules.names_by_id(self._model), type(self._model).__name__
        if isinstance(self._model, Several):
            all_models = "pass all models whose parameters the optimizer holds"
        elif any(id(p) in known for group in self._held for p in group):
            all_models = f"pass a list of this {kind} and all other modules whose parameters the optimizer holds"
        else:
            return f"pass the {kind} whose parameters the optimizer holds"
        return (
            f"{all_models}, with nn.ParameterList([tensor]) for a tensor that is in no module, or use "
            "Belay.from_parameters(...), which averages the tensors that it is given"
        )

    def _name(self, names: Names, p: Tensor) -> str:
        if is_lazy(p):
            raise ValueError(
                f"parameter {names[id(p)]!r} has no shape yet (a lazy module): call the model once on a batch before "
                "averaging it, and then make the optimizer"
            )
        if p.is_meta:
            raise ValueError(
                f"parameter {names[id(p)]!r} is on the meta device; materialise the model (to_empty, then load or "
                "initialise) before averaging it"
            )
        if (whole := getattr(p, "ds_numel", p.numel())) != p.numel():
            raise ValueError(
                f"parameter {names[id(p)]!r} holds {p.numel()} of its {whole} weights: DeepSpeed's ZeRO-3 has "
                "partitioned it; give the engine to torchbelay.integrations.deepspeed.attach"
            )
        return names[id(p)]


def why_lost(name: str) -> str:
    """Return what to say of a parameter that has an average, and that the optimizer holds but the model does not."""
    return (
        f"parameter {name!r} is no longer in the model, but the optimizer still trains it; it may have been tied, "
        "parametrized, pruned, deleted, moved to another device, or replaced by load_state_dict(assign=True): take it "
        "out of the optimizer, or make the optimizer and Belay anew"
    )


def _refuse_sparse(name: str, p: Tensor) -> None:
    """Refuse weights that are not one block of memory: torch has no operation with which their average would move."""
    if p.layout != torch.strided:
        raise ValueError(
            f"parameter {name!r} is sparse ({p.layout}), which cannot be averaged; make it dense, by p.to_dense(), "
            "take it out of the optimizer if it is frozen, or let the method be a function that returns None for it"
        )


def _refuse_narrow(name: str, p: Tensor) -> None:
    """Refuse weights of 8 bits and fewer: torch has no arithmetic for them, with which an average would move."""
    if p.element_size() < 2:
        raise ValueError(
            f"parameter {name!r} is {p.dtype}, which cannot be averaged; take it out of the optimizer if it is frozen, "
            "or let the method be a function that returns None for this parameter"
        )
