"""The claims about two dimensions: C1 to C4, C12 and C13, from the records of Figures 2 and 3 and of robustness."""

import math
from collections.abc import Sequence

from torchbelay.lab.part import Record
from torchbelay.lab.plane.fig3 import PAPER

from .verdict import Answer, Claim, Finding, Records, of_parts

WORKS = 0.9  # a method works at a rate if this share of the starts converges
BOX = 0.5  # half-width of the starts on Rosenbrock that the claims are judged by
SAVES = 0.1  # of the starts: fewer diverge by at least so much
AT_ITS_LIMIT = 3.0  # half an order of magnitude: a rate is the highest that a method can bear if so many times it fails
SIX = ("BELAY+Adam", "BELAY+SGD", "EMA+Adam", "EMA+SGD", "Adam", "SGD")


def ships(arm: str) -> str:
    """What a method is judged by: its average, if it has one."""
    return "w2" if "+" in arm else "w1"


def percent(share: float) -> str:
    """A share as people read it."""
    return f"{share:.0%}"


def listed(names: Sequence[str]) -> str:
    """Names as a sentence has them."""
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names) or "none"


# C1 and C2: Figure 2 -----------------------------------------------------------------------------------------------


def shares(records: Records, lr: float, judged: str | None = None) -> dict[str, Record]:
    """What became of the many starts on Rosenbrock at a learning rate, by arm; judged by what it ships, or as said."""
    return {
        r["arm"]: r
        for r in records["fig2"]
        if r["kind"] == "share"
        and r["lr"] == lr
        and r["half_width"] == BOX
        and r["judged"] == (judged or ships(r["arm"]))
    }


def high_rate(records: Records) -> Finding:
    """C1."""
    at = shares(records, 0.15)
    works = [arm for arm in SIX if at[arm]["converged"] >= WORKS]
    claimed = [arm for arm in works if arm in ("BELAY+Adam", "EMA+Adam")]
    control = at["Adam at BELAY's effective rate"]["converged"]
    only = len(works) == len(claimed) and control < WORKS
    answer = Answer.FAILS if len(claimed) < 2 else Answer.HOLDS if only else Answer.IN_PART
    weights = {arm: r["converged"] for arm, r in shares(records, 0.15, judged="w1").items()}
    summary = (
        f"At learning rate 0.15 {listed(works)} converge from at least {percent(WORKS)} of the starts (Adam itself "
        f"from {percent(at['Adam']['converged'])}, and from {percent(control)} at BELAY's effective rate). It is the "
        f"average that is steady: BELAY's own weights w1 converge from {percent(weights['BELAY+Adam'])}."
    )
    numbers = [(f"{arm}, judged by {r['judged']}", percent(r["converged"])) for arm, r in at.items()]
    numbers += [(f"{arm}, judged by w1", percent(weights[arm])) for arm in ("BELAY+Adam", "EMA+Adam")]
    return Finding(answer, summary, tuple(numbers))


def medium_rate(records: Records) -> Finding:
    """C2."""
    at = shares(records, 0.01)
    fewer = {arm: at["SGD"]["diverged"] - at[f"{arm}+SGD"]["diverged"] for arm in ("EMA", "BELAY")}
    saved = [round(share, 6) >= SAVES for share in fewer.values()]  # 0.5 − 0.4 is a hair less than 0.1
    control = at["SGD at BELAY's effective rate"]["diverged"]
    summary = (
        f"At learning rate 0.01 SGD diverges from {percent(at['SGD']['diverged'])} of the starts, with EMA from "
        f"{percent(at['EMA+SGD']['diverged'])}, with BELAY from {percent(at['BELAY+SGD']['diverged'])}; plain SGD at "
        f"BELAY's effective rate from {percent(control)}."
    )
    numbers = tuple(
        (f"{arm}: diverged", percent(r["diverged"])) for arm, r in at.items() if arm.endswith(("SGD", "rate"))
    )
    return Finding(of_parts(saved), summary, numbers)


# C3 and C4: Figure 3 -----------------------------------------------------------------------------------------------


def arrival(record: Record, field: str = "median_arrival") -> float:
    """The median step of arrival, of all starts or of those that arrive; never is later than any."""
    return math.inf if record[field] is None else float(record[field])


def said(steps: float) -> str:
    """A number of steps as people read it."""
    return f"{steps:g}" if math.isfinite(steps) else "never"


