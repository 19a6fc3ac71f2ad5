"""The oracle: Algorithm 1 and the four-number coupling, out of place, as they are written down.

Every other path is tested against these functions. They use +, −, × and / only, so that they take tensors of any dtype,
floats, and sympy's symbols alike. `Reference` is the backend that computes with them, tensor by tensor.
"""

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from .lists import ListBackend
from .step import Motion, TensorGroup, Tensors

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


class Reference(ListBackend):
    """Motions by the functions above, tensor by tensor, from a copy of w1 that is always made."""

    name = "reference"
    copies_always = True

    def move(self, group: TensorGroup, motion: Motion, copy: Tensors | None, keep: Tensor | None) -> None:
        """Compute new tensors by `couple` and the velocity equations, then write them back."""
        assert copy is not None
        a, b, p, q = motion.numbers
        for i, (x1, x2, x0) in enumerate(zip(group.w1, group.w2, copy, strict=True)):
            widest = reduce(torch.promote_types, (x1.dtype, x2.dtype), torch.float32)
            y1, y2, y0 = (t.to(widest) for t in (x1, x2, x0))
            u = y1 - y0
            new1, new2 = couple(y0, y2, u, a=a, b=b, p=p, q=q)
            news = [(x1, new1), (x2, new2)]
            for at, swing, apart in ((0, motion.swing1, y2 - y0), (1, motion.swing2, y0 - y2)):
                if swing is not None:
                    v, (carry, stay, stiffness, push) = swing.v[i].to(widest), swing.inertia
                    news[at] = (news[at][0], news[at][1] + carry * v)
                    news.append((swing.v[i], stay * v + stiffness * apart + push * u))
            if motion.meets and motion.swings:  # where the average arrives with its velocity
                news[0] = (x1, news[1][1])
            for old, new in news if motion.pulls else news[1:]:  # w1 + u is w1* but for a rounding
                old.copy_(new if keep is None else torch.where(keep.to(old.device) != 0, new, old.to(new.dtype)))
