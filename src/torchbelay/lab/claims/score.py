"""The claims about score models of images: C9, BELAY beats EMA on MNIST, and C10, they are about equal on CIFAR-10.

Both have a control: an EMA that is matched to BELAY in effective learning rate and memory. Whatever difference is left
against the matched EMA is the effect of the spring itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torchbelay.lab.arms import BELAY, EMA, MATCHED
from torchbelay.lab.part import Record
from torchbelay.lab.report.words import listed, sentence
from torchbelay.lab.score.analysis import FAILED, FID_MARGIN, PAPER_LR, StudyResults, fid_at_best, fids, rate_difference
from torchbelay.lab.score.comparison import Comparison, compare
from torchbelay.lab.statistics import CONFIDENCE, MARGIN

from .verdict import Answer, Claim, Finding, Numbers, Records, combine

SHORT, LONG, CIFAR10 = "rates", "table1", "cifar10"  # the studies that the claims look at
QUANTITIES = LOSS, FID = "test loss", "FID"
AT_PAPER, AT_BEST = f"at the paper's rate of {PAPER_LR:g}", "at each one's best rate"
_READINGS = {"lower": "lower", "equal": "equal", "higher": "higher", "open": "undecided", "lost": "lost"}


@dataclass(frozen=True)
class Contest:
    """BELAY against a rival, in one quantity."""

    rival: str
    quantity: str
    rates: str  # at which learning rates; empty if there is no choice
    comparison: Comparison

    @property
    def losses(self) -> tuple[int, int]:
        """The numbers of seeds that BELAY and the rival lost."""
        found = self.comparison
        return found.both_lost + found.only_one_lost, found.both_lost + found.only_other_lost


# C9 -------------------------------------------------------------------------------------------------------------------


def contests_on_mnist(records: Sequence[Record]) -> list[Contest]:
    """Return BELAY's test loss and FID against its rivals': at the paper's rate, and each at its own best."""
    short, long = StudyResults(records, SHORT), StudyResults(records, LONG)
    fid = {arm: fids(records, long, arm, PAPER_LR) for arm in (BELAY, EMA)}
    best = {arm: fid_at_best(records, long, arm) for arm in (BELAY, EMA)}
    return [
        Contest(EMA, LOSS, AT_PAPER, short.compare(BELAY, EMA, PAPER_LR)),
        Contest(EMA, LOSS, AT_BEST, compare(short.at_best(BELAY), short.at_best(EMA))),
        Contest(EMA, FID, AT_PAPER, compare(fid[BELAY], fid[EMA], FID_MARGIN)),
        Contest(EMA, FID, AT_BEST, compare(best[BELAY], best[EMA], FID_MARGIN)),
        Contest(MATCHED, LOSS, AT_PAPER, short.compare(BELAY, MATCHED, PAPER_LR)),
        Contest(MATCHED, LOSS, AT_BEST, compare(short.at_best(BELAY), short.at_best(MATCHED))),
    ]


def judge_mnist(records: Records) -> Finding:
    """Judge C9."""
    contests = contests_on_mnist(records["mnist"])
    lower = [each.comparison.lower for each in contests]
    numbers = list_numbers(contests) + _gap(StudyResults(records["mnist"], SHORT))
    if not any(each.comparison.judged for each in contests):
        return Finding(Answer.OPEN, f"Too few seeds to judge by: {count_seeds(contests)}.", numbers)
    if rates := rate_difference(records["mnist"], StudyResults(records["mnist"], LONG), (BELAY, EMA)):
        numbers += (("rates at which the FIDs are best", rates),)
    drawn = [each.comparison for each in contests if each.quantity == FID]
    if not any(lower) and any(each.reading == "open" for each in drawn):
        numbers += (("what more seeds could change", "by FID the claim may still hold in part"),)
    ways = {rates: [each for each in contests if each.rates == rates] for rates in (AT_PAPER, AT_BEST)}
    summary = " ".join(sentence(f"{rates}, {describe(some)}") for rates, some in ways.items())
    return Finding(combine(lower), summary, numbers)


