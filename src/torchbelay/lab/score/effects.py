"""BELAY against EMA in the three ways that are always given together, in this order.

At equal nominal rate both optimizers have the same learning rate, so that BELAY makes less progress per step. At equal
effective rate the EMA is the matched one, which makes BELAY's progress: what is left is the pull itself. At each one's
best, every method has the rate that suits it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchbelay.lab.arms import BELAY, MATCHED
from torchbelay.lab.part import MISSING, Plate, Record, Table
from torchbelay.lab.report.words import listed
from torchbelay.lab.statistics import CONFIDENCE

from .analysis import StudyResults, compare_fids, fids, rate_of_fids
from .comparison import Comparison, compare, format_ratio

NOMINAL, EFFECTIVE, BEST = WAYS = ("equal nominal rate", "equal effective rate", "each one's best")
LOSS, FID = "test loss", "FID"
TITLE = "BELAY against EMA, in three ways"
CHOICE = (
    "A seed's best rate is chosen by the training loss of the other seeds, among the rates at which the arm keeps more "
    "than half of its seeds; if lost seeds leave fewer than two others, by that of all seeds."
)
RATIOS = f"Below 1 BELAY is better. Ratios are taken seed by seed, with their {CONFIDENCE:.0%} interval"


@dataclass(frozen=True)
class Effect:
    """What BELAY does to one quantity of a study: its ratio to the EMA's, in the three ways."""

    study: str
    quantity: str
    rival: str  # the EMA of the first way and of the third
    nominal: Mapping[float, Comparison]  # by learning rate
    effective: Mapping[float, Comparison]
    best: Comparison
    left_out: tuple[Sequence[float], Sequence[float]]  # the rates that the first two ways lack because runs are lost
    safest: Comparison | None = None  # at each one's best of the rates at which it loses no seed, if others are better

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

    @property
    def seeds(self) -> str:
        """The number of seeds as text, lost ones included; those of the three ways if they differ."""
        counts = [_count_seeds(way) for way in self.ways]
        known = {count for count in counts if count != MISSING}
        return known.pop() if len(known) == 1 else ", ".join(counts)


def _count_seeds(found: Sequence[Comparison]) -> str:
    counts = sorted({each.seeds for each in found if each.seeds})
    return " to ".join(dict.fromkeys(f"{count}" for count in (counts[0], counts[-1]))) if counts else MISSING


def _list_rates(found: Mapping[float, Comparison], rival: str) -> str:
    return "; ".join(f"rate {lr:g}: {each.describe(BELAY, rival)}" for lr, each in found.items()) or MISSING


def _shorten(found: Mapping[float, Comparison], rival: str) -> str:
    return _list_rates(found, rival) if len(found) <= 2 else f"{span([*found.values()])} at {len(found)} rates"


def spans(found: Sequence[Effect]) -> list[str]:
    """Return the ratios of some effects in each of the three ways: the least and the largest, if there are several."""
    return [
        span([each for some in way for each in some]) for way in zip(*(effect.ways for effect in found), strict=True)
    ]


def span(found: Sequence[Comparison]) -> str:
    """Return the least and the largest ratio, each marked if it is undecided; "not run" if there is none.

    >>> span([compare({0: 1.1, 1: 1.1}, {0: 1.0, 1: 1.0}), compare({0: 1.3, 1: 1.4}, {0: 1.0, 1: 1.2})])
    '1.10 to 1.23 (undecided)'
    """
    known = sorted((each for each in found if each.point is not None), key=lambda each: each.point or 0.0)
    if not known:
        return "not run"
    marks = {"open": " (undecided)"}
    ends = [f"{format_ratio(each.point or 0.0)}{marks.get(each.reading, '')}" for each in (known[0], known[-1])]
    return " to ".join(dict.fromkeys(ends))


def sentence(found: Sequence[Effect]) -> str:
    """Return the ratios of some effects in the three ways as a sentence, a quantity after the other."""
    if not any(found):
        return ""
    texts = [f"{each.quantity} {', '.join(spans([each])) if each else 'not run'}" for each in found]
    return f" BELAY ÷ {found[0].rival} at {NOMINAL}, {EFFECTIVE} (matched EMA) and {BEST}: {'; '.join(texts)}."


