"""Facts about tensors that are found once, and then asked for at every step: is it still true?"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

try:  # torch's own, and not for everybody: without it facts are looked at one by one
    from torch._C._dynamo.guards import TensorGuards  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    TensorGuards = None


class Fact:
    """Something that follows from the types, dtypes, devices, sizes and strides of tensors.

    `holds` finds it out, which takes a loop over the tensors for each thing that it looks at. As long as the tensors are
    alike to those of the last time, there is no need to: one call of C++, which torch's compiler has for its guards,
    compares all of them. That call may also say that tensors are not alike if they are, for instance within autocast
    and outside of it. So only its yes is an answer.

    >>> import torch
    >>> flat = Fact(lambda tensors: all(t.dim() == 1 for t in tensors))
    >>> flat([torch.ones(3)]), flat([torch.ones(3, 3)])
    (True, False)
    """

    def __init__(self, holds: Callable[[Sequence[Tensor]], bool]) -> None:
        self._holds = holds
        self._guards: Any = None
        self._count = 0

    def __call__(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the fact holds for these tensors."""
        if self._guards is not None and len(tensors) == self._count and self._guards.check(*tensors):
            return True
        self._guards = None
        if not self._holds(tensors):
            return False
        self._guards, self._count = _guards(tensors), len(tensors)
        return True


def _guards(tensors: Sequence[Tensor]) -> Any:
    """Return what compares tensors with these, without keeping them alive; None if there is no such thing."""
    if TensorGuards is None or not tensors:
        return None
    try:
        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except (TypeError, RuntimeError):  # another version of torch, or tensors that have no strides
        return None
