"""The trial of advice: runs of a grid, advice from the losses of some of them, and runs that follow the advice.

The advice knows what `torchbelay recommend --from-run` knows: the losses of the weights and of the EMA of one run, its
decay, and β1. Those losses are of other examples than the loss by which all runs are compared. Advice is asked for
again from an EMA that follows it, for some rounds. On MNIST there is also advice from the curvatures at the end of a
run, as `torchbelay recommend --probe` gives it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from torchbelay.lab.part import Record, Tick
from torchbelay.lab.records import rounded
from torchbelay.physics.methods import centred
from torchbelay.physics.recommend import Advice, recommend
from torchbelay.physics.run_fit import RunFit, fit_run
from torchbelay.physics.spectrum import Spectrum

Report = dict[str, float]  # a line of stats.jsonl: step, lr, w1 and w2
Setting = tuple[centred, float]  # a method and its learning rate

RATE, BETA1 = 0.01, 0.9  # of the EMA whose runs give advice, and of Adam
THETAS = (-0.5, 0.0)
RATES = (0.003, RATE, 0.03)


@dataclass(frozen=True)
class Protocol:
    """The size of the trial."""

    lrs: tuple[float, ...] = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)
    seeds: int = 4
    steps: int = 1000
    rounds: int = 6  # of advice, each from all runs so far
    first_seed: int = 300  # the rules of `physics.region` were chosen on runs with smaller ones

    @property
    def grid(self) -> list[Setting]:
        """The settings whose best the advice is compared with; the runs that give advice are among them."""
        return [(centred(theta, rate), lr) for theta, rate, lr in product(THETAS, RATES, self.lrs)]

    @property
    def units(self) -> int:
        """The units of work: runs and advices."""
        return self.seeds * (len(self.grid) + 2 * self.rounds * len(self.lrs))


@dataclass(frozen=True)
class Run:
    """A run that is over."""

    reports: list[Report]
    loss: float  # of the average at the end


Train = Callable[[Sequence[Setting], int], list[Run]]  # runs at these settings, all with one seed
Probe = Callable[[Setting, int], tuple[Run, Spectrum]]  # a run with some seed, and the curvatures at its end


def marks(steps: int, count: int = 18) -> set[int]:
    """Return the steps at which losses are reported: many at first, few later."""
    return {round(3 * (steps / 3) ** (i / (count - 1))) for i in range(count)}


def describe(problem: str, how: Protocol, *, weights: int, batch: int) -> Record:
    """Return the record that says how a problem was tried."""
    return {
        "kind": "protocol",
        "problem": problem,
        "weights": weights,
        "batch": batch,
        "steps": how.steps,
        "seeds": how.seeds,
        "first_seed": how.first_seed,
        "rounds": how.rounds,
        "decay": 1 - RATE,
        "beta1": BETA1,
        "thetas": list(THETAS),
        "rates": list(RATES),
        "lrs": list(how.lrs),
    }


def measure(problem: str, how: Protocol, train: Train, tick: Tick) -> Iterator[Record]:
    """Yield the losses of the grid, of the runs that give advice and of those that follow it, one record per run."""
    for seed in range(how.first_seed, how.first_seed + how.seeds):
        runs = train(how.grid, seed)
        tick(len(runs))
        about = {"problem": problem, "seed": seed}
        for (method, lr), run in zip(how.grid, runs, strict=True):
            options = {"theta": method.theta, "rate": method.rate, "lr": lr}
            yield {"kind": "setting", **about, **options, "loss": rounded(run.loss)}
        ema = centred(0.0, RATE)
        begun = {lr: [_Step((ema, lr), run)] for (method, lr), run in zip(how.grid, runs, strict=True) if method == ema}
        for count in range(1, how.rounds + 1):
            advices = {}
            for first, steps in begun.items():
                try:
                    advices[first] = advise(steps, how.steps)
                except (ValueError, ArithmeticError) as error:
                    yield {"kind": "refusal", **about, "lr": first, "round": count, "why": str(error)}
            tick(len(how.lrs))
            chosen = {lr: (method_of(advice), advice.lr) for lr, (_, advice) in advices.items()}
            after = _train(chosen, train, seed)
            emas = {lr: (centred(0.0, method.rate), eta) for lr, (method, eta) in chosen.items() if method.theta != 0}
            watched = after | _train(emas, train, seed)  # advice is asked for from EMAs alone
            tick(len(how.lrs))
            for first, (fit, advice) in advices.items():
                (method, lr), steps = chosen[first], begun[first]
                steps.append(_Step((centred(0.0, method.rate), lr), watched[first], after[first]))
                yield {
                    "kind": "advice",
                    **about,
                    "lr": first,
                    "round": count,
                    "run": rounded(steps[0].run.loss),
                    "error": rounded(fit.error),
                    "share": None if fit.share is None else rounded(fit.share),
                    "case": advice.region.case,
                    "theta": rounded(float(method.theta)),  # type: ignore[arg-type]
                    "rate": rounded(float(method.rate)),  # type: ignore[arg-type]
                    "advised_lr": rounded(lr),
                    "loss": rounded(after[first].loss),
                    "best": rounded(min(steps, key=_Step.seen).followed.loss),
                    "warned": bool(fit.caveats),
                }
            begun = {lr: begun[lr] for lr, (_, advice) in advices.items() if advice.region.case != "between"}


class _Step:
    """One run of a search: an EMA that advice is asked from, and the run that followed the advice before it."""

    def __init__(self, setting: Setting, run: Run, followed: Run | None = None) -> None:
        self.setting, self.run, self.followed = setting, run, followed or run

    @cached_property
    def fit(self) -> RunFit | Exception:
        """The quadratic behind the run, or why there is none."""
        method, _ = self.setting
        try:
            return fit_run(self.run.reports, decay=1 - float(method.rate), beta1=BETA1)  # type: ignore[arg-type]
        except (ValueError, ArithmeticError) as error:  # the losses are not finite, or do not fall
            return error

    def seen(self) -> float:
        """Return the loss by which a user would choose: that of the average on the reported examples."""
        end = self.followed.reports[-1]["w2"]
        return end if math.isfinite(end) else math.inf


def _train(chosen: Mapping[float, Setting], train: Train, seed: int) -> dict[float, Run]:
    return dict(zip(chosen, train([*chosen.values()], seed), strict=True))


def measure_probes(problem: str, how: Protocol, train: Train, probe: Probe, batch: int, tick: Tick) -> Iterator[Record]:
    """Yield the losses of runs that follow advice from measured curvatures, one record per run.

    The advice knows what `torchbelay recommend --probe --batch` knows: the curvatures at the end of a run with the EMA,
    and the size of a batch.
    """
    for seed, lr in product(range(how.first_seed, how.first_seed + how.seeds), how.lrs):
        about = {"problem": problem, "seed": seed, "lr": lr}
        tick(1)
        try:
            run, found = probe((centred(0.0, RATE), lr), seed)
            advice = recommend(how.steps, curvatures=found, batch=batch)
        except (ValueError, ArithmeticError) as error:  # no curvature is positive, or the loss is not finite
            yield {"kind": "probe refusal", **about, "why": str(error)}
            continue
        method = method_of(advice)
        (after,) = train([(method, advice.lr)], seed)
        yield {
            "kind": "probe",
            **about,
            "run": rounded(run.loss),
            "largest": rounded(found.curvatures[0]),
            "theta": rounded(float(method.theta)),  # type: ignore[arg-type]
            "rate": rounded(float(method.rate)),  # type: ignore[arg-type]
            "advised_lr": rounded(advice.lr),
            "loss": rounded(after.loss),
            "warned": bool(advice.warnings),
        }


def advise(steps: Sequence[_Step], count: int) -> tuple[RunFit, Advice]:
    """Return the quadratic behind the best of some EMAs, and the advice that follows from all of them."""
    begun, *later = [step.fit for step in steps]
    if isinstance(begun, Exception):
        raise begun
    fits = [begun, *(fit for fit in later if isinstance(fit, RunFit))]
    lost = [step.setting[1] for step in steps if isinstance(step.fit, Exception)]
    return min(fits, key=lambda fit: fit.end), recommend(count, curvatures=fits, beta1=BETA1, lost=lost)


def method_of(advice: Advice) -> centred:
    """Return the method of advice from a run, which never is schedule-free."""
    assert isinstance(advice.method, centred)
    return advice.method
