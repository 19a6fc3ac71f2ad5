"""The claims about the highest learning rate that works on the plane: C12 and C13. And what C11 and C14 use too.

In C11, C13 and C14, a method that works at no rate on a function has a lower highest rate and a narrower range than
one that works at some. A function on which no method that is compared works decides nothing.
"""

from collections.abc import Sequence

from torchbelay.lab.part import Record
from torchbelay.lab.plane.fig3 import PAPER
from torchbelay.lab.report.words import listed, sentence

from .planar import WORKS, judged_weights
from .verdict import Claim, Finding, Outcome, Records, combine, describe_answer, find, more, need_some

AT_ITS_LIMIT = 3.0  # half an order of magnitude: a rate is at its limit if 3 times that rate fails
VOID = "if a function on which no rate works for one of the two decided nothing"
PAPER_RATES = {arm.name: lr for arm, lr in PAPER.items()}


def two_digits(factor: float) -> str:
    """Return a factor with two digits.

    >>> two_digits(8.38), two_digits(104.0)
    ('8.4', '100')
    """
    return f"{float(f'{factor:.2g}'):g}"


def curve(records: Records, function: str, arm: str) -> Sequence[Record]:
    """Return an arm's records on a function, sorted by learning rate."""
    judged = judged_weights(arm)
    found = [
        r
        for r in records["robustness"]
        if r["kind"] == "rate" and (r["function"], r["arm"], r["judged"]) == (function, arm, judged)
    ]
    return need_some(sorted(found, key=lambda r: r["lr"]), f"{arm} on {function}")


def functions(records: Records) -> list[str]:
    """Return the names of the functions that were tried."""
    return list(dict.fromkeys(r["function"] for r in records["robustness"] if r["kind"] == "rate"))


def highest_rate(chosen: Sequence[Record], field: str = "lr") -> float | None:
    """Return the highest rate at which the method works; None if it works at none."""
    return max((r[field] for r in chosen if r["converged"] >= WORKS), default=None)


def judge_rate_limits(records: Records) -> Finding:
    """Judge C12."""
    tests: dict[str, Outcome] = {}
    counted: list[Outcome] = []  # by a rule in which a function on which no rate works counts as a limit of 0
    room: dict[str, float] = {}  # how many times the paper's rate still works
    numbers = []
    for arm, paper in PAPER_RATES.items() if functions(records) else ():
        every = [highest_rate(curve(records, f, arm)) for f in functions(records)]
        rates = [rate for rate in every if rate is not None]
        if rates:
            room[arm] = min(rates) / paper
        passed = round(room[arm], 6) < AT_ITS_LIMIT if rates else None
        tests[f"{arm} at its highest rate"] = passed
        counted.append(passed or None in every)
        worst = f"{min(rates):.3g} ({two_digits(room[arm])} times the paper's)" if rates else "none"
        numbers.append(
            (f"{arm}: the paper's rate, and the highest that works on every function", f"{paper:g}, {worst}")
        )
    numbers.append(("if a function on which no rate works had a highest rate of 0", describe_answer(counted)))
    at_limit = [arm for arm in room if tests[f"{arm} at its highest rate"]]
    higher = [f"{arm} (×{two_digits(x)})" for arm, x in room.items() if arm not in at_limit]
    idle = [arm for arm in PAPER_RATES if arm not in room]
    clauses = [f"{listed(at_limit, none='no method')} ran within ×{AT_ITS_LIMIT:g} of their highest rate"]
    clauses += [f"higher rates work for {listed(higher)}"] if higher else []
    clauses += [f"no rate works for {listed(idle)}"] if idle else []
    summary = sentence("; ".join(clauses))
    return find(tests, summary, tuple(numbers))


def judge_against_momentum(records: Records) -> Finding:
    """Judge C13."""
    won: dict[str, Outcome] = {}
    void: list[Outcome] = []  # by a rule in which a function counts only if both methods work at some rate
    numbers = []
    for field, kind in (("lr", "nominal"), ("effective_lr", "effective")):
        for arm in ("EMA+SGD", "BELAY+SGD") if functions(records) else ():
            pairs = {
                f: tuple(highest_rate(curve(records, f, name), field) for name in (arm, "momentum"))
                for f in functions(records)
            }
            every = [more(own or 0, other or 0) for own, other in pairs.values()]
            both = [more(own, other) for own, other in pairs.values() if own is not None and other is not None]
            for f, pair in pairs.items():
                shown = ", ".join("none" if rate is None else f"{rate:.3g}" for rate in pair)
                numbers.append((f"{f}, {kind}: highest rate of {arm} and of momentum", shown))
            won[f"{arm.removesuffix('+SGD')} by {kind} rate"] = more(every.count(True), every.count(False))
            void.append(more(both.count(True), both.count(False)))
            found = f"higher on {every.count(True)} and lower on {every.count(False)} of {len(every)} functions"
            numbers.append((f"{kind}: the highest rate of {arm} against that of momentum", found))
    outcomes = [*won.values()]
    numbers.append((VOID, describe_answer(void)))
    summary = f"Averaging works at higher rates than momentum in {outcomes.count(True)} of {len(won)} comparisons."
    if combine(void) is not combine(outcomes):
        summary += f" Without functions on which one never works: {void.count(True)}, {combine(void)}."
    return find(won, summary, tuple(numbers))


CLAIMS = (
    Claim(
        "C12",
        "Each method was run at the highest learning rate that it can handle.",
        f"A test per method: {AT_ITS_LIMIT:g} times its rate is more than works on some function. A function on which "
        "no rate works says nothing of a highest rate, and does not count; if there is no other, the test is open. "
        "Holds if all six tests are passed, in part if at least half are.",
        ("robustness",),
        judge_rate_limits,
        "robustness-sgd-nominal",
    ),
    Claim(
        "C13",
        "Averaging stabilises better than momentum does.",
        "Four comparisons with momentum 0.9: EMA+SGD and BELAY+SGD, by nominal and by effective learning rate. "
        "Averaging wins a comparison if its highest rate that works is higher on more functions than it is lower, and "
        "loses in the opposite case; as many leave it open. A method that works at no rate is lower than one that "
        "works at some. Holds if averaging wins all four, in part if it wins at least half.",
        ("robustness",),
        judge_against_momentum,
        "robustness-sgd-effective",
    ),
)
