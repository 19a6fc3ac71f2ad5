"""The claim that matters most to those who train, C11: is BELAY more robust to the learning rate?

How wide the range of rates that work is does not depend on whether they are nominal or effective: it is a ratio.
So it is the width that is compared, on the plane and on the ring, with EMA and with the matched EMA. Whatever BELAY's
feedback itself contributes must show against the latter.
"""

import math
from collections.abc import Sequence

from torchbelay.lab.measures import working_range
from torchbelay.lab.part import Record

from .planar import WORKS, curve, functions
from .verdict import Claim, Finding, Records, of_parts

FAMILIES = ("SGD", "Adam")
NOTABLE = 2  # steps of the grid of learning rates: narrower differences count as none
RIVALS = ("EMA", "matched EMA")
BAR = 1.5  # times the best loss: up to there a learning rate works on the ring
SURE = 0.9  # of the seeds; by chance 9 of 10 would agree once in ninety times


def working(chosen: Sequence[Record]) -> int:
    """At how many rates of the grid a method works."""
    return sum(r["converged"] >= WORKS for r in chosen)


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


def on_the_ring(records: Records, rival: str) -> tuple[int, int, int]:
    """For how many seeds BELAY's range is wider, and narrower, of how many; each arm at its first setting.

    A rate works if the loss is within a factor of the best that either of the two reaches: a curve that is flat because
    it is nowhere good is not robust.
    """
    mine, other = (_by_seed(records, arm) for arm in ("BELAY", rival))
    wider = narrower = 0
    for seed, losses in mine.items():
        pair = (losses, other[seed])
        best = min((x for curve in pair for x in curve.values() if x is not None), default=math.inf)
        ranges = [working_range(list(curve), list(curve.values()), BAR * best) for curve in pair]
        one, two = (0.0 if found is None else found.width for found in ranges)
        wider += one > two
        narrower += one < two
    return wider, narrower, len(mine)


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
        above, below, seeds = on_the_ring(records, rival)
        kept.append(above >= SURE * seeds)
        numbers.append((f"ring: seeds with a wider range than {rival}, narrower, of", f"{above}, {below}, {seeds}"))
        said.append(
            f"than with {rival} in {wider} of {tried} cases on the plane (narrower in {narrower}) and for {above} of "
            f"{seeds} seeds on the ring (narrower for {below})"
        )
    summary = f"The range of learning rates that work is wider {'; '.join(said)}."
    return Finding(of_parts(kept), summary, tuple(numbers))


CLAIMS = (
    Claim(
        "C11",
        "BELAY makes training more robust to the learning rate.",
        "The range of rates that work is wider with BELAY than with EMA, and than with the matched EMA: on the plane "
        f"in more cases (functions × SGD and Adam, by at least {NOTABLE} steps of the grid; a rate works if "
        f"{WORKS:.0%} "
        f"of the starts converge) than it is narrower, and on the ring for at least {SURE:.0%} of the seeds (a rate "
        f"works within {BAR:g} times the best loss of the two). In part if some of these four are so.",
        ("robustness", "ring"),
        more_robust,
        "robustness-adam-nominal",
    ),
)
