"""What a live module, its model and its average were at the last step. If they still are, a step looks no closer."""

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, call, is_, methodcaller
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor, nn

from torchbelay.ops import arithmetic

from .average import WholeAverage
from .modules import held
from .replica import Twin, pairs
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
        twins: Sequence[tuple[Twin, nn.Module]],
        average: WholeAverage,
        writes: Iterable[tuple[Tensor, Tensor]],
        watched: Sequence[Tensor],
    ) -> None:
        self._model, self._made = [twin.model for twin, _ in twins], [twin.made for twin, _ in twins]
        self._average, self._cohorts = average, average.cohorts
        self._objects, self._addresses = self._objects_now(), self._addresses_now()
        tensors, self._ids, self._places = _of_module([made for _, made in twins])
        index = {id(t): i for i, t in enumerate(tensors)}
        self._writes = [(index[id(t)], source) for t, source in writes]
        self._watched, self._versions = watched, [t._version for t in watched]
        self._rows = _rows(twins, {id(tensors[i]) for i, _ in self._writes})

    def renew(self, part: WholeAverage | None) -> list[Tensor] | None:
        """Write what every step writes, and return the module's parameters; None if anything has changed.

        If only a `part` of the average has moved, this looks at its parameters alone.
        """
        return self._renew_all() if part is None else self._renew_part(part)

    def _renew_all(self) -> list[Tensor] | None:
        cohorts = self._average.cohorts
        if len(cohorts) != len(self._cohorts) or not all(map(is_, cohorts, self._cohorts)):
            return None
        made = list(map(call, self._made))
        if None in made or not self.is_model() or self._addresses_now() != self._addresses or self._has_changed():
            return None
        tensors, ids, places = _of_module(made)
        if ids != self._ids or places != self._places:
            return None
        arithmetic.copy_([local(tensors[i]) for i, _ in self._writes], [local(source) for _, source in self._writes])
        return [t for t in tensors[: len(places)] if t is not None]

    def _renew_part(self, part: WholeAverage) -> list[Tensor] | None:
        known = set(map(id, self._cohorts))
        if not all(id(cohort) in known for cohort in part.cohorts) or self._has_changed():
            return None
        parameters: list[Tensor] = []
        copies: list[tuple[Tensor, Tensor]] = []
        for e in part.entries.values():
            for row in self._rows.get(id(e.w1), [None]):
                q = None if row is None else row.tensor(e.w1)
                if row is None or q is None:
                    return None
                parameters.append(q)
                if row.copied:
                    copies.append((q, e.w2))
        arithmetic.copy_([q for q, _ in copies], [source for _, source in copies])
        return parameters

    def _has_changed(self) -> bool:
        """Whether something was written to that is copied only then."""
        return bool(self._watched) and [t._version for t in self._watched] != self._versions

    def is_model(self) -> bool:
        """Whether the model, and the averaged buffers, still consist of the same objects."""
        now = self._objects_now()
        return len(now) == len(self._objects) and all(map(is_, now, self._objects))

    def _objects_now(self) -> list[Any]:
        slots = [_all(each, self._model) for each in (_parameters, _buffers, _children)]
        return [*chain.from_iterable(slots), *map(type, self._model), *self._average.buffers.values()]

    def _addresses_now(self) -> list[int]:
        return [_address(p) for p in _all(_parameters, self._model) if p is not None]


class _Row(NamedTuple):
    """A parameter of the module, and that of the model that it was made from, as they were."""

    made: "ref[nn.Module]"
    key: str
    id: int
    address: int
    address_of_model: int
    copied: bool  # at every step, because it does not share the average's memory

    def tensor(self, p: Tensor) -> Tensor | None:
        """Return the module's parameter; None if it, or the model's, is not what it was."""
        made = self.made()
        q = None if made is None else held(made._parameters, self.key)
        is_known = q is not None and id(q) == self.id and _address(q) == self.address
        return q if is_known and _address(p) == self.address_of_model else None


def _rows(twins: Sequence[tuple[Twin, nn.Module]], copied: set[int]) -> dict[int, list[_Row]]:
    """Return the parameters of the module, by the ids of those of the model."""
    found: dict[int, list[_Row]] = {}
    for twin, key, p, q in pairs(twins):
        row = _Row(twin.made, key, id(q), _address(q), _address(p), id(q) in copied)
        found.setdefault(id(p), []).append(row)
    return found


def _of_module(made: Sequence[Any]) -> tuple[list[Any], list[int], list[int]]:
    """Return the module's parameters and buffers, their ids, and where the parameters are."""
    parameters = _all(_parameters, made)
    tensors = parameters + _all(_buffers, made)
    return tensors, list(map(id, tensors)), [0 if p is None else _address(p) for p in parameters]


def _all(slots: Any, modules: Sequence[Any]) -> list[Any]:
    return list(chain.from_iterable(map(_values, map(slots, modules))))
