"""C11, the claim that matters most in training: is BELAY more robust to the learning rate?

The width of the range of working rates is a ratio, so it is the same for nominal and for effective rates. C11 compares
this width on the plane, on the ring and on MNIST, with EMA and with the matched EMA. The comparison with the matched
EMA shows what BELAY's feedback itself contributes. The other sign of the spring is reported in the numbers and does
not change the verdict.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from torchbelay.lab.arms import in_words
from torchbelay.lab.score.analysis import StudyResults, compare_fids
from torchbelay.lab.score.comparison import Comparison
from torchbelay.lab.score.effects import FID, LOSS
from torchbelay.lab.score.sign import lost_by_theta, ratios_to_zero, theta_text
from torchbelay.lab.statistics import MARGIN, working_range
from torchbelay.lab.statistics import WORKS as BAR

from .ranges import NOTABLE, count_working, decades
from .rates import curve, functions
from .verdict import Claim, Finding, Outcome, Records, combine, describe_answer, find, more

FAMILIES = ("SGD", "Adam")
RIVALS = {"EMA": "EMA's", "matched EMA": "the matched EMA's"}  # each with its possessive
NEGATIVE = "θ < 0 (Generalized Primal Averaging, schedule-free its case c = 1/t)"
SURE = 0.9  # share of the seeds; by chance, 9 of 10 agree once in ninety times


class Tally(NamedTuple):
    """The number of cases, and in how many of them BELAY's range is wider or narrower than the rival's."""

    wider: int
    narrower: int
    cases: int


def compare_on_plane(records: Records, rival: str) -> tuple[Tally, list[tuple[str, str]]]:
    """Compare BELAY's range with a rival's on every function, with SGD and with Adam; also return the widths."""
    wider = narrower = cases = 0
    numbers = []
    for family in FAMILIES:
        for function in functions(records):
            own, other = (curve(records, function, f"{arm}+{family}") for arm in ("BELAY", rival))
            difference = count_working(own) - count_working(other)
            wider += difference >= NOTABLE
            narrower += difference <= -NOTABLE
            cases += 1
            widths = [f"{count_working(chosen) * decades(chosen):.2g}" for chosen in (own, other)]
            numbers.append((f"{function}, {family}: decades that work, BELAY and {rival}", ", ".join(widths)))
    return Tally(wider, narrower, cases), numbers


Curves = dict[int, dict[float, float | None]]  # for each seed, the test loss at each learning rate


def compare_on_ring(records: Records, rival: str, *, shared: bool) -> Tally:
    """Compare the ranges seed by seed on the ring; each arm at its first setting."""
    return _compare(_curves(records, "BELAY"), _curves(records, rival), shared=shared)


def compare_on_mnist(records: Records, rival: str, *, shared: bool) -> Tally:
    """Compare the ranges seed by seed for the score models of MNIST; no case if they were not run."""
    study = StudyResults(records.get("mnist", ()), "rates")
    return _compare(study.by_seed("BELAY"), study.by_seed(study.ema if rival == "EMA" else rival), shared=shared)


def _compare(own: Curves, other: Curves, *, shared: bool) -> Tally:
    """Count the seeds for which the one range is wider, and narrower, than the other.

    A rate works if its loss is within a factor of a best loss. With `shared` that is the better best loss of the two
    methods, else each method's own. Neither is enough alone: by its own best loss, a curve may be flat because it is
    bad everywhere; by the shared one, a flat curve may be narrow.
    """
    wider = narrower = 0
    seeds = [seed for seed in own if seed in other]
    for seed in seeds:
        pair = (own[seed], other[seed])
        bests = [min((x for x in curve.values() if x is not None), default=math.inf) for curve in pair]
        bars = [min(bests)] * 2 if shared else bests
        one, two = (_width(curve, BAR * best) for curve, best in zip(pair, bars, strict=True))
        wider += one > MARGIN * two
        narrower += two > MARGIN * one
    return Tally(wider, narrower, len(seeds))


def _width(curve: dict[float, float | None], limit: float) -> float:
    """Return the width of the range in which the losses stay within a limit; 0 if there is none."""
    found = working_range(list(curve), list(curve.values()), limit) if math.isfinite(limit) else None
    return 0.0 if found is None else found.width


def _curves(records: Records, arm: str) -> Curves:
    """Return an arm's test loss on the ring at each learning rate, for each seed."""
    runs = [r for r in records["ring"] if r["kind"] == "run" and r["arm"] == arm]
    found: Curves = {}
    for r in sorted(runs, key=lambda r: float(r["lr"])):
        if r["setting"] == runs[0]["setting"]:
            found.setdefault(r["seed"], {})[r["lr"]] = r["test"]
    return found


