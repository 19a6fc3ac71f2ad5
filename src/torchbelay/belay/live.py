"""What users hold of the averages of a Belay: modules, mappings, and tensors out of these.

While somebody looks at the memory of an average, `averaged()` may not put the weights there.
"""

from collections.abc import Callable, Iterator, Mapping
from weakref import WeakSet

import torch
from torch import Tensor, nn

from .average import WholeAverage
from .live_module import LiveModule, Origin
from .shard import local


class LiveTensors(Mapping[str, Tensor]):
    """An average by the names of its parameters, each as it is when it is looked up; nothing is copied.

    Tensors share the average's memory and have its dtype; do not write to them. If the model was moved, look them up
    again. Before the average begins, these are the weights.
    """

    def __init__(
        self,
        average: WholeAverage,
        waiting: Callable[[], Mapping[str, Tensor]],
        settle: Callable[[], None],
        follow: Callable[..., None],
    ) -> None:
        self.average, self._waiting, self._settle, self._follow = average, waiting, settle, follow

    def __getitem__(self, name: str) -> Tensor:
        self._settle()
        self._follow()
        entry = self.average.entries.get(name)
        return (self._waiting()[name] if entry is None else entry.w2).detach()

    def __iter__(self) -> Iterator[str]:
        self._follow(always=True)
        return iter([*self.average.entries, *self._waiting()])

    def __len__(self) -> int:
        return len(self.average.entries) + len(self._waiting())

    # One mapping is not another, and to compare tensors is not what == would mean.
    __eq__, __hash__ = object.__eq__, object.__hash__

    def __repr__(self) -> str:
        return f"<the average {self.average.name!r}: {len(self)} tensors>"


class Live:
    """The modules and mappings of a Belay that somebody still holds."""

    def __init__(self) -> None:
        self.modules: list[LiveModule] = []
        self._mappings: WeakSet[LiveTensors] = WeakSet()

    def add_module(self, origin: Origin, module: nn.Module) -> None:
        """Let a module be an average from now on, for as long as somebody holds it."""
        new = LiveModule(origin, module)
        new.follow(moved=False, first=True)
        self.modules = [*(each for each in self.modules if each.is_alive() and not each.contains(module)), new]

    def add_mapping(
        self,
        average: WholeAverage,
        waiting: Callable[[], Mapping[str, Tensor]],
        settle: Callable[[], None],
        follow: Callable[..., None],
    ) -> LiveTensors:
        """Return a new mapping, and know it for as long as somebody holds it."""
        mapping = LiveTensors(average, waiting, settle, follow)
        self._mappings.add(mapping)
        return mapping

    def prepare(self) -> None:
        """Let every module get the parts that its model has got; raises, before anything moves, if one cannot."""
        self.modules = [each for each in self.modules if each.is_alive()]
        for each in self.modules:
            each.prepare()

    def follow(self, *, moved: bool, part: Mapping[str, WholeAverage] | None = None) -> None:
        """Let every module be what its average is now, and forget those that nobody holds; arguments, see `Held`."""
        self.modules = [each for each in self.modules if each.is_alive()]
        for each in self.modules:
            each.follow(moved=moved, part=None if part is None else part[each.average.name])

    def shares(self, parameters: set[int]) -> bool:
        """Whether a module follows an average of a model that has one of these parameters, given by their ids."""
        return any(each.shares(parameters) for each in self.modules)

    def holds(self, average: WholeAverage) -> bool:
        """Whether somebody holds a module or a mapping of this average, or a tensor that shares its memory."""
        self.modules = [each for each in self.modules if each.is_alive()]
        held = [each.average for each in self.modules] + [each.average for each in self._mappings]
        return any(each is average for each in held) or any(_is_seen(local(e.w2)) for e in average.entries.values())


def _is_seen(t: Tensor) -> bool:
    """Whether other tensors share the memory of this one."""
    return torch._C._storage_Use_Count(t.untyped_storage()._cdata) > 2  # this tensor, and the storage as an object
