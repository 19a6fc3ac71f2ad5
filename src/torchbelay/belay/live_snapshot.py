"""What a live module, its model and its average were at the last step. If they still are, a step looks no closer."""

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, call, is_, methodcaller
from typing import Any

from torch import Tensor, nn

from torchbelay.ops import arithmetic

from .average import WholeAverage
from .replica import Part
from .shard import local

_children, _parameters, _buffers = (attrgetter(name) for name in ("_modules", "_parameters", "_buffers"))
_values = methodcaller("values")
_address = Tensor.data_ptr


class Snapshot:
    """Knows which tensors there were, and where the parameters were; of the module it keeps nothing alive.

    A parameter that is moved, cast or laid out anew gets other memory, so that its address tells. Of tensors that are
    copied only if they change, `watched`, it knows how often they were written to.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Part, nn.Module]],
        average: WholeAverage,
        writes: Iterable[tuple[Tensor, Tensor]],
        watched: Sequence[Tensor],
    ) -> None:
        self._model, self._made = [part.model for part, _ in parts], [part.made for part, _ in parts]
        self._average, self._cohorts = average, average.cohorts
        self._objects, self._addresses = self._of_model()
        tensors, self._ids, self._places = _of_module([made for _, made in parts])
        index = {id(t): i for i, t in enumerate(tensors)}
        self._writes = [(index[id(t)], source) for t, source in writes]
        self._watched, self._versions = watched, [t._version for t in watched]

    def renew(self) -> list[Tensor] | None:
        """Write what every step writes, and return the module's parameters; None if anything has changed."""
        cohorts = self._average.cohorts
        if len(cohorts) != len(self._cohorts) or not all(map(is_, cohorts, self._cohorts)):
            return None
        objects, addresses = self._of_model()
        if addresses != self._addresses or len(objects) != len(self._objects):
            return None
        if self._watched and [t._version for t in self._watched] != self._versions:
            return None
        made = list(map(call, self._made))
        if None in made or not all(map(is_, objects, self._objects)):
            return None
        tensors, ids, places = _of_module(made)
        if ids != self._ids or places != self._places:
            return None
        arithmetic.copy_([local(tensors[i]) for i, _ in self._writes], [local(source) for _, source in self._writes])
        return [t for t in tensors[: len(places)] if t is not None]

    def _of_model(self) -> tuple[list[Any], list[int]]:
        """Return all that the module was made from, and where the parameters are."""
        parameters = _all(_parameters, self._model)
        others = _all(_buffers, self._model) + _all(_children, self._model)
        objects = [*parameters, *others, *map(type, self._model), *self._average.buffers.values()]
        return objects, [_address(p) for p in parameters if p is not None]


def _of_module(made: Sequence[Any]) -> tuple[list[Any], list[int], list[int]]:
    """Return the module's parameters and buffers, their ids, and where the parameters are."""
    parameters = _all(_parameters, made)
    tensors = parameters + _all(_buffers, made)
    return tensors, list(map(id, tensors)), [0 if p is None else _address(p) for p in parameters]


def _all(slots: Any, modules: Sequence[Any]) -> list[Any]:
    return list(chain.from_iterable(map(_values, map(slots, modules))))
