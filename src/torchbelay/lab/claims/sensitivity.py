"""C15: is EMA sensitive to its decay? From the ring, and from averages of many lengths of the same runs.

The control is BELAY's spring constant k over the same factor: a method is no cure for a sensitivity that it shares.
"""

from collections.abc import Sequence

from torchbelay.lab.arms import BELAY, EMA
from torchbelay.lab.part import MISSING, Record
from torchbelay.lab.records import select
from torchbelay.lab.score.comparison import Comparison, compare, geometric_mean
from torchbelay.lab.statistics import MARGIN

from .verdict import Claim, Finding, Records, find

SETTINGS = {EMA: ("decay 0.999", "decay 0.996"), BELAY: ("k 1, m1 2000, m2 500", "k 4, m1 2000, m2 500")}  # times four
FACTOR = 4  # how much longer or shorter a memory is

Losses = dict[int, float | None]  # by seed


def judge_decay(records: Records) -> Finding:
    """Judge C15."""
    found: dict[str, Comparison] = {}
    for arm in (EMA, BELAY):
        one, other = (_curve(records["ring"], arm, setting) for setting in SETTINGS[arm])
        if not one or not other:
            continue
        lr = min(other, key=lambda lr: _mean(other[lr]))
        found[f"{arm} at equal nominal rate"] = compare(one[lr], other[lr])
        best = min(one, key=lambda lr: _mean(one[lr]))
        found[f"{arm} at each one's best"] = compare(one[best], other[lr])
    lengths = {
        f"EMA of one run at {lr:g}": _compare_lengths(select(records["posthoc"], "network", lr=lr))
        for lr in sorted({r["lr"] for r in select(records["posthoc"], "network")})
    }
    tests = {name: _matters(each) for name, each in (found | lengths).items() if name.startswith(EMA)}
    shown, belay = (
        " and ".join(dict.fromkeys(_factor(each) for name, each in found.items() if name.startswith(arm)))
        for arm in (EMA, BELAY)
    )
    others = [_factor(each) for each in sorted(lengths.values(), key=lambda each: each.point or 0.0)]
    summary = (
        f"On the ring, a memory {FACTOR} times as long changes EMA's loss by a factor of {shown or MISSING} and "
        f"BELAY's by {belay or MISSING}. In one run, nearby half-lives are worse by up to "
        f"{others[-1] if others else MISSING}."
    )
    numbers = tuple((f"{name}: the longer memory ÷ the shorter", each.size) for name, each in found.items())
    numbers += tuple((f"{name}: the worst half-life ÷ the best", each.size) for name, each in lengths.items())
    return find(tests, summary, numbers)


def _factor(found: Comparison) -> str:
    """Return the ratio without its interval."""
    return found.size.split()[0] if found.size else MISSING


def _matters(found: Comparison) -> bool | None:
    """Whether the setting is shown to change the loss by more than the margin (True), or by less (False)."""
    if found.ratio is None:
        return None
    if found.ratio.low > MARGIN or found.ratio.high < 1 / MARGIN:
        return True
    return False if found.equal else None


def _curve(runs: Sequence[Record], arm: str, setting: str) -> dict[float, Losses]:
    """Return the test losses of an arm with one setting, by learning rate and seed."""
    found: dict[float, Losses] = {}
    for r in select(runs, "run", arm=arm, setting=setting):
        found.setdefault(float(r["lr"]), {})[int(r["seed"])] = None if r["failed"] else r["test"]
    return found


def _mean(losses: Losses) -> float:
    """Return the mean loss; infinite if a run failed."""
    values = [*losses.values()]
    return float("inf") if None in values else geometric_mean(values) or float("inf")


def _compare_lengths(lines: Sequence[Record]) -> Comparison:
    """Compare the worst half-life within a factor of the best with the best, seed by seed."""
    means = {r["half_life"]: geometric_mean(r["along"]) or 0.0 for r in lines}
    losses = {r["half_life"]: dict(enumerate(r["along"])) for r in lines}
    best = min(means, key=means.__getitem__)
    near = [life for life in means if 1 / FACTOR <= life / best <= FACTOR]
    return compare(losses[max(near, key=means.__getitem__)], losses[best])


CLAIMS = (
    Claim(
        "C15",
        "EMA is sensitive to its decay.",
        "Tests on the ring: EMA with decay 0.999 against 0.996, a memory four times as long, at the best learning rate "
        "of the latter and at each one's best; and, for averages of the same run, the worst half-life within a factor "
        f"of {FACTOR} of the best against the best, at each learning rate. A test is passed if the interval of the "
        f"ratio, paired by seed, lies beyond {MARGIN - 1:.0%}, and failed if the two are shown equal within it. Holds "
        "if all are passed, in part if at least half are. BELAY's k over the same factor is shown beside it.",
        ("ring", "posthoc"),
        judge_decay,
        "ring-curves",
    ),
)
