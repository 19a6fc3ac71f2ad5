"""What advice is asked for: the arguments of `recommend`, checked, and the quadratic and the region that follow."""

from collections.abc import Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any

from . import arguments
from .evidence import Evidence
from .quadratics import Quadratic, typical
from .region import Region
from .run_fit import RunFit
from .search import LONGEST
from .spectrum import Spectrum

_DEFAULTS = (1.0, 128.0, 1.0)  # noise, batch and start of `recommend`


@dataclass(frozen=True)
class Question:
    """A run for which settings are sought.

    >>> asked = Question.of(1000, curvatures=[1.0, 0.1], near=0.5)
    >>> asked.problem.largest, asked.region.lrs
    (1.0, (0.25, 1.0))
    """

    steps: int
    beta1: float
    problem: Quadratic
    region: Region  # where to search
    known: float  # the learning rate of the run that the curvatures are from; 0 if there is none
    lr: float | None  # the learning rate that is best for an EMA, if the user knows it
    evidence: Evidence | None  # the runs that the quadratic was fitted to
    caveats: tuple[str, ...]  # the user's, and those of what made the curvatures
    is_typical: bool  # no curvatures were given
    is_measured: bool  # the curvatures are those of a network

    @classmethod
    def of(
        cls,
        steps: int,
        *,
        curvatures: Any = None,
        beta1: float | None = None,
        noise: float = _DEFAULTS[0],
        batch: float = _DEFAULTS[1],
        start: float = _DEFAULTS[2],
        lr: float | None = None,
        near: float | None = None,
        lost: Sequence[float] = (),
        caveats: Sequence[str] = (),
    ) -> "Question":
        """Check the arguments of `recommend`, which says what they mean."""
        count = arguments.whole("steps", steps, low=2)
        if count > LONGEST:
            raise ValueError(f"steps={steps!r} is too large to search for; it needs steps ≤ {LONGEST:,}")
        noise = arguments.number("noise", noise, low=0, open_low=False)
        batch, start = arguments.number("batch", batch, low=0), arguments.number("start", start, low=0, open_low=False)
        told = _texts("caveats", caveats)
        if isinstance(curvatures, Mapping):
            raise TypeError(f"curvatures={curvatures!r} is a mapping; give a list, or Quadratic.of(..., counts=...)")
        if lr is not None and near is not None:
            raise ValueError(
                f"lr={lr!r} gives curvatures their size, and near={near!r} is a rate on curvatures whose size is "
                "known; leave one of them out"
            )
        if isinstance(curvatures, Iterator | ValuesView):
            curvatures = list(curvatures)
        evidence = _evidence(curvatures, lost, near, lr)
        if (evidence or isinstance(curvatures, Quadratic)) and (noise, batch, start) != _DEFAULTS:
            what = "fitted runs" if evidence else "a Quadratic"
            raise ValueError(
                f"noise={noise!r}, batch={batch!r} and start={start!r} are known of {what}; leave all three out"
            )
        source = evidence.best if evidence else curvatures
        beta = _momentum(beta1, source)
        problem = _problem(source, start=start, noise=noise, batch=batch)
        if isinstance(source, Spectrum | RunFit):
            told += (evidence or source).caveats
        known, region = 0.0, Region()
        if near is not None:
            known, evidence = arguments.number("near", near, low=0), None
            region = Region.near(known)
        elif evidence:
            known, region = evidence.best.lr, evidence.region(count)
            problem = evidence.problem(region)
            told += evidence.beyond(region)
        return cls(
            steps=count,
            beta1=beta,
            problem=problem,
            region=region,
            known=known,
            lr=None if lr is None else arguments.number("lr", lr, low=0),
            evidence=evidence,
            caveats=tuple(told),
            is_typical=curvatures is None,
            is_measured=isinstance(curvatures, Spectrum),
        )

    @property
    def is_without_size(self) -> bool:
        """Whether nothing says how large curvatures or learning rates are."""
        return self.is_typical and self.lr is None

    @property
    def learnt(self) -> tuple[int, float | None]:
        """The number of fitted runs, and the share of noise in the weights of the best of them."""
        return (self.evidence.count, self.evidence.best.share) if self.evidence else (0, None)

    @property
    def limit_scale(self) -> float:
        """The limits of the quadratic as it was fitted, over those of `problem`, whose curvatures may be smaller."""
        return self.problem.largest / self.evidence.best.problem.largest if self.evidence else 1.0


