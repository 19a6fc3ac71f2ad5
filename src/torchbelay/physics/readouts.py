"""Readouts: the point that is evaluated and saved, as a mixture of the states that a Belay stores.

    value = r0·w0 + r1·w1 + r2·w2,    r0 + r1 + r2 = 1

w1 are the weights, w2 is their average, and w0 are the weights at which the average began, which `Belay` keeps with
keep_initial=True. A readout is any object whose `shares(name, method, step, lr)` returns r0, r1 and r2 for a parameter.
It changes neither weights nor average, and steps do not depend on it.
"""

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol, runtime_checkable

from . import arguments
from .brief import brief
from .method import Method, uncalled

__all__ = ["Readout", "Shares", "bema", "blend", "centre"]

Share = float | Mapping[str, float] | Callable[[str], float]


class Shares(NamedTuple):
    """The shares of w0, w1 and w2 in a readout; their sum is 1.

    >>> Shares(w0=0.0, w1=0.25, w2=0.75)
    Shares(w0=0.0, w1=0.25, w2=0.75)
    """

    w0: float
    w1: float
    w2: float


@runtime_checkable
class Readout(Protocol):
    """A readout: any object that returns the shares of w0, w1 and w2 for a parameter.

    >>> class Extrapolated:
    ...     def shares(self, name, method, step, lr):
    ...         return Shares(0.0, -0.5, 1.5)
    >>> isinstance(Extrapolated(), Readout)
    True
    """

    def shares(self, name: str, method: Method, step: int, lr: float) -> Shares:
        """Return the shares for the parameter of that name.

        `method` moves its average, which has taken `step` steps so far; `lr` is the learning rate at present.
        """


@dataclass(frozen=True)
class blend:
    """A point between the weights and the average: (1 − share)·w1 + share·w2.

        r0 = 0, r1 = 1 − share, r2 = share

    share=1 is the average, and share=0 are the weights, bit for bit. The share may depend on the parameter: give a
    function name -> share, or a dict of patterns, of which the first one that matches a name counts. In a pattern `*`
    stands for any characters.

    When to use it: if a validation set says that neither end is best, as late in a run whose learning rate has decayed.

    >>> blend(0.75).shares("head.weight", None, 10, 0.1)
    Shares(w0=0.0, w1=0.25, w2=0.75)
    >>> by_name = blend({"head.*": 0.5, "*": 1.0})
    >>> by_name.shares("head.weight", None, 10, 0.1).w2, by_name.shares("body.weight", None, 10, 0.1).w2
    (0.5, 1.0)
    """

    share: Share

    def __post_init__(self) -> None:
        if isinstance(self.share, Mapping):
            for pattern, share in self.share.items():
                if not isinstance(pattern, str):
                    raise TypeError(f"share={dict(self.share)!r} has the pattern {pattern!r}; give texts as 'head.*'")
                _checked_share(f"share of {pattern!r}", share)
        elif not callable(self.share):
            arguments.store(self, "share", _checked_share("share", self.share))

    def shares(self, name: str, method: Method, step: int, lr: float) -> Shares:
        """Return the shares for this name; ignores the rest."""
        share = self._share(name)
        return Shares(0.0, 1 - share, share)

    def _share(self, name: str) -> float:
        if isinstance(self.share, Mapping):
            for pattern, share in self.share.items():
                if fnmatchcase(name, pattern):
                    return float(share)
            raise ValueError(
                f"share={dict(self.share)!r} has no pattern for the parameter {name!r}; add one for the rest, as "
                "'*': 1.0"
            )
        share = self.share(name) if callable(self.share) else self.share
        return _checked_share(f"share of {name!r}", share)


def _checked_share(name: str, value: Any) -> float:
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"{name}={value!r} is not a number; give a float from 0 (the weights) to 1 (the average)")
    if not 0 <= float(value) <= 1:
        raise ValueError(f"{name}={value!r} is out of range; it needs a number from 0 (the weights) to 1 (the average)")
    return float(value)


@dataclass(frozen=True)
class centre:
    """The centre of mass of weights and average: z = (w1 + θ·w2)/(1 + θ), by the method's own θ.

        r0 = 0, r1 = 1/(1 + θ), r2 = θ/(1 + θ)

    Updates alone move z; the coupling does not. Gradients are taken at w1 = z + θ·(z − w2). For BELAY, with θ = m2/m1,
    z lies between weights and average. For a repelling spring (θ < 0) it lies beyond the weights: of `schedule_free`
    and `primal_averaging` it is the base iterate. For averages that only watch (θ = 0), z = w1.

    A scheduled θ is that of the coming step. While the β of `ema_nesterov` changes, z changes with it. `lookahead` and
    `switch_ema` are refused: they pull at some steps only, and have no θ of their own.

    When to use it: to see where the training is, apart from the pull of the average.

    >>> from torchbelay import Spring
    >>> centre().shares("weight", Spring(k=1.0, m1=10.0, m2=30.0), 10, 0.1)
    Shares(w0=0.0, w1=0.25, w2=0.75)
    """

    def shares(self, name: str, method: Method, step: int, lr: float) -> Shares:
        """Return the shares by the θ of the step that comes next; ignores `name`."""
        theta = _own_theta(method, step + 1, lr)
        if theta == math.inf:  # the average is infinitely heavy
            return Shares(0.0, 0.0, 1.0)
        if theta == -1 or not math.isfinite(theta):
            raise ValueError(f"centre() needs θ > −1, and {method!r} has θ = {theta:g}: use blend(share)")
        return Shares(0.0, 1 / (1 + theta), theta / (1 + theta))


