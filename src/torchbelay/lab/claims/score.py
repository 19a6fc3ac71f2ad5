"""The claims about score models of images: C9, BELAY beats EMA on MNIST, and C10, they are about equal on CIFAR-10.

An EMA that is matched to BELAY (its effective learning rate, its memory) is the control of both: what is left against
it is what the spring itself does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torchbelay.lab.arms import BELAY, EMA, MATCHED
from torchbelay.lab.part import Record
from torchbelay.lab.report.words import listed
from torchbelay.lab.score.analysis import (
    FAILED,
    FID_MARGIN,
    PAPER_LR,
    StudyResults,
    fid_at_best,
    fids,
    rate_difference,
)
from torchbelay.lab.score.comparison import Comparison, compare
from torchbelay.lab.statistics import CONFIDENCE, MARGIN

from .verdict import Answer, Claim, Finding, Records, of_parts

SHORT, LONG, CIFAR10 = "rates", "table1", "cifar10"  # the studies that the claims look at
LOSS, FID = "test loss", "FID"
_WAYS = AT_PAPER, AT_BEST = f"at the paper's rate of {PAPER_LR:g}", "at each one's best rate"
_WORDS = {"lower": "lower", "equal": "as good as equal", "higher": "higher", "open": "not told apart", "lost": "lost"}


@dataclass(frozen=True)
class Compared:
    """BELAY over a rival, in something."""

    rival: str
    what: str
    where: str  # at which learning rates; empty where there is no choice
    found: Comparison

    @property
    def said(self) -> str:
        """How it came out."""
        return self.found.describe(BELAY, self.rival)


# C9 -------------------------------------------------------------------------------------------------------------------


def on_mnist(records: Sequence[Record]) -> list[Compared]:
    """BELAY's test loss, and its FID, over that of its rivals: at the paper's rate, and each at its own best."""
    short, long = StudyResults(records, SHORT), StudyResults(records, LONG)
    fid = {arm: fids(records, long, arm, PAPER_LR) for arm in (BELAY, EMA)}
    best = {arm: fid_at_best(records, long, arm) for arm in (BELAY, EMA)}
    return [
        Compared(EMA, LOSS, AT_PAPER, short.compare(BELAY, EMA, PAPER_LR)),
        Compared(EMA, LOSS, AT_BEST, compare(short.at_best(BELAY), short.at_best(EMA))),
        Compared(EMA, FID, AT_PAPER, compare(fid[BELAY], fid[EMA], FID_MARGIN)),
        Compared(EMA, FID, AT_BEST, compare(best[BELAY], best[EMA], FID_MARGIN)),
        Compared(MATCHED, LOSS, AT_PAPER, short.compare(BELAY, MATCHED, PAPER_LR)),
        Compared(MATCHED, LOSS, AT_BEST, compare(short.at_best(BELAY), short.at_best(MATCHED))),
    ]


def beats_ema(records: Records) -> Finding:
    """C9."""
    compared = on_mnist(records["mnist"])
    lower = [each.found.lower for each in compared]
    said = numbers(compared) + bar(StudyResults(records["mnist"], SHORT))
    if not any(each.found.judged for each in compared):
        return Finding(Answer.OPEN, f"Too few seeds to judge by: {most_seeds(compared)}.", said)
    drawn = [each.found for each in compared if each.what == FID]
    clauses = [_in_both_ways(compared, LOSS), "FID has not been run"]
    if any(each.seeds for each in drawn):
        why = rate_difference(records["mnist"], StudyResults(records["mnist"], LONG), (BELAY, EMA))
        clauses[1:] = [f"in the long runs {_in_both_ways(compared, FID)}", *([why] if why else [])]
    if not any(lower) and any(each.reading == "open" for each in drawn):
        clauses.append("by FID it might yet hold in part")
    return Finding(of_parts(lower), sentence("; ".join(clauses)), said)


def _in_both_ways(compared: Sequence[Compared], what: str) -> str:
    """One thing at the paper's rate and at the best ones, as clauses."""
    ways = {where: [each for each in compared if (each.what, each.where) == (what, where)] for where in _WAYS}
    return "; ".join(f"{where} {told(there)}" for where, there in ways.items())


def bar(study: StudyResults) -> tuple[tuple[str, str], ...]:
    """Where the bar of a lost run lies: between which losses."""
    kept, gone = study.loss_gap()
    if kept is None or gone is None:
        return ()
    return ((f"above {FAILED:g} a run is lost: the largest loss below, the least above", f"{kept:.3g}, {gone:.3g}"),)


# C10 ------------------------------------------------------------------------------------------------------------------


def on_cifar10(records: Sequence[Record]) -> list[Compared]:
    """BELAY's test loss, and its FID, over that of its rivals, each at its own best rate."""
    study = StudyResults(records, CIFAR10)
    fid = {arm: fid_at_best(records, study, arm) for arm in (BELAY, EMA)}
    return [
        Compared(EMA, LOSS, "", compare(study.at_best(BELAY), study.at_best(EMA))),
        Compared(EMA, FID, "", compare(fid[BELAY], fid[EMA], FID_MARGIN)),
        Compared(MATCHED, LOSS, "", compare(study.at_best(BELAY), study.at_best(MATCHED))),
    ]


