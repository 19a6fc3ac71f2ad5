"""The claims about two dimensions: C1 to C4, C12 and C13, from the records of Figures 2 and 3 and of robustness."""

import math
from collections.abc import Sequence
from dataclasses import replace

from torchbelay.lab.part import Record
from torchbelay.lab.plane.fig3 import PAPER
from torchbelay.lab.report.words import listed, sentence
from torchbelay.lab.statistics import CONFIDENCE, difference_interval, exceeds, share_interval

from .verdict import Answer, Claim, Finding, Records, Tests, find

WORKS = 0.9  # a method works at a rate if at least this share of the starts converges
BOX = 0.5  # half-width of the square of starts on Rosenbrock that the claims are judged by
SAVES = 0.1  # averaging saves SGD if the share of starts that diverge falls by at least this much
AT_ITS_LIMIT = 3.0  # half an order of magnitude: a rate is at its limit if 3 times that rate fails
SIX = ("BELAY+Adam", "BELAY+SGD", "EMA+Adam", "EMA+SGD", "Adam", "SGD")


def judged_weights(arm: str) -> str:
    """Return the weights that an arm is judged by: its average w2 if it has one, else w1.

    >>> judged_weights("EMA+SGD"), judged_weights("SGD")
    ('w2', 'w1')
    """
    return "w2" if "+" in arm else "w1"


def format_share(share: float) -> str:
    """Return a share as a percentage.

    >>> format_share(0.664), format_share(0.9033)
    ('66%', '90%')
    """
    return f"{share:.0%}"


def interval(record: Record, field: str = "converged") -> tuple[float, float]:
    """Return the interval of a share of the starts."""
    return share_interval(round(record[field] * record["starts"]), record["starts"])


def format_interval(record: Record, field: str = "converged") -> str:
    """Return a share of the starts with its interval.

    >>> format_interval({"converged": 0.903333, "starts": 300})
    '90.3% (86.5% to 93.2%)'
    """
    low, high = interval(record, field)
    return f"{record[field]:.1%} ({low:.1%} to {high:.1%})"


def format_steps(steps: float) -> str:
    """Return a number of steps; infinitely many are "never".

    >>> format_steps(163.0), format_steps(math.inf)
    ('163', 'never')
    """
    return f"{steps:g}" if math.isfinite(steps) else "never"


def two_digits(factor: float) -> str:
    """Return a factor with two digits.

    >>> two_digits(8.38), two_digits(104.0)
    ('8.4', '100')
    """
    return f"{float(f'{factor:.2g}'):g}"


# C1 and C2: Figure 2 -----------------------------------------------------------------------------------------------


def shares(records: Records, lr: float, judged: str | None = None) -> dict[str, Record]:
    """Return each arm's record of the many starts on Rosenbrock at a learning rate.

    `judged` chooses the weights to look at; by default they are those that the arm is judged by.
    """
    return {
        r["arm"]: r
        for r in records["fig2"]
        if r["kind"] == "share"
        and r["lr"] == lr
        and r["half_width"] == BOX
        and r["judged"] == (judged or judged_weights(r["arm"]))
    }


def judge_high_rate(records: Records) -> Finding:
    """Judge C1."""
    at = shares(records, 0.15)
    works = {arm: exceeds(interval(r), WORKS) for arm, r in at.items()}
    claimed, control = ("BELAY+Adam", "EMA+Adam"), "Adam at BELAY's effective rate"
    both = [works[arm] for arm in claimed]
    others = [_negated(works[arm]) for arm in SIX if arm not in claimed]
    tests = {
        **{f"{arm} converges": works[arm] for arm in claimed},
        "of the six methods only these two": _all([*both, *others]),
        "nor Adam alone at BELAY's effective rate": _all([*both, _negated(works[control])]),
    }
    weights = {arm: r["converged"] for arm, r in shares(records, 0.15, judged="w1").items()}
    summary = (
        f"At learning rate 0.15, {listed([arm for arm in SIX if works[arm]], none='no method')} converged from at "
        f"least {format_share(WORKS)} of the starts. Adam alone converged from "
        f"{format_share(at['Adam']['converged'])}, and from {format_interval(at[control])} at BELAY's effective rate."
    )
    numbers = [(f"{arm}, judged by {r['judged']}", format_interval(r)) for arm, r in at.items()]
    numbers += [(f"{arm}, judged by w1", format_share(weights[arm])) for arm in claimed]
    return find(tests, summary, tuple(numbers))