def loss_effect(study: StudyResults) -> Effect:
    """Return the effect on the test loss, at the rates at which no run of the two is lost.

    If there is no such rate, at those at which both keep more than half of their seeds.
    """
    rival = study.ema

    def along(other: str) -> tuple[dict[float, Comparison], list[float]]:
        found = {lr: each for lr in study.lrs if (each := study.compare(BELAY, other, lr)).seeds}
        kept = {lr: each for lr, each in found.items() if all(_keeps(study, arm, lr) for arm in (BELAY, other))}
        shown = without_lost(kept)
        return shown, [lr for lr in found if lr not in shown]

    (nominal, first), (effective, second) = along(rival), along(MATCHED)
    ours, theirs = study.at_best(BELAY), study.at_best(rival)
    safe, safe_theirs = (study.at_best(arm, study.safe_rates(arm)) for arm in (BELAY, rival))
    differs = (safe, safe_theirs) != (ours, theirs)
    safest = compare(safe, safe_theirs) if differs and safe and safe_theirs else None
    return Effect(study.name, LOSS, rival, nominal, effective, compare(ours, theirs), (first, second), safest)


def without_lost(found: dict[float, Comparison]) -> dict[float, Comparison]:
    """Return the comparisons without a lost run; all of them if every one has lost runs."""
    return {lr: each for lr, each in found.items() if not each.unpaired} or found


def _keeps(study: StudyResults, arm: str, lr: float) -> bool:
    """Whether an arm keeps more than half of its seeds at a rate."""
    return 2 * study.lost_count(arm, lr) < len(study.runs_at(arm, lr))


def fid_effect(records: Sequence[Record], study: StudyResults) -> Effect:
    """Return the effect on FID, at the rates at which both arms have images of networks that are not lost."""
    rival = study.ema

    def along(other: str) -> tuple[dict[float, Comparison], list[float]]:
        found = {lr: compare_fids(records, study, BELAY, other, lr) for lr in study.lrs}
        lost = [lr for lr, each in found.items() if each.point is None and each.seeds]
        return {lr: each for lr, each in found.items() if each.point is not None}, lost

    (nominal, first), (effective, second) = along(rival), along(MATCHED)
    best = compare_fids(records, study, BELAY, rival)
    return Effect(study.name, FID, rival, nominal, effective, best, (first, second))


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


def describe_left_out(found: Sequence[Effect], names: Mapping[str, str]) -> str:
    """Return which rates the first two ways lack because runs are lost, and the rule, as text."""
    places: dict[str, list[str]] = {}  # the studies that have the same quantity and the same rates
    for each in found:
        if any(each.left_out):
            places.setdefault(f"{each.quantity} at {_rates_left_out(each)}", []).append(names[each.study])
    texts = [f"{listed(some)}, {place}" for place, some in places.items()]
    if not texts:
        return "No rate is left out because of lost runs."
    partly = any(each.unpaired for effect in found for way in effect.ways[:2] for each in way)
    stay = " A rate stays if none would be left without it, or if it has FIDs; its cell then counts the lost runs."
    return (
        f"The first two ways leave out rates at which a run of the two arms is lost: {'; '.join(texts)}."
        f"{stay if partly else ''}"
    )


def _rates_left_out(effect: Effect) -> str:
    """Return the rates; with the way if the two ways differ."""
    first, second = (listed([f"{lr:g}" for lr in rates]) for rates in effect.left_out)
    ways = ((first, NOMINAL), (second, EFFECTIVE))
    return first if first == second else ", ".join(f"{rates} ({way})" for rates, way in ways if rates)


def describe_choice(found: Sequence[Effect], names: Mapping[str, str]) -> str:
    """Return how the third way would change if an arm never had a rate at which it loses a seed, as text."""
    texts = [
        f"{names[each.study]}, {each.quantity} {each.safest.describe(BELAY, each.rival)}"
        for each in found
        if each.safest
    ]
    if not texts:
        return ""
    return (
        "A best rate may be one at which the arm loses a seed, which then has no ratio. If an arm is never given such "
        f"a rate, the third way gives: {'; '.join(texts)}."
    )