BARS = {"the better best loss of the two": True, "each method's own best loss": False}  # whether the two share it
TRAINED = {"the ring": compare_on_ring, "score models of MNIST": compare_on_mnist}


def judge_robustness(records: Records) -> Finding:
    """Judge C11."""
    tests: dict[str, Outcome] = {}
    numbers: list[tuple[str, str]] = []
    totals: dict[str, dict[str, Tally]] = {bar: {} for bar in BARS}  # against each rival
    ties_open: list[Outcome] = []  # the tests by a rule in which equal ranges do not count against BELAY
    for rival, possessive in RIVALS.items():
        plane, widths = compare_on_plane(records, rival)
        tests[f"wider than {possessive} on the plane"] = more(plane.wider, plane.narrower)
        ties_open.append(more(plane.wider, plane.narrower))
        numbers += [(f"plane: BELAY's range against {possessive}", _format_tally(plane, "cases")), *widths]
        tallies = {bar: [plane] for bar in BARS}
        for place, compare in TRAINED.items():
            for bar, shared in BARS.items():
                tally = compare(records, rival, shared=shared)
                if not tally.cases:
                    continue
                tests[f"wider than {possessive} on {place}, by {bar}"] = _nearly_all(tally)
                ties_open.append(_nearly_all_differ(tally))
                label = f"{place.removeprefix('the ')}, by {bar}: BELAY's range against {possessive}"
                numbers.append((label, _format_tally(tally, "seeds")))
                tallies[bar].append(tally)
        for bar, some in tallies.items():
            totals[bar][possessive] = Tally(*map(sum, zip(*some, strict=True)))
            label = f"all, by {bar}: BELAY's range against {possessive}"
            numbers.append((label, _format_tally(totals[bar][possessive], "cases")))
    numbers.append(("by a rule in which ties stay open", describe_answer(ties_open)))
    by_shared, by_own = totals.values()
    counts = [f"{each.wider} and {each.narrower}" for each in by_own.values()]
    own = f" (own bests: {'; '.join(counts)})" if by_own != by_shared else ""
    summary = f"BELAY's range is wider than {_count_both(by_shared)}{own}."
    if (answer := combine(ties_open)) is not combine([*tests.values()]):
        summary += f" With ties open: {answer}."
    return find(tests, summary, (*numbers, *count_lost_by_sign(records), *compare_signs(records)))


def _count_both(totals: Mapping[str, Tally]) -> str:
    """Return in how many cases BELAY's range is wider than each rival's, and narrower.

    >>> _count_both({"EMA's": Tally(3, 1, 8), "the matched EMA's": Tally(0, 5, 8)})
    "EMA's in 3 of 8 cases and narrower in 1; matched EMA's: 0 and 5"
    """
    (first, total), *others = totals.items()
    clauses = [f"{first} in {total.wider} of {total.cases} cases and narrower in {total.narrower}"]
    for possessive, each in others:
        cases = "" if each.cases == total.cases else f" of {each.cases}"
        clauses.append(f"{possessive.removeprefix('the ')}: {each.wider} and {each.narrower}{cases}")
    return "; ".join(clauses)


def _nearly_all(tally: Tally) -> Outcome:
    """Whether BELAY's range is wider for nearly all seeds (True) or for nearly none (False); None in between."""
    if tally.wider >= SURE * tally.cases:
        return True
    return False if tally.cases - tally.wider >= SURE * tally.cases else None


def _nearly_all_differ(tally: Tally) -> Outcome:
    """Whether BELAY's range is wider for nearly all seeds (True) or narrower for nearly all (False); else None."""
    if tally.wider >= SURE * tally.cases:
        return True
    return False if tally.narrower >= SURE * tally.cases else None


def _format_tally(tally: Tally, noun: str) -> str:
    """Return a tally in words.

    >>> _format_tally(Tally(0, 5, 8), "cases")
    'wider in 0 and narrower in 5 of 8 cases'
    """
    return f"wider in {tally.wider} and narrower in {tally.narrower} of {tally.cases} {noun}"


# The other sign -------------------------------------------------------------------------------------------------------