def _all(outcomes: Sequence[bool | None]) -> bool | None:
    """Return whether all are true; None if none is false and some are open."""
    return False if False in outcomes else None if None in outcomes else True


def _negated(outcome: bool | None) -> bool | None:
    """Return the opposite of an outcome; an open one stays open."""
    return None if outcome is None else not outcome


def judge_medium_rate(records: Records) -> Finding:
    """Judge C2."""
    at = shares(records, 0.01)
    tests: Tests = {
        f"{arm} saves SGD": exceeds(
            difference_interval(*(_diverged(at[name]) for name in ("SGD", f"{arm}+SGD"))), SAVES
        )
        for arm in ("EMA", "BELAY")
    }
    control = at["SGD at BELAY's effective rate"]["diverged"]
    summary = (
        f"At learning rate 0.01, SGD diverged from {format_share(at['SGD']['diverged'])} of the starts, with EMA from "
        f"{format_share(at['EMA+SGD']['diverged'])} and with BELAY from {format_share(at['BELAY+SGD']['diverged'])}. "
        f"Plain SGD at BELAY's effective rate diverged from {format_share(control)}."
    )
    numbers = tuple(
        (f"{arm}: diverged", format_interval(r, "diverged")) for arm, r in at.items() if arm.endswith(("SGD", "rate"))
    )
    return find(tests, summary, numbers)


def _diverged(record: Record) -> tuple[int, int]:
    """Return how many of the starts diverged, and of how many."""
    return round(record["diverged"] * record["starts"]), int(record["starts"])


# C3 and C4: Figure 3 -----------------------------------------------------------------------------------------------


def arrival(record: Record, field: str = "median_arrival") -> float:
    """Return the median step of arrival, of all starts or of those that arrive; infinity means never."""
    return math.inf if record[field] is None else float(record[field])


def judge_speed(records: Records) -> Finding:
    """Judge C3."""
    beaten, numbers = [], []
    fast: dict[str, bool | None] = {}
    names = list(dict.fromkeys(r["function"] for r in records["fig3"] if r["kind"] == "arrival"))
    for function in names:
        at = {r["arm"]: arrival(r) for r in records["fig3"] if r["kind"] == "arrival" and r["function"] == function}
        best = min(at["BELAY+Adam"], at["BELAY+SGD"])
        rank = 1 + sum(at[arm] < best for arm in SIX)
        fast[f"among the two fastest on {function}"] = rank <= 2 and math.isfinite(best)
        if min(value for arm, value in at.items() if arm.endswith("effective rate")) < best:
            beaten.append(function)
        numbers.append((f"{function}: rank of the faster BELAY among the six", f"{rank}"))
        numbers += [(f"{function}: median steps of {arm}", format_steps(value)) for arm, value in at.items()]
    count = list(fast.values()).count(True)
    summary = (
        f"At the paper's rates, BELAY is among the two fastest of six methods on {count} of {len(fast)} functions. "
        f"SGD or Adam at BELAY's effective rate is faster on {len(beaten)} of {len(fast)}."
    )
    found = find(fast, summary, tuple(numbers))
    return replace(found, answer=Answer.IN_PART) if found.answer is Answer.HOLDS and beaten else found