def _momentum(beta1: float | None, source: object) -> float:
    """Return the momentum that was given, or that of what made the curvatures; refuse another one than a run's."""
    if beta1 is None:
        beta1 = source.beta1 if isinstance(source, Spectrum | RunFit) else 0.0
    beta = arguments.number("beta1", beta1, low=0, high=1, open_low=False)
    if isinstance(source, RunFit) and beta != source.beta1:
        raise ValueError(f"beta1={beta1!r} is not that of the fitted runs, {source.beta1:g}; leave it out")
    return beta


def _evidence(curvatures: object, lost: Sequence[float], near: float | None, lr: float | None) -> Evidence | None:
    """Return the fitted runs that were given in place of curvatures."""
    runs = curvatures if isinstance(curvatures, list | tuple) else [curvatures]
    gone = tuple(arguments.number("lost", each, low=0) for each in _listed("lost", lost, "learning rates"))
    if not any(isinstance(each, RunFit) for each in runs):
        if gone:
            raise ValueError(f"lost={lost!r} goes with fitted runs; give them as curvatures")
        return None
    if lr is not None:
        raise ValueError(f"lr={lr!r} gives curvatures their size, and those of fitted runs have one; leave it out")
    if gone and near is not None:
        raise ValueError(f"near={near!r} takes the place of all runs, also of lost={lost!r}; leave one of them out")
    return Evidence.of(runs, gone)


def _texts(name: str, value: Any) -> list[str]:
    """Return a list of texts."""
    found = _listed(name, value, "texts")
    if wrong := [each for each in found if not isinstance(each, str)]:
        raise TypeError(f"{name} has {wrong[0]!r}, which is not a text; give a list of texts")
    return found


def _listed(name: str, value: Any, of: str) -> list[Any]:
    """Return a list of what a list or another collection holds; refuse a text."""
    try:
        if not isinstance(value, str):
            return list(value)
    except TypeError:  # one thing, also an array of no dimension
        pass
    raise TypeError(f"{name}={value!r} is not a list; give a list of {of}")


def _problem(curvatures: Any, *, start: float, noise: float, batch: float) -> Quadratic:
    """Return the quadratic that the arguments of `recommend` describe."""
    if isinstance(curvatures, RunFit):
        return curvatures.problem
    if isinstance(curvatures, Quadratic):
        return _checked(curvatures)
    if start == 0:
        raise ValueError("start=0 begins at the minimum, and the best learning rate there is 0; give the loss above it")
    if curvatures is None:
        return typical(start=start, noise=noise, batch=batch)
    if isinstance(curvatures, Spectrum):
        many = curvatures.counts
        return Quadratic.of(curvatures.curvatures, counts=many, start=start, noise=noise, batch=batch)
    return Quadratic.of(curvatures, start=start, noise=noise, batch=batch)


def _checked(problem: Quadratic) -> Quadratic:
    """Return a quadratic whose directions are numbers that a loss can have, else raise."""
    for h, number, start, noise in problem.directions:
        arguments.number("curvature of the Quadratic", h, low=0)
        arguments.number("number of the Quadratic", number, low=0)
        arguments.number("start of the Quadratic", start, low=0, open_low=False)
        arguments.number("noise of the Quadratic", noise, low=0, open_low=False)
    if problem.start == 0:
        raise ValueError(
            "curvatures is a Quadratic with start=0, which is at the minimum, and the best learning rate there is 0; "
            "give it directions that begin away from it"
        )
    return problem
