"""The model holds an average for a while, and gets its weights back."""

from typing import Any

import torch
from torch import Tensor, nn

from . import _model
from ._average import Average, Entry
from .ops import foreach


class Swap:
    """Puts an average into the model when made; `undo()` puts the weights back, bit for bit.

    Where weights and average have one dtype they trade places in place. Elsewhere the average is rounded into the model
    and the weights are kept aside, so that neither loses a bit.
    """

    @torch.inference_mode(False)  # an evaluation under inference_mode must not leave such tensors behind
    @torch.no_grad()
    def __init__(self, model: nn.Module, average: Average, *, buffers: bool) -> None:
        self.average = average
        self._model = model
        narrow, wide = average.pairs(same_dtype=False)
        self._aside = {id(p): p.detach().clone() for p in narrow}
        self._slots: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []  # (slots, key, buffer, its values)
        for prefix, _, module in _model.walk(model) if buffers else ():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    self._slots.append((module._buffers, key, buffer, buffer.detach().clone()))
                    if prefix + key in average.buffers:
                        buffer.copy_(average.buffers[prefix + key])
        self._versions = [buffer._version for _, _, buffer, _ in self._slots]
        foreach.exchange_(*average.pairs(same_dtype=True))
        foreach.copy_(narrow, wide)

    @torch.inference_mode(False)
    @torch.no_grad()
    def undo(self) -> None:
        """Give the model its own weights and buffers; buffers that were changed meanwhile become the average's."""
        foreach.exchange_(*self.average.pairs(same_dtype=True))
        for entry in self.average.entries.values():
            if id(entry.w1) in self._aside:
                entry.w1.copy_(self._aside[id(entry.w1)])
        if self.changed_buffers():
            self.average.buffers = self.buffers()
        for slots, key, buffer, values in self._slots:
            slots[key] = buffer
            buffer.copy_(values)

    def changed_buffers(self) -> bool:
        """Whether anybody wrote to a buffer, or replaced it, since the swap."""
        return any(
            slots.get(key) is not buffer or buffer._version != version
            for (slots, key, buffer, _), version in zip(self._slots, self._versions, strict=True)
        )

    def buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers as they are in the model now."""
        return {name: b.detach().clone() for name, b in _model.named_buffers(self._model).items()}

    def weights(self, entry: Entry) -> Tensor:
        """Where w1 of an entry of any average is at present."""
        if id(entry.w1) in self._aside:
            return self._aside[id(entry.w1)]
        swapped = self.average.entries.get(entry.name)
        return entry.w1 if swapped is None else swapped.w2

    def value(self, entry: Entry, average: str) -> Tensor:
        """Where w2 of an entry of the average of that name is at present."""
        traded = average == self.average.name and id(entry.w1) not in self._aside
        return entry.w1.detach() if traded else entry.w2

    def own_buffers(self) -> dict[str, Tensor]:
        """The model's own buffers, by name, while the average's are in it."""
        values = {id(buffer): values for _, _, buffer, values in self._slots}
        return {name: values.get(id(b), b) for name, b in _model.named_buffers(self._model).items()}