def count_lost_by_sign(records: Records) -> list[tuple[str, str]]:
    """Return how many runs on MNIST each sign of the spring loses, at the rate at which the most runs are lost.

    θ < 0 is Generalized Primal Averaging. If no run is lost, return in how many cases it has a lower loss than θ = 0,
    and a higher one.
    """
    study = StudyResults(records.get("sign", ()), "sign")
    signs: dict[float, list[tuple[int, int]]] = {
        lr: [_sum_by_sign(lost_by_theta(study, lr), sign) for sign in (-1, 0, 1)] for lr in study.lrs
    }
    lr = max(signs, key=lambda lr: sum(count for count, _ in signs[lr]), default=None)
    if lr is None or not signs[lr][0][1]:
        return []
    if any(count for count, _ in signs[lr]):
        lost = ", ".join(f"{count} of {runs}" for count, runs in signs[lr])
        return [(f"MNIST at {lr:g}: runs lost with {NEGATIVE}, θ = 0 (EMA), θ > 0", lost)]
    pairs = [each for lr in study.lrs for theta, each in ratios_to_zero(study, lr).items() if theta < 0]
    lower, higher = sum(each.below for each in pairs), sum(each.above for each in pairs)
    return [
        (f"MNIST: loss with {NEGATIVE} against θ = 0", f"lower in {lower} and higher in {higher} of {len(pairs)} cases")
    ]


def _sum_by_sign(counts: Mapping[float, tuple[int, int]], sign: int) -> tuple[int, int]:
    """Return the lost runs, and all runs, of every θ of one sign together."""
    chosen = [found for theta, found in counts.items() if (theta > 0) - (theta < 0) == sign]
    return sum(count for count, _ in chosen), sum(seeds for _, seeds in chosen)


def compare_signs(records: Records) -> list[tuple[str, str]]:
    """Return the loss of every θ over that of θ = 0, for score models of MNIST and of CIFAR-10."""
    study = StudyResults(records.get("sign", ()), "sign")
    lines = []
    for lr in study.lrs:
        for theta, each in ratios_to_zero(study, lr).items():
            arm = f"θ = {theta_text(theta)}"
            lines.append((f"MNIST at {lr:g}: test loss with {arm} ÷ that with θ = 0", each.describe(arm, "θ = 0")))
    for quantity, (arm, rival), lr, each in _negative_on_cifar10(records):
        arm = arm.replace("θ ", "θ = ")
        lines.append((f"CIFAR-10 at {lr:g}: {quantity} with {arm} ÷ {in_words(rival)}'s", each.describe(arm, rival)))
    return lines


def _negative_on_cifar10(records: Records) -> list[tuple[str, tuple[str, str], float, Comparison]]:
    """Return every θ < 0 that was tried on CIFAR-10 against the EMA there, at each learning rate: test loss and FID."""
    lines = records.get("cifar10", ())
    study = StudyResults(lines, "cifar10")
    arms = {str(run["arm"]): float(run["theta"]) for run in study.runs}
    found = []
    for arm in (arm for arm, theta in arms.items() if theta < 0):
        for lr in study.rates(arm):
            found.append((LOSS, (arm, study.ema), lr, study.compare(arm, study.ema, lr)))
            found.append((FID, (arm, study.ema), lr, compare_fids(lines, study, arm, study.ema, lr)))
    return [each for each in found if each[-1].seeds]


CLAIMS = (
    Claim(
        "C11",
        "BELAY makes training more robust to the learning rate.",
        "Ten comparisons of the range of learning rates that work: five with EMA, and the same five with the matched "
        f"EMA. On the plane, BELAY wins if, over all functions with SGD and with Adam, its range is wider by at least "
        f"{NOTABLE} steps of the grid more often than it is narrower, and loses in the opposite case. On the ring, "
        "where each arm has its first setting, and on MNIST, a rate works by the better best loss of the two methods, "
        "and once more by each method's own. BELAY "
        f"wins if its range is more than {MARGIN - 1:.0%} wider for at least {SURE:.0%} of the seeds, and loses if it "
        f"is for at most {1 - SURE:.0%}, so that ties count against it. Holds if BELAY wins all ten, in part if it "
        "wins at least half. The other sign of the spring is among the numbers and does not count.",
        ("robustness", "ring", "mnist"),
        judge_robustness,
        "robustness-adam-nominal",
    ),
)
