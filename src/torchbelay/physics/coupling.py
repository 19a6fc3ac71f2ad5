"""The linear map of a step: four numbers that couple the weights w1 and their average w2.

    w1' = w1 + a·(w2 − w1) + p·u
    w2' = w2 + b·(w1 − w2) + q·u

u is the update of the inner optimizer, and w1* = w1 + u. With a > 0 the average attracts the weights and slows
them down; with a < 0 it repels and accelerates them; with a = 0 it leaves them alone.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from . import arguments, convergence, inner_momentum, variance

Follow = Literal["before", "after"]  # the weights that the average follows: those before the step, or w1*


class Inertia(NamedTuple):
    """The motion that a velocity v adds to a mass, besides the coupling.

    position += carry·v, then v' = stay·v + pull·(other − own) + push·u. All values on the right are those before the
    step.
    """

    carry: float
    stay: float
    pull: float
    push: float


@dataclass(frozen=True)
class Coupling:
    """Four numbers (a, b, p, q) and the properties that follow from them.

    >>> ema = Coupling(a=0.0, b=0.01, p=1.0, q=0.01)
    >>> ema.rate, ema.theta, ema.effective_lr_scale
    (0.01, 0.0, 1.0)
    >>> ema.max_stable_lr(curvature=202)  # the limit 2/h of plain SGD: an EMA does not change it
    0.0099...
    """

    a: float
    b: float
    p: float
    q: float

    def __post_init__(self) -> None:
        for name in ("a", "b", "p", "q"):
            value = getattr(self, name)
            if type(value) is not float:  # a tensor, say, that its owner could change later
                try:
                    value = arguments.store(self, name, arguments.plain(name, value))
                except TypeError:
                    raise TypeError(f"{name}={value!r} of a Coupling is not a number; give a float") from None
            if not math.isfinite(value):
                raise ValueError(f"{name}={value!r} of a Coupling is not finite; check the numbers it was made from")

    @property
    def rate(self) -> float:
        """c = a + b, the share of the distance w2 − w1 that a step without an update closes."""
        return self.a + self.b

    @property
    def eigenvalues(self) -> tuple[float, float]:
        """Eigenvalues of the motion without updates: 1 for the common position, 1 − a − b for the distance."""
        return 1.0, 1.0 - self.rate

    @property
    def theta(self) -> float:
        """θ = a/b: gradients are taken at z + θ·(z − w2), z the centre of mass. 0 if a = b = 0."""
        if self.b == 0:
            return math.copysign(math.inf, self.a) if self.a else 0.0
        return self.a / self.b

    @property
    def effective_lr_scale(self) -> float:
        """r = (b·p + a·q)/(a + b): how far z = (b·w1 + a·w2)/(a + b) moves for a unit u."""
        drift = self.b * self.p + self.a * self.q
        if self.rate == 0:  # either a = b = 0, or a constant update accelerates the pair without end
            return self.p if self.a == 0 else math.copysign(math.inf, drift or self.p)
        return drift / self.rate

    def max_stable_lr(self, curvature: float, momentum: float = 0.0) -> float:
        """Return the largest stable learning rate of SGD on a quadratic of this curvature.

        `momentum` is β of an inner optimizer that averages its gradients, m' = β·m + (1−β)·gradient: Adam's β1, or
        SGD's momentum with as much dampening. By Jury's conditions (`inner_momentum`); without momentum, with x = ηh,
        the step has trace 2 − c − p·x and determinant 1 − c − x·(p(1−b) − a·q).

        >>> heavy_ball = Coupling(a=-0.9, b=1.0, p=1.0, q=0.0)
        >>> round(heavy_ball.max_stable_lr(curvature=1.0), 12)  # 2(1 + μ)
        3.8
        >>> round(Coupling(a=0.0, b=0.05, p=1.0, q=0.05).max_stable_lr(curvature=1.0, momentum=0.9), 12)  # EMA
        38.0
        """
        h = arguments.number("curvature", curvature, low=0)
        beta = arguments.number("momentum", momentum, low=0, high=1, open_low=False)
        return inner_momentum.stable_range(self, beta) / h

    def stationary_variance(
        self, curvature: float, lr: float, noise: float = 1.0, momentum: float = 0.0
    ) -> variance.Variances:
        """Return the variances of w1 and w2 around the minimum in the long run, if gradients are noisy.

        Gradients are curvature·w1 + ξ, and ξ has the standard deviation `noise`. `momentum` is as in `max_stable_lr`.
        Both are infinite if the learning rate is not stable. `physics/variance.py` has the formula.

        >>> ema = Coupling(a=0.0, b=0.05, p=1.0, q=0.05)
        >>> w1, w2 = ema.stationary_variance(curvature=1.0, lr=0.1)
        >>> round(w1, 6), round(w2, 6)  # the average has a third of the noise
        (0.052632, 0.017265)
        """
        return variance.stationary_variance(self, curvature, lr, noise, momentum)

    def convergence_rate(self, curvatures: tuple[float, float], lr: float, momentum: float = 0.0) -> float:
        """Return the factor by which the error shrinks per step on quadratics, for the worst of these curvatures.

        `curvatures` are the least and the largest; no curvature between them is worse (`physics/convergence.py`).

        >>> round(Coupling(a=0.0, b=0.5, p=1.0, q=0.5).convergence_rate((1.0, 10.0), lr=0.1), 12)  # 1 − ημ, as SGD
        0.9
        """
        return convergence.quadratic_rate(self, curvatures, lr, momentum)

    def convergence_bound(self, curvatures: tuple[float, float], lr: float, momentum: float = 0.0) -> float:
        """Return the factor per step that is proved for smooth functions whose curvatures lie between these two.

        Every factor above it holds for every such function. For an attractive spring (θ ≥ 0) without momentum it is
        `convergence_rate`. Otherwise it may be larger, and it is infinite if nothing could be proved. `docs/theory.md`
        has the theorems.

        >>> from torchbelay import Spring
        >>> belay = Spring(k=1.0, m1=10.0, m2=20.0).coupling()
        >>> belay.convergence_bound((1.0, 10.0), lr=0.1) == belay.convergence_rate((1.0, 10.0), lr=0.1)
        True
        """
        return convergence.smooth_rate(self, curvatures, lr, momentum)

    def compound(self, n: int) -> "Coupling":
        """Return n steps of free motion as one: a_n = a(1 − (1−c)ⁿ)/c, b_n = b(1 − (1−c)ⁿ)/c, applied to w1*.

        >>> twice = Coupling(a=0.1, b=0.2, p=0.9, q=0.2).compound(2)
        >>> round(twice.a, 12), round(twice.b, 12)
        (0.17, 0.34)
        """
        self._check_relaxes()
        c, n = self.rate, arguments.whole("n", n, low=1)
        steps = closed(c, n) / c if c else float(n)
        a, b = self.a * steps, self.b * steps
        return Coupling(a, b, 1 - a, b if self.q else 0.0)

    def then(self, later: "Coupling") -> "Coupling":
        """Return this coupling followed by `later` as one coupling; needs p = 1 − a and q = 0 or q = b of both.

        Such couplings only close a part of the distance between w1* and w2, and two such parts make one. It follows the
        weights that `later` follows; if that one is at rest, those that this one follows.
        """
        self._check_relaxes()
        later._check_relaxes()
        left = 1 - self.rate
        a, b = self.a + later.a * left, self.b + later.b * left
        last = later if later.b else self  # q = 0 means follow="before" only if b is not 0 too
        return Coupling(a, b, 1 - a, b if last.q else 0.0)

    def _check_relaxes(self) -> None:
        if not self.relaxes:
            raise ValueError(
                f"{self} does more than relax (it needs p = 1 − a and q = 0 or q = b): it cannot be compounded"
            )

    @property
    def relaxes(self) -> bool:
        """Whether the step only adds u and then closes a part of the distance (p = 1 − a; q = 0 or q = b)."""
        return _same(self.p, 1 - self.a) and (self.q == 0 or _same(self.q, self.b))

    @property
    def pulls(self) -> bool:
        """Whether the average changes the motion of the weights: a ≠ 0 or p ≠ 1."""
        return self.a != 0 or self.p != 1

    @property
    def meets(self) -> bool:
        """Whether weights and average end in one place: w1* and w2 alone give the result, and a + b = 1.

        If the average has a velocity, they meet where it arrives with it.
        """
        return math.isclose(self.rate, 1, rel_tol=1e-15) and not self.needs_copy

    @property
    def needs_copy(self) -> bool:
        """Whether this coupling needs a copy of w1 from before the step.

        It does not if w1* and w2 alone give the result (p = 1 − a and q = b): w1* then moves by `a` of its way to w2
        while w2 moves by `b` of its way to w1*.

        >>> Coupling(a=0.0, b=0.1, p=1.0, q=0.1).needs_copy  # EMA
        False
        >>> Coupling(a=0.1, b=0.1, p=0.9, q=0.0).needs_copy  # Algorithm 1: w2 follows the w1 that the step overwrote
        True
        """
        return not (_same(self.p, 1 - self.a) and _same(self.q, self.b))


def closed(rate: float, steps: float) -> float:
    """Return 1 − (1 − c)ⁿ, the share of the distance that n steps at the rate c close; n is any number if c ≤ 1.

    >>> closed(0.5, 2), round(closed(closed(0.5, 2), 0.5), 12)
    (0.75, 0.5)
    """
    if rate < 1:
        return -math.expm1(steps * math.log1p(-rate))
    return 1.0 - float((1 - rate) ** steps)


def watch(rate: float, follow: Follow = "after") -> Coupling:
    """Return the coupling of an average that follows the weights at this rate and never pulls them.

    >>> watch(0.25)
    Coupling(a=0.0, b=0.25, p=1.0, q=0.25)
    """
    return Coupling(0.0, rate, 1.0, rate if follow == "after" else 0.0)


def _same(x: float, y: float) -> bool:
    """Whether two numbers are equal up to the rounding of a few operations."""
    return math.isclose(x, y, rel_tol=1e-14, abs_tol=1e-15)
