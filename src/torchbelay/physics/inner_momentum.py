"""What an optimizer's own momentum leaves of a spring's stable range: the floor that θ must not fall below.

The optimizer steps by u = −η·m' with m' = β·m + (1−β)·gradient, as Adam with its β1. SGD's momentum without dampening
is the same with η = lr/(1−β). On a quadratic of curvature h, with x = (1−β)·η·h, the step has the characteristic
polynomial

    (λ − β)(λ − 1)(λ − 1 + c) + x·((1+ν)λ − ν)·(p·λ − s)    s = p − (b·p + a·q), ν = 0, or ν = β for Nesterov's

As x grows, a root leaves the unit circle through −1, or a complex pair leaves it. Above the floor no pair does. Below
it a pair leaves at a finite x, because two momenta feed each other. That x is infinite at the floor and falls with θ:
the floor binds where the pair leaves first.
"""

import math
from typing import TYPE_CHECKING

from . import arguments

if TYPE_CHECKING:
    from .coupling import Coupling, Follow


def theta_floor(beta: float, c: float, follow: "Follow" = "after") -> float:
    """Return the θ above which no complex pair grows, for momentum β of the optimizer and the average's rate c.

        −(1−β)/g    (follow="before": −(1−c)(1−β)/g)    with g = 1 − β(1−c)

    Below the floor a pair grows from a finite learning rate on. The stable range becomes smaller only if that limit is
    the lower one, which it is below floor·(2−c)²/(4(1−c)): 1% below the floor at c = 0.2, and 80% at c = 0.8.
    `is_below_floor` tests it.

    θ < 0 is Generalized Primal Averaging. Without momentum the floor is −1 (before: −(1−c)). Near the floor the pair is
    poorly damped; keep θ ≥ 0.75·floor.

    >>> round(theta_floor(0.9, 0.05), 3), round(theta_floor(0.9, 0.5), 3), theta_floor(0.0, 0.5)
    (-0.69, -0.182, -1.0)
    """
    beta = arguments.number("beta", beta, low=0, high=1, open_low=False)
    c = arguments.number("c", c, low=0, high=1, open_high=False)
    arguments.one_of("follow", follow, ("before", "after"))
    share = 1 - c if follow == "before" else 1.0
    return -share * (1 - beta) / (1 - beta + beta * c)


def stable_range(coupling: "Coupling", beta: float, *, nesterov: bool = False) -> float:
    """Return the limit of ηh: SGD with momentum β and this coupling is stable on a curvature h below it.

    It is 0 if the pair diverges without any gradient, or goes uphill.

    >>> from torchbelay import Coupling
    >>> ema, repelling = Coupling(0.0, 0.05, 1.0, 0.05), Coupling(-0.45, 0.5, 0.145, 0.05)  # θ = −0.9
    >>> round(stable_range(ema, 0.9), 2), round(stable_range(repelling, 0.9), 2)
    (38.0, 0.25)
    """
    if not 0 <= coupling.rate <= 2 or coupling.b * coupling.p + coupling.a * coupling.q < 0:
        return 0.0
    return min(_limits(coupling, beta, nesterov)) / (1 - beta)


def is_below_floor(coupling: "Coupling", beta: float, *, nesterov: bool = False) -> bool:
    """Whether the floor binds: a complex pair ends a repelling spring's range before a root through −1 does.

    A θ right below `theta_floor` may be above this, since the pair's limit is still the larger one there.
    """
    flip, turn = _limits(coupling, beta, nesterov)
    return coupling.theta < 0 and turn < flip


def _limits(coupling: "Coupling", beta: float, nesterov: bool) -> tuple[float, float]:
    """Return the x at which a root leaves through −1, and that at which a complex pair leaves, by Jury's conditions."""
    c, p, nu = coupling.rate, coupling.p, beta if nesterov else 0.0
    s = p - (coupling.b * coupling.p + coupling.a * coupling.q)
    through = (p + s) * (1 + 2 * nu)
    flip = 2 * (1 + beta) * (2 - c) / through if through > 0 else math.inf
    # λ³ + A·λ² + B·λ + C, each of the three linear in x; a pair is on the circle where 1 − B + A·C − C² = 0.
    a0, a1 = -(2 - c + beta), (1 + nu) * p
    b1 = -((1 + nu) * s + nu * p)
    c0, c1 = -beta * (1 - c), nu * s
    free = c * (1 - beta) * (1 - beta * (1 - c))  # at x = 0; B is there β(2 − c) + 1 − c
    return flip, _first_root(free, -b1 + a0 * c1 + a1 * c0 - 2 * c0 * c1, a1 * c1 - c1 * c1)


def _first_root(n0: float, n1: float, n2: float) -> float:
    """Return the least x > 0 at which n0 + n1·x + n2·x² falls below 0, for n0 ≥ 0; infinity if there is none."""
    # rounding leaves traces of numbers that are 0
    if abs(n1) < 1e-14:
        n1 = 0.0
    if n0 == 0:  # on the circle already
        return 0.0 if n1 < 0 else math.inf if n2 >= 0 else -n1 / n2
    square = n1 * n1 - 4 * n2 * n0
    if square < 0:
        return math.inf
    half = -(n1 + math.copysign(math.sqrt(square), n1)) / 2
    roots = [x for x in (half / n2 if n2 else math.inf, n0 / half if half else math.inf) if x > 0]
    return min(roots, default=math.inf)
