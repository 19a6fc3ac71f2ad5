"""The centred average that is critically damped: the least noise at a given speed.

Around SGD on a curvature h, with x = ηh, both modes of `centred(θ, c)` shrink by the same factor 1 − μ if

    c = μ²/x        θ = (1 − (1−μ)²/(1−c))/x − 1

The double root is exact. What follows holds for small x, to leading order: θ = −(1 − μ/x)², a spring that repels
(Generalized Primal Averaging). For μ ≤ x no other θ and c have less noise in w2 and are as fast. The EMA with c = μ has
2x/(x + μ) times the variance, between 1 and 2. At x = 1 and μ = 0.5 it has 1.8 times, not 1.33. docs/theory.md has the
proof.
"""

import math

from . import arguments
from .methods.centred import NEAREST, centred


def critical(curvature: float, lr: float, rate: float) -> centred:
    """Return the method whose two modes both shrink by 1 − `rate` per step, around SGD on this curvature.

    `rate` is the speed μ, for instance 5/T for a run of T steps. It must be below 2x/(1 + x).

    >>> method = critical(curvature=1.0, lr=0.1, rate=0.02)
    >>> round(method.theta, 4), round(method.rate, 4)
    (-0.6426, 0.004)
    >>> ema = centred(theta=0.0, rate=0.02)
    >>> noise = [m.coupling(1, 0.1).stationary_variance(1.0, 0.1).w2 for m in (method, ema)]
    >>> round(noise[0] / noise[1], 2)  # about (x + μ)/(2x), since x is small
    0.6
    """
    x = arguments.number("curvature", curvature, low=0) * arguments.number("lr", lr, low=0)
    mu = arguments.number("rate", rate, low=0, high=1)
    if not 0 < x < math.inf:
        raise ValueError(f"curvature={curvature!r} times lr={lr!r} is not a positive float; use moderate numbers")
    too_fast = (
        f"rate={rate!r} is too fast for curvature·lr = {x:.4g}: no θ > −1 makes both modes shrink by 1 − rate; use a "
        f"rate below {2 * x / (1 + x):.4g}, or a higher learning rate"
    )
    if mu >= 2 * x / (1 + x):
        raise ValueError(too_fast)
    c = mu * (mu / x)  # below 1, because 2x/(1 + x) ≤ √x
    # 1 − (1−μ)²/(1−c) = (2μ − μ² − c)/(1−c), which keeps the digits of a small μ
    theta = (2 * mu - mu * mu - c) / (1 - c) / x - 1
    if theta < NEAREST or c == 0:
        if mu > x:  # 1 + θ is 0 at the fastest rate, too
            raise ValueError(too_fast)
        raise ValueError(  # 1 + θ is about 2μ/x
            f"rate={rate!r} is too slow for curvature·lr = {x:.4g}: 1 + θ would be below 1e-8; use a rate above "
            f"{x * 6e-9:.4g}, or a lower learning rate"
        )
    return centred(theta=theta, rate=c)
