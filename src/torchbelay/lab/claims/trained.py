"""The claim that matters most to those who train, C11: is BELAY more robust to the learning rate?

How wide the range of rates that work is does not depend on whether they are nominal or effective: it is a ratio.
So it is the width that is compared, on the plane, on the ring and on MNIST, with EMA and with the matched EMA. Whatever
BELAY's feedback itself contributes must show against the latter. What the other sign of the spring does is told, too,
and decides nothing.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from torchbelay.lab.part import Record
from torchbelay.lab.report.words import listed
from torchbelay.lab.score.analysis import StudyResults
from torchbelay.lab.score.comparison import Comparison
from torchbelay.lab.score.sign import lost_by_theta, ratios_to_zero, theta_text
from torchbelay.lab.statistics import MARGIN, working_range
from torchbelay.lab.statistics import WORKS as BAR

from .planar import WORKS, curve, functions
from .verdict import Claim, Finding, Records, of_parts

FAMILIES = ("SGD", "Adam")
NOTABLE = 2  # steps of the grid of learning rates: narrower differences count as none
RIVALS = ("EMA", "matched EMA")
SURE = 0.9  # of the seeds; by chance 9 of 10 would agree once in ninety times


def working(chosen: Sequence[Record]) -> int:
    """The length of the longest run of rates on the grid at which a method works."""
    runs = [sum(1 for _ in some) for works, some in groupby(chosen, lambda r: bool(r["converged"] >= WORKS)) if works]
    return max(runs, default=0)


def decades(chosen: Sequence[Record]) -> float:
    """How many decades lie between two neighbours on the grid of learning rates."""
    return math.log10(chosen[-1]["lr"] / chosen[0]["lr"]) / (len(chosen) - 1)


def on_the_plane(records: Records, rival: str) -> tuple[int, int, int, list[tuple[str, str]]]:
    """On how many functions, with SGD and with Adam, BELAY's range is wider, narrower, or neither; and the widths."""
    wider = narrower = tried = 0
    numbers = []
    for family in FAMILIES:
        for function in functions(records):
            mine, other = (curve(records, function, f"{arm}+{family}") for arm in ("BELAY", rival))
            difference = working(mine) - working(other)
            wider += difference >= NOTABLE
            narrower += difference <= -NOTABLE
            tried += 1
            widths = [f"{working(chosen) * decades(chosen):.2g}" for chosen in (mine, other)]
            numbers.append((f"{function}, {family}: decades that work, BELAY and {rival}", ", ".join(widths)))
    return wider, narrower, tried, numbers


Curves = dict[int, dict[float, float | None]]  # of each seed, the test loss at each learning rate


def on_the_ring(records: Records, rival: str, *, shared: bool) -> tuple[int, int, int]:
    """For how many seeds BELAY's range is wider, and narrower, of how many; each arm at its first setting."""
    return _wider(_by_seed(records, "BELAY"), _by_seed(records, rival), shared=shared)


def on_mnist(records: Records, rival: str, *, shared: bool) -> tuple[int, int, int]:
    """The same for the score models of MNIST; of no seed, where they were not run."""
    study = StudyResults(records.get("mnist", ()), "rates")
    return _wider(study.by_seed("BELAY"), study.by_seed(rival), shared=shared)


def _wider(mine: Curves, other: Curves, *, shared: bool) -> tuple[int, int, int]:
    """For how many seeds the one range is wider, and narrower, than the other, of how many that both have.

    A rate works if the loss is within a factor of the method's own best, or of the best that either of the two reaches:
    by the former a curve may be flat because it is nowhere good, by the latter narrow although it is flat.
    """
    wider = narrower = 0
    seeds = [seed for seed in mine if seed in other]
    for seed in seeds:
        pair = (mine[seed], other[seed])
        bests = [min((x for x in curve.values() if x is not None), default=math.inf) for curve in pair]
        bars = [min(bests)] * 2 if shared else bests
        one, two = (_width(curve, BAR * best) for curve, best in zip(pair, bars, strict=True))
        wider += one > MARGIN * two
        narrower += two > MARGIN * one
    return wider, narrower, len(seeds)


