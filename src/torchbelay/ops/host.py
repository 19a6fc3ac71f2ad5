"""The backend for averages on a device of their own: in host memory, for weights on a GPU, or on another GPU.

An average is copied to the weights' device piece by piece, moved there by the code that moves any other average, and
copied back. On a GPU this runs on a stream of its own, beside the next forward and backward, which only read the
weights. The next step waits for that stream, on the device. The scratch buffer on the device has a bounded size.
Weights elsewhere take the same way, one piece after the other, and the host waits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from . import arithmetic
from .foreach import Foreach
from .lists import ListBackend, PreparedLists
from .reference import Reference
from .step import Count, Motion, Move, Piece, Swing, TensorGroup, Tensors


class Host(ListBackend):
    """Averages that only watch, kept on the device `home`."""

    name = "host"

    def __init__(self, impl: str, home: torch.device) -> None:
        if impl == "triton":
            raise ValueError(
                f"impl='triton' does not go with device={str(home)!r}: averages that are kept there are moved piece by "
                "piece; use impl='auto'"
            )
        super().__init__()
        self._home = home
        self._inner = Reference() if impl == "reference" else Foreach()
        self.copies_always = self._inner.copies_always
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._held: list[object] = []  # what a stream may still be reading

    def used_for(self, group: TensorGroup) -> str:
        """The code that moves the group, and where its average is kept."""
        return f"{self._inner.name}, kept {'in host memory' if self._home.type == 'cpu' else f'on {self._home}'}"

    def prepare(self, moves: Sequence[Move], count: Count, *, capturing: bool = False) -> PreparedLists:
        """Let the coming step wait for the last one's copies, then copy w1 for motions that cannot do without."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        self._held = []
        return super().prepare(moves, count)

    def wait(self) -> None:
        """Return when everything is where it is kept."""
        for stream in self._streams.values():
            stream.synchronize()
        self._held = []

    def move(self, group: TensorGroup, motion: Motion, copy: Tensors | None, keep: Tensor | None) -> None:
        """Move the average, and its velocity if it has one."""
        self._move(group, motion, copy, keep, None)

    def move_planes(
        self, group: TensorGroup, motion: Motion, copy: Tensors | None, keep: Tensor | None, step: Tensor
    ) -> None:
        """Move an average of 24 bits, and its velocity if it has one."""
        self._move(group, motion, copy, keep, step)

    def _move(
        self, group: TensorGroup, motion: Motion, copy: Tensors | None, keep: Tensor | None, step: Tensor | None
    ) -> None:
        device = group.w1[0].device
        with self._beside(device, keep, step, copy, *(w.detach() for w in group.w1)):
            columns = [each for each in (copy, group.v2, group.low, group.places) if each]
            for w1, w2, *rest in arithmetic.pieces(group.w1, group.w2, *columns):
                before = None if copy is None else rest.pop(0)
                there, swing = _copies(w2, device), motion.swing2
                velocities = rest.pop(0) if group.v2 else []
                if swing is not None:
                    swing = Swing(_copies(velocities, device), swing.inertia)
                low, places = rest or ([], [])
                piece = Piece(w1, there, _copies(low, device), places, group.born)
                how = replace(motion, swing2=swing)
                if step is None:
                    self._inner.move(piece, how, before, keep)
                else:
                    self._inner.move_planes(piece, how, before, keep, step)
                _return(w2, there)
                _return(low, piece.low)
                if swing is not None:
                    _return(velocities, swing.v)

    @contextmanager
    def _beside(self, device: torch.device, *held: object) -> Iterator[None]:
        """Run the block on a stream of its own, from where the device is now; `held` lives until that is done."""
        if device.type != "cuda" or not torch.cuda.is_available():
            yield
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        self._held += held
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield


def _copies(tensors: Tensors, device: torch.device) -> list[Tensor]:
    # Without a stream of its own (the weights are not on a GPU), nothing would wait for what is copied in the back.
    return [t.to(device, non_blocking=device.type == "cuda", copy=True) for t in tensors]


def _return(tensors: Tensors, there: Tensors) -> None:
    for own, new in zip(tensors, there, strict=True):
        own.copy_(new, non_blocking=new.device.type == "cuda")
