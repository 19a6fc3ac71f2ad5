"""A coupling as work around a step that the optimizer takes on its own: some before it, the rest after it.

Ways to do the same: `Foreach`; `Reference`, which is slow, keeps a copy always and is there to be believed; and one
launch for a whole model (`torchbelay.ops.triton`), where there is a GPU for it.
"""

import os
from collections.abc import Sequence
from functools import reduce
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchbelay.physics.coupling import Coupling
from torchbelay.physics.method import Law

from . import arithmetic, reference
from .arithmetic import Swing, Tensors


class Motion(NamedTuple):
    """What one step does to a list of tensors: the four numbers, and velocities where a mass has them."""

    coupling: Coupling
    swing1: Swing | None = None
    swing2: Swing | None = None

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        """(a, b, p, q)."""
        c = self.coupling
        return c.a, c.b, c.p, c.q

    @property
    def swings(self) -> bool:
        """Whether either mass has velocities."""
        return self.swing1 is not None or self.swing2 is not None

    @property
    def leads(self) -> bool:
        """Whether the average moves before the optimizer does."""
        split = None if self.swings else self.coupling.split()
        return split is not None and split.before != 0

    @property
    def trails(self) -> bool:
        """Whether anything moves after it."""
        split = None if self.swings else self.coupling.split()
        return split is None or split.pull != 0 or split.follow != 0


class Score(NamedTuple):
    """All that a method will ever say, where neither learning rates nor a host that counts are needed for it.

    `motions` are those of one period, from the first step on; a law, where there is one, takes their place.
    """

    motions: tuple[Motion, ...]
    law: Law | None = None


class Lists(Protocol):
    """Tensors that move alike, in aligned lists; `born` steps of the optimizer had been taken before their first."""

    w1: list[Tensor]
    w2: list[Tensor]
    v1: list[Tensor]
    v2: list[Tensor]
    born: int


class Move(NamedTuple):
    """What a step does to some lists: a motion, or None where only the device knows which of the score it is."""

    lists: Lists
    motion: Motion | None
    score: Score | None = None

    @property
    def motions(self) -> tuple[Motion, ...]:
        """Every motion that may be applied without asking the host again."""
        if self.score is not None:
            return self.score.motions
        assert self.motion is not None
        return (self.motion,)


class Ready(Protocol):
    """A step that has been prepared for."""

    def before(self, keep: Tensor | None) -> None:
        """Do what is done before the optimizer steps; w1 is never touched."""

    def after(self, keep: Tensor | None) -> None:
        """Do the rest, when w1 holds w1*."""


class Around(Protocol):
    """One way to carry motions out."""

    name: str

    def counts(self, lists: Lists) -> bool:
        """Whether a score of these lists would be followed on the device, so that the host need not count for them."""

    def prepare(self, moves: Sequence[Move], count: "Count") -> Ready:
        """Keep what must be kept of w1 from before the step; in the order of the moves, each sees what the last did."""

    def used_for(self, lists: Lists) -> str:
        """The name of what is used for such tensors."""

    def exchange_(self, x: Tensors, y: Tensors) -> None:
        """Let the two lists, of one dtype a pair, trade their contents in place, all of them or none."""


class Count(Protocol):
    """Steps taken so far, as a number that stays on the device."""

    def on(self, device: torch.device) -> Tensor:
        """The count there, as a 0-dim int64 tensor that goes with the steps."""


class _OneByOne:
    """Lists moved one after the other, each by `before` and `after` of its implementation."""

    def __init__(self, around: "Foreach | Reference", moves: Sequence[Move]) -> None:
        self._around = around
        self._moves = []
        for lists, motion, _ in moves:
            assert motion is not None
            copy = [w.detach().clone() for w in lists.w1] if around.needs_copy(motion) else None
            self._moves.append((lists, motion, copy))

    def before(self, keep: Tensor | None) -> None:
        for lists, motion, _ in self._moves:
            self._around.before(lists.w1, lists.w2, motion, keep)

    def after(self, keep: Tensor | None) -> None:
        for lists, motion, copy in self._moves:
            self._around.after(lists.w1, lists.w2, copy, motion, keep)


