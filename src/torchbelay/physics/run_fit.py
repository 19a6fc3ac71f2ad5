"""The quadratic that explains the losses of a run: its curvatures, its noise, and how well it explains them.

The expected losses of weights and average on a quadratic are a sum of three known curves: the loss at the minimum, what
is left of the start, and what the noise has added. For each shape of the spectrum and each largest curvature the shares
of the three follow by least squares; the best fit is kept. With an adaptive optimizer the curvatures are those that its
steps see.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import index
from statistics import median
from typing import Any

from . import arguments
from .coupling import Coupling, watch
from .inner_momentum import stable_range
from .matrices import Matrix, apply, congruence, repeat, solve, total
from .quadratics import Direction, Quadratic
from .variance import step

FAR = 0.1  # a relative error of the fit above this: the run is far from a quadratic
LONG = 1.0  # a run of fewer times the length of its average says nothing about noise
MOST = 24  # reports that are looked at
_LOST = "If this is one of several runs and it was lost, give its learning rate alone, as lost (--lost)"
_HUGE = 1e100  # squares of numbers that are larger, or smaller than its inverse, may leave the range of floats
_CURVATURES = tuple(10 ** (-i / 2) for i in range(9))  # over the largest
_COUNTS = (0.0, 0.5, 1.0)  # the number of directions of a curvature is its power −0, −½ or −1
_PUSHES = tuple(10 ** (-i / 4) for i in range(13))  # the largest curvature, times lr, over the stable range


@dataclass(frozen=True)
class RunFit:
    """A quadratic that explains a run, and what is doubtful about it."""

    problem: Quadratic
    lr: float  # of the run
    minimum: float  # the loss at the minimum
    error: float  # relative, root mean square over the reports
    caveats: tuple[str, ...]
    steps: int  # of the run, up to the report of its end
    end: float  # the loss of its average in the last report that has one, or of its weights without an average
    beta1: float = 0.0  # of its optimizer
    rate: float | None = None  # the averaging rate of its EMA, if it has one
    share: float | None = None  # what noise adds to the loss of its weights at the end, over what it had to gain


@dataclass(frozen=True)
class _Report:
    step: int
    w1: float
    w2: float | None


def fit_run(lines: Sequence[Mapping[str, Any]], *, decay: float | None = None, beta1: float = 0.0) -> RunFit:
    """Return the quadratic that fits a run best.

    Args:
        lines: one mapping per report, with `step`, `lr` and the loss of the weights, `w1` or `loss`; and with the loss
            of the average, `w2`. A loss may be a mapping with `test` or `train`, as in stats.jsonl.
        decay: the decay of the run's EMA. Without it `w2` is not looked at.
        beta1: the optimizer's momentum.

    >>> run = [{"step": t, "lr": 0.1, "w1": 0.5 + 0.5 * 0.8 ** t} for t in range(0, 40, 4)]
    >>> found = fit_run(run)
    >>> round(found.minimum, 2), found.error < 0.05
    (0.5, True)
    """
    beta = arguments.number("beta1", beta1, low=0, high=1, open_low=False)
    coupling = watch(1.0 if decay is None else 1 - arguments.number("decay", decay, low=0, high=1))
    reports, lr, caveats = _read(lines, decay)
    limit = stable_range(coupling, beta)
    best: tuple[float, Quadratic, float] | None = None
    for power in _COUNTS:
        for share in _PUSHES:
            top = 0.95 * share * limit / lr
            shape = [Direction(h * top, h**-power, 1.0, h * top) for h in _CURVATURES]
            curves = list(_curves(shape, coupling, lr, beta, [report.step for report in reports]))
            rows, seen = [], []
            for report, (start1, noise1, start2, noise2) in zip(reports, curves, strict=True):
                for loss, start, noise in ((report.w1, start1, noise1), (report.w2, start2, noise2)):
                    if loss is not None:
                        rows.append((1 / loss, start / loss, noise / loss))
                        seen.append(1.0)
            (minimum, begin, scale), error = _least_squares(rows, seen)
            if best is None or error < best[2] - 1e-12:
                directions = tuple(Direction(h, n, begin * d, scale * v) for h, n, d, v in shape)
                best = minimum, Quadratic(directions), error
    assert best is not None
    minimum, problem, error = best
    if problem.start <= 0:
        raise ValueError(
            f"the losses of the run do not fall: there is nothing to learn from them; give a longer run. {_LOST}"
        )
    if error > FAR:
        caveats.append(
            f"The best quadratic misses the losses of the run by {error:.0%}: the model is far from a quadratic, and "
            "the advice is a guess."
        )
    last = reports[-1]
    ends = [(report.step, report.w2) for report in reports if report.w2 is not None]
    steps, end = ends[-1] if ends else (last.step, last.w1)
    if not ends:
        return RunFit(problem, lr, minimum, error, tuple(caveats), steps, end, beta)
    ((_, noise, _, _),) = _curves(problem.directions, coupling, lr, beta, [last.step])
    known = noise / problem.start if coupling.b * last.step >= LONG else None
    return RunFit(problem, lr, minimum, error, tuple(caveats), steps, end, beta, coupling.b, known)


def _read(lines: Sequence[Mapping[str, Any]], decay: float | None) -> tuple[list[_Report], float, list[str]]:
    """Return at most MOST reports, the learning rate, and what is doubtful about them."""
    found, lrs = [], []
    for number, line in enumerate(lines, 1):
        at: Any = line.get("step")
        if isinstance(at, bool) or not hasattr(at, "__index__") or index(at) < 0:
            raise ValueError(f"line {number} of the run has step={at!r}; it needs a whole number of at least 0")
        w1 = _loss(line.get("w1", line.get("loss")), number)
        w2 = None if decay is None or line.get("w2") is None else _loss(line["w2"], number)
        found.append(_Report(index(at), w1, w2))
        if at:
            if "lr" not in line:
                raise ValueError(
                    f"line {number} of the run has no lr; every report needs the learning rate of its step"
                )
            lrs.append(arguments.number(f"lr of line {number}", line["lr"], low=0, open_low=False))
    found.sort(key=lambda report: report.step)
    if (count := len({report.step for report in found})) < 4:
        raise ValueError(f"the run has reports at {count} steps; the fit needs losses at 4 steps or more")
    caveats = []
    lr = median(lrs)
    if lr <= 0:
        raise ValueError("the run has lr=0 at most of its reports; give one whose learning rate is positive")
    sizes = [lr, *(loss for report in found for loss in (report.w1, report.w2) if loss is not None)]
    if min(sizes) < 1 / _HUGE or max(sizes) > _HUGE:
        raise OverflowError(
            f"losses or learning rates of the run are below {1 / _HUGE:g} or above {_HUGE:g}; use moderate units. "
            f"{_LOST}"
        )
    if max(lrs) > 1.2 * lr or min(lrs) < lr / 1.2:
        caveats.append(f"The learning rate of the run changes; the fit takes it as its median, {lr:.3g}.")
    if decay is None and any(line.get("w2") is not None for line in lines):
        caveats.append(
            "The run has losses of the average (w2), and its decay was not given: they are not used, and noise cannot "
            "be told from the loss at the minimum. Give the decay (--decay)."
        )
    elif all(report.w2 is None for report in found):
        caveats.append("Without losses of the average (w2) noise cannot be told from the loss at the minimum.")
    elif decay is not None and (1 - decay) * found[-1].step < LONG:
        caveats.append(
            f"The average reaches back over {1 / (1 - decay):,.0f} steps, and the run has {found[-1].step:,}: noise "
            "cannot be told from the loss at the minimum. Give a run with a shorter average."
        )
    if len(found) > MOST and sum(report.w2 is not None for report in found) >= MOST / 2:
        found = [report for report in found if report.w2 is not None]  # they say more
    if len(found) > MOST:
        found = [found[round(i * (len(found) - 1) / (MOST - 1))] for i in range(MOST)]
    return found, lr, caveats


def _loss(value: Any, number: int) -> float:
    """Return a loss, which may be a mapping with `test` or `train`."""
    if isinstance(value, Mapping):
        value = value.get("test", value.get("train"))
    try:
        return arguments.number("loss", value, low=0)
    except (TypeError, ValueError):
        raise ValueError(
            f"line {number} of the run has the loss {value!r}; the fit needs positive finite numbers. {_LOST}"
        ) from None


def _curves(
    shape: Sequence[Direction], coupling: Coupling, lr: float, beta: float, steps: Sequence[int]
) -> Iterator[tuple[float, float, float, float]]:
    """Yield what is left of the start and what noise adds, for the weights and the average, at each of the steps."""
    states: list[tuple[Sequence[float], Matrix]] = []
    for _ in shape:
        n = 3 if beta else 2
        states.append(((1.0, 1.0, 0.0)[:n], ((0.0,) * n,) * n))
    done = 0
    for at in steps:
        sums = [0.0] * 4
        for i, (h, count, start, variance) in enumerate(shape):
            mean, moments = states[i]
            if at > done:
                after, added = repeat(*step(coupling, lr * h, beta), at - done)
                mean, moments = apply(after, mean), total(congruence(after, moments), added)
                states[i] = mean, moments
            for k in (0, 1):
                sums[2 * k] += count * h * start * mean[k] ** 2 / 2
                sums[2 * k + 1] += count * h * variance * lr * lr * moments[k][k] / 2
        done = max(done, at)
        yield sums[0], sums[1], sums[2], sums[3]


def _least_squares(rows: Sequence[Sequence[float]], seen: Sequence[float]) -> tuple[list[float], float]:
    """Return the shares ≥ 0 of three curves that explain what was seen, and the root mean square of the rest."""
    best: tuple[float, list[float]] = math.inf, [0.0] * 3
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            square = [[sum(row[i] * row[j] for row in rows) for j in chosen] for i in chosen]
            right = [sum(row[i] * y for row, y in zip(rows, seen, strict=True)) for i in chosen]
            try:
                found = solve(square, right)
            except ZeroDivisionError:  # a curve is 0, or two are the same
                continue
            if min(found) < 0:
                continue
            shares = [0.0] * 3
            for i, value in zip(chosen, found, strict=True):
                shares[i] = value
            rest = [sum(x * s for x, s in zip(row, shares, strict=True)) - y for row, y in zip(rows, seen, strict=True)]
            best = min(best, (math.sqrt(sum(x * x for x in rest) / len(rest)), shares))
    return best[1], best[0]