def _gap(study: StudyResults) -> Numbers:
    """Return the losses between which the bar of a lost run lies."""
    kept, gone = study.loss_gap()
    if kept is None or gone is None:
        return ()
    label = f"a run is lost if its loss exceeds {FAILED:g}: the largest loss below, the least above"
    return ((label, f"{kept:.3g}, {gone:.3g}"),)


# C10 ------------------------------------------------------------------------------------------------------------------


def contests_on_cifar10(records: Sequence[Record]) -> list[Contest]:
    """Return BELAY's test loss and FID against its rivals', each at its own best rate."""
    study = StudyResults(records, CIFAR10)
    fid = {arm: fid_at_best(records, study, arm) for arm in (BELAY, EMA)}
    return [
        Contest(EMA, LOSS, "", compare(study.at_best(BELAY), study.at_best(EMA))),
        Contest(EMA, FID, "", compare(fid[BELAY], fid[EMA], FID_MARGIN)),
        Contest(MATCHED, LOSS, "", compare(study.at_best(BELAY), study.at_best(MATCHED))),
    ]


def judge_cifar10(records: Records) -> Finding:
    """Judge C10."""
    contests = contests_on_cifar10(records["cifar10"])
    numbers = list_numbers(contests)
    if not any(each.comparison.judged for each in contests):
        return Finding(Answer.OPEN, f"Too few seeds to judge by: {count_seeds(contests)}.", numbers)
    equal = sum(each.comparison.equal for each in contests)
    different = sum(each.comparison.reading in ("lower", "higher") for each in contests)
    shown = f"BELAY is shown equal in {equal} of {len(contests)} comparisons"
    shown += f" and different in {different}" if different else ""
    answer = combine([each.comparison.equal for each in contests])
    if answer is Answer.FAILS and not different:  # neither equality nor a difference is shown
        answer, shown = Answer.OPEN, f"Undecided: {shown}"
    undecided = [each.comparison for each in contests if each.comparison.reading == "open"]
    if enough := [n for each in undecided if (n := each.seeds_to_be_equal) is not None]:
        numbers += (("seeds that might decide what is undecided", f"{max(enough)}"),)
    return Finding(answer, f"{shown}. {sentence(describe(contests))}", numbers)


# Words ----------------------------------------------------------------------------------------------------------------


def describe(contests: Sequence[Contest]) -> str:
    """Return the results of contests as clauses: what is lost, the ratios, the lost seeds, what was not run."""
    run = [each for each in contests if each.comparison.seeds]
    if not run:
        return "nothing was run"
    clauses = [*_describe_lost(run), *_describe_ratios(run), *_describe_losers(run)]
    for quantity in QUANTITIES:
        missing = [each for each in contests if each not in run and each.quantity == quantity]
        if missing:
            some = any(each.quantity == quantity for each in run)
            against = f" against {listed([_name(each.rival) for each in missing])}" if some else ""
            clauses.append(f"{quantity} was not run{against}")
    return (", and " if len(clauses) == 2 else "; ").join(clauses)


def _describe_lost(run: Sequence[Contest]) -> list[str]:
    """Return one clause about the contests in which both sides lost every seed, if there are any."""
    lost = [each for each in run if each.comparison.reading == "lost"]
    if not lost:
        return []
    names = dict.fromkeys(_name(each.rival) for each in lost)
    scope = "" if len(lost) == len(run) else f" ({listed([*dict.fromkeys(each.quantity for each in lost)])})"
    return [f"{listed([BELAY, *names])} lose every seed{scope}"]


