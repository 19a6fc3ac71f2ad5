"""How much of each checkpoint a merge takes: even shares, the shares that stand for a learning-rate decay, or an EMA.

**A merge is a decay.** Checkpoints w_1, …, w_n of a run at a constant learning rate are sums of updates: w_j = w_1 +
u_2 + … + u_j, and u_j is all that happened between two of them. A merge Σ c_j·w_j with Σ c_j = 1 therefore takes the
share d_j = c_j + … + c_n of u_j, as if its learning rate had been d_j times as large. Read backwards, a wanted decay
d_1 = 1 ≥ d_2 ≥ … ≥ d_n has the weights c_j = d_j − d_{j+1}, with d_{n+1} = 0 (Tian et al. 2025, "WSM: Decay-Free
Learning Rate Schedule via Checkpoint Merging", arXiv 2507.17634). Here d_j = D((j − 1)/n), with D(0) = 1 and D(1) = 0,
for checkpoints at even distances. The linear decay gives even shares: it is the same merge as "uniform".
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from torchbelay.physics import arguments

# D(x): the learning rate after the share x of the window, relative to that at its beginning.
DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "1-sqrt": lambda x: 1 - math.sqrt(x),
}

_FORMS = "'uniform', 'linear', 'cosine', '1-sqrt', 'ema:0.9' or numbers such as '0.2,0.3,0.5'"


def merge_weights(
    weights: str | Sequence[float] = "uniform", count: int = 2, *, normalize: bool = False
) -> tuple[float, ...]:
    """Return the weights of `count` checkpoints, given from the oldest to the newest.

    "uniform" is the average of a window (SWA, LAWA). "linear", "cosine" and "1-sqrt" stand for a learning rate that
    decays in this way over the window. "ema:0.9" is an average with decay 0.9 that begins with the oldest and takes one
    step per checkpoint. Numbers must add up to 1, unless `normalize` divides them by their sum.

    >>> merge_weights("cosine", 4)
    (0.146..., 0.353..., 0.353..., 0.146...)
    >>> merge_weights("ema:0.5", 3), merge_weights([1, 3], 2, normalize=True)
    ((0.25, 0.25, 0.5), (0.25, 0.75))
    """
    arguments.whole("count", count, low=1)
    if not isinstance(weights, str):
        return _numbers(weights, weights, count, normalize)
    name, colon, rest = weights.partition(":")
    if name == "uniform" and not colon:
        return (1 / count,) * count
    if name in DECAYS and not colon:
        rates = [*(DECAYS[name](j / count) for j in range(count)), 0.0]
        return tuple(here - after for here, after in pairwise(rates))
    if name == "ema" and colon:
        decay = _ema_decay(weights, rest)
        return (decay ** (count - 1), *((1 - decay) * decay ** (count - j) for j in range(2, count + 1)))
    try:
        numbers = [float(part) for part in weights.split(",")]
    except ValueError:
        raise ValueError(f"weights={weights!r} is unknown; give {_FORMS}") from None
    return _numbers(weights, numbers, count, normalize)


def _ema_decay(weights: str, text: str) -> float:
    try:
        decay = float(text)
    except ValueError:
        decay = math.nan
    if not 0 <= decay < 1:
        raise ValueError(
            f"weights={weights!r} needs a decay of at least 0 and below 1 after the colon, as in 'ema:0.9'"
        )
    return decay


def _numbers(given: object, numbers: Sequence[float], count: int, normalize: bool) -> tuple[float, ...]:
    try:
        values = tuple(float(number) for number in numbers)
    except (TypeError, ValueError):
        raise ValueError(f"weights={given!r} is unknown; give {_FORMS}") from None
    if len(values) != count:
        raise ValueError(
            f"weights={given!r} has {len(values)} numbers for {count} checkpoints; give one per checkpoint"
        )
    total = math.fsum(values)
    if not math.isfinite(total):
        raise ValueError(f"weights={given!r} holds a number that is not finite; give finite numbers that add up to 1")
    if normalize:
        if total <= 0:
            raise ValueError(f"weights={given!r} add up to {total:g}, which cannot be made 1; give a positive sum")
        return tuple(value / total for value in values)
    if abs(total - 1) > 1e-6:
        raise ValueError(
            f"weights={given!r} add up to {total:g} instead of 1; correct them, or use normalize=True (--normalize)"
        )
    return values
