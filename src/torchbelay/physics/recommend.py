"""Which θ, averaging rate and learning rate to take for a run: a search on a noisy quadratic, with its reasons.

The expected loss of the average after T steps is exact on a quadratic (`quadratics`), so that settings can be compared
without a run. The search keeps θ ≥ ¾ of the floor that the optimizer's momentum sets (`inner_momentum`). The EMA and
schedule-free averaging that it is compared with are tuned on the same quadratic by the same search. A network is not a
quadratic: the advice is where to begin.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

from . import arguments, recommend_words
from .coupling import watch
from .inner_momentum import stable_range, theta_floor
from .methods.centred import centred
from .methods.schedule_free import schedule_free
from .quadratics import Quadratic, Split, typical
from .run_fit import RunFit
from .spectrum import Spectrum

LONGEST = 10**9  # steps: the search takes averaging rates down to 1/LONGEST
MOST = 10  # curvatures that the search looks at; more are merged
CLEAR = 0.75  # θ stays above this share of the floor
SIMPLER = 1.03  # an EMA is recommended if its loss is at most this many times the best
AROUND = 1.15  # the search judges a learning rate by the rates this many times smaller and larger: no knife's edge
WITHIN = 1.1  # the range of learning rates: those whose loss is at most this many times that of the best
NEAR = 2.0  # how many times smaller or larger than the rate of a run the advice from that run may be
_THETAS = (-0.85, -0.6, -0.4, -0.2, 0.0, 0.3)  # where the search begins
_FREE_BETA = 0.9  # of schedule-free averaging
_FINEST = 1.04  # the search ends when neighbours differ by this factor


@dataclass(frozen=True)
class Setting:
    """A method at a learning rate, and its expected loss above the minimum after the run."""

    method: centred | schedule_free
    lr: float
    loss: Split
    lrs: tuple[float, float]  # the learning rates whose loss is at most 10% above this one's, all else equal
    limit: float  # the largest stable learning rate; for schedule-free, that of its first step

    @property
    def width(self) -> float:
        """How many times the largest of `lrs` is the least."""
        return self.lrs[1] / self.lrs[0]


@dataclass(frozen=True)
class Advice:
    """What `recommend` has found.

    >>> advice = recommend(1000, curvatures=[1.0, 0.1, 0.01], noise=0.1)
    >>> advice.method, advice.floor
    (centred(theta=-0.2..., rate=0.00...), -1.0)
    >>> advice.loss.total < advice.alternatives["EMA"].loss.total
    True
    """

    steps: int
    beta1: float
    best: Setting
    alternatives: dict[str, Setting]  # "EMA" and "schedule-free", each at its best on the same quadratic
    problem: Quadratic
    warnings: tuple[str, ...] = field(default=())
    lr_unit: str | None = None  # what learning rates are multiples of; None if they are rates for the optimizer
    measured: bool = False  # the curvatures are those of a network, by `measure_curvatures`
    near: float | None = None  # the learning rate of the run that the advice is from

    @property
    def floor(self) -> float:
        """The floor of θ at the recommended averaging rate."""
        rate = getattr(self.method, "rate", 1 / self.steps)
        assert isinstance(rate, float)
        return theta_floor(self.beta1, rate)

    @property
    def method(self) -> centred | schedule_free:
        """The recommended method, to be given to `Belay`."""
        return self.best.method

    @property
    def lr(self) -> float:
        """The recommended learning rate, a multiple of `lr_unit` if there is one."""
        return self.best.lr

    @property
    def loss(self) -> Split:
        """The expected loss above the minimum."""
        return self.best.loss

    def explain(self) -> str:
        """Return the advice in words: what, why, the range of learning rates, the comparison, the warnings."""
        return recommend_words.explain(self)


def recommend(
    steps: int,
    *,
    curvatures: Sequence[float] | Spectrum | Quadratic | RunFit | None = None,
    beta1: float | None = None,
    noise: float = 1.0,
    batch: float = 128.0,
    start: float = 1.0,
    lr: float | None = None,
    near: float | None = None,
    caveats: Sequence[str] = (),
) -> Advice:
    """Return θ, the averaging rate and the learning rate for a run of `steps` steps, with reasons.

    Args:
        steps: the length of the run.
        curvatures: the eigenvalues of the loss's Hessian, what `measure_curvatures` or `fit_run` has found, or a
            `Quadratic`. Left out, a typical spectrum stands for them, and learning rates are in units of 1/(largest
            curvature).
        beta1: the optimizer's momentum: Adam's β1, or that of SGD with dampening = momentum. Without dampening, torch's
            default, learning rates of SGD that follow from curvatures are 1 − β1 times as large. Left out, it is that
            of the Adam that curvatures were measured for, else 0.
        noise: the variance of one example's gradient over the curvature; 1 for a log-likelihood near its minimum.
        batch: examples per step.
        start: the loss above its minimum at the beginning.
        lr: the learning rate that is best for an EMA, if you know it; rates of the advice are then relative to it.
        near: the learning rate of the run that the curvatures are known from; the advice stays within a factor of 2.
            Left out, it is that of the run which was fitted.
        caveats: warnings to add, of what made the curvatures.

    >>> advice = recommend(2000, beta1=0.9, lr=3e-4)
    >>> print(advice.explain())
    Use tb.methods.centred(theta=...) ...
    """
    count = arguments.whole("steps", steps, low=2)
    if count > LONGEST:
        raise ValueError(f"steps={steps!r} is too large to search for; it needs steps ≤ {LONGEST:,}")
    if isinstance(caveats, str):
        raise TypeError(f"caveats={caveats!r} is a text; give a list of texts")
    if beta1 is None:
        beta1 = curvatures.beta1 if isinstance(curvatures, Spectrum) else 0.0
    beta = arguments.number("beta1", beta1, low=0, high=1, open_low=False)
    if isinstance(curvatures, RunFit) and near is None:
        near = curvatures.lr
    problem = _problem(curvatures, start=start, noise=noise, batch=batch)
    small = problem.merged(MOST)
    known = 0.0 if near is None else arguments.number("near", near, low=0)
    found = _search(small, count, beta, known)
    ema, free = found[0.0], _tune_free(small, count)
    candidates = [*found.values(), *([] if beta or known else [free])]  # schedule-free takes the place of the momentum
    best = _choose(small, ema, candidates, known, beta)
    measured, unknown = isinstance(curvatures, Spectrum), curvatures is None and lr is None
    warnings = [*caveats, *(curvatures.caveats if isinstance(curvatures, Spectrum | RunFit) else ())]
    warnings += [*_warnings(small, best, count, unknown), *(_warnings_near(best, free, known) if known else ())]
    alternatives = {"EMA": ema, "schedule-free": free}
    if lr is not None:
        scale = arguments.number("lr", lr, low=0) / ema.lr
        if curvatures is not None:
            warnings.append(recommend_words.rescaled(float(lr), problem.largest, scale))
        alternatives = {name: _scaled(each, scale) for name, each in alternatives.items()}
        best = _scaled(best, scale)
    unit = recommend_words.UNIT if unknown else None
    return Advice(count, beta, best, alternatives, problem, tuple(warnings), unit, measured, known or None)


def _problem(
    curvatures: Sequence[float] | Spectrum | Quadratic | RunFit | None, *, start: float, noise: float, batch: float
) -> Quadratic:
    """Return the quadratic that the arguments of `recommend` describe."""
    if isinstance(curvatures, RunFit):
        return curvatures.problem
    if isinstance(curvatures, Quadratic):
        return curvatures
    if start == 0:
        raise ValueError("start=0 begins at the minimum, and the best learning rate there is 0; give the loss above it")
    if curvatures is None:
        return typical(start=start, noise=noise, batch=batch)
    if isinstance(curvatures, Spectrum):
        many = curvatures.counts
        return Quadratic.of(curvatures.curvatures, counts=many, start=start, noise=noise, batch=batch)
    return Quadratic.of(curvatures, start=start, noise=noise, batch=batch)


def _choose(problem: Quadratic, ema: Setting, candidates: Sequence[Setting], known: float, beta: float) -> Setting:
    """Return the setting with the least loss, or the EMA if it is about as good; refuse losses that say nothing."""
    least = min(each.loss.total for each in candidates)
    if not math.isfinite(least):
        if known * problem.largest > 2 * NEAR * (1 + beta) / (1 - beta):  # NEAR times smaller, plain SGD diverges too
            raise ValueError(
                f"near={known!r} is not a learning rate of a run on these curvatures, the largest of which is "
                f"{problem.largest:.3g}: it would have diverged; check both"
            )
        raise OverflowError("the losses of this quadratic are not finite; use moderate curvatures, noise and start")
    best = next(each for each in (ema, *candidates) if each.loss.total <= (SIMPLER if each is ema else 1) * least)
    if best.loss.noise == 0 and any(each.noise for each in problem.directions):
        raise ArithmeticError("the losses of this quadratic are too small to compute with; use moderate numbers")
    return best


# The search ----------------------------------------------------------------------------------------------------------


def _search(problem: Quadratic, steps: int, beta: float, known: float) -> dict[float, Setting]:
    """Return the best settings that were found, by their θ; 0 is always among them.

    If a learning rate is known, the search stays near it.
    """

    def loss(theta: float, c: float, lr: float) -> float:
        if not (1 / LONGEST < c < 1 and theta >= CLEAR * theta_floor(beta, c)):
            return math.inf
        if known and not known / NEAR <= lr <= known * NEAR:
            return math.inf
        coupling = centred(theta, c).coupling(1, lr)
        return sum(problem.loss(coupling, each, steps, beta).total for each in (lr * AROUND, lr / AROUND)) / 2

    found: dict[float, tuple[float, float, float]] = {}
    for theta in _THETAS:
        c = min(0.5, 5 / steps)
        while theta < CLEAR * theta_floor(beta, c) and c > 1e-8:
            c /= 2
        if theta < CLEAR * theta_floor(beta, c):
            continue
        limit = stable_range(centred(theta, c).coupling(1, 0.1), beta) / problem.largest
        lr = min(known, max(known / NEAR, 0.8 * limit / AROUND)) if known else 0.2 * limit
        rate, eta = _descend(lambda c, lr, theta=theta: loss(theta, c, lr), (c, lr))
        found[theta] = (loss(theta, rate, eta), rate, eta)
    theta = min(found, key=lambda each: found[each])
    if theta:
        _, rate, eta = found[theta]
        shift, rate, eta = _descend(lambda s, c, lr: loss(s - 1, c, lr), (1 + theta, rate, eta))
        found[shift - 1] = (loss(shift - 1, rate, eta), rate, eta)
    return {theta: _describe(problem, theta, rate, eta, steps, beta) for theta, (_, rate, eta) in found.items()}


def _descend(loss: Callable[..., float], start: tuple[float, ...]) -> tuple[float, ...]:
    """Return positive numbers with the least loss, by trying neighbours that are a shrinking factor away."""
    at, least, factor = start, loss(*start), 3.0
    while factor > _FINEST:
        moves = [move for move in product((1 / factor, 1.0, factor), repeat=len(at)) if move.count(1.0) >= len(at) - 1]
        tried = [tuple(x * f for x, f in zip(at, move, strict=True)) for move in moves if set(move) != {1.0}]
        value, best = min((loss(*each), each) for each in tried)
        if value < least:
            at, least = best, value
        else:
            factor = math.sqrt(factor)
    return at


def _describe(problem: Quadratic, theta: float, rate: float, lr: float, steps: int, beta: float) -> Setting:
    method = centred(theta, rate)
    coupling = method.coupling(1, lr)
    lrs = _range(lambda lr: problem.loss(coupling, lr, steps, beta).total, lr)
    limit = stable_range(coupling, beta) / problem.largest
    return Setting(method, lr, problem.loss(coupling, lr, steps, beta), lrs, limit)


def _tune_free(problem: Quadratic, steps: int) -> Setting:
    """Return schedule-free averaging at its best learning rate, around an optimizer without momentum."""

    def loss(lr: float) -> float:
        return problem.loss_free(_FREE_BETA, lr, steps).total

    (lr,) = _descend(lambda lr: loss(lr * AROUND) + loss(lr / AROUND), (1.0 / problem.largest,))
    limit = stable_range(watch(1.0), 0.0) / problem.largest  # of its first step, at which c = 1
    return Setting(schedule_free(_FREE_BETA), lr, problem.loss_free(_FREE_BETA, lr, steps), _range(loss, lr), limit)


def _range(loss: Callable[[float], float], best: float) -> tuple[float, float]:
    """Return the learning rates around the best one at which the loss is WITHIN times as large."""
    allowed = WITHIN * loss(best)

    def end(factor: float) -> float:
        inside, outside = best, best * factor
        while loss(outside) <= allowed and 1e-6 < outside / best < 1e6:
            inside, outside = outside, outside * factor
        for _ in range(5):
            middle = math.sqrt(inside * outside)
            inside, outside = (middle, outside) if loss(middle) <= allowed else (inside, middle)
        return inside

    return end(1 / 1.5), end(1.5)


def _scaled(setting: Setting, scale: float) -> Setting:
    """Return the setting of a loss whose curvatures are 1/scale times as large: all its rates are scale times so."""
    low, high = setting.lrs
    return Setting(setting.method, scale * setting.lr, setting.loss, (scale * low, scale * high), scale * setting.limit)


def _warnings(problem: Quadratic, best: Setting, steps: int, unknown: bool) -> list[str]:
    """Return what makes the advice doubtful."""
    found = []
    if unknown:
        found.append(recommend_words.NO_CURVATURES)
    if best.loss.bias > 0.5 * problem.start:
        found.append(
            f"After {steps:,} steps most of the way is still to go: the run is too short for any average to matter."
        )
    if best.lr > best.limit / 2:
        found.append(
            "The recommended learning rate is more than half of the largest stable one. On a network the curvature "
            "changes with the learning rate: begin at half of it, with a warm-up."
        )
    return found


def _warnings_near(best: Setting, free: Setting, known: float) -> list[str]:
    """Return what lies beyond the learning rates that a run at a known one says something about."""
    found = []
    if not known / NEAR * AROUND < best.lr < known * NEAR / AROUND:
        found.append(
            f"On this quadratic a learning rate further from the run's {known:.3g} would be better still, but the run "
            "says little about it. Run again at the recommended rate, and ask again."
        )
    if free.loss.total < best.loss.total:
        found.append(
            f"On this quadratic schedule-free averaging is better, but at a learning rate of {free.lr:.3g}, far from "
            f"the run's {known:.3g}: the run says little about it."
        )
    return found