class Foreach:
    """A few launches for all tensors; a copy of w1 only where the coupling cannot do without."""

    name = "foreach"

    def counts(self, lists: Lists) -> bool:
        """Never: the host knows the numbers."""
        return False

    def prepare(self, moves: Sequence[Move], count: Count) -> Ready:
        """Copy w1 where a coupling cannot do without."""
        return _OneByOne(self, moves)

    def used_for(self, lists: Lists) -> str:
        """Itself, for all."""
        return self.name

    def exchange_(self, x: Tensors, y: Tensors) -> None:
        """By way of a scratch buffer."""
        arithmetic.exchange_(x, y)

    def needs_copy(self, motion: Motion) -> bool:
        """True for velocities, and for couplings that no split around the step gives."""
        return motion.swings or motion.coupling.needs_copy

    def before(self, w1: Tensors, w2: Tensors, motion: Motion, keep: Tensor | None) -> None:
        """Move w2 where that can, or must, be done before the step."""
        split = None if motion.swings else motion.coupling.split()
        if split is not None:
            arithmetic.lerp_(w2, w1, split.before, keep)

    def after(self, w1: Tensors, w2: Tensors, copy: Tensors | None, motion: Motion, keep: Tensor | None) -> None:
        """Move both."""
        split = None if motion.swings else motion.coupling.split()
        if split is not None:
            arithmetic.pull_together_(w1, w2, split.pull, split.follow, keep)
        else:
            assert copy is not None
            arithmetic.couple_(w1, w2, copy, motion.numbers, keep, swing1=motion.swing1, swing2=motion.swing2)


class Reference:
    """The oracle's own functions, tensor by tensor."""

    name = "reference"

    def counts(self, lists: Lists) -> bool:
        """Never: the host knows the numbers."""
        return False

    def prepare(self, moves: Sequence[Move], count: Count) -> Ready:
        """Copy w1."""
        return _OneByOne(self, moves)

    def used_for(self, lists: Lists) -> str:
        """Itself, for all."""
        return self.name

    def exchange_(self, x: Tensors, y: Tensors) -> None:
        """By way of a scratch buffer."""
        arithmetic.exchange_(x, y)

    def needs_copy(self, motion: Motion) -> bool:
        """Always: everything is computed from what was before the step."""
        return True

    def before(self, w1: Tensors, w2: Tensors, motion: Motion, keep: Tensor | None) -> None:
        """Nothing."""

    def after(self, w1: Tensors, w2: Tensors, copy: Tensors | None, motion: Motion, keep: Tensor | None) -> None:
        """Compute new tensors by `reference.couple` and the velocity equations, then write them back."""
        assert copy is not None
        a, b, p, q = motion.numbers
        for i, (x1, x2, x0) in enumerate(zip(w1, w2, copy, strict=True)):
            widest = reduce(torch.promote_types, (x1.dtype, x2.dtype), torch.float32)
            y1, y2, y0 = (t.to(widest) for t in (x1, x2, x0))
            u = y1 - y0
            new1, new2 = reference.couple(y0, y2, u, a=a, b=b, p=p, q=q)
            news = [(x1, new1), (x2, new2)]
            for at, swing, apart in ((0, motion.swing1, y2 - y0), (1, motion.swing2, y0 - y2)):
                if swing is not None:
                    v, (carry, stay, stiffness, push) = swing.v[i].to(widest), swing.inertia
                    news[at] = (news[at][0], news[at][1] + carry * v)
                    news.append((swing.v[i], stay * v + stiffness * apart + push * u))
            for old, new in news:
                old.copy_(new if keep is None else torch.where(keep.to(old.device) != 0, new, old.to(new.dtype)))


IMPLEMENTATIONS: dict[str, Foreach | Reference] = {"foreach": Foreach(), "reference": Reference()}
NAMES = ("auto", *IMPLEMENTATIONS, "triton")


def check(impl: str) -> None:
    """Refuse a name that is none, and one whose library is not there."""
    if impl not in NAMES:
        raise ValueError(f"impl={impl!r} is unknown; choose one of {', '.join(map(repr, NAMES))}")
    if impl == "triton" and not has_triton():
        raise ValueError("impl='triton' needs the package triton, which is not installed; use impl='auto'")


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched there now is recorded in a graph, to be run later, instead of run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_interpreted() -> bool:
    """Whether Triton runs its kernels on the host, one program after the other, as it does in tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def has_triton() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


def choose(impl: str, *, rounding: str = "nearest") -> Around:
    """The implementation of that name; "auto" is the fastest that runs here.

    >>> choose("foreach").name
    'foreach'
    """
    check(impl)
    if impl == "triton" or (impl == "auto" and torch.cuda.is_available() and has_triton()):
        from .triton.backend import Triton  # only where it will be used: importing Triton takes a while

        return Triton(strict=impl == "triton", stochastic=rounding == "stochastic")
    return IMPLEMENTATIONS["foreach" if impl == "auto" else impl]