def judge_saddle(records: Records) -> Finding:
    """Judge C4."""
    found = {r["arm"]: r for r in records["fig3"] if r["kind"] == "saddle"}
    at = {arm: arrival(r, "median_of_arrived") for arm, r in found.items()}
    struggles = at["momentum"] > at["SGD"] or at["Adam"] > at["Adam without momentum"]
    cures = [at[f"{average}+{inner}"] < at[inner] for inner in ("momentum", "Adam") for average in ("EMA", "BELAY")]
    steps = {arm: format_steps(value) for arm, value in at.items()}
    summary = (
        f"From the saddle, the median steps with and without momentum are {steps['momentum']} and {steps['SGD']} for "
        f"SGD, {steps['Adam']} and {steps['Adam without momentum']} for Adam. An average needs fewer steps in "
        f"{sum(cures)} of {len(cures)} cases."
    )
    numbers = tuple(
        (f"{arm}: median steps of the runs that converge", f"{steps[arm]} ({format_share(r['converged'])} converge)")
        for arm, r in found.items()
    )
    return find({"momentum struggles": struggles, "an average cures it": any(cures)}, summary, numbers)


# C12 and C13: robustness -------------------------------------------------------------------------------------------


def curve(records: Records, function: str, arm: str) -> list[Record]:
    """Return an arm's records on a function, sorted by learning rate."""
    judged = judged_weights(arm)
    found = [
        r
        for r in records["robustness"]
        if r["kind"] == "rate" and (r["function"], r["arm"], r["judged"]) == (function, arm, judged)
    ]
    return sorted(found, key=lambda r: r["lr"])


def functions(records: Records) -> list[str]:
    """Return the names of the functions that were tried."""
    return list(dict.fromkeys(r["function"] for r in records["robustness"] if r["kind"] == "rate"))


def highest_rate(chosen: Sequence[Record], field: str = "lr") -> float | None:
    """Return the highest rate at which the method works; None if it works at none."""
    return max((r[field] for r in chosen if r["converged"] >= WORKS), default=None)


PAPER_RATES = {arm.name: lr for arm, lr in PAPER.items()}


def judge_rate_limits(records: Records) -> Finding:
    """Judge C12."""
    at_limit: list[str] = []
    room: dict[str, float] = {}  # how many times the paper's rate still works
    numbers = []
    for arm, paper in PAPER_RATES.items():
        rates = [rate for f in functions(records) if (rate := highest_rate(curve(records, f, arm))) is not None]
        if rates:
            room[arm] = min(rates) / paper
            at_limit += [arm] if round(room[arm], 6) < AT_ITS_LIMIT else []
        worst = f"{min(rates):.3g} ({two_digits(room[arm])} times the paper's)" if rates else "none"
        numbers.append(
            (f"{arm}: the paper's rate, and the highest that works on every function", f"{paper:g}, {worst}")
        )
    more = [f"{arm} (×{two_digits(room[arm])})" for arm in PAPER_RATES if arm not in at_limit and arm in room]
    idle = [arm for arm in PAPER_RATES if arm not in room]
    rest = [f"higher rates work for {listed(more)}"] if more else []
    rest += [f"no rate works for {listed(idle)}"] if idle else []
    summary = (
        f"Of six methods, {listed(at_limit, none='none')} ran within a factor of {AT_ITS_LIMIT:g} of the highest "
        "rate that works."
    )
    summary += f" {sentence('; '.join(rest))}" if rest else ""
    return find({f"{arm} at its highest rate": arm in at_limit for arm in PAPER_RATES}, summary, tuple(numbers))


def more(ones: int, others: int) -> bool | None:
    """Whether there are more of the first kind (True) or of the second (False); None for as many.

    >>> more(3, 1), more(0, 2), more(2, 2)
    (True, False, None)
    """
    return None if ones == others else ones > others


