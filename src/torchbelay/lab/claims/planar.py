"""The claims about Figures 2 and 3, in two dimensions: C1 to C4."""

import math
from collections.abc import Sequence
from dataclasses import replace

from torchbelay.lab.part import Record
from torchbelay.lab.report.words import listed
from torchbelay.lab.statistics import CONFIDENCE, difference_interval, exceeds, share_interval

from .verdict import Answer, Claim, Finding, Outcome, Records, Tests, find, more, need

WORKS = 0.9  # a method works at a rate if at least this share of the starts converges
BOX = 0.5  # half-width of the square of starts on Rosenbrock that the claims are judged by
SAVES = 0.1  # averaging saves SGD if the share of starts that diverge falls by at least this much
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
    claimed, control = ("BELAY+Adam", "EMA+Adam"), "Adam at BELAY's effective rate"
    at = need(shares(records, 0.15), (*SIX, control))
    works = {arm: exceeds(interval(r), WORKS) for arm, r in at.items()}
    both = [works[arm] for arm in claimed]
    others = [_negated(works[arm]) for arm in SIX if arm not in claimed]
    tests = {
        **{f"{arm} converges": works[arm] for arm in claimed},
        "of the six methods only these two": _all([*both, *others]),
        "nor Adam alone at BELAY's effective rate": _all([*both, _negated(works[control])]),
    }
    weights = {arm: r["converged"] for arm, r in shares(records, 0.15, judged="w1").items()}
    summary = (
        f"At learning rate 0.15, {listed([arm for arm in SIX if works[arm]], none='no method')} converged from "
        f"over {format_share(WORKS)} of starts, Adam from {format_share(at['Adam']['converged'])}, at BELAY's "
        f"effective rate from {format_interval(at[control])}."
    )
    numbers = [(f"{arm}, judged by {r['judged']}", format_interval(r)) for arm, r in at.items()]
    numbers += [(f"{arm}, judged by w1", format_share(weights[arm])) for arm in claimed if arm in weights]
    return find(tests, summary, tuple(numbers))


def _all(outcomes: Sequence[Outcome]) -> Outcome:
    """Return whether all are true; None if none is false and some are open."""
    return False if False in outcomes else None if None in outcomes else True


def _negated(outcome: Outcome) -> Outcome:
    """Return the opposite of an outcome; an open one stays open."""
    return None if outcome is None else not outcome


