"""`identify`: what does this averaging code really do? Its four numbers, warm-up, stability and habits, in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from torchbelay.physics import arguments
from torchbelay.physics.coupling import Coupling

from . import kinds, paragraph, problems
from .impulses import Measurement, measure
from .isolation import isolated
from .kinds import Idle, Kind, SixteenBit
from .reading import BrokenError
from .toy import Factory, NoFactoryError
from .warmup import Warmup, recognise

STEPS = 256  # enough for code that waits for 100 updates and then averages every tenth
MOST_STEPS = 2048

Start = Literal["at the weights", "at the first update", "elsewhere"]


@dataclass(frozen=True)
class Identification:
    """What averaging code does, as found by `identify`; `print` shows it as a paragraph.

    `couplings` has the four numbers of update 1, 2, …: w1' = w1 + a·(w2 − w1) + p·u and w2' = w2 + b·(w1 − w2) + q·u.
    It is empty if there are none; `reason` says why. a and b of an update cannot be seen if weights and average are
    equal before it. These updates are in `hidden`; their a and b are those of an update with the same p and q.
    """

    couplings: tuple[Coupling, ...] = ()
    hidden: tuple[int, ...] = ()
    reason: str | None = None
    start: Start | None = None  # where the average begins
    left: float = 0.0  # if elsewhere, the share of the distance to the weights that is left after all updates
    warmup: Warmup | None = None
    growth: float | None = None  # the factor of the distance between weights and average per update, in the long run
    weights_dtype: str = ""  # of the toy's weights: float64, or float32 if the code does not take that
    dtype: str = ""  # of their average
    buffers: Kind | None = None
    integers: Kind | None = None
    frozen: Kind | None = None
    tied: Kind | None = None
    sixteen_bit: tuple[SixteenBit, ...] = ()
    idle: Idle | None = None  # what an update does if the weights have not changed
    problems: tuple[str, ...] = ()  # what looks wrong, a sentence each

    @property
    def coupling(self) -> Coupling | None:
        """The coupling of the last update that moved anything; None if there is none."""
        moving = self.warmup.moving if self.warmup else ()
        return self.couplings[moving[-1] - 1] if moving else None

    @property
    def eigenvalues(self) -> tuple[float, float] | None:
        """The eigenvalues of that coupling, without updates of the weights: 1, and the factor of the distance."""
        return None if self.coupling is None else self.coupling.eigenvalues

    def __str__(self) -> str:
        return paragraph.write(self)


def identify(factory: Factory, *, steps: int = STEPS, every: int = 1) -> Identification:
    """Find out by impulses on a toy model what anybody's averaging code does.

    Args:
        factory: makes the average of a model: factory(model) -> (update, read). `update()` is called after every change
            of the model's weights and may change them too. `read()` returns the average: a state dict or another
            mapping name -> tensor, a module, or tensors in the order of `model.parameters()`.
        steps: how many updates to look at, at most 2048. More show a longer warm-up; memory grows with their square.
        every: after how many calls of `update()` the average is meant to move; another number is a problem.

    The code runs about 15 times `steps` updates on a model of a few hundred weights in float64 on the CPU. Code that
    raises, or that is no linear map, is described as such: `reason` and `problems` say how. Its warnings are silenced,
    and torch's random generators are restored afterwards.

    >>> import torch
    >>> def factory(model):
    ...     shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    ...     def update():
    ...         for name, p in model.named_parameters():
    ...             shadow[name].lerp_(p.detach(), 0.01)
    ...     return update, lambda: shadow
    >>> result = identify(factory)
    >>> round(result.couplings[9].b, 12), result.warmup.law, result.problems
    (0.01, 'none', ())
    >>> print(result)
    The average follows the weights and never moves them: w2' = 0.99·w2 + 0.01·w1. ...
    """
    if not callable(factory):
        raise TypeError(
            f"factory={factory!r} is not a function; give one that takes a model and returns (update, read)"
        )
    if arguments.whole("steps", steps, low=4) > MOST_STEPS:
        raise ValueError(
            f"steps={steps!r} is too large; it needs steps ≤ {MOST_STEPS}, as memory grows with its square"
        )
    arguments.whole("every", every, low=1)
    with isolated(Warning), torch.inference_mode(False), torch.device("cpu"):
        try:
            measured = measure(factory, steps)
        except NoFactoryError:
            raise
        except BrokenError as error:
            return Identification(reason=str(error), problems=(f"It cannot be identified: {error}.",))
        return _describe(factory, measured, steps, every)


def _describe(factory: Factory, measured: Measurement, steps: int, every: int) -> Identification:
    dtype, couplings = measured.dtype, measured.couplings
    warmup = recognise(couplings, measured.precision) if couplings else None
    start, left = _start(measured)
    found = Identification(
        couplings=couplings,
        hidden=measured.hidden,
        reason=measured.reason,
        start=start,
        left=left,
        warmup=warmup,
        growth=_growth(couplings),
        weights_dtype=str(dtype).removeprefix("torch."),
        dtype=str(measured.rest.dtype).removeprefix("torch."),
        buffers=kinds.buffers(factory, steps, dtype),
        integers=kinds.integers(factory, steps, dtype),
        frozen=kinds.frozen(factory, steps, dtype),
        tied=kinds.tied(factory, steps, dtype),
        sixteen_bit=tuple(kinds.sixteen_bit(factory, low, couplings) for low in (torch.bfloat16, torch.float16)),
        idle=kinds.idle(factory, couplings, dtype, measured.rounding) if couplings else None,
    )
    return problems.with_problems(found, measured, every)


def _start(measured: Measurement) -> tuple[Start, float]:
    """Return where the average begins, and the share of its distance to the weights that is left in the end."""
    states = measured.rest.states[measured.rest.began :, :, :, 1:]  # of weights at rest
    apart = (states[:, 1] - states[:, 0]).abs().flatten(1).amax(1)
    allowed = measured.rounding
    if apart[0] <= allowed:
        return "at the weights", 0.0
    moved = [t for t in range(1, len(states)) if (states[t, 1] - states[0, 1]).abs().max() > allowed]
    if moved and apart[moved[0]] <= allowed:
        return "at the first update", 0.0
    return "elsewhere", float(apart[-1] / apart[0])


def _growth(couplings: Sequence[Coupling]) -> float | None:
    """Return the factor of the distance per update, over the second half of the updates."""
    factors = [abs(1 - c.rate) for c in couplings[len(couplings) // 2 :]]
    if not factors:
        return None
    return math.exp(math.fsum(map(math.log, factors)) / len(factors)) if all(factors) else 0.0
