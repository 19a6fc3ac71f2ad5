"""The claims about score models of images: C9, BELAY beats EMA on MNIST, and C10, they are about equal on CIFAR-10.

Both have a control: an EMA that is matched to BELAY in effective learning rate and memory. Whatever difference is left
against the matched EMA is the effect of the spring itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torchbelay.lab.arms import BELAY, MATCHED, in_words
from torchbelay.lab.part import Record
from torchbelay.lab.report.words import listed, sentence
from torchbelay.lab.score.analysis import FAILED, PAPER_LR, StudyResults, compare_fids
from torchbelay.lab.score.comparison import Comparison, compare
from torchbelay.lab.score.effects import FID, LOSS, WAYS, Effect, effects, mean_fid, span
from torchbelay.lab.score.readings import readings

from .verdict import Answer, Claim, Finding, Numbers, Records, find

SHORT, LONG, FIGURE4, CIFAR10 = "rates", "table1", "figure4", "cifar10"  # the studies that the claims look at
QUANTITIES = LOSS, FID
AT_PAPER = f"at the paper's rate of {PAPER_LR:g}"
DEFAULT = "cold start, Adam's eps 1e-8"  # the reading of the parts that train over rates
_READINGS = {"lower": "lower", "equal": "equal", "higher": "higher", "open": "undecided", "lost": "lost"}


@dataclass(frozen=True)
class Contest:
    """BELAY against a rival, in one quantity."""

    rival: str
    quantity: str
    where: str  # at which rates, or under which reading of the paper
    comparison: Comparison

    @property
    def losses(self) -> tuple[int, int]:
        """The numbers of seeds that BELAY and the rival lost."""
        found = self.comparison
        return found.both_lost + found.only_one_lost, found.both_lost + found.only_other_lost

    @property
    def name(self) -> str:
        """What is compared, and where."""
        where = f", {self.where}" if self.where else ""
        return f"{self.quantity} below {in_words(self.rival)}'s{where}"


# C9 -------------------------------------------------------------------------------------------------------------------


def contests_on_mnist(records: Records) -> list[Contest]:
    """Return BELAY against its rivals at the paper's rate, under every reading of the paper that was run."""
    lines = records["mnist"]
    short, long = StudyResults(lines, SHORT), StudyResults(lines, LONG)
    found = [
        Contest(short.ema, LOSS, f"{DEFAULT}, short runs", short.compare(BELAY, short.ema, PAPER_LR)),
        Contest(long.ema, LOSS, f"{DEFAULT}, long runs", long.compare(BELAY, long.ema, PAPER_LR)),
        Contest(long.ema, FID, f"{DEFAULT}, long runs", compare_fids(lines, long, BELAY, long.ema, PAPER_LR)),
        Contest(MATCHED, LOSS, f"{DEFAULT}, short runs", short.compare(BELAY, MATCHED, PAPER_LR)),
    ]
    for text, study in readings(records.get("readings", ())).items():
        found.append(Contest(study.ema, LOSS, text, study.compare(BELAY, study.ema, PAPER_LR)))
    return found


def judge_mnist(records: Records) -> Finding:
    """Judge C9."""
    contests = contests_on_mnist(records)
    run = [each for each in contests if each.comparison.judged]
    trained = [each for each in run if each.comparison.reading != "lost"]
    found = effects(records["mnist"], (SHORT, LONG)) + effects(records.get(FIGURE4, ()), (FIGURE4,))
    numbers = list_numbers(contests) + list_effects(found) + _gap(StudyResults(records["mnist"], SHORT))
    if not run and not found:
        return Finding(Answer.OPEN, f"Too few seeds to judge by: {count_seeds(contests)}.", numbers)
    elsewhere = f"Elsewhere {describe_effects(found)}" if found else "No other rate was run"
    if not trained:
        answer, why = (Answer.NOT_REPRODUCED, f"{AT_PAPER} no method trains") if run else (Answer.OPEN, _open(contests))
        return Finding(answer, f"{sentence(why)} {elsewhere}.", numbers)
    tests = {each.name: each.comparison.better for each in trained}
    won, undecided = ([*tests.values()].count(outcome) for outcome in (True, None))
    state = f"{undecided} open{'' if any(each.quantity == FID for each in trained) else '; no FID'}"
    shown = (
        f"At the paper's rate, BELAY wins {won} of {len(trained)} comparisons ({state})."
        if len(trained) > 2
        else sentence(f"{AT_PAPER}, {describe(trained)}")
    )
    return find(tests, f"{shown} {elsewhere}.", numbers)


