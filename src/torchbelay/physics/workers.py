"""Several workers on one average: N + 1 bodies, and the modes of their motion.

Every worker trains weights w1_i of its own and hangs on the common average w2 by a spring. All springs are equal:

    w1_i' = w1_i + a·(w2 − w1_i) + p·u_i
    w2'   = w2 + Σ_i [ b·(w1_i − w2) + q·u_i ]

The map is the same whatever the order of the workers, so that it falls apart into two kinds of motion. The mean of the
workers and w2 are a pair with the four numbers (a, N·b, p, N·q), which has a centre of mass and one distance. And the
N − 1 differences between workers shrink by 1 − a per step, and feel nothing of w2.

Reference: Zhang, Choromanska, LeCun, "Deep learning with elastic averaging SGD", 2015, Section 3 and 5.
"""

import math
from dataclasses import dataclass

from . import arguments
from .coupling import Coupling
from .method import Gathering, Method


@dataclass(frozen=True)
class Workers:
    """`count` workers on equal springs with these four numbers, and what follows for their motion.

    >>> four = Workers(Coupling(a=0.1, b=0.1, p=1.0, q=0.0), count=4)  # EASGD with α = 0.1
    >>> four.pair
    Coupling(a=0.1, b=0.4, p=1.0, q=0.0)
    >>> [round(x, 12) for x in four.eigenvalues]
    [1.0, 0.5, 0.9, 0.9, 0.9]
    >>> four.effective_lr_scale, round(four.max_stable_lr(curvature=1.0), 12)
    (0.8, 1.875)
    """

    coupling: Coupling
    count: int

    def __post_init__(self) -> None:
        arguments.whole("count", self.count, low=1)

    @property
    def pair(self) -> Coupling:
        """The coupling of the mean of all workers with w2: (a, N·b, p, N·q)."""
        c, n = self.coupling, self.count
        return Coupling(c.a, n * c.b, c.p, n * c.q)

    @property
    def rate(self) -> float:
        """a + N·b, the share of the distance between w2 and the workers' mean that a step without updates closes."""
        return self.pair.rate

    @property
    def eigenvalues(self) -> tuple[float, ...]:
        """The eigenvalues of a step without updates: 1 (all), 1 − a − N·b (mean and w2), and N − 1 times 1 − a."""
        return (*self.pair.eigenvalues, *[1 - self.coupling.a] * (self.count - 1))

    @property
    def effective_lr_scale(self) -> float:
        """How far the centre of mass (b·Σw1_i + a·w2)/(N·b + a) moves if every worker has a unit update."""
        return self.pair.effective_lr_scale

    def max_stable_lr(self, curvature: float) -> float:
        """Return the largest stable learning rate of plain SGD on a quadratic that all workers have in common.

        A difference r between workers has r' = (1 − a − p·ηh)·r, which is stable below ηh = (2 − a)/p.
        """
        h = arguments.number("curvature", curvature, low=0)
        return min(self.pair.max_stable_lr(h), self._relative_limit / h)

    @property
    def _relative_limit(self) -> float:
        c = self.coupling
        if self.count == 1 or c.p == 0:
            return math.inf
        return (2 - c.a) / c.p if c.p > 0 else 0.0

    def half_lives(self) -> tuple[float, float]:
        """Return the syncs after which half is left: of the distance of mean and w2, of differences between workers."""
        return _half_life(1 - self.rate), _half_life(1 - self.coupling.a)

    def compound(self, n: int) -> "Workers":
        """Return n steps as one: the mean of the workers and w2 move as they would in n steps of free motion.

        The differences between workers then shrink by 1 − a_n, not by (1 − a)ⁿ, which is a little less.

        >>> once = Workers(Coupling(a=0.1, b=0.1, p=0.9, q=0.0), count=4).compound(2)
        >>> round(once.rate, 12), 1 - 0.5**2
        (0.75, 0.75)
        """
        pair, count = self.pair.compound(n), self.count
        return Workers(Coupling(pair.a, pair.b / count, pair.p, pair.q / count), count)

    def explain(self) -> str:
        """Return one paragraph about the workers' motion."""
        c, n = self.coupling, self.count
        if c.a == 0:
            return (
                f"{n} workers and an average that does not pull them: nothing holds them together, and the average of "
                "their weights need not be good anywhere. Give the weights a finite mass m1."
            )
        mean, apart = self.half_lives()
        said = [
            f"{n} workers hang on one average, each by a spring of its own: per sync a worker is pulled by {c.a:.4g} "
            f"of its way to the average, and the average follows all of them by {c.b:.4g} of its way to each.",
            f"The average closes a + N·b = {self.rate:.4g} of its distance to the mean of the workers per sync, and "
            f"forgets half of it in {mean:.3g} syncs.",
        ]
        if n > 1:
            said.append(f"The {n - 1} differences between workers shrink by half in {apart:.3g} syncs.")
        if self.rate >= 1:
            return " ".join([*said, f"That is unstable or overshoots: {cure(c, n)}."])
        limit, alone = self.max_stable_lr(1.0), self.pair.max_stable_lr(1.0)
        which = "the mean of the workers" if alone <= self._relative_limit else "the differences between workers"
        said.append(
            f"If they sync at every step, all together move at {self.effective_lr_scale:.4g} of the optimizer's "
            f"learning rate, and SGD on curvature h is stable below ηh = {limit:.4g}; {which} would be the first to "
            "leave."
        )
        return " ".join(said)


def gathering(method: Method) -> Gathering | None:
    """Return what a method does with several workers; None if it is for one alone."""
    return getattr(method, "gathering", None)


def share_of_each(method: Method, coupling: Coupling, workers: int, every: int = 1) -> Coupling:
    """Return the four numbers of each worker at a sync after `every` steps; refuses springs that are too strong.

    >>> from torchbelay.physics.methods import easgd
    >>> share_of_each(easgd(0.3), easgd(0.3).coupling(1, 0.1), workers=4)
    Traceback (most recent call last):
        ...
    ValueError: easgd(alpha=0.3) with 4 workers has a + N·b = 1.5, and a + N·b < 1 is needed: ...
    """
    if gathering(method) != "spring" or coupling.b == 0:
        return coupling
    found = Workers(coupling, workers)
    if found.rate >= 1:
        raise ValueError(
            f"{method!r} with {workers} workers has a + N·b = {found.rate:.4g}, and a + N·b < 1 is needed: "
            f"{cure(coupling, workers)}"
        )
    return coupling if every == 1 else found.compound(every).coupling


def cure(coupling: Coupling, workers: int) -> str:
    """Return what makes springs weak enough for so many workers."""
    if coupling.a == coupling.b:
        return f"use α < 1/(N + 1) = {1 / (workers + 1):.4g}"
    return f"weaken the springs by at least {coupling.a + workers * coupling.b:.4g}, as by a smaller k, or a larger m2"


def _half_life(left: float) -> float:
    """Return the steps after which a half is left, if each leaves this share."""
    if not 0 < abs(left) < 1:
        return 0.0 if left == 0 else math.inf
    return math.log(0.5) / math.log(abs(left))