def judge_against_momentum(records: Records) -> Finding:
    """Judge C13."""
    won: dict[str, bool | None] = {}
    numbers = []
    for field, kind in (("lr", "nominal"), ("effective_lr", "effective")):
        for arm in ("EMA+SGD", "BELAY+SGD"):
            wins, losses, tried = 0, 0, 0
            for f in functions(records):
                own, momentum = (highest_rate(curve(records, f, name), field) for name in (arm, "momentum"))
                if own is None and momentum is None:
                    continue
                tried += 1
                wins += (own or 0) > (momentum or 0)
                losses += (own or 0) < (momentum or 0)
                shown = [f"{x:.3g}" if x is not None else "none" for x in (own, momentum)]
                numbers.append((f"{f}, {kind}: highest rate of {arm} and of momentum", ", ".join(shown)))
            won[f"{arm.removesuffix('+SGD')} by {kind} rate"] = more(wins, losses)
            found = f"higher on {wins} and lower on {losses} of {tried} functions"
            numbers.append((f"{kind}: the highest rate of {arm} against that of momentum", found))
    better = [name for name, yes in won.items() if yes]
    summary = (
        f"Averaging works at higher rates than momentum more often than at lower ones in {len(better)} of {len(won)} "
        f"comparisons (EMA and BELAY, by nominal and effective rate){f': {listed(better)}' if better else ''}."
    )
    return find(won, summary, tuple(numbers))


CLAIMS = (
    Claim(
        "C1",
        "At a high learning rate only BELAY and EMA on Adam converge without serious instability.",
        f"Rosenbrock, learning rate 0.15, starts within ±{BOX}. Four tests: BELAY+Adam converges; EMA+Adam converges; "
        "of the six methods only these two do; nor does Adam alone at BELAY's effective rate. A method converges if "
        f"the {CONFIDENCE:.0%} interval of its share of starts lies above {WORKS:.0%}, and does not if it lies below; "
        "in between the test is open. Holds if all four are passed, in part if at least half are.",
        ("fig2",),
        judge_high_rate,
        "fig2",
    ),
    Claim(
        "C2",
        "At a medium learning rate averaging keeps SGD from diverging.",
        f"Rosenbrock, learning rate 0.01, starts within ±{BOX}. Two tests, for EMA and for BELAY: the share of starts "
        f"that diverge is at least {100 * SAVES:.0f} percentage points lower than with SGD alone. A test is open if "
        f"the {CONFIDENCE:.0%} interval of the difference contains that bar. Holds if both are passed, in part if one "
        "is.",
        ("fig2",),
        judge_medium_rate,
        "fig2-starts",
    ),
    Claim(
        "C3",
        "BELAY, with Adam or SGD, is always among the fastest.",
        "The paper's learning rates, many starts, median steps. A test per function: the faster of BELAY+Adam and "
        "BELAY+SGD is among the two fastest of the six methods. Holds if all are passed and neither SGD nor Adam alone "
        "at BELAY's effective rate is faster anywhere; in part if at least half are passed.",
        ("fig3",),
        judge_speed,
        "fig3-times",
    ),
    Claim(
        "C4",
        "On Beale's function momentum struggles near a saddle, and averaging cures it.",
        "Starts around the saddle, one learning rate for all methods, median steps of the runs that converge. Two "
        "tests: momentum needs more steps than the same optimizer without it (SGD or Adam), and some average around it "
        "needs fewer. Holds if both are passed, in part if one is.",
        ("fig3",),
        judge_saddle,
        "fig3-saddle",
    ),
    Claim(
        "C12",
        "Each method was run at the highest learning rate that it can handle.",
        f"A method ran at its highest rate if {AT_ITS_LIMIT:g} times that rate is more than works on some function. A "
        f"rate works if at least {WORKS:.0%} of the starts converge; a function on which no rate works does not count. "
        "Holds if all six methods ran at their highest rate, in part if at least half did.",
        ("robustness",),
        judge_rate_limits,
        "robustness-sgd-nominal",
    ),
    Claim(
        "C13",
        "Averaging stabilises better than momentum does.",
        "Four comparisons with momentum 0.9: EMA+SGD and BELAY+SGD, by nominal and by effective learning rate. "
        "Averaging wins a comparison if its highest rate that works is higher on more functions than it is lower, and "
        "loses in the opposite case; as many leave it open. Holds if it wins all four, in part if it wins at least "
        "half.",
        ("robustness",),
        judge_against_momentum,
        "robustness-sgd-effective",
    ),
)
