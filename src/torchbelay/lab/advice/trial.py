"""The trial of advice: runs of a grid, advice from the losses of some of them, and runs that follow the advice.

The advice knows what `torchbelay recommend --from-run` knows: the losses of the weights and of the EMA of one run, its
decay, and β1. Those losses are of other examples than the loss by which all runs are compared. On MNIST there is also
advice from the curvatures at the end of such a run, as `torchbelay recommend --probe` gives it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from torchbelay.lab.part import Record, Tick
from torchbelay.lab.records import rounded
from torchbelay.physics.methods import centred
from torchbelay.physics.recommend import Advice, recommend
from torchbelay.physics.run_fit import FAR, NOISY, RunFit, fit_run
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

    @property
    def grid(self) -> list[Setting]:
        """The settings whose best the advice is compared with; the runs that give advice are among them."""
        return [(centred(theta, rate), lr) for theta, rate, lr in product(THETAS, RATES, self.lrs)]

    @property
    def units(self) -> int:
        """The units of work: runs and advices."""
        return self.seeds * (len(self.grid) + 2 * len(self.lrs))


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
        "decay": 1 - RATE,
        "beta1": BETA1,
        "thetas": list(THETAS),
        "rates": list(RATES),
        "lrs": list(how.lrs),
    }


def measure(problem: str, how: Protocol, train: Train, tick: Tick) -> Iterator[Record]:
    """Yield the losses of the grid, of the runs that give advice and of those that follow it, one record per run."""
    for seed in range(how.seeds):
        runs = train(how.grid, seed)
        tick(len(runs))
        about = {"problem": problem, "seed": seed}
        for (method, lr), run in zip(how.grid, runs, strict=True):
            options = {"theta": method.theta, "rate": method.rate, "lr": lr}
            yield {"kind": "setting", **about, **options, "loss": rounded(run.loss)}
        given = {lr: run for (method, lr), run in zip(how.grid, runs, strict=True) if method == centred(0.0, RATE)}
        advices = {}
        for lr, run in given.items():
            tick(1)
            try:
                advices[lr] = advise(run.reports, how.steps)
            except ValueError as error:  # the losses are not finite, or do not fall
                yield {"kind": "refusal", **about, "lr": lr, "why": str(error)}
        followed = train([(method_of(advice), advice.lr) for _, advice in advices.values()], seed)
        tick(len(given))
        for (lr, (fit, advice)), after in zip(advices.items(), followed, strict=True):
            method = method_of(advice)
            yield {
                "kind": "advice",
                **about,
                "lr": lr,
                "run": rounded(given[lr].loss),
                "error": rounded(fit.error),
                "gap": None if fit.gap is None else rounded(fit.gap),
                "theta": rounded(float(method.theta)),  # type: ignore[arg-type]
                "rate": rounded(float(method.rate)),  # type: ignore[arg-type]
                "advised_lr": rounded(advice.lr),
                "loss": rounded(after.loss),
                "warned": fit.error > FAR or (fit.gap or 0.0) > NOISY,
            }


def measure_probes(problem: str, how: Protocol, train: Train, probe: Probe, batch: int, tick: Tick) -> Iterator[Record]:
    """Yield the losses of runs that follow advice from measured curvatures, one record per run.

    The advice knows what `torchbelay recommend --probe --batch` knows: the curvatures at the end of a run with the EMA,
    and the size of a batch.
    """
    for seed, lr in product(range(how.seeds), how.lrs):
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


def advise(reports: Sequence[Report], steps: int) -> tuple[RunFit, Advice]:
    """Return the quadratic behind one run with the EMA, and the advice that follows from it."""
    fit = fit_run(reports, decay=1 - RATE, beta1=BETA1)
    return fit, recommend(steps, curvatures=fit, beta1=BETA1)


def method_of(advice: Advice) -> centred:
    """Return the method of advice from a run, which never is schedule-free."""
    assert isinstance(advice.method, centred)
    return advice.method