def judge_medium_rate(records: Records) -> Finding:
    """Judge C2."""
    plain = "SGD at BELAY's effective rate"
    at = need(shares(records, 0.01), ("SGD", "EMA+SGD", "BELAY+SGD", plain))
    tests: Tests = {
        f"{arm} saves SGD": exceeds(
            difference_interval(*(_diverged(at[name]) for name in ("SGD", f"{arm}+SGD"))), SAVES
        )
        for arm in ("EMA", "BELAY")
    }
    lost = {arm: format_share(r["diverged"]) for arm, r in at.items()}
    summary = (
        f"At learning rate 0.01, SGD diverged from {lost['SGD']} of starts, with EMA from {lost['EMA+SGD']}, with "
        f"BELAY from {lost['BELAY+SGD']}, and at BELAY's effective rate from {lost[plain]}."
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
    fast: dict[str, Outcome] = {}
    controls = ("Adam at BELAY's effective rate", "SGD at BELAY's effective rate")
    names = list(dict.fromkeys(r["function"] for r in records["fig3"] if r["kind"] == "arrival"))
    for function in names:
        every = {r["arm"]: arrival(r) for r in records["fig3"] if r["kind"] == "arrival" and r["function"] == function}
        at = need(every, (*SIX, *controls))
        best = min(at["BELAY+Adam"], at["BELAY+SGD"])
        rivals = [at[arm] for arm in SIX if not arm.startswith("BELAY")]
        fast[f"among the two fastest on {function}"] = _among_two(best, rivals)
        if min(at[arm] for arm in controls) < best:
            beaten.append(function)
        rank = 1 + sum(steps < best for steps in rivals)
        numbers.append((f"{function}: rank of the faster BELAY among the six", f"{rank}"))
        numbers += [(f"{function}: median steps of {arm}", format_steps(value)) for arm, value in at.items()]
    count = list(fast.values()).count(True)
    summary = (
        f"At the paper's rates, BELAY is among the two fastest on {count} of {len(fast)} functions. SGD or Adam at its "
        f"effective rate wins on {len(beaten)}."
    )
    found = find(fast, summary, tuple(numbers))
    return replace(found, answer=Answer.IN_PART) if found.answer is Answer.HOLDS and beaten else found


def _among_two(steps: float, rivals: Sequence[float]) -> Outcome:
    """Whether at most one rival needs fewer steps (True) or more do (False); None if ties decide, or none arrives.

    >>> _among_two(9.0, [8.0, 10.0]), _among_two(9.0, [8.0, 7.0]), _among_two(9.0, [8.0, 9.0])
    (True, False, None)
    >>> _among_two(math.inf, [8.0, math.inf]), _among_two(math.inf, [math.inf])
    (False, None)
    """
    if not math.isfinite(steps):
        return False if any(map(math.isfinite, rivals)) else None
    fewer, as_many = sum(other < steps for other in rivals), sum(other <= steps for other in rivals)
    return True if as_many <= 1 else False if fewer > 1 else None


def judge_saddle(records: Records) -> Finding:
    """Judge C4."""
    found = {r["arm"]: r for r in records["fig3"] if r["kind"] == "saddle"}
    bare = {"momentum": "SGD", "Adam": "Adam without momentum"}  # each optimizer with momentum, and without
    averages = ("EMA", "BELAY")
    slow = "momentum at SGD's effective rate"  # a control, which no test is about
    need(found, (*bare, *bare.values(), slow, *(f"{average}+{inner}" for inner in bare for average in averages)))
    at = {arm: arrival(r, "median_of_arrived") for arm, r in found.items()}
    struggles = {f"{inner} struggles": more(at[inner], at[without]) for inner, without in bare.items()}
    cures = {
        f"{average} cures {inner}": more(at[inner], at[f"{average}+{inner}"]) for inner in bare for average in averages
    }
    steps = {arm: format_steps(value) for arm, value in at.items()}
    summary = (
        f"From the saddle, momentum takes {steps['momentum']} steps ({steps[slow]} at SGD's effective rate), SGD "
        f"{steps['SGD']}; with Adam {steps['Adam']} against {steps['Adam without momentum']}. Averages need fewer in "
        f"{[*cures.values()].count(True)} of {len(cures)} cases."
    )
    numbers = tuple(
        (f"{arm}: median steps of the runs that converge", f"{steps[arm]} ({format_share(r['converged'])} converge)")
        for arm, r in found.items()
    )
    return find(struggles | cures, summary, numbers)


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
        "BELAY+SGD is among the two fastest of the six methods. It is open if a tie decides, or if no method arrives. "
        "Holds if all are passed and neither SGD nor Adam alone at BELAY's effective rate is faster anywhere; in part "
        "if at least half are passed.",
        ("fig3",),
        judge_speed,
        "fig3-times",
    ),
    Claim(
        "C4",
        "On Beale's function momentum struggles near a saddle, and averaging cures it.",
        "Starts around the saddle, one learning rate for all methods, median steps of the runs that converge. Six "
        "tests, for SGD with momentum and for Adam: it needs more steps than the same optimizer without momentum; with "
        "EMA around it, it needs fewer; with BELAY around it, it needs fewer. The opposite fails a test, and a tie "
        "leaves it open. Holds if all are passed, in part if at least half are.",
        ("fig3",),
        judge_saddle,
        "fig3-saddle",
    ),
)
