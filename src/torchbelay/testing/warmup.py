"""The warm-up that an average really has, told from the four numbers of its updates."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from torchbelay.physics.coupling import Coupling

Law = Literal["none", "ratio", "inverse-power", "mean", "power", "debiased", "linear", "other"]


@dataclass(frozen=True)
class Warmup:
    """What happens before an average has its constant decay.

    `law` says how the decay d of an update depends on τ, which counts calls of `update()` from `numbers["from"]`:

        "none"             d is constant
        "ratio"            d = (1 + τ)/(10 + τ), as in TensorFlow's ExponentialMovingAverage
        "inverse-power"    d = 1 − (1 + τ/inv_gamma)^(−power)
        "mean"             d = 1 − 1/n: the uniform mean of n points
        "power"            d = (1 − 1/t)^(gamma + 1): power-function EMA
        "debiased"         d = (β − βⁿ)/(1 − βⁿ): an average that began at zero and is divided by its weight, as in Adam
        "linear"           d rises by `slope` per call
        "other"            none of these, or the average pulls the weights; `decays` has the numbers
    """

    law: Law
    ignored: int = 0  # calls of update() that do nothing before the average begins to move, or after its first copy
    copies: int = 0  # updates at the start that copy the weights
    copied_until: int = 0  # the call of the last of these
    every: int = 1  # calls of update() per update of the average; 0 if irregular, or if it never moves
    decay: float | None = None  # the constant decay in the end; None if it has none so far
    numbers: Mapping[str, float] = field(default_factory=dict)
    decays: tuple[float, ...] = ()  # 1 − b of every update that is neither ignored nor a copy
    moving: tuple[int, ...] = ()  # the calls of update() that moved anything, counted from 1


def recognise(couplings: Sequence[Coupling], allowed: float = 1e-9) -> Warmup:
    """Return the warm-up of an average with these couplings; errors up to `allowed` are rounding.

    >>> from torchbelay.physics.methods import ema
    >>> method = ema(0.9, warmup="ratio")
    >>> found = recognise([method.coupling(t, 0.1) for t in range(1, 200)])
    >>> found.law, found.decay
    ('ratio', 0.9)
    """
    near = _nearness(allowed)
    moving = [t for t, c in enumerate(couplings, start=1) if not all(map(near, (c.a, c.b, c.q), (0, 0, 0)))]
    if not moving:
        return Warmup("none", ignored=len(couplings), every=0)
    every, ignored = _rhythm(moving)
    rates = {t: couplings[t - 1].b for t in moving}
    copied: list[int] = []
    for t in moving:
        c = couplings[t - 1]
        if not (near(c.b, 1) and near(c.q, 1) and near(c.a, 0)):
            break
        copied.append(t)
    after = [t for t in moving if t not in copied]
    decays = tuple(_tidy(1 - rates[t], allowed) for t in after)
    plain = Warmup("none", ignored, len(copied), max(copied, default=0), every, decays=decays, moving=tuple(moving))
    if not after:
        return replace(plain, decay=0.0)
    tail = len(after) - _steady(list(reversed(decays)), near)
    constant = tail == 0 or len(after) - tail >= 3
    decay = decays[-1] if constant else None
    if tail == 0:
        return replace(plain, decay=decay)
    varying = after[:tail] if constant else after
    law: Law = "other"
    numbers: dict[str, float] = {}
    head = _steady(decays[: len(varying)], near)  # a least decay, for as long as the law is below it
    if all(near(c.a, 0) for c in couplings):  # else b is not the whole rate
        for least in (0, head) if head == 1 else (head,):
            law, numbers = _law([*copied[-1:], *varying[least:]], rates, moving, _nearness(10 * allowed))
            if law != "other":
                numbers |= {"min_decay": decays[0]} if least else {}
                break
    return replace(plain, law=law, decay=decay, numbers=numbers)


def _nearness(allowed: float) -> Callable[[float, float], bool]:
    """Return the comparison of two numbers; code that computes its decay in float32 has errors of 1e-7."""
    return lambda x, y: abs(x - y) <= max(1e-7, allowed) + 1e-6 * abs(y)


def _tidy(value: float, allowed: float) -> float:
    """Return a decay without the digits that are rounding."""
    return round(value, math.floor(-math.log10(allowed)))


def _steady(values: Sequence[float], near: Callable[[float, float], bool]) -> int:
    """Return how many of the values, from the first on, are equal to the first."""
    return next((i for i, value in enumerate(values) if not near(value, values[0])), len(values))


def _rhythm(moving: list[int]) -> tuple[int, int]:
    """Return after how many calls the average moves again, and how many calls at the start do nothing."""
    gaps = [later - earlier for earlier, later in pairwise(moving)]
    if not gaps:
        return 1, moving[0] - 1
    if len({*gaps}) == 1:
        return gaps[0], max(0, moving[0] - gaps[0])
    if len({*gaps[1:]}) == 1:  # one copy, then nothing for a while
        return gaps[1], gaps[0] - gaps[1]
    return 0, moving[0] - 1


def _law(
    calls: list[int], rates: Mapping[int, float], moving: list[int], near: Callable[[float, float], bool]
) -> tuple[Law, dict[str, float]]:
    """Return the law of the rates of these calls, and its numbers."""
    order = [moving.index(t) + 1 for t in calls]
    b = [rates[t] for t in calls]
    inner = [(t, n, x) for t, n, x in zip(calls, order, b, strict=True) if 0 < x < 1 and not near(x, 1)]
    if len(inner) < 2:
        return "other", {}
    # Ratio: τ = (10·d − 1)/(1 − d) = 9/b − 10 counts calls, or updates, from somewhere.
    for index in (0, 1):
        begin = [round(point[index] - (9 / point[2] - 10)) for point in inner]
        if len({*begin}) == 1 and all(near(9 / (10 + point[index] - begin[0]), point[2]) for point in inner):
            return "ratio", {"from": float(begin[0])}
    if len(inner) < 4:
        return "other", {}
    shift = [1 / x - n for _, n, x in inner]
    if all(near(1 / (n + shift[0]), x) for _, n, x in inner):
        return "mean", {"before": round(shift[0], 6)}
    if all(t > 1 for t, _, _ in inner):
        exponents = [math.log1p(-x) / math.log1p(-1 / t) for t, _, x in inner]
        if all(near(1 - (1 - 1 / t) ** exponents[0], x) for t, _, x in inner):
            return "power", {"gamma": round(exponents[0] - 1, 6)}
    return _debiased(b, near) or _inverse_power(inner, near) or _linear(inner, near) or ("other", {})


Named = tuple[Law, dict[str, float]] | None


def _debiased(b: list[float], near: Callable[[float, float], bool]) -> Named:
    """Test 1/b' = 1 + β/b, from a copy on."""
    beta = (1 / b[1] - 1) * b[0]
    if near(b[0], 1) and all(near(1 / (1 + beta / x), y) for x, y in pairwise(b)):
        return "debiased", {"beta": round(beta, 9)}
    return None


