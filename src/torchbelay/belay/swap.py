"""Putting an average into the model for a while, and the weights back."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from torchbelay.ops import arithmetic
from torchbelay.ops.backend import Backend
from torchbelay.physics.warnings import warn

from . import modules
from .average import Average, Entry, local_parts
from .shard import local, reshard


class Swap:
    """Puts an average into the model when constructed; `undo()` puts the weights back, bit for bit.

    If weights and average have one dtype, they trade places in place. If not, the average is rounded into the model and
    the weights are set aside, so that neither loses a bit. If construction fails, everything is as it was.
    """

    @torch.inference_mode(False)  # an evaluation under inference_mode must not leave such tensors behind
    @torch.no_grad()
    def __init__(self, model: nn.Module, average: Average, backend: Backend, *, buffers: bool) -> None:
        self.average, self._backend = average, backend
        self._model = model
        reshard(model)  # an FSDP root that keeps what it gathered would not see the swap
        entries = average.entries.values()
        self._traded = [e for e in entries if e.w1.dtype == e.w2.dtype]
        rounded = [e for e in entries if e.w1.dtype != e.w2.dtype]
        # All that needs memory comes first: when it runs out, nothing has moved yet.
        self._aside = {id(e.w1): local(e.w1).detach().clone() for e in rounded}
        self._slots: list[tuple[dict[str, Any], str, Tensor]] = []
        self._own: dict[int, Tensor] = {}  # copies of the model's buffers by id, one per buffer that modules share
        for _, _, module in modules.walk(model) if buffers else ():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    self._slots.append((module._buffers, key, buffer))
                    if id(buffer) not in self._own:
                        self._own[id(buffer)] = buffer.detach().clone()
        backend.exchange_(*local_parts(self._traded))
        arithmetic.copy_(*local_parts(rounded))
        named = modules.named_buffers(model)
        for name in average.buffers.keys() & named.keys() if buffers else ():
            named[name].copy_(average.buffers[name])
        self._versions = [buffer._version for _, _, buffer in self._slots]

    @torch.inference_mode(False)
    @torch.no_grad()
    def undo(self) -> None:
        """Give the model its own weights and buffers; buffers that were changed meanwhile become the average's."""
        reshard(self._model)  # what was gathered of the average inside must not be trained
        self._backend.exchange_(*local_parts(e for e in self._traded if e.w1.dtype == e.w2.dtype))
        self._undo_converted()
        for entry in self.average.entries.values():
            if id(entry.w1) in self._aside:
                local(entry.w1).copy_(self._aside[id(entry.w1)])
        if self.changed_buffers():
            self.average.buffers = self.buffers()
        for slots, key, buffer in self._slots:
            slots[key] = buffer
            buffer.copy_(self._own[id(buffer)])

    def _undo_converted(self) -> None:
        """Handle a model that was converted inside the block: its dtype stays, and the average was rounded to it."""
        converted = [e for e in self._traded if e.w1.dtype != e.w2.dtype]
        for w1, w2 in zip(*local_parts(converted), strict=True):
            weights = w2.clone()
            w2.copy_(w1)
            w1.copy_(weights)
        if converted:
            warn(f"the model was converted to {converted[0].w1.dtype} inside averaged(): the average was rounded to it")

    def changed_buffers(self) -> bool:
        """Whether a buffer was written to or replaced since the swap."""
        return any(
            slots.get(key) is not buffer or buffer._version != version
            for (slots, key, buffer), version in zip(self._slots, self._versions, strict=True)
        )

    def buffers(self) -> dict[str, Tensor]:
        """Return copies of the buffers as they are in the model now."""
        return {name: b.detach().clone() for name, b in modules.named_buffers(self._model).items()}

    def weights(self, entry: Entry) -> Tensor:
        """Return the local part of w1 of an entry of any average, wherever it is at present."""
        if id(entry.w1) in self._aside:
            return self._aside[id(entry.w1)]
        swapped = self.average.entries.get(entry.name)
        return local(entry.w1 if swapped is None else swapped.w2)

    def value(self, entry: Entry, average: str) -> Tensor:
        """Return w2 of an entry of the average of that name, wherever it is at present."""
        traded = average == self.average.name and id(entry.w1) not in self._aside
        return entry.w1.detach() if traded else entry.w2

    def own_buffers(self) -> dict[str, Tensor]:
        """Return the model's own buffers, by name, while the average's are in the model."""
        return {name: self._own.get(id(b), b) for name, b in modules.named_buffers(self._model).items()}


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold a Ctrl-C back until the block is done, because between two copies it would lose weights."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])