def _width(curve: dict[float, float | None], limit: float) -> float:
    """Of the range in which the losses stay within a limit; 0 if they nowhere do."""
    found = working_range(list(curve), list(curve.values()), limit) if math.isfinite(limit) else None
    return 0.0 if found is None else found.width


def _by_seed(records: Records, arm: str) -> Curves:
    """The test loss at each learning rate, for each seed."""
    runs = [r for r in records["ring"] if r["kind"] == "run" and r["arm"] == arm]
    found: Curves = {}
    for r in sorted(runs, key=lambda r: float(r["lr"])):
        if r["setting"] == runs[0]["setting"]:
            found.setdefault(r["seed"], {})[r["lr"]] = r["test"]
    return found


BARS = {"the better best loss of the two": True, "each one's own best": False}  # whether both share it
TRAINED = {"the ring": on_the_ring, "score models of MNIST": on_mnist}


def more_robust(records: Records) -> Finding:
    """C11."""
    kept, numbers = [], []
    said, own = [], []  # of each rival; and where only each one's own best loss shows a wider range
    for rival in RIVALS:
        wider, narrower, tried, widths = on_the_plane(records, rival)
        kept.append(wider > narrower)
        numbers += [(f"plane: wider than {rival}, narrower, of", f"{wider}, {narrower}, {tried}"), *widths]
        counts = {"cases on the plane": (wider, narrower, tried)}
        for place, trained in TRAINED.items():
            for bar, shared in BARS.items():
                above, below, seeds = trained(records, rival, shared=shared)
                if not seeds:
                    continue
                kept.append(above >= SURE * seeds)
                about = f"{place.removeprefix('the ')}, by {bar}: seeds with a wider range than {rival}, narrower, of"
                numbers.append((about, f"{above}, {below}, {seeds}"))
                if shared:
                    counts[f"seeds on {place}"] = (above, below, seeds)
                elif kept[-1] and not kept[-2]:
                    own.append(f"{_whose(rival)} for {above} of {seeds} seeds on {place}")
        said.append(f"than {_whose(rival)} in {_counted(counts)}")
    more = f"; only by each one's own best loss is it wider than {listed(own)}" if own else ""
    summary = f"BELAY's range of learning rates that work is wider {', and '.join(said)}{more}{other_sign(records)}."
    return Finding(of_parts(kept), summary, (*numbers, *sign_of_the_spring(records)))


def _whose(rival: str) -> str:
    return f"{'' if rival == 'EMA' else 'the '}{rival}'s"


def _counted(counts: Mapping[str, tuple[int, int, int]]) -> str:
    """Of what there are how many wider, and narrower.

    >>> _counted({"cases on the plane": (1, 5, 8), "seeds on the ring": (0, 10, 10)})
    '1 of 8 cases on the plane and 0 of 10 seeds on the ring (narrower in 5 and 10)'
    """
    wider = listed([f"{above} of {tried} {what}" for what, (above, _, tried) in counts.items()])
    return f"{wider} (narrower in {listed([str(below) for _, below, _ in counts.values()])})"


# The other sign -------------------------------------------------------------------------------------------------------


def sign_of_the_spring(records: Records) -> list[tuple[str, str]]:
    """The loss of every θ over that of θ = 0, on score models of MNIST, at each learning rate, and of CIFAR-10."""
    study = StudyResults(records.get("sign", ()), "sign")
    found = [
        (
            f"MNIST at {lr:g}: test loss at θ = {theta_text(theta)} ÷ that at θ = 0",
            each.describe(f"θ = {theta_text(theta)}", "θ = 0"),
        )
        for lr in study.lrs
        for theta, each in ratios_to_zero(study, lr).items()
    ]
    return found + [
        (f"CIFAR-10 at {lr:g}: test loss at {arm} ÷ EMA's", each.describe(arm, "EMA"))
        for arm, lr, each in _on_cifar10(records)
    ]


