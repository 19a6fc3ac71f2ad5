"""Parameters that leave the model while the optimizer trains them on: exports have no place for their average."""

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, call, getitem
from typing import Protocol
from weakref import ref

from torch import Tensor, nn

from torchbelay.physics.warnings import warn

from . import modules
from .parameters import Names, Parameters, why_lost
from .shard import is_sharded

EVERY = 16  # steps between two looks


class Averaged(Protocol):
    """The averages of what one optimizer trains."""

    parameters: Parameters

    def followed(self) -> list[tuple[str, Tensor]]:
        """Return the name and the tensor of every parameter that is averaged, or will be."""

    def refresh_names(self, names: Names | None = None) -> None:
        """Call every entry by the name that the model has for its parameter now."""


class Departures:
    """Warns, once, if a parameter that is averaged and trained is no longer in the model.

    It knows which slot of which module held each parameter, and each module, and looks in one pass without a loop in
    Python whether all still do. Only if one does not, the model is asked for its names. Each optimizer asks for a look
    before every 16th of its steps. Sharded models are left out: the slots of FSDP hold other tensors now and then.
    """

    def __init__(self, model: nn.Module, everyone: Iterable[Averaged]) -> None:
        self._model, self._everyone, self._ended = model, list(everyone), False
        self._excused: set[int] = set()  # the optimizers, by their averages, that need not look the next time
        self._held: list[ref[Parameters]] = []  # what is remembered here keeps no tensor alive
        self._owners: list[ref[nn.Module]] = []  # of the parameters
        self._parents: list[ref[nn.Module]] = []  # of the modules
        self._keys: list[str] = []  # of the parameters, then of the modules, in the slots of those
        self._ids: list[int] = []

    def look(self, asking: Averaged) -> None:
        """Warn if a parameter has left the model, and call parameters by the names that they have now.

        Of several optimizers that step in turn only one looks: its look excuses each of the others from the next one.
        """
        if id(asking) in self._excused:
            self._excused.remove(id(asking))
            return
        self._excused = {id(each) for each in self._everyone if each is not asking}
        if not self._ended and not self._is_known():
            self._look_closer([averages.parameters for averages in self._everyone])

    def _is_known(self) -> bool:
        """Whether the optimizers hold what they held, and the modules too."""
        if [averages.parameters for averages in self._everyone] != [each() for each in self._held]:
            return False
        try:
            parameters = map(attrgetter("_parameters"), map(call, self._owners))
            children = map(attrgetter("_modules"), map(call, self._parents))
            return list(map(id, map(getitem, chain(parameters, children), self._keys))) == self._ids
        except (AttributeError, KeyError):  # a module, or its slot, is gone
            return False

    def _look_closer(self, held: list[Parameters]) -> None:
        if any(is_sharded(p) for each in held for p in each.all):
            self._ended = True
            return
        # The next step of any other optimizer follows what it holds first.
        current = [averages for averages in self._everyone if averages.parameters.is_current()]
        names = modules.names_by_id(self._model)
        for name, p in (each for averages in current for each in averages.followed()):
            if id(p) not in names:
                self._ended = True
                warn(f"{why_lost(name)}. Until then its average goes on, but cannot be used, saved or reset")
                return
        if len(current) < len(self._everyone):
            return
        for averages in self._everyone:
            averages.refresh_names(names)
        self._remember(held)

    def _remember(self, held: list[Parameters]) -> None:
        """Take the slots of the parameters that the optimizers hold, and those of all modules."""
        wanted = {id(p) for each in held for p in each.all}
        everything = [(module, ref(module)) for module in self._model.modules()]
        owned = [(at, k, id(p)) for m, at in everything for k, p in m._parameters.items() if id(p) in wanted]
        children = [(at, k, id(child)) for m, at in everything for k, child in m._modules.items()]
        self._held = list(map(ref, held))
        self._owners, self._parents = [at for at, _, _ in owned], [at for at, _, _ in children]
        self._keys = [k for _, k, _ in owned + children]
        self._ids = [one for _, _, one in owned + children]
