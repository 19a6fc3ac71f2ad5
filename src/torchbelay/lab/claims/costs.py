"""The claims about what BELAY costs: C5, and C16 for springs whose masses keep their velocities."""

from collections.abc import Callable, Sequence

from torchbelay.lab.arms import BELAY, EMA, PLAIN
from torchbelay.lab.overhead import bytes_per_weight, cost
from torchbelay.lab.part import Record
from torchbelay.lab.records import select
from torchbelay.lab.report.words import excess, listed
from torchbelay.lab.statistics import exceeds
from torchbelay.lab.timed_models import VELOCITIES

from .verdict import Claim, Finding, Outcome, Records, combine, describe_answer, find, need, need_some

NEGLIGIBLE = 0.05  # the largest overhead that counts as negligible, in time and in memory


def judge_costs(arm: str) -> Callable[[Records], Finding]:
    """Return the rule that judges the costs of an arm."""

    def judge(records: Records) -> Finding:
        costs = need_some(select(records["overhead"], "cost"), "costs")
        for network in dict.fromkeys(r["network"] for r in costs):
            need({r["arm"]: r for r in costs if r["network"] == network}, (arm, EMA, PLAIN))
        return _judge(costs, arm)

    return judge


def _judge(costs: Sequence[Record], arm: str) -> Finding:
    networks = list(dict.fromkeys(r["network"] for r in costs))
    times = {name: cost(costs, name, arm)["timing_s"] for name in networks}
    belay, ema, plain = (cost(costs, networks[0], each) for each in (arm, EMA, PLAIN))
    own, with_ema, alone = (bytes_per_weight(record) for record in (belay, ema, plain))
    during = belay["bytes_during_update"] / belay["weights"]
    copy = belay["bytes"].get("copy", 0) / belay["weights"]
    tests: dict[str, Outcome] = {
        f"time, {name} network": _within((t["to_plain"]["low"], t["to_plain"]["high"])) for name, t in times.items()
    }
    without_copy = [*(tests | _judge_memory(own - copy, alone, with_ema)).values()]
    tests |= _judge_memory(own, alone, with_ema)
    longer = listed([f"{excess(t['to_plain']['ratio'])} ({name})" for name, t in times.items()])
    more_than_ema = own / with_ema - 1
    beside_ema = "the same as an EMA" if abs(more_than_ema) < 0.001 else f"{more_than_ema:+.0%} beside an EMA"
    summary = f"On a CPU, {arm} costs {longer} time, {own / alone - 1:+.0%} memory, {beside_ema}."
    if copy and combine(without_copy) is not combine([*tests.values()]):
        summary += f" Without the CPU-only copy: {combine(without_copy)}."
    numbers = []
    for name, t in times.items():
        for key, rival in (("to_plain", "no averaging"), ("to_ema", "EMA")):
            r = t[key]
            value = f"{r['ratio']:.3f} ({r['low']:.3f} to {r['high']:.3f})"
            numbers.append((f"time of a step, {name} network: {arm} ÷ {rival}", value))
    numbers.append((f"bytes per weight: no averaging, EMA, {arm}", f"{alone:.1f}, {with_ema:.1f}, {own:.1f}"))
    numbers.append(("of these, a copy of the weights that is kept for the next step on a CPU alone", f"{copy:.1f}"))
    numbers.append(("by a rule that does not count this copy", describe_answer(without_copy)))
    numbers.append(("further bytes per weight during the update", f"{during:.1f}"))
    return find(tests, summary, tuple(numbers))


def _judge_memory(own: float, alone: float, with_ema: float) -> dict[str, Outcome]:
    """Return whether bytes per weight are within the limit, against no average and against an EMA."""
    rivals = {"memory against no average": alone, "memory against an EMA": with_ema}
    return {name: own / rival - 1 <= NEGLIGIBLE for name, rival in rivals.items()}


def _within(interval: tuple[float, float]) -> Outcome:
    """Whether a ratio of times is within the limit (True) or beyond it (False); None if the limit is in the interval.

    >>> _within((1.01, 1.03)), _within((1.13, 1.23)), _within((1.03, 1.08))
    (True, False, None)
    """
    beyond = exceeds(interval, 1 + NEGLIGIBLE)
    return None if beyond is None else not beyond


_RULE = (
    f"Four tests on a CPU, each of at most {NEGLIGIBLE:.0%} more: the time of a training step against no average, for "
    "a small MLP and for a convolutional network (passed if the whole 95% interval is within that limit, failed if it "
    "is beyond); the bytes kept between steps against no average, and against an EMA. Holds if all four are passed, in "
    "part if at least half are."
)

CLAIMS = (
    Claim(
        "C5",
        "BELAY's overhead in time and memory is negligible.",
        _RULE,
        ("overhead",),
        judge_costs(BELAY),
        "overhead",
    ),
    Claim(
        "C16",
        "Even with non-trivial damping the overhead is negligible.",
        f"A critically damped spring, whose masses keep their velocities. {_RULE}",
        ("overhead",),
        judge_costs(VELOCITIES),
        "overhead",
    ),
)