def steps_of(records: Sequence[Record], study: str) -> str:
    """Return the length of a study's runs in words; empty without runs.

    >>> steps_of([{"kind": "run", "study": "rates", "steps": 3000}], "rates")
    '3,000 steps'
    """
    counts = sorted({line["steps"] for line in records if line["kind"] == "run" and line["study"] == study})
    return f"{listed([f'{count:,}' for count in counts])} steps" if counts else ""


def with_lengths(records: Sequence[Record], names: Mapping[str, str]) -> dict[str, str]:
    """Return what studies are called, with the length of their runs.

    >>> with_lengths([{"kind": "run", "study": "rates", "steps": 3000}], {"rates": "short runs"})
    {'rates': 'short runs of 3,000 steps'}
    """
    lengths = {study: steps_of(records, study) for study in names}
    return {study: f"{name} of {lengths[study]}" if lengths[study] else name for study, name in names.items()}


def effects_plate(records: Sequence[Record], part: str, names: Mapping[str, str]) -> Plate | None:
    """Return the table of effects; `names` says what the studies are called. None without records."""
    found = effects(records, [*names])
    if not found:
        return None
    whole = with_lengths(records, names)
    first = found[0]
    caption = (
        f"BELAY's loss and FID over those of the {first.rival}: at {NOMINAL}, at {EFFECTIVE} (the matched EMA) and at "
        f"{BEST}. In {first.quantity} of the {whole[first.study]} they are {', '.join(spans([first]))}."
    )
    notes = (
        f"{RATIOS}; that of a FID contains the noise of its samples.",
        "The effective rate is that at which the centre of mass moves. An EMA at the same nominal rate moves faster "
        "than BELAY; the matched EMA moves as fast, and averages over as many steps.",
        f"{CHOICE} FIDs exist at few rates: there one rate is chosen for all seeds.",
        describe_left_out(found, names),
        *filter(None, [describe_choice(found, names)]),
    )
    return Plate(f"{part}-effects", TITLE, caption, effects_table(found, whole), notes)


def effects_table(found: Sequence[Effect], names: Mapping[str, str]) -> Table:
    """Return the table of effects; `names` says what the studies are called."""
    rows = tuple((f"{names[each.study]}, {each.quantity}", each.seeds, *each.cells) for each in found)
    return Table(("", "Seeds", *map(str.capitalize, WAYS)), rows)


def describe_better(found: Sequence[Effect], names: Mapping[str, str]) -> str:
    """Return how many comparisons show which outcome, and in which BELAY is better, as text."""
    every = [
        (effect, f"{way} {lr:g}" if lr else way, each)
        for effect in found
        for way, some in zip(WAYS, (effect.nominal, effect.effective, {0.0: effect.best}), strict=True)
        for lr, each in some.items()
        if each.point is not None and (way == NOMINAL or some is not effect.nominal)  # the same runs count once
    ]
    better = [
        f"{names[effect.study]}, {effect.quantity} at {where}: {each.size}"
        for effect, where, each in every
        if each.reading == "lower"
    ]
    worse, equal, undecided = ([each.reading for *_, each in every].count(text) for text in ("higher", "equal", "open"))
    count = (
        f"Of these {len(every)} comparisons, BELAY is shown to be worse in {worse}, equal in {equal} and better in "
        f"{len(better)}; {undecided} are undecided"
    )
    return f"{'. Better: '.join(filter(None, [count, '; '.join(better)]))}."


def mean_fid(records: Sequence[Record], study: StudyResults, arm: str = BELAY) -> float | None:
    """Return an arm's mean FID at its best rate; None without images."""
    lr = rate_of_fids(records, study, arm)
    known = [] if lr is None else [fid for fid in fids(records, study, arm, lr).values() if fid is not None]
    return sum(known) / len(known) if known else None
