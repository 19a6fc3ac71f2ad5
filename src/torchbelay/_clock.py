"""Counting steps without asking the device whether they took place."""

import torch
from torch import Tensor


class Clock:
    """Steps taken. One that may have been skipped is settled when somebody reads the count, not before.

    >>> clock = Clock()
    >>> clock.tick(None)
    >>> clock.tick(torch.tensor(0.0))  # mixed-precision training skipped this one
    >>> clock.count
    1
    """

    def __init__(self, count: int = 0) -> None:
        self._count = count
        self._unsettled: Tensor | None = None  # how many of the steps since the last reading took place

    def tick(self, keep: Tensor | None) -> None:
        """Count a step; `keep`, if given, is 1 on the device where it took place and 0 where not."""
        if keep is None:
            self._count += 1
        else:
            taken = keep.to(torch.int64)
            self._unsettled = taken if self._unsettled is None else self._unsettled + taken

    @property
    def count(self) -> int:
        """Steps that took place; waits for the device only if one of them may have been skipped."""
        if self._unsettled is not None:
            self._count += int(self._unsettled)
            self._unsettled = None
        return self._count
