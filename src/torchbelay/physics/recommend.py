"""Which θ, averaging rate and learning rate to take for a run: a search on a noisy quadratic, with its reasons.

The expected loss of the average after T steps is exact on a quadratic (`quadratics`), so that settings can be compared
without a run. The search keeps θ ≥ ¾ of the floor that the optimizer's momentum sets (`inner_momentum`). The EMA and
schedule-free averaging that it is compared with are tuned on the same quadratic by the same search. A network is not a
quadratic: the advice is where to begin.
"""

import math
from collections.abc import Iterable, Iterator, Sequence, ValuesView
from dataclasses import dataclass, field, replace
from typing import Any

from . import arguments, recommend_words
from .evidence import Evidence
from .inner_momentum import theta_floor
from .methods.centred import centred
from .methods.schedule_free import schedule_free
from .quadratics import Quadratic, Split, typical
from .region import LINE_SEARCH, NEAR, Region
from .run_fit import RunFit
from .search import AROUND, LONGEST, Setting, scaled, search, tune_free
from .spectrum import Spectrum

MOST = 10  # curvatures that the search looks at; more are merged
SIMPLER = 1.03  # an EMA is recommended if its loss is at most this many times the best


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
    runs: int = 0  # that the advice is from, lost ones included
    share: float | None = None  # of noise in the weights of the best of them
    region: Region = field(default=Region())  # where the search stayed, and why

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
    curvatures: Sequence[float] | Spectrum | Quadratic | RunFit | Iterable[RunFit] | None = None,
    beta1: float | None = None,
    noise: float = 1.0,
    batch: float = 128.0,
    start: float = 1.0,
    lr: float | None = None,
    near: float | None = None,
    lost: Sequence[float] = (),
    caveats: Sequence[str] = (),
) -> Advice:
    """Return θ, the averaging rate and the learning rate for a run of `steps` steps, with reasons.

    Args:
        steps: the length of the run.
        curvatures: the eigenvalues of the loss's Hessian, what `measure_curvatures` or `fit_run` has found, a list of
            what `fit_run` has found for several runs, or a `Quadratic`. Left out, a typical spectrum stands for them,
            and learning rates are in units of 1/(largest curvature).
        beta1: the optimizer's momentum: Adam's β1, or that of SGD with dampening = momentum. Without dampening, torch's
            default, learning rates of SGD that follow from curvatures are 1 − β1 times as large. Left out, it is that
            of the Adam that curvatures were measured for, or of the fitted runs, else 0.
        noise: the variance of one example's gradient over the curvature; 1 for a log-likelihood near its minimum.
        batch: examples per step.
        start: the loss above its minimum at the beginning.
        lr: the learning rate that is best for an EMA, if you know it; rates of the advice are then relative to it.
        near: the learning rate of the run that the curvatures are known from; the advice stays within a factor of 2.
            Left out, it is that of the fitted run that ended best. Then its averaging rate, its noise and the other
            runs count too (`physics.region`).
        lost: learning rates of other runs of the same kind, whose loss became infinite or did not fall.
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
    if isinstance(curvatures, Iterator | ValuesView):
        curvatures = list(curvatures)
    evidence = _evidence(curvatures, lost, near, lr)
    if evidence and (noise, batch, start) != (1.0, 128.0, 1.0):
        raise ValueError(
            f"noise={noise!r}, batch={batch!r} and start={start!r} are known of fitted runs; leave all three out"
        )
    source = evidence.best if evidence else curvatures
    if beta1 is None:
        beta1 = source.beta1 if isinstance(source, Spectrum | RunFit) else 0.0
    beta = arguments.number("beta1", beta1, low=0, high=1, open_low=False)
    if isinstance(source, RunFit) and beta != source.beta1:
        raise ValueError(f"beta1={beta1!r} is not that of the fitted runs, {source.beta1:g}; leave it out")
    problem = _problem(source, start=start, noise=noise, batch=batch)
    doubts = (evidence or source).caveats if isinstance(source, Spectrum | RunFit) else ()
    if near is not None:
        known, evidence = arguments.number("near", near, low=0), None
        region = Region.near(known)
    elif evidence:
        known, region = evidence.best.lr, evidence.region(count)
        problem = evidence.problem(region)
        doubts = [*doubts, *evidence.beyond(region)]
    else:
        known, region = 0.0, Region()
    small = problem.merged(MOST)
    found = search(small, count, beta, region)
    ema, free = found[0.0], tune_free(small, count)
    candidates = [*found.values(), *([] if beta or known else [free])]  # schedule-free takes the place of the momentum
    best = _choose(small, ema, candidates, known, beta)
    measured, unknown = isinstance(curvatures, Spectrum), curvatures is None and lr is None
    if evidence:  # limits are those of the quadratic as it was fitted
        smaller = problem.largest / evidence.best.problem.largest
        best, ema, free = (replace(each, limit=smaller * each.limit) for each in (best, ema, free))
    alternatives = {"EMA": ema, "schedule-free": free}
    warnings = [*caveats, *doubts, *_warnings(small, best, count, unknown, region)]
    warnings += _warnings_near(best, free, region, known) if known else []
    if lr is not None:
        scale = arguments.number("lr", lr, low=0) / ema.lr
        if curvatures is not None:
            warnings.append(recommend_words.rescaled(float(lr), problem.largest, scale))
        alternatives = {name: scaled(each, scale) for name, each in alternatives.items()}
        best = scaled(best, scale)
    unit = recommend_words.UNIT if unknown else None
    learnt = (evidence.count, evidence.best.share) if evidence else (0, None)
    said = tuple(warnings)
    return Advice(count, beta, best, alternatives, problem, said, unit, measured, known or None, *learnt, region)


def _evidence(curvatures: object, lost: Sequence[float], near: float | None, lr: float | None) -> Evidence | None:
    """Return the fitted runs that were given in place of curvatures."""
    runs = curvatures if isinstance(curvatures, list | tuple) else [curvatures]
    if not hasattr(lost, "__iter__"):
        raise TypeError(f"lost={lost!r} is not a list of learning rates; give a list")
    gone = tuple(arguments.number("lost", each, low=0) for each in lost)
    if not any(isinstance(each, RunFit) for each in runs):
        if gone:
            raise ValueError(f"lost={lost!r} goes with fitted runs; give them as curvatures")
        return None
    if lr is not None:
        raise ValueError(f"lr={lr!r} gives curvatures their size, and those of fitted runs have one; leave it out")
    if gone and near is not None:
        raise ValueError(f"near={near!r} takes the place of all runs, also of lost={lost!r}; leave one of them out")
    return Evidence.of(runs, gone)


def _problem(curvatures: Any, *, start: float, noise: float, batch: float) -> Quadratic:
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


def _warnings(problem: Quadratic, best: Setting, steps: int, unknown: bool, region: Region) -> list[str]:
    """Return what makes the advice doubtful."""
    found = []
    if unknown:
        found.append(recommend_words.NO_CURVATURES)
    if best.loss.bias > 0.5 * problem.start:
        found.append(
            f"After {steps:,} steps most of the way is still to go: the run is too short for any average to matter."
        )
    if best.lr > best.limit / 2 and region.case not in LINE_SEARCH:
        found.append(
            "The recommended learning rate is more than half of the largest stable one. On a network the curvature "
            "changes with the learning rate: begin at half of it, with a warm-up."
        )
    return found


def _warnings_near(best: Setting, free: Setting, region: Region, known: float) -> list[str]:
    """Return what lies beyond the learning rates that a run at a known one says something about."""
    found = []
    assert region.lrs is not None
    low, high = region.lrs
    if region.case == "near" and not low * AROUND < best.lr < high / AROUND:
        found.append(
            f"On this quadratic a learning rate further from the run's {known:.3g} would be better still, but the run "
            "says little about it. Run again at the recommended rate, and ask again."
        )
    if free.loss.total < best.loss.total and not known / NEAR <= free.lr <= known * NEAR:
        found.append(
            f"On this quadratic schedule-free averaging is better, but at a learning rate of {free.lr:.3g}, far from "
            f"the run's {known:.3g}: the run says little about it."
        )
    return found
