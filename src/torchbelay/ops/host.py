"""Averages in host memory, of weights that may be on a GPU.

Piece by piece an average is copied to the weights' device, moved there by the same code as any other, and copied back.
That runs on a stream of its own, beside the next forward and backward, which only read the weights; the next step waits
for it, on the device. On the device it takes a scratch buffer of bounded size. Weights on the host take the same way,
one thing after the other.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from . import arithmetic
from .arithmetic import Swing, Tensors
from .backend import IMPLEMENTATIONS, Count, Foreach, Lists, Motion, Move, Ready, Reference


class Host:
    """Averages that only watch, kept in host memory."""

    name = "host"

    def __init__(self, impl: str = "auto") -> None:
        if impl == "triton":
            raise ValueError(
                "impl='triton' does not go with device='cpu': averages in host memory are moved piece by piece; use "
                "impl='auto'"
            )
        self._inner = IMPLEMENTATIONS["foreach" if impl == "auto" else impl]
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._held: list[object] = []  # what a stream may still be reading

    def counts(self, lists: Lists) -> bool:
        """Never: the host knows the numbers."""
        return False

    def used_for(self, lists: Lists) -> str:
        """How it is moved, and where it is kept."""
        return f"{self._inner.name}, kept in host memory"

    def prepare(self, moves: Sequence[Move], count: Count) -> Ready:
        """Copy w1 where a coupling cannot do without, and let the coming step wait for what the last one left to do."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        self._held = []
        return _Ready(self, self._inner, moves)

    def exchange_(self, x: Tensors, y: Tensors) -> None:
        """Trade contents, piece by piece through the device."""
        arithmetic.exchange_(x, y)

    def wait(self) -> None:
        """Return when everything is in host memory."""
        for stream in self._streams.values():
            stream.synchronize()
        self._held = []

    @contextmanager
    def beside(self, device: torch.device, *held: object) -> Iterator[None]:
        """A stream of our own, which goes on from where the device is now; `held` must live until it is done."""
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

    def rejoin(self, device: torch.device) -> None:
        """Let the device wait for what is under way: the weights are about to be written."""
        if device in self._streams:
            torch.cuda.current_stream(device).wait_stream(self._streams[device])


class _Ready:
    def __init__(self, host: Host, inner: Foreach | Reference, moves: Sequence[Move]) -> None:
        self._host, self._inner = host, inner
        self._moves: list[tuple[Lists, Motion, list[Tensor] | None]] = []
        for lists, motion, _ in moves:
            assert motion is not None
            copy = [w.detach().clone() for w in lists.w1] if inner.needs_copy(motion) else None
            self._moves.append((lists, motion, copy))

    def before(self, keep: Tensor | None) -> None:
        for lists, motion, _ in self._moves:
            if self._inner.name == "foreach" and motion.leads:
                device = lists.w1[0].device
                with self._host.beside(device, keep, *(w.detach() for w in lists.w1)):
                    for w1, w2 in arithmetic._pieces(lists.w1, lists.w2):
                        there = _copies(w2, device)
                        self._inner.before(w1, there, motion, keep)
                        _return(w2, there)
                self._host.rejoin(device)

    def after(self, keep: Tensor | None) -> None:
        for lists, motion, copy in self._moves:
            if self._inner.name == "foreach" and not motion.trails:
                continue
            device = lists.w1[0].device
            with self._host.beside(device, keep, copy, *(w.detach() for w in lists.w1)):
                columns = [lists.w1, lists.w2] + ([] if copy is None else [copy]) + ([lists.v2] if lists.v2 else [])
                for w1, w2, *rest in arithmetic._pieces(*columns):
                    before = None if copy is None else rest.pop(0)
                    there, swing = _copies(w2, device), motion.swing2
                    if swing is not None:
                        swing = Swing(_copies(rest[0], device), swing.inertia)
                    self._inner.after(w1, there, before, motion._replace(swing2=swing), keep)
                    _return(w2, there)
                    if swing is not None:
                        _return(rest[0], swing.v)


def _copies(tensors: Tensors, device: torch.device) -> list[Tensor]:
    return [t.to(device, non_blocking=True, copy=True) for t in tensors]


def _return(tensors: Tensors, there: Tensors) -> None:
    for own, new in zip(tensors, there, strict=True):
        own.copy_(new, non_blocking=True)
