"""Facts about tensors that are found out once, and looked at again before every step: are they still true?"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

TensorGuards: Any = None
with suppress(ImportError, AttributeError):  # torch's own, and not promised: without it facts are found out every time
    from torch._C._dynamo import guards

    TensorGuards = guards.TensorGuards


class Fact:
    """Something that follows from the types, dtypes, devices, sizes and strides of tensors.

    `holds` finds it out, in a loop over the tensors for each thing that it looks at. If the tensors are alike to those
    of the last time, there is no need to. One call of C++, which torch's compiler has for its guards, compares all of
    them. That call also looks at things that do not matter here, such as `requires_grad`. So its yes is an answer, and
    its no is none.

    >>> import torch
    >>> flat = Fact(lambda tensors: all(t.dim() == 1 for t in tensors))
    >>> flat([torch.ones(3)]), flat([torch.ones(3, 3)])
    (True, False)
    """

    def __init__(self, holds: Callable[[Sequence[Tensor]], bool]) -> None:
        self._holds = holds
        self._guards: Any = None
        self._count = 0
        self._comparable = True  # torch can compare these tensors

    def __call__(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the fact holds for these tensors."""
        if self._guards is not None and len(tensors) == self._count and self._guards.check(*tensors):
            return True
        self._guards = None
        if not self._holds(tensors):
            return False
        if self._comparable and tensors:
            self._guards, self._count = _guards(tensors), len(tensors)
            self._comparable = self._guards is not None
        return True


def _guards(tensors: Sequence[Tensor]) -> Any:
    """Return what compares tensors with these, without keeping them alive; None if there is no such thing."""
    if TensorGuards is None:
        return None
    try:
        found = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        return found if found.check(*tensors) else None  # not so if one of them is there twice
    except (TypeError, RuntimeError):  # another version of torch, or tensors that have no strides
        return None
