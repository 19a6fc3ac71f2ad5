"""Counting steps without waiting for a device to say whether they took place."""

import torch
from torch import Tensor

from torchbelay.ops.devices import is_capturing


class Clock:
    """The number of steps taken. Whether a step was skipped is settled when the count is read, not before.

    Kernels that find the numbers of a step by themselves read the count on their device. There it also counts steps
    that the host does not see: the replays of a captured graph.

    >>> clock = Clock()
    >>> clock.tick(None)
    >>> clock.tick(torch.tensor(0.0))  # mixed-precision training skipped this one
    >>> clock.count
    1
    """

    def __init__(self, count: int = 0) -> None:
        self._count = count
        self._unsettled: Tensor | None = None  # how many of the steps since the last reading took place
        self._there: dict[torch.device, Tensor] = {}  # the count on each device
        self._asked: torch.device | None = None  # the device whose count was asked for last
        self._replayed = False  # a captured graph counts too
        self.era = 0  # how often the count was set: steps of one era follow each other

    def on(self, device: torch.device) -> Tensor:
        """Return the count on a device, as a tensor that every step updates."""
        if device not in self._there:
            if is_capturing(device):
                raise RuntimeError(
                    "this graph would capture an average's first step on the device; take a step before capturing, as "
                    "the optimizer needs too"
                )
            with torch.inference_mode(False):  # later steps write to it, also outside
                self._there[device] = torch.tensor(self.count, dtype=torch.int64, device=device)
        self._asked = device
        return self._there[device]

    def tick(self, keep: Tensor | None, *, counted: bool = False, captured: bool = False) -> None:
        """Count a step. `keep`, if given, is 1 if the step took place and 0 if not, known on the device only.

        If `counted`, the device that asked for the count last has counted the step already. If `captured`, a graph will
        count it at every replay.
        """
        taken = None if keep is None else keep.to(torch.int64)
        if not counted or len(self._there) > 1:
            for device, count in self._there.items():
                if not (counted and device == self._asked):
                    count += 1 if taken is None else taken.to(device, non_blocking=True)
        if captured and self._there:
            self._replayed = True
        elif taken is None:
            self._count += 1
        else:
            self._unsettled = taken if self._unsettled is None else self._unsettled + taken

    @property
    def is_certain(self) -> bool:
        """Whether the host knows the count without waiting for a device."""
        return self._unsettled is None and not self._replayed

    @property
    def count(self) -> int:
        """The steps that took place; waits for the device only if one of them may have been skipped."""
        if self._replayed:
            self._count = int(next(iter(self._there.values())))
        elif self._unsettled is not None:
            self._count += int(self._unsettled)
        self._unsettled = None
        return self._count

    def set(self, count: int) -> None:
        """Begin again from another count; captured graphs go on from it too."""
        self._count, self._unsettled = count, None
        self.era += 1
        for there in self._there.values():
            there.fill_(count)