def about_equal(records: Records) -> Finding:
    """C10."""
    compared = on_cifar10(records["cifar10"])
    if not any(each.found.judged for each in compared):
        return Finding(Answer.OPEN, f"Too few seeds to judge by: {most_seeds(compared)}.", numbers(compared))
    equal = sum(each.found.equal for each in compared)
    different = sum(each.found.reading in ("lower", "higher") for each in compared)
    shown = f"{_count(equal)} of {_count(len(compared))} comparisons {'is' if equal == 1 else 'are'} shown equal"
    shown += f" and {_count(different)} different" if different else ""
    detail = "; ".join(told([each for each in compared if each.what == what]) for what in (LOSS, FID))
    answer = of_parts([each.found.equal for each in compared])
    if answer is Answer.FAILS and not different:  # neither the one nor the other is shown
        answer, shown = Answer.OPEN, f"undecided, {shown}"
    return Finding(answer, sentence(f"{shown}: {detail}{_wanting(compared)}"), numbers(compared))


def _count(number: int) -> str:
    return ("none", "one", "two", "three")[number]


def _wanting(compared: Sequence[Compared]) -> str:
    """How many seeds would decide what is not decided, if more than one was run and any number would."""
    undecided = [each.found for each in compared if each.found.reading == "open"]
    known = [n for each in undecided if (n := each.seeds_to_be_equal) is not None]
    return f" ({max(known)} seeds might decide it)" if known else ""


# Words ----------------------------------------------------------------------------------------------------------------


def told(compared: Sequence[Compared]) -> str:
    """BELAY against its rivals in one thing, as a clause."""
    everywhere = [each.rival for each in compared if each.found.reading == "lost"]
    said = []
    if everywhere:
        names = [BELAY, *map(_name, everywhere)]
        said.append(f"{listed(names)} are {'both' if len(names) == 2 else 'all'} lost in every seed")
    rest = [each for each in compared if each.rival not in everywhere]
    said += [_clause(each, first=not place) for place, each in enumerate(rest)]
    return " and ".join(said)


def _clause(each: Compared, *, first: bool) -> str:
    """The ratio to a rival, and what was lost."""
    if not each.found.seeds:
        return f"{each.what} against {_name(each.rival)} has not been run"
    lost = each.found.describe_lost(BELAY, each.rival)
    if each.found.point is None:
        return lost
    size = each.found.size.replace("(one seed)", "(one seed, which decides nothing)")
    size = f"{size[:-1]}; {lost})" if lost else size
    number, rest = size.split(" ", 1)
    whose = f"BELAY's {each.what} is " if first else ""
    return f"{whose}{number} times {_name(each.rival)}'s {rest}"


def _name(arm: str) -> str:
    return arm if arm == EMA else f"the {arm}"


def sentence(text: str) -> str:
    """Text with a capital and a full stop."""
    return f"{text[0].upper()}{text[1:]}."


def numbers(compared: Sequence[Compared]) -> tuple[tuple[str, str], ...]:
    """Each comparison on a line of its own, with what it means."""
    return tuple(
        (
            f"{each.what}{f' {each.where}' if each.where else ''}: BELAY ÷ {each.rival}",
            f"{each.said}; {_WORDS[each.found.reading]}" if each.found.judged else each.said,
        )
        for each in compared
    )


def most_seeds(compared: Sequence[Compared]) -> str:
    """How many seeds there are, at the most."""
    seeds = max((each.found.seeds for each in compared), default=0)
    return "no seed" if not seeds else f"{seeds} seed{'s' if seeds > 1 else ''}"


CLAIMS = (
    Claim(
        "C9",
        "On MNIST BELAY beats EMA (FID 15.2 against 18.1).",
        f"The test loss of BELAY's average is lower than EMA's and than that of the EMA that is matched to it: at the "
        f"paper's learning rate of {PAPER_LR:g}, and each at its own best rate, which the other seeds choose by their "
        "training loss; and in the long runs its FID is lower than EMA's: at the paper's rate, and each at the rate "
        "with the lowest training loss among those of which images were made. Lower: the "
        f"{CONFIDENCE:.0%} interval of the ratio, seed by seed, lies below 1, or BELAY loses so many fewer seeds that "
        f"Fisher's exact one-sided p is at most {1 - CONFIDENCE:.0%}; and it loses no seed that the other keeps. Lost "
        f"is a run with a test loss above {FAILED:g}, half of what predicting nothing gives: the bar lies between the "
        "runs that work and those that collapsed. Where both are lost, BELAY does not beat the other. In part if some "
        "of these six are so; what has fewer than two seeds is not.",
        ("mnist",),
        beats_ema,
        "mnist-pairs",
    ),
    Claim(
        "C10",
        "On CIFAR-10 BELAY and EMA are about equal (FID 1.99 against 1.98).",
        f"Two one-sided t-tests at {1 - CONFIDENCE:.0%}, seed by seed, show BELAY's test loss to be within "
        f"{MARGIN - 1:.0%} of EMA's and of that of the EMA that is matched to it, and its FID within "
        f"{FID_MARGIN - 1:.0%} of EMA's, each at its best rate, and neither loses a seed (a test loss above "
        f"{FAILED:g}) that the other keeps. In part if some of these three are so; if none is, it does not hold where "
        "a difference is shown, and counts as not run where nothing is.",
        ("cifar10",),
        about_equal,
        "cifar10-pairs",
    ),
)
