"""Which θ, averaging rate and learning rate to take for a run: a search on a noisy quadratic, with its reasons.

The expected loss of the average after T steps is exact on a quadratic (`quadratics`), so that settings can be compared
without a run. The search keeps θ ≥ ¾ of the floor that the optimizer's momentum sets (`inner_momentum`). The EMA and
schedule-free averaging that it is compared with are tuned on the same quadratic by the same search. A network is not a
quadratic: the advice is where to begin.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from . import recommend_words
from .inner_momentum import theta_floor
from .methods.centred import centred
from .methods.schedule_free import schedule_free
from .quadratics import Quadratic, Split
from .question import Question
from .region import LINE_SEARCH, NEAR, Region
from .run_fit import RunFit
from .search import CLEAR, Setting, falls_beyond, is_out_of_reach, scaled, search, tune_free
from .spectrum import Spectrum

MOST = 100  # curvatures that losses are told for; more are merged
SHORT = 10  # a run of fewer than this many times 1/(1 − β1) steps is short for a momentum of β1
LEAST = 1e-6  # of the loss at the start: if no settings remove as much, there is no advice
SIMPLER = 1.03  # an EMA is recommended if its loss is at most this many times the best
_EXTREME = "the losses of this quadratic are not finite; use moderate curvatures, noise and start"


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
    problem: Quadratic  # in the units of the curvatures, also if `lr` gave the rates others
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
    def is_at_the_lowest_theta(self) -> bool:
        """Whether θ is as near to the floor as the search goes."""
        theta = getattr(self.method, "theta", 0.0)
        assert isinstance(theta, float)
        return theta < 0.999 * CLEAR * self.floor

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
    Use tb.methods.ema(0.997...) at a learning rate of 0.0003, for 2,000 steps...
    """
    asked = Question.of(
        steps,
        curvatures=curvatures,
        beta1=beta1,
        noise=noise,
        batch=batch,
        start=start,
        lr=lr,
        near=near,
        lost=lost,
        caveats=caveats,
    )
    told = asked.problem.merged(MOST)
    ema, free, candidates = _search(told, asked)
    best = _choose(told, ema, candidates, asked.known)
    warnings = [*asked.caveats, *_warnings(told, best, asked)]
    if asked.known:
        warnings += _warnings_near(told, best, free, asked)
    if asked.lr is None:
        best, ema, free = (each.below(asked.limit_scale * each.limit) for each in (best, ema, free))
    else:
        scale = _scale(asked.lr, (best, ema, free), ema.lr)
        if not asked.is_typical:
            warnings.append(recommend_words.rescaled(asked.lr, asked.problem.largest, scale))
        best, ema, free = (scaled(each, scale) for each in (best, ema, free))
    return Advice(
        asked.steps,
        asked.beta1,
        best,
        {"EMA": ema, "schedule-free": free},
        asked.problem,
        tuple(warnings),
        recommend_words.UNIT if asked.is_without_size else None,
        asked.is_measured,
        asked.known or None,
        *asked.learnt,
        asked.region,
    )


def _search(problem: Quadratic, asked: Question) -> tuple[Setting, Setting, list[Setting]]:
    """Return the best EMA and the best schedule-free average, and all settings that may be recommended."""
    steps, beta = asked.steps, asked.beta1
    try:
        found = search(problem, steps, beta, asked.region)
        ema = found[0.0]
        if asked.known and is_out_of_reach(ema):  # an EMA diverges there: it is compared at rates of its own
            del found[0.0]
            ema = search(problem, steps, beta, Region())[0.0]
        free = tune_free(problem, steps)
    except ArithmeticError:  # a quotient or a power left the range of floats
        raise OverflowError(_EXTREME) from None
    candidates = [*found.values()]
    if not (beta or asked.known):  # schedule-free averaging takes the place of the momentum
        candidates.append(free)
    return ema, free, candidates


def _scale(lr: float, settings: Sequence[Setting], best_lr: float) -> float:
    """Return by how much rates are multiplied if a learning rate stands for the best one; refuse one too extreme."""
    scale = lr / best_lr
    ends = [scale * end for each in settings for end in each.lrs]
    if min(ends) < sys.float_info.min or max(ends) == math.inf:
        raise ValueError(f"lr={lr!r} makes rates of the advice that no float holds; use a moderate one")
    return scale


def _choose(problem: Quadratic, ema: Setting, candidates: Sequence[Setting], known: float) -> Setting:
    """Return the setting with the least loss, or the EMA if it is about as good; refuse losses that say nothing."""
    if known and all(map(is_out_of_reach, candidates)):
        raise ValueError(
            f"near={known!r} is not a learning rate of a run on these curvatures, the largest of which is "
            f"{problem.largest:.3g}: it would have diverged; check both"
        )
    least = min(each.loss.total for each in candidates)
    if not math.isfinite(least):
        raise OverflowError(_EXTREME)
    if ema in candidates and ema.loss.total <= SIMPLER * least:
        best = ema
    else:
        best = min(candidates, key=lambda each: each.loss.total)
    if not known and problem.start and best.loss.total > (1 - LEAST) * problem.start:
        raise ArithmeticError(
            f"noise is so strong that no learning rate lowers the loss by {LEAST:.1g} of itself in these steps; use "
            "less noise, a larger batch or more steps"
        )
    if best.loss.noise == 0 and any(each.noise for each in problem.directions):
        raise ArithmeticError("the losses of this quadratic are too small to compute with; use moderate numbers")
    return best


def _warnings(problem: Quadratic, best: Setting, asked: Question) -> list[str]:
    """Return what makes the advice doubtful."""
    found, steps, beta = [], asked.steps, asked.beta1
    if asked.is_without_size:
        found.append(recommend_words.NO_CURVATURES)
    elif asked.is_typical:
        found.append(recommend_words.TYPICAL)
    if best.loss.bias > 0.5 * problem.start:
        short = "" if asked.known else ": the run is too short for any average to matter"
        found.append(f"After {steps:,} steps most of the way is still to go{short}.")
    enough = math.ceil(SHORT / (1 - beta) * (1 - 1e-9))  # 1 − β1 has rounding, which may not add a step
    if steps < enough:
        what = f"few for a momentum of {beta:g}" if beta else "few"
        found.append(
            f"{steps:,} steps are {what}: errors still swing at the end, and what is best depends on where they stand "
            f"just then. Ask for at least {enough:,} steps."
        )
    if (many := len(asked.problem.directions)) > MOST and best.loss.noise < 0.01 * best.loss.total:
        found.append(
            f"Of {many:,} curvatures neighbours were merged into {MOST}: with so little noise, losses are told to "
            "about a third of themselves."
        )
    if best.lr > best.limit / 2 and asked.region.case not in LINE_SEARCH:
        found.append(
            "The recommended learning rate is more than half of the largest stable one. On a network the curvature "
            "changes with the learning rate: begin at half of it, with a warm-up."
        )
    return found


def _warnings_near(problem: Quadratic, best: Setting, free: Setting, asked: Question) -> list[str]:
    """Return what lies beyond the learning rates that a run at a known one says something about."""
    found, known, region = [], asked.known, asked.region
    if region.case == "near" and falls_beyond(problem, best, asked.steps, asked.beta1, region):
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