def other_sign(records: Records) -> str:
    """What the other sign of the spring does, as clauses: on MNIST, where seeds are lost, and on CIFAR-10."""
    clauses = [*_on_mnist(records), *(_higher_or_lower(arm, each) for arm, _, each in _on_cifar10(records))]
    return f"; the other sign of the spring, θ < 0, {', but '.join(clauses)}" if clauses else ""


def _on_mnist(records: Records) -> list[str]:
    """At the rate at which the most runs are lost, how many of either sign; else, who is the lower one at how many."""
    study = StudyResults(records.get("sign", ()), "sign")
    signs: dict[float, list[tuple[int, int]]] = {
        lr: [_sum(lost_by_theta(study, lr), sign) for sign in (-1, 0, 1)] for lr in study.lrs
    }
    lr = max(signs, key=lambda lr: sum(count for count, _ in signs[lr]), default=None)
    if lr is None or not signs[lr][0][1]:
        return []
    if any(count for count, _ in signs[lr]):
        below, none, above = (f"{count or 'none'} of {runs}" for count, runs in signs[lr])
        return [f"loses {below} runs on MNIST at {lr:g}, where EMA (θ = 0) loses {none} and θ > 0 {above}"]
    pairs = [each for lr in study.lrs for theta, each in ratios_to_zero(study, lr).items() if theta < 0]
    better, worse = sum(each.below for each in pairs), sum(each.above for each in pairs)
    return [f"has a lower loss than θ = 0 in {better} of {len(pairs)} cases on MNIST and a higher one in {worse}"]


def _sum(counts: Mapping[float, tuple[int, int]], sign: int) -> tuple[int, int]:
    """Of all θ of a sign together."""
    chosen = [found for theta, found in counts.items() if (theta > 0) - (theta < 0) == sign]
    return sum(count for count, _ in chosen), sum(seeds for _, seeds in chosen)


def _on_cifar10(records: Records) -> list[tuple[str, float, Comparison]]:
    """Every θ < 0 that was tried there, against EMA, at each learning rate."""
    study = StudyResults(records.get("cifar10", ()), "cifar10")
    arms = {str(run["arm"]): float(run["theta"]) for run in study.runs}
    found = [
        (arm, lr, study.compare(arm, "EMA", lr)) for arm, theta in arms.items() if theta < 0 for lr in study.rates(arm)
    ]
    return [(arm, lr, each) for arm, lr, each in found if each.seeds]


def _higher_or_lower(arm: str, found: Comparison) -> str:
    if found.point is None:
        return f"on CIFAR-10 {arm} has no ratio to EMA ({found.describe(arm, 'EMA')})"
    number, interval = found.size.split(" ", 1)
    return f"on CIFAR-10 {arm.replace('θ ', 'θ = ')} has {number} times EMA's loss {interval}"


CLAIMS = (
    Claim(
        "C11",
        "BELAY makes training more robust to the learning rate.",
        "The range of rates that work is wider with BELAY than with EMA, and than with the matched EMA: on the "
        f"plane in more cases (functions × SGD and Adam, by at least {NOTABLE} steps of the grid; a rate works if "
        f"{WORKS:.0%} of the starts converge) than it is narrower; on the ring, and on MNIST, by more than "
        f"{MARGIN - 1:.0%} for at least {SURE:.0%} of the seeds, where a rate works within {BAR:g} times the best loss "
        "of the two, and, judged again, of its own. In part if some of these ten are so. What the other sign of the "
        "spring does is told beside it, and decides nothing.",
        ("robustness", "ring", "mnist"),
        more_robust,
        "robustness-adam-nominal",
    ),
)