def _open(contests: Sequence[Contest]) -> str:
    """Return why the runs at the paper's rate cannot be judged, as a clause."""
    some = any(each.comparison.seeds for each in contests)
    return f"{AT_PAPER}, {count_seeds(contests)} is not enough to judge by" if some else f"nothing was run {AT_PAPER}"


def _gap(study: StudyResults) -> Numbers:
    """Return the losses between which the bar of a lost run lies."""
    kept, gone = study.loss_gap()
    if kept is None or gone is None:
        return ()
    label = f"a run is lost if its loss exceeds {FAILED:g}: the largest loss below, the least above"
    return ((label, f"{kept:.3g}, {gone:.3g}"),)


def describe_effects(found: Sequence[Effect]) -> str:
    """Return the least and the largest ratio of test losses, over all studies and the three ways; of FIDs if alone.

    The rival of the second way is the matched EMA, that of the others the study's own EMA.
    """
    matched = any(each.point is not None for effect in found for each in effect.effective.values())
    rivals = {effect.rival for effect in found} | ({MATCHED} if matched else set())
    whose = {1: f"{in_words(found[0].rival)}'s", 2: "either EMA's"}.get(len(rivals), "any EMA's")
    quantity = next(quantity for quantity in QUANTITIES if any(effect.quantity == quantity for effect in found))
    ratios = [each for effect in found if effect.quantity == quantity for way in effect.ways for each in way]
    return f"BELAY's {'loss' if quantity == LOSS else quantity} is {span(ratios)} times {whose}"


def list_effects(found: Sequence[Effect]) -> Numbers:
    """Return every effect, in the order of the three ways."""
    return tuple(
        (f"{each.quantity}, {each.study}, at {way}: BELAY ÷ {rival}", cell)
        for each in found
        for way, rival, cell in zip(WAYS, (each.rival, MATCHED, each.rival), each.details, strict=True)
    )


# C10 ------------------------------------------------------------------------------------------------------------------


def contests_on_cifar10(records: Sequence[Record]) -> list[Contest]:
    """Return BELAY's test loss and FID against its rivals', each at its own best rate."""
    study = StudyResults(records, CIFAR10)
    return [
        Contest(study.ema, LOSS, "", compare(study.at_best(BELAY), study.at_best(study.ema))),
        Contest(study.ema, FID, "", compare_fids(records, study, BELAY, study.ema)),
        Contest(MATCHED, LOSS, "", compare(study.at_best(BELAY), study.at_best(MATCHED))),
    ]


def judge_cifar10(records: Records) -> Finding:
    """Judge C10."""
    contests = contests_on_cifar10(records["cifar10"])
    numbers = list_numbers(contests) + list_effects(effects(records["cifar10"], (CIFAR10,)))
    if not any(each.comparison.judged for each in contests):
        return Finding(Answer.OPEN, f"Too few seeds to judge by: {count_seeds(contests)}.", numbers)
    tests = {
        f"{each.quantity} equal to {in_words(each.rival)}'s": each.comparison.alike if each.comparison.judged else None
        for each in contests
    }
    equal, different = list(tests.values()).count(True), list(tests.values()).count(False)
    fid = mean_fid(records["cifar10"], StudyResults(records["cifar10"], CIFAR10))
    length = "" if fid is None else f" (FID about {float(f'{fid:.1g}'):g})"
    shown = f"In short runs{length}, {equal} of {len(contests)} comparisons show equality"
    shown += f" and {different} a difference" if different else ""
    undecided = [each.comparison for each in contests if each.comparison.reading == "open"]
    if enough := [n for each in undecided if (n := each.seeds_to_be_equal) is not None]:
        numbers += (("seeds that might decide what is undecided", f"{max(enough)}"),)
    own = [each for each in contests if each.rival != MATCHED]  # the control is among the numbers
    return find(tests, f"{shown}. {sentence(describe(own))}", numbers)


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
            against = f" against {listed([in_words(each.rival) for each in missing])}" if some else ""
            clauses.append(f"{quantity} was not run{against}")
    return (", and " if len(clauses) == 2 else "; ").join(clauses)