def _describe_ratios(run: Sequence[Contest]) -> list[str]:
    """Return one clause per quantity with the ratios to the rivals; what is not shown is marked."""
    clauses: list[str] = []
    for quantity in QUANTITIES:
        ratios = []
        for each in run:
            if each.quantity == quantity and each.comparison.point is not None:
                found = each.comparison
                mark = " (one seed)" if found.ratio is None else " (undecided)" if found.reading == "open" else ""
                ratios.append(f"{found.size.split()[0]} times {_name(each.rival)}'s{mark}")
        if ratios:
            owner = "its" if clauses else "BELAY's"
            clauses.append(f"{owner} {quantity} is {listed(ratios)}")
    return clauses


def _describe_losers(run: Sequence[Contest]) -> list[str]:
    """Return one clause about the contests that lost seeds alone decide: they leave no pair for a ratio."""
    lost: dict[str, str] = {}
    for each in run:
        if each.comparison.point is None and each.comparison.reading != "lost":
            for name, count in zip((BELAY, _name(each.rival)), each.losses, strict=True):
                lost.setdefault(name, f"{name} {count} of {each.comparison.seeds}")
    return [f"seeds lost: {listed([*lost.values()])}"] if lost else []


def _name(arm: str) -> str:
    return arm if arm == EMA else f"the {arm}"


def list_numbers(contests: Sequence[Contest]) -> Numbers:
    """Return each contest with its result, and what the result means."""
    lines = []
    for each in contests:
        result = each.comparison.describe(BELAY, each.rival)
        meaning = f"; {_READINGS[each.comparison.reading]}" if each.comparison.judged else ""
        rates = f" {each.rates}" if each.rates else ""
        lines.append((f"{each.quantity}{rates}: BELAY ÷ {each.rival}", f"{result}{meaning}"))
    return tuple(lines)


def count_seeds(contests: Sequence[Contest]) -> str:
    """Return the largest number of seeds that a contest has, in words."""
    seeds = max((each.comparison.seeds for each in contests), default=0)
    return "no seed" if not seeds else f"{seeds} seed{'s' if seeds > 1 else ''}"


CLAIMS = (
    Claim(
        "C9",
        "On MNIST BELAY beats EMA (FID 15.2 against 18.1).",
        "Six comparisons. In the short runs: BELAY's test loss against EMA's and against the matched EMA's, at the "
        f"paper's learning rate of {PAPER_LR:g} and at each one's best rate, which the training loss of the other "
        "seeds chooses. In the long runs: BELAY's FID against EMA's, at the paper's rate and at the rate with the "
        f"lowest training loss among those with images. BELAY wins if the {CONFIDENCE:.0%} interval of the ratio, "
        "paired by seed, lies below 1, or if it loses so many fewer seeds that Fisher's exact one-sided p is at most "
        f"{1 - CONFIDENCE:.0%}; it must lose no seed that the rival keeps. A seed is lost if its test loss exceeds "
        f"{FAILED:g}, half the loss of a network that predicts nothing. If both lose every seed, or if there are fewer "
        "than two seeds, BELAY does not win. Holds if BELAY wins all six, in part if it wins some.",
        ("mnist",),
        judge_mnist,
        "mnist-pairs",
    ),
    Claim(
        "C10",
        "On CIFAR-10 BELAY and EMA are about equal (FID 1.99 against 1.98).",
        "Three comparisons, at each one's best rate: BELAY's test loss against EMA's and against the matched EMA's, "
        f"and its FID against EMA's. Two are equal if two one-sided t-tests at {1 - CONFIDENCE:.0%}, paired by seed, "
        f"show a difference of at most {MARGIN - 1:.0%} (test loss) or {FID_MARGIN - 1:.0%} (FID), and neither loses a "
        f"seed (test loss above {FAILED:g}) that the other keeps. Holds if all three are equal, in part if some are. "
        "If none is, it does not hold if a difference is shown, and counts as not run otherwise.",
        ("cifar10",),
        judge_cifar10,
        "cifar10-pairs",
    ),
)