def _own_theta(method: Method, step: int, lr: float) -> float:
    """Return the θ by which the weights are z + θ·(z − w2) when this step begins."""
    asked: Any = copy(method)  # this question must not be remembered
    if hasattr(asked, "settled"):  # θ is scheduled, and a/b of a step is not θ
        return float(asked.settled(step, lr).theta)
    if isinstance(getattr(asked, "theta", None), float | int):
        return float(asked.theta)
    if getattr(asked, "rhythm", False) and getattr(asked, "pulls", False):
        raise ValueError(
            f"centre() needs a method with a θ of its own, and {method!r} pulls at some steps only; use blend(share), "
            "with the share of the average that you want"
        )
    return float(asked.coupling(step, lr).theta)


@dataclass(frozen=True)
class bema:
    """Bias-corrected EMA: the average, moved on by a share α of the way that the weights have come since it began.

        w2 + α·(w1 − w0),  α = (lag + multiplier·t)^(−bias_power)
        r0 = −α, r1 = α, r2 = 1

    t counts the steps of the average. Needs `Belay(..., keep_initial=True)`, 4 more bytes per float32 weight.

    The average of the reference is `ema` with the decay 1 − (lag + multiplier·t)^(−ema_power) at every `update_freq`-th
    step, and 1 between. With that schedule this readout equals TRL's BEMACallback whenever that one has just updated.
    Between two updates TRL keeps its last point, and this readout has the present weights. For TRL's update_after=N use
    start=N, and lag + multiplier·N as the lag: t of TRL counts from the start of the run.

    When to use it: on fine-tuning, and on runs that are short for their average, which lags behind.

    Reference: Block, Zhang, "EMA without the lag: bias-corrected iterate averaging schemes", 2025.

    >>> bema(bias_power=0.5, lag=0.0).shares("weight", None, 16, 0.1)
    Shares(w0=-0.25, w1=0.25, w2=1.0)
    """

    bias_power: float = 0.2
    lag: float = 10.0
    multiplier: float = 1.0

    __repr__ = brief

    def __post_init__(self) -> None:
        for name in ("bias_power", "lag", "multiplier"):
            arguments.keep(self, name, low=0, open_low=False)
        if self.lag == self.multiplier == 0:
            raise ValueError(f"lag={self.lag!r} and multiplier={self.multiplier!r} are both 0; give one of them")

    def shares(self, name: str, method: Method, step: int, lr: float) -> Shares:
        """Return the shares after this number of steps; ignores the rest."""
        time = self.lag + self.multiplier * max(1, step)  # before the first step w1 is w0, whatever α is
        alpha = float(time**-self.bias_power)
        return Shares(-alpha, alpha, 1.0)


def check(readout: object) -> Readout:
    """Return a readout; refuse what is none.

    >>> check(blend)
    Traceback (most recent call last):
    TypeError: readout=blend was not called; give the readout that it makes, as blend(...)
    """
    if (maker := uncalled(readout)) is not None:
        raise TypeError(f"readout={maker} was not called; give the readout that it makes, as {maker}(...)")
    if not isinstance(readout, Readout):
        raise TypeError(
            f"readout={readout!r} has no shares(name, method, step, lr); give a readout of torchbelay.readouts, as "
            "blend(0.65)"
        )
    return readout


def shares_of(readout: Readout, name: str, method: Method, step: int, lr: float) -> Shares:
    """Return the shares of a parameter; refuse what are not three finite numbers with the sum 1."""
    found: Any = readout.shares(name, method, step, lr)
    try:
        shares = Shares(*map(float, found))
    except (TypeError, ValueError):
        raise TypeError(
            f"{readout!r}.shares({name!r}, …) returned {found!r}, not three numbers; return Shares(w0, w1, w2)"
        ) from None
    if not all(map(math.isfinite, shares)) or not math.isclose(
        math.fsum(shares), 1, abs_tol=1e-9 * max(map(abs, shares))
    ):
        raise ValueError(
            f"{readout!r}.shares({name!r}, …) returned {tuple(shares)}, and shares need the sum 1, so that equal "
            "weights stay what they are"
        )
    return shares
