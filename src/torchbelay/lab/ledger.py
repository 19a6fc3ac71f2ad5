"""Counts bytes: those of tensors, and the most that are alive at a time while a block runs."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors(tree: Any) -> list[Tensor]:
    """Return all tensors of a tree of lists and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def count_bytes(counted: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors."""
    return sum(t.numel() * t.element_size() for t in counted)


class Ledger(TorchDispatchMode):
    """Watches the allocations inside a block: `peak` is the largest number of bytes alive at a time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive, self.peak = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
        for t in tensors(out):
            if t.untyped_storage().data_ptr() not in given:  # neither in place nor a view
                self._count(t.untyped_storage().nbytes())
                weakref.finalize(t, self._count, -t.untyped_storage().nbytes())
        return out

    def _count(self, change: int) -> None:
        self.alive += change
        self.peak = max(self.peak, self.alive)
