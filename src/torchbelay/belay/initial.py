"""The weights at which averages began, for readouts that need them."""

from typing import Protocol

import torch
from torch import Tensor

from .shard import local


class Averaged(Protocol):
    """A parameter and its average."""

    w1: Tensor
    w2: Tensor

    @property
    def value(self) -> Tensor:
        """The average's values."""


class Initial:
    """w0: copies of the weights at which their averages began, one per parameter, whatever the number of averages.

    They have the dtype of the averages and are on their devices. Only a new beginning changes them. If they are not
    `kept`, there are none, and all of this does nothing.
    """

    def __init__(self, *, kept: bool) -> None:
        self.kept = kept
        self._each: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of w1: w1, and w0

    def of(self, w1: Tensor) -> Tensor:
        """Return the initial weights of a parameter."""
        return self._each[id(w1)][1]

    def knows(self, w1: Tensor) -> bool:
        """Whether the initial weights of a parameter are kept."""
        return id(w1) in self._each

    @torch.inference_mode(False)
    @torch.no_grad()
    def follow(self, e: Averaged) -> None:
        """Go where the average of a parameter is; if none are kept of it, its average has begun just now: copy it."""
        if not self.kept:
            return
        if not self.knows(e.w1):
            self._each[id(e.w1)] = e.w1, e.value.detach().clone()
        elif local(self.of(e.w1)).device != local(e.w2).device:
            self._each[id(e.w1)] = e.w1, self.of(e.w1).to(local(e.w2).device)

    @torch.inference_mode(False)
    @torch.no_grad()
    def renew(self, e: Averaged) -> None:
        """Take the average of a parameter, which has begun again just now."""
        # The shapes of the wholes too: one rank's part may have the old size, another's not.
        old = self.of(e.w1) if self.knows(e.w1) else None
        if old is not None and old.shape == e.w2.shape and local(old).shape == local(e.w2).shape:
            local(old).copy_(local(e.value))
        else:
            self.forget(e.w1)
            self.follow(e)

    def forget(self, w1: Tensor) -> None:
        """Keep nothing of a parameter any more."""
        self._each.pop(id(w1), None)
