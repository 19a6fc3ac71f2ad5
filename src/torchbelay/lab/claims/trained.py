"""The claim that matters most to those who train, C11: is BELAY more robust to the learning rate?

How wide the range of rates that work is does not depend on whether they are nominal or effective: it is a ratio.
So it is the width that is compared, on the plane and on the ring, with EMA and with the matched EMA. Whatever BELAY's
feedback itself contributes must show against the latter.
"""

import math
from collections.abc import Sequence
from itertools import groupby

from torchbelay.lab.measures import MARGIN, working_range
from torchbelay.lab.measures import WORKS as BAR
from torchbelay.lab.part import Record

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


def on_the_ring(records: Records, rival: str, *, shared: bool) -> tuple[int, int, int]:
    """For how many seeds BELAY's range is wider, and narrower, of how many; each arm at its first setting.

    A rate works if the loss is within a factor of the method's own best, or of the best that either of the two reaches:
    by the former a curve may be flat because it is nowhere good, by the latter narrow although it is flat.
    """
    mine, other = (_by_seed(records, arm) for arm in ("BELAY", rival))
    wider = narrower = 0
    for seed, losses in mine.items():
        pair = (losses, other[seed])
        bests = [min((x for x in curve.values() if x is not None), default=math.inf) for curve in pair]
        bars = [min(bests)] * 2 if shared else bests
        one, two = (_width(curve, BAR * best) for curve, best in zip(pair, bars, strict=True))
        wider += one > MARGIN * two
        narrower += two > MARGIN * one
    return wider, narrower, len(mine)


def _width(curve: dict[float, float | None], limit: float) -> float:
    """Of the range in which the losses stay within a limit; 0 if they nowhere do."""
    found = working_range(list(curve), list(curve.values()), limit) if math.isfinite(limit) else None
    return 0.0 if found is None else found.width


def _by_seed(records: Records, arm: str) -> dict[int, dict[float, float | None]]:
    """The test loss at each learning rate, for each seed."""
    runs = [r for r in records["ring"] if r["kind"] == "run" and r["arm"] == arm]
    found: dict[int, dict[float, float | None]] = {}
    for r in sorted(runs, key=lambda r: float(r["lr"])):
        if r["setting"] == runs[0]["setting"]:
            found.setdefault(r["seed"], {})[r["lr"]] = r["test"]
    return found


def more_robust(records: Records) -> Finding:
    """C11."""
    kept, numbers, said = [], [], []
    for rival in RIVALS:
        wider, narrower, tried, widths = on_the_plane(records, rival)
        kept.append(wider > narrower)
        numbers += [(f"plane: wider than {rival}, narrower, of", f"{wider}, {narrower}, {tried}"), *widths]
        counts = []
        for bar, shared in (("the better best loss of the two", True), ("each one's own best", False)):
            above, below, seeds = on_the_ring(records, rival, shared=shared)
            kept.append(above >= SURE * seeds)
            counts.append(above)
            about = f"ring, by {bar}: seeds with a wider range than {rival}, narrower, of"
            numbers.append((about, f"{above}, {below}, {seeds}"))
        said.append(
            f"against {rival} wider in {wider} of {tried} cases on the plane and narrower in {narrower}, and on the "
            f"ring wider for {counts[0]} of {seeds} seeds ({counts[1]}, if each is measured by its own best loss)"
        )
    summary = f"The range of learning rates that work is {'; '.join(said)}."
    return Finding(of_parts(kept), summary, tuple(numbers))


CLAIMS = (
    Claim(
        "C11",
        "BELAY makes training more robust to the learning rate.",
        "The range of rates that work is wider with BELAY than with EMA, and than with the matched EMA: on the "
        f"plane in more cases (functions × SGD and Adam, by at least {NOTABLE} steps of the grid; a rate works if "
        f"{WORKS:.0%} of the starts converge) than it is narrower; on the ring by more than {MARGIN - 1:.0%} for at "
        f"least {SURE:.0%} of the seeds, where a rate works within {BAR:g} times the best loss of the two, and, "
        "judged again, of its own. In part if some of these six are so.",
        ("robustness", "ring"),
        more_robust,
        "robustness-adam-nominal",
    ),
)
