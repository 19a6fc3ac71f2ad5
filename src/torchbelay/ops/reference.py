"""The oracle: Algorithm 1 and the four-number coupling, out of place, as they are written down.

Every other path is tested against this file. The functions use +, −, × and / only, so that they take tensors of any
dtype, floats, and sympy's symbols alike.
"""

from typing import Any

Number = Any  # a tensor, a float, a symbol


def couple(w1: Number, w2: Number, u: Number, *, a: float, b: float, p: float, q: float) -> tuple[Number, Number]:
    """One step of the linear map: the new (w1, w2), for the update u = w1* − w1.

    >>> couple(0.0, 8.0, 1.0, a=0.25, b=0.5, p=0.75, q=0.0)
    (2.75, 4.0)
    """
    return w1 + a * (w2 - w1) + p * u, w2 + b * (w1 - w2) + q * u


def algorithm1(
    w1: Number, w2: Number, u: Number, *, k: float, m1: float, m2: float, dt: float = 1.0
) -> tuple[Number, Number]:
    """Algorithm 1, velocity-free (c = 2m/Δt): both masses move at once, from what they were before the step.

    >>> algorithm1(0.0, 8.0, 1.0, k=1.0, m1=2.0, m2=1.0)
    (2.75, 4.0)
    """
    alpha, beta = 1 - k * dt**2 / (2 * m1), 1 - k * dt**2 / (2 * m2)
    return alpha * (w1 + u) + (1 - alpha) * w2, beta * w2 + (1 - beta) * w1


def algorithm1_with_velocities(
    w1: Number,
    w2: Number,
    v1: Number,
    v2: Number,
    u: Number,
    *,
    k: float,
    m1: float,
    m2: float,
    c1: float,
    c2: float,
    dt: float = 1.0,
    force: str = "derived",
) -> tuple[Number, Number, Number, Number]:
    """Algorithm 1 as printed, with its velocities: the new (w1, w2, v1, v2).

    The position gains α·u = (f/m1)·Δt²/2 from the update's force f, so the velocity gains (f/m1)·Δt = 2α·u/Δt:
    `force="derived"`. The paper prints u/(2α) (at Δt = 1): `force="printed"`.

    >>> algorithm1_with_velocities(0.0, 8.0, 0.0, 0.0, 1.0, k=1.0, m1=2.0, m2=1.0, c1=1.0, c2=1.0)
    (2.75, 4.0, 5.5, -8.0)
    """
    alpha, beta = 1 - k * dt**2 / (2 * m1), 1 - k * dt**2 / (2 * m2)
    s = {"derived": 2 * alpha / dt, "printed": 1 / (2 * alpha * dt)}[force]
    return (
        alpha * (w1 + u) + (1 - alpha) * w2 + (dt - c1 * dt**2 / (2 * m1)) * v1,
        beta * w2 + (1 - beta) * w1 + (dt - c2 * dt**2 / (2 * m2)) * v2,
        v1 + dt * (k / m1 * (w2 - w1) - c1 / m1 * v1) + s * u,
        v2 + dt * (k / m2 * (w1 - w2) - c2 / m2 * v2),
    )
