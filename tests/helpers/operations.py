"""What torch is asked to do inside a `with` block: numbers read, operations, and memory, counted as they pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors(tree: Any) -> list[Tensor]:
    """All tensors in a tree of arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Reading(TorchDispatchMode):
    """Counts the numbers that are read out of tensors: item, bool, int, float, if."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs or {})


class Operations(TorchDispatchMode):
    """Lists the names of all operations; calls `before`, if it is given, with each name and the list so far."""

    def __init__(self, before: Callable[[str, list[str]], None] = lambda name, done: None) -> None:
        super().__init__()
        self.names: list[str] = []
        self._before = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self._before(name, self.names)
        out = func(*args, **kwargs or {})
        self.names.append(name)
        return out


class Copies(TorchDispatchMode):
    """Keeps every tensor that is cloned."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if func is torch.ops.aten.clone.default:
            self.made.append(out)
        return out


class Scarcity(TorchDispatchMode):
    """Lets memory run out for every copy of more than a number of elements."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.refused, self._elements = 0, elements

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default and args[0].numel() > self._elements:
            self.refused += 1
            raise MemoryError("exhausted")
        return func(*args, **kwargs or {})


class Allocations(TorchDispatchMode):
    """Lists how many elements each operation newly allocates; views of its arguments do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        given = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
        self.sizes.append(sum(t.numel() for t in tensors(out) if t.untyped_storage()._cdata not in given))
        return out


class Memory(TorchDispatchMode):
    """Measures the most bytes that live at one time, of all that is allocated inside."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._old: set[int] = set()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._old |= {t.untyped_storage()._cdata for t in tensors((args, kwargs))} - set(self._storages)
        out = func(*args, **kwargs or {})
        for t in tensors(out):
            storage = t.untyped_storage()
            if storage._cdata not in self._old:
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        """Bytes that are still alive."""
        self._storages = {key: each for key, each in self._storages.items() if not each[0].expired()}
        return sum(size for _, size in self._storages.values())


def foreach_calls(step: Callable[[], Any]) -> int:
    """How many operations on whole lists of tensors a step asks for."""
    with Operations() as asked:
        step()
    return sum(name.startswith("_foreach") for name in asked.names)