def among_the_fastest(records: Records) -> Finding:
    """C3."""
    kept, beaten, numbers = [], [], []
    functions = list(dict.fromkeys(r["function"] for r in records["fig3"] if r["kind"] == "arrival"))
    for function in functions:
        at = {r["arm"]: arrival(r) for r in records["fig3"] if r["kind"] == "arrival" and r["function"] == function}
        best = min(at["BELAY+Adam"], at["BELAY+SGD"])
        rank = 1 + sum(at[arm] < best for arm in SIX)
        kept.append(rank <= 2 and math.isfinite(best))
        if min(value for arm, value in at.items() if arm.endswith("effective rate")) < best:
            beaten.append(function)
        numbers.append((f"{function}: rank of the faster BELAY of the six, its median steps", f"{rank}, {said(best)}"))
        numbers += [(f"{function}: {arm}", said(value)) for arm, value in at.items()]
    summary = (
        f"BELAY is among the two fastest of the six on {sum(kept)} of {len(kept)} functions at the paper's rates; "
        f"SGD or Adam alone, at BELAY's effective rate, is faster than it on {len(beaten)} of {len(kept)}."
    )
    answer = of_parts(kept)
    return Finding(Answer.IN_PART if answer is Answer.HOLDS and beaten else answer, summary, tuple(numbers))


def saddle(records: Records) -> Finding:
    """C4."""
    found = {r["arm"]: r for r in records["fig3"] if r["kind"] == "saddle"}
    at = {arm: arrival(r, "median_of_arrived") for arm, r in found.items()}
    struggles = at["momentum"] > at["SGD"] or at["Adam"] > at["Adam without momentum"]
    cures = {
        f"{average} with {inner}": at[f"{average}+{inner}"] < at[inner]
        for inner in ("momentum", "Adam")
        for average in ("EMA", "BELAY")
    }
    helps = [name for name, helped in cures.items() if helped]
    took = {arm: f"{said(value)} ({percent(found[arm]['converged'])} converge)" for arm, value in at.items()}
    summary = (
        f"From the saddle, the median steps of those that arrive: momentum {took['momentum']}, SGD {took['SGD']}; Adam "
        f"{took['Adam']}, without its momentum {took['Adam without momentum']}. An average makes it shorter in "
        f"{len(helps)} of {len(cures)} cases: BELAY with momentum {took['BELAY+momentum']}, with Adam "
        f"{took['BELAY+Adam']}."
    )
    numbers = tuple((f"{arm}: median steps of those that arrive", took[arm]) for arm in at)
    return Finding(of_parts([struggles, bool(helps)]), summary, numbers)


# C12 and C13: robustness -------------------------------------------------------------------------------------------


def curve(records: Records, function: str, arm: str) -> list[Record]:
    """An arm's records on a function, by learning rate."""
    judged = ships(arm)
    found = [
        r
        for r in records["robustness"]
        if r["kind"] == "rate" and (r["function"], r["arm"], r["judged"]) == (function, arm, judged)
    ]
    return sorted(found, key=lambda r: r["lr"])


def functions(records: Records) -> list[str]:
    """The functions that were tried."""
    return list(dict.fromkeys(r["function"] for r in records["robustness"] if r["kind"] == "rate"))


def highest(chosen: Sequence[Record], field: str = "lr") -> float | None:
    """The highest rate at which the method works."""
    return max((r[field] for r in chosen if r["converged"] >= WORKS), default=None)


def times(factor: float) -> str:
    """A factor as people read it, with two digits."""
    return f"{float(f'{factor:.2g}'):g} times"


PAPER_RATES = {arm.name: lr for arm, lr in PAPER.items()}