def _inverse_power(inner: list[tuple[int, int, float]], near: Callable[[float, float], bool]) -> Named:
    """Test b = (1 + τ/γ)^(−power): b^(−1/power) is a line for one power, which three points tell by bisection."""
    (t1, _, b1), (t2, _, b2), (t3, _, b3) = inner[0], inner[len(inner) // 2], inner[-1]
    if not b1 > b2 > b3:
        return None

    def bend(power: float) -> float:
        low, middle, high = (math.exp(-math.log(x) / power) for x in (b1, b2, b3))
        return (middle - low) * (t3 - t1) - (high - low) * (t2 - t1)

    low, high = 0.05, 20.0  # a small power makes the curve convex, a large one concave
    if not bend(low) < 0 < bend(high):
        return None
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if bend(middle) < 0 else (low, middle)
    power = (low + high) / 2
    slope = (b3 ** (-1 / power) - b1 ** (-1 / power)) / (t3 - t1)
    begin = t1 - (b1 ** (-1 / power) - 1) / slope
    if all(near((1 + slope * (t - begin)) ** -power, x) for t, _, x in inner):
        return "inverse-power", {
            "power": round(power, 4),
            "inv_gamma": round(1 / slope, 4),
            "from": round(begin, 2) + 0.0,
        }
    return None


def _linear(inner: list[tuple[int, int, float]], near: Callable[[float, float], bool]) -> Named:
    (t1, _, b1), (t3, _, b3) = inner[0], inner[-1]
    slope = (b3 - b1) / (t3 - t1)
    if all(near(b1 + slope * (t - t1), x) for t, _, x in inner):
        return "linear", {"slope": -slope}
    return None