def _describe_lost(run: Sequence[Contest]) -> list[str]:
    """Return one clause about the contests in which both sides lost every seed, if there are any."""
    lost = [each for each in run if each.comparison.reading == "lost"]
    if not lost:
        return []
    names = dict.fromkeys(in_words(each.rival) for each in lost)
    scope = "" if len(lost) == len(run) else f" ({listed([*dict.fromkeys(each.quantity for each in lost)])})"
    return [f"{listed([BELAY, *names])} lose every seed{scope}"]


def _describe_ratios(run: Sequence[Contest]) -> list[str]:
    """Return one clause per rival with the ratios of each quantity; what is not shown is marked."""
    known = [each for each in run if each.comparison.point is not None]
    clauses: list[str] = []
    for rival in dict.fromkeys(each.rival for each in known):
        owner = "its" if clauses else "BELAY's"
        ratios: list[str] = []
        for quantity in QUANTITIES:
            some = [_marked(each.comparison) for each in known if (each.rival, each.quantity) == (rival, quantity)]
            if some:
                ratios.append(f"its {quantity} {listed(some)}" if ratios else f"{owner} {quantity} is {listed(some)}")
        clauses.append(f"{' and '.join(ratios)} times {in_words(rival)}'s")
    return clauses


def _marked(found: Comparison) -> str:
    """Return a ratio without its interval, marked if it is not shown."""
    mark = " (one seed)" if found.ratio is None else " (undecided)" if found.reading == "open" else ""
    return f"{found.size.split()[0]}{mark}"


def _describe_losers(run: Sequence[Contest]) -> list[str]:
    """Return one clause about the contests that lost seeds alone decide: they leave no pair for a ratio."""
    lost: dict[str, str] = {}
    for each in run:
        if each.comparison.point is None and each.comparison.reading != "lost":
            for name, count in zip((BELAY, in_words(each.rival)), each.losses, strict=True):
                lost.setdefault(name, f"{name} {count} of {each.comparison.seeds}")
    return [f"seeds lost: {listed([*lost.values()])}"] if lost else []


def list_numbers(contests: Sequence[Contest]) -> Numbers:
    """Return each contest with its result, and what the result means."""
    lines = []
    for each in contests:
        result = each.comparison.describe(BELAY, each.rival)
        meaning = f"; {_READINGS[each.comparison.reading]}" if each.comparison.judged else ""
        where = f", {AT_PAPER}, {each.where}" if each.where else ""
        lines.append((f"{each.quantity}{where}: BELAY ÷ {each.rival}", f"{result}{meaning}"))
    return tuple(lines)


def count_seeds(contests: Sequence[Contest]) -> str:
    """Return the largest number of seeds that a contest has, in words."""
    seeds = max((each.comparison.seeds for each in contests), default=0)
    return "no seed" if not seeds else f"{seeds} seed{'s' if seeds > 1 else ''}"


CLAIMS = (
    Claim(
        "C9",
        "On MNIST BELAY beats EMA (FID 15.2 against 18.1).",
        f"Judged at the paper's learning rate of {PAPER_LR:g}, under every reading of the paper that was run (cold "
        "start or warm-up, Adam's eps, network). A reading in which both methods lose every seed is no test. If there "
        "is no other, the claim is not reproduced. Else every other reading is a test of BELAY's test loss against "
        "EMA's; cold starts are also tested against the matched EMA (short runs) and in FID (long runs). BELAY passes "
        "a test if it is shown to be better, and fails if it is shown to be worse or equal. Equality comes first: what "
        "is shown equal within its margin fails, even if a smaller advantage is shown too. Holds if all tests are "
        "passed, in part if at least half are.",
        ("mnist",),
        judge_mnist,
        "mnist-effects",
    ),
    Claim(
        "C10",
        "On CIFAR-10 BELAY and EMA are about equal (FID 1.99 against 1.98).",
        "Three tests, at each one's best rate: BELAY's test loss against EMA's and against the matched EMA's, and its "
        "FID against EMA's. A test is passed if the two are shown to be equal, and failed if BELAY is shown to be "
        "better or worse. Equality comes first: what is shown equal within its margin passes, even if a smaller "
        "difference is shown too. Holds if all three are passed, in part if at least half are.",
        ("cifar10",),
        judge_cifar10,
        "cifar10-effects",
    ),
)