def at_the_highest_rate(records: Records) -> Finding:
    """C12."""
    kept, numbers, room = [], [], {}
    for arm, paper in PAPER_RATES.items():
        found = [h for f in functions(records) if (h := highest(curve(records, f, arm))) is not None]
        if found:
            room[arm] = min(found) / paper
        kept.append(bool(found) and round(room[arm], 6) < AT_ITS_LIMIT)
        worst = f"{min(found):.3g}, {times(room[arm])} it" if found else "none"
        numbers.append(
            (f"{arm}: paper's rate; the highest that works on every function where any does", f"{paper:g}; {worst}")
        )
    at_limit = [arm for arm, yes in zip(PAPER_RATES, kept, strict=True) if yes]
    others = [f"{arm} {times(room[arm])}" for arm in PAPER_RATES if arm not in at_limit and arm in room]
    others += [f"{arm} works at no rate" for arm in PAPER_RATES if arm not in room]
    summary = (
        f"Of the six, {listed(at_limit)} ran within a factor of {AT_ITS_LIMIT:g} of the highest rate that works; "
        f"what the others could have borne of theirs: {', '.join(others) or 'no more'}."
    )
    answer = Answer.HOLDS if all(kept) else Answer.IN_PART if 2 * sum(kept) >= len(kept) else Answer.FAILS
    return Finding(answer, summary, tuple(numbers))


def against_momentum(records: Records) -> Finding:
    """C13."""
    kept: dict[str, bool] = {}
    numbers = []
    for field, kind in (("lr", "nominal"), ("effective_lr", "effective")):
        for arm in ("EMA+SGD", "BELAY+SGD"):
            wins, tried = 0, 0
            for f in functions(records):
                mine, momentum = highest(curve(records, f, arm), field), highest(curve(records, f, "momentum"), field)
                if mine is None and momentum is None:
                    continue
                tried += 1
                wins += (mine or 0) > (momentum or 0)
                shown = [f"{x:.3g}" if x is not None else "none" for x in (mine, momentum)]
                numbers.append((f"{f}, {kind}: highest rate of {arm} and of momentum", ", ".join(shown)))
            kept[f"{arm}, {kind}"] = 2 * wins > tried
            numbers.append((f"{kind}: functions on which {arm} bears more", f"{wins} of {tried}"))
    better = [name for name, yes in kept.items() if yes]
    summary = (
        f"In the highest rate that works, averaging beats momentum 0.9 on most functions for {listed(better)}"
        f" (of {len(kept)} comparisons: EMA and BELAY, nominal and effective rate)."
    )
    return Finding(of_parts(list(kept.values())), summary, tuple(numbers))


CLAIMS = (
    Claim(
        "C1",
        "At a high learning rate only BELAY and EMA on Adam converge without serious instability.",
        f"Rosenbrock, learning rate 0.15, starts within ±{BOX}: BELAY+Adam and EMA+Adam converge (and stay) from at "
        f"least {WORKS:.0%} of the starts, and neither the other four nor Adam at BELAY's effective rate does; in "
        "part if only the first is so.",
        ("fig2",),
        high_rate,
        "fig2",
    ),
    Claim(
        "C2",
        "At a medium learning rate averaging keeps SGD from diverging.",
        f"Rosenbrock, learning rate 0.01, starts within ±{BOX}: with EMA, and with BELAY, at least {SAVES:.0%} of the "
        "starts fewer diverge than with SGD alone; in part if for one of the two.",
        ("fig2",),
        medium_rate,
        "fig2-starts",
    ),
    Claim(
        "C3",
        "BELAY, with Adam or SGD, is always among the fastest.",
        "At the paper's rates, from many starts: on each function the faster of the two BELAYs is among the two "
        "fastest of the six by median steps, and the inner optimizer alone at BELAY's effective rate is not faster; "
        "in part if the first is so on some functions.",
        ("fig3",),
        among_the_fastest,
        "fig3-times",
    ),
    Claim(
        "C4",
        "On Beale's function momentum struggles near a saddle, and averaging cures it.",
        "Starts around the saddle, everything at one rate, median steps of those that arrive: momentum needs more than "
        "the same without it (SGD or Adam), and some average around it needs fewer; in part if one of the two.",
        ("fig3",),
        saddle,
        "fig3-saddle",
    ),
    Claim(
        "C12",
        "Each method was run at the highest learning rate that it can handle.",
        f"A method is at its highest rate if {AT_ITS_LIMIT:g} times it exceeds what works (converges from at least "
        f"{WORKS:.0%} of the starts) on some function; in part if for at least half of the six.",
        ("robustness",),
        at_the_highest_rate,
        "robustness-sgd-nominal",
    ),
    Claim(
        "C13",
        "Averaging stabilises better than momentum does.",
        "The highest rate that works is higher than that of momentum 0.9 on most functions: for EMA and for BELAY, "
        "in the nominal and in the effective rate; in part if for some of the four.",
        ("robustness",),
        against_momentum,
        "robustness-sgd-effective",
    ),
)
