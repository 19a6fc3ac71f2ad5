"""Two lists of tensors that trade their contents in place, there and back, whatever interrupts them."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from . import arithmetic
from .step import Tensors


class Trade(Protocol):
    """Lists x and y, made ready to trade contents: what can be refused has been refused.

    Any line of `go` and `back` may raise. Nothing is lost then, and both can be called again, in any order.
    """

    def go(self) -> None:
        """Let x hold what y held, and y what x held; do nothing if they do already."""

    def back(self) -> None:
        """Let each hold its own contents again; do nothing if they do already."""


class _Half(NamedTuple):
    """A piece whose trade has begun: x will hold what y holds, and y what is held here."""

    x: list[Tensor]
    y: list[Tensor]
    held: list[Tensor]
    traded: int  # pieces, when this one is done
    written: bool = False  # x has been written, and y may be


class ListTrade:
    """A trade by way of a scratch buffer of bounded size, piece by piece; pairs have one dtype and one shape.

    >>> x, y = [torch.tensor([1.0])], [torch.tensor([2.0])]
    >>> trade = ListTrade(x, y)
    >>> trade.go()
    >>> x, y
    ([tensor([2.])], [tensor([1.])])
    >>> trade.back()
    >>> x, y
    ([tensor([1.])], [tensor([2.])])
    """

    def __init__(self, x: Tensors, y: Tensors) -> None:
        self._pieces = list(arithmetic.pieces(x, y))
        self._traded = 0  # pieces, from the first on
        self._half: _Half | None = None

    def go(self) -> None:
        """Trade the pieces that are not traded yet."""
        self._finish()
        while self._traded < len(self._pieces):
            self._trade(self._pieces[self._traded], self._traded + 1)

    def back(self) -> None:
        """Trade the pieces that are traded once more, in smaller ones if memory runs out: this must not fail."""
        self._finish()
        while self._traded:
            last = self._traded - 1
            try:
                self._trade(self._pieces[last], last)
            except (MemoryError, RuntimeError):
                if self._half is not None or not (parts := _halves(self._pieces[last])):
                    raise
                self._pieces[last : last + 1], self._traded = parts, last + len(parts)

    def _trade(self, piece: list[list[Tensor]], traded: int) -> None:
        x, y = ([arithmetic.bits(t) for t in tensors] for tensors in piece)  # 16-bit nans too come back as they went
        held = [t.clone() for t in x]
        # From here on the piece can be finished, whatever happens: each write is noted before the next destroys more.
        self._half = _Half(x, y, held, traded)
        self._finish()

    def _finish(self) -> None:
        """Finish the piece whose trade has begun. Every write may be repeated."""
        if self._half is None:
            return
        if not self._half.written:
            torch._foreach_copy_(self._half.x, self._half.y)
            self._half = self._half._replace(written=True)
        torch._foreach_copy_(self._half.y, self._half.held)
        self._traded, self._half = self._half.traded, None


def _halves(piece: list[list[Tensor]]) -> list[list[list[Tensor]]]:
    """Return two pieces that make up this one; none if it has a single element."""
    x, y = piece
    if len(x) > 1:
        middle = len(x) // 2
        return [[x[:middle], y[:middle]], [x[middle:], y[middle:]]]
    if x[0].numel() < 2:
        return []
    longest = max(range(x[0].dim()), key=lambda d: x[0].shape[d])
    middle = (x[0].shape[longest] + 1) // 2
    return [
        [[one], [other]] for one, other in zip(*(torch.split(t, middle, longest) for t in (x[0], y[0])), strict=True)
    ]
