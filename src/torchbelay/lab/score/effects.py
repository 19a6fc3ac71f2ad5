"""BELAY against EMA in the three ways that are always given together, in this order.

At equal nominal rate both optimizers have the same learning rate, so that BELAY makes less progress per step. At equal
effective rate the EMA is the matched one, which makes BELAY's progress: what is left is the pull itself. At each one's
best, every method has the rate that suits it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchbelay.lab.arms import BELAY, MATCHED
from torchbelay.lab.part import MISSING, Plate, Record, Table

from .analysis import StudyResults, compare_fids, fids, rate_of_fids
from .comparison import Comparison, compare, format_ratio

NOMINAL, EFFECTIVE, BEST = WAYS = ("equal nominal rate", "equal effective rate", "each one's best")
LOSS, FID = "test loss", "FID"


@dataclass(frozen=True)
class Effect:
    """What BELAY does to one quantity of a study: its ratio to the EMA's, in the three ways."""

    study: str
    quantity: str
    rival: str  # the EMA of the first way and of the third
    nominal: Mapping[float, Comparison]  # by learning rate
    effective: Mapping[float, Comparison]
    best: Comparison

    def __bool__(self) -> bool:
        return any(each.point is not None for each in (*self.nominal.values(), *self.effective.values(), self.best))

    @property
    def details(self) -> tuple[str, str, str]:
        """The three ratios with their intervals at every rate, and what was lost."""
        return _list_rates(self.nominal, self.rival), _list_rates(self.effective, MATCHED), self._best

    @property
    def cells(self) -> tuple[str, str, str]:
        """The same for a table: of more than two rates only the least and the largest ratio."""
        return _shorten(self.nominal, self.rival), _shorten(self.effective, MATCHED), self._best

    @property
    def _best(self) -> str:
        return self.best.describe(BELAY, self.rival) if self.best.seeds else MISSING

    @property
    def ways(self) -> tuple[list[Comparison], list[Comparison], list[Comparison]]:
        """The comparisons of the three ways."""
        return [*self.nominal.values()], [*self.effective.values()], [self.best]


def _list_rates(found: Mapping[float, Comparison], rival: str) -> str:
    return "; ".join(f"at {lr:g} {each.describe(BELAY, rival)}" for lr, each in found.items()) or MISSING


def _shorten(found: Mapping[float, Comparison], rival: str) -> str:
    return _list_rates(found, rival) if len(found) <= 2 else f"{_span([*found.values()])} at {len(found)} rates"


def spans(found: Sequence[Effect]) -> list[str]:
    """Return the ratios of some effects in each of the three ways: the least and the largest, if there are several."""
    return [
        _span([each for some in way for each in some]) for way in zip(*(effect.ways for effect in found), strict=True)
    ]


def _span(found: Sequence[Comparison]) -> str:
    """Return the least and the largest ratio, marked if all are undecided; "not run" if there is none.

    >>> _span([compare({0: 1.1, 1: 1.1}, {0: 1.0, 1: 1.0}), compare({0: 1.2, 1: 1.2}, {0: 1.0, 1: 1.0})])
    '1.1 to 1.2'
    """
    known = sorted((each for each in found if each.point is not None), key=lambda each: each.point or 0.0)
    if not known:
        return "not run"
    ends = dict.fromkeys(format_ratio(each.point or 0.0) for each in (known[0], known[-1]))
    mark = " (undecided)" if all(each.reading == "open" for each in known) else ""
    return " to ".join(ends) + mark


def loss_effect(study: StudyResults) -> Effect:
    """Return the effect on the test loss, at the rates at which no run of the two is lost.

    If there is no such rate, at those at which both keep more than half of their seeds.
    """
    rival = study.ema

    def along(other: str) -> dict[float, Comparison]:
        shared = [lr for lr in study.lrs if all(_keeps(study, arm, lr) for arm in (BELAY, other))]
        return _without_lost({lr: study.compare(BELAY, other, lr) for lr in shared})

    best = compare(study.at_best(BELAY), study.at_best(rival))
    return Effect(study.name, LOSS, rival, along(rival), along(MATCHED), best)


def _without_lost(found: dict[float, Comparison]) -> dict[float, Comparison]:
    """Return the comparisons without a lost run; all of them if every one has lost runs."""
    return {lr: each for lr, each in found.items() if not each.unpaired} or found


def _keeps(study: StudyResults, arm: str, lr: float) -> bool:
    """Whether an arm keeps more than half of its seeds at a rate."""
    return 2 * study.lost_count(arm, lr) < len(study.runs_at(arm, lr))


def fid_effect(records: Sequence[Record], study: StudyResults) -> Effect:
    """Return the effect on FID, at the rates at which both arms have images of networks that are not lost."""
    rival = study.ema

    def along(other: str) -> dict[float, Comparison]:
        found = {lr: compare_fids(records, study, BELAY, other, lr) for lr in study.lrs}
        return {lr: each for lr, each in found.items() if each.point is not None}

    return Effect(study.name, FID, rival, along(rival), along(MATCHED), compare_fids(records, study, BELAY, rival))


def effects(records: Sequence[Record], names: Sequence[str]) -> list[Effect]:
    """Return the effects on test loss and on FID in some studies, as far as they were run."""
    return list(_effects(records, names))


def _effects(records: Sequence[Record], names: Sequence[str]) -> Iterator[Effect]:
    for name in names:
        study = StudyResults(records, name)
        if BELAY in study.arms and (found := loss_effect(study)):
            yield found
        if BELAY in study.arms and (found := fid_effect(records, study)):
            yield found


def effects_plate(records: Sequence[Record], part: str, names: Mapping[str, str]) -> Plate | None:
    """Return the table of effects; `names` says what the studies are called. None without records."""
    found = effects(records, [*names])
    if not found:
        return None
    rows = tuple((f"{names[each.study]}, {each.quantity}", *each.cells) for each in found)
    first = found[0]
    caption = (
        f"BELAY's loss and FID over those of the {first.rival}: at {NOMINAL}, at {EFFECTIVE} (the matched EMA) and at "
        f"{BEST}. In {first.quantity} of the {names[first.study]} they are {', '.join(spans([first]))}."
    )
    notes = (
        "Below 1 BELAY is better. Ratios are taken seed by seed, with their 95% interval; that of a FID contains the "
        "noise of its samples.",
        "The effective rate is that at which the centre of mass moves. An EMA at the same nominal rate moves faster "
        "than BELAY; the matched EMA moves as fast, and averages over as many steps.",
        "The best rate of a seed is chosen by the training loss of the other seeds, among the rates at which the arm "
        "keeps more than half of its seeds. FIDs exist at few rates: there one rate is chosen for all seeds.",
    )
    title = "BELAY against EMA, in three ways"
    return Plate(f"{part}-effects", title, caption, Table(("", *map(str.capitalize, WAYS)), rows), notes)


def mean_fid(records: Sequence[Record], study: StudyResults, arm: str = BELAY) -> float | None:
    """Return an arm's mean FID at its best rate; None without images."""
    lr = rate_of_fids(records, study, arm)
    known = [] if lr is None else [fid for fid in fids(records, study, arm, lr).values() if fid is not None]
    return sum(known) / len(known) if known else None
