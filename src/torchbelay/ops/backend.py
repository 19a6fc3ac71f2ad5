"""What carries a step's motions out, and the choice of it.

`Foreach` runs everywhere. `Reference` is slow and is the one to believe. `Host` keeps averages on a device of their
own. `torchbelay.ops.triton` moves a whole model in one launch on a GPU.
"""

import os
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from .foreach import Foreach
from .host import Host
from .reference import Reference
from .step import Count, Move, TensorGroup, Tensors
from .trade import Trade
from .workers import Workers

_EVERYWHERE = {"foreach": Foreach, "reference": Reference}
NAMES = ("auto", *_EVERYWHERE, "triton")


class PreparedStep(Protocol):
    """A step whose preparation is done: copies are made, numbers are on the device."""

    def finish(self, keep: Tensor | None) -> None:
        """Move everything, when w1 holds w1*."""


class Backend(Protocol):
    """One way to carry motions out."""

    name: str
    fuses: bool  # whether `fuse` may return a pass

    def remember(self, groups: Iterable[TensorGroup]) -> None:
        """Remember what matters of the weights (device, dtype, address, layout): these groups are to be moved."""

    def is_current(self) -> bool:
        """Whether that is still true; asked before every step, because users move, cast and lay out models anew."""

    def follows_schedule(self, group: TensorGroup) -> bool:
        """Whether the device finds the motion of a step by itself, so that the host need not count for this group."""

    def prepare(self, moves: Sequence[Move], count: Count, *, capturing: bool = False) -> PreparedStep:
        """Keep what is needed of w1 from before the step. Moves are applied in order: each sees what the last did.

        `capturing` says that the step is being recorded in a CUDA graph.
        """

    def fuse(self, rule: str, parameters: list[Tensor], states: list[Any], moves: Sequence[Move]) -> Any | None:
        """Return the moves in one pass with an optimizer's update; None if these tensors do not allow it."""

    def used_for(self, group: TensorGroup) -> str:
        """The name of the code that moves this group."""

    def trade(self, x: Tensors, y: Tensors) -> Trade:
        """Make two lists ready to trade their contents in place; pairs have one dtype and one shape."""

    def wait(self) -> None:
        """Return when every average is what the last step made of it."""

    def release(self) -> None:
        """Give up memory that is kept for the next step only."""


def check(impl: str) -> None:
    """Refuse an unknown name, and "triton" if the package is not installed."""
    if impl not in NAMES:
        raise ValueError(f"impl={impl!r} is unknown; choose one of {', '.join(map(repr, NAMES))}")
    if impl == "triton" and not has_triton():
        raise ValueError("impl='triton' needs the package triton, which is not installed; use impl='auto'")


class Team(Protocol):
    """The ranks that share an average."""

    group: Any  # a process group


def choose(
    impl: str, *, rounding: str = "nearest", home: torch.device | None = None, workers: Team | None = None
) -> Backend:
    """Return the backend of that name; "auto" is the fastest one that runs here.

    Averages may have a `home`, and may be shared by `workers`.

    >>> choose("foreach").name
    'foreach'
    """
    check(impl)
    if workers is not None:
        return Workers(workers.group)
    if home is not None:
        return Host(impl, home)
    if impl == "triton" or (impl == "auto" and torch.cuda.is_available() and has_triton()):
        from .triton.backend import Triton  # imported late: importing Triton takes a while

        return Triton(strict=impl == "triton", stochastic=rounding == "stochastic")
    return _EVERYWHERE["foreach" if impl == "auto" else impl]()


def is_interpreted() -> bool:
    """Whether Triton runs its kernels on the host, one program after the other, as it does in tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def has_triton() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None
