"""A coupling as work around a step that the optimizer takes on its own: some before it, the rest after it.

Two ways to do the same: `Foreach`, and `Reference`, which is slow, keeps a copy always and is there to be believed.
"""

from functools import reduce
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchbelay.physics.coupling import Coupling

from . import foreach, reference
from .foreach import Swing, Tensors


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


class Around(Protocol):
    """One way to carry a motion out."""

    name: str

    def needs_copy(self, motion: Motion) -> bool:
        """Whether w1 from before the step must be kept for `after`."""

    def before(self, w1: Tensors, w2: Tensors, motion: Motion, keep: Tensor | None) -> None:
        """Do what is done before the optimizer steps; w1 is never touched."""

    def after(self, w1: Tensors, w2: Tensors, copy: Tensors | None, motion: Motion, keep: Tensor | None) -> None:
        """Do the rest, when w1 holds w1*; `copy` is w1 from before if it was asked for."""


class Foreach:
    """A few launches for all tensors; a copy of w1 only where the coupling cannot do without."""

    name = "foreach"

    def needs_copy(self, motion: Motion) -> bool:
        """True for velocities, and for couplings that no split around the step gives."""
        return motion.swings or motion.coupling.needs_copy

    def before(self, w1: Tensors, w2: Tensors, motion: Motion, keep: Tensor | None) -> None:
        """Move w2 where that can, or must, be done before the step."""
        split = None if motion.swings else motion.coupling.split()
        if split is not None:
            foreach.lerp_(w2, w1, split.before, keep)

    def after(self, w1: Tensors, w2: Tensors, copy: Tensors | None, motion: Motion, keep: Tensor | None) -> None:
        """Move both."""
        split = None if motion.swings else motion.coupling.split()
        if split is not None:
            foreach.pull_together_(w1, w2, split.pull, split.follow, keep)
        else:
            assert copy is not None
            foreach.couple_(w1, w2, copy, motion.numbers, keep, swing1=motion.swing1, swing2=motion.swing2)


class Reference:
    """The oracle's own functions, tensor by tensor."""

    name = "reference"

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


IMPLEMENTATIONS: dict[str, Around] = {"foreach": Foreach(), "reference": Reference()}


def choose(impl: str) -> Around:
    """The implementation of that name; "auto" is the fastest that runs here.

    >>> choose("auto").name
    'foreach'
    """
    if impl != "auto" and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r} is unknown; choose one of 'auto', {', '.join(map(repr, IMPLEMENTATIONS))}")
    return IMPLEMENTATIONS["foreach" if impl == "auto" else impl]
