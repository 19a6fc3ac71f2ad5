"""C15: is EMA sensitive to its decay? From the ring, and from averages of many lengths of the same runs.

The control is BELAY's spring constant k over the same factor: a method is no cure for a sensitivity that it shares.
"""

import math
from collections.abc import Sequence

from torchbelay.lab.arms import BELAY, EMA
from torchbelay.lab.part import MISSING, Record
from torchbelay.lab.records import select
from torchbelay.lab.score.analysis import Losses, StudyResults
from torchbelay.lab.score.comparison import Comparison, compare, geometric_mean
from torchbelay.lab.statistics import MARGIN

from .verdict import Claim, Finding, Outcome, Records, combine, describe_answer, find

SETTINGS = {EMA: ("decay 0.999", "decay 0.996"), BELAY: ("k 1, m1 2000, m2 500", "k 4, m1 2000, m2 500")}  # times four
FACTOR = 4  # how much longer or shorter a memory is


def judge_decay(records: Records) -> Finding:
    """Judge C15."""
    found: dict[str, Comparison] = {}
    for arm in (EMA, BELAY):
        longer, shorter = SETTINGS[arm]
        study = _study(records["ring"], arm)
        if longer in study.arms and shorter in study.arms:
            found[f"{arm} at equal nominal rate"] = compare(
                _at_rates_of(study, shorter, longer), study.at_best(shorter)
            )
            found[f"{arm} at each one's best"] = compare(study.at_best(longer), study.at_best(shorter))
    runs = {lr: select(records["posthoc"], "network", lr=lr) for lr in _rates(records["posthoc"])}
    lengths = {f"EMA of one run at {lr:g}": _compare_lengths(lines) for lr, lines in runs.items()}
    one_pair = {f"EMA of one run at {lr:g}": _compare_lengths(lines, once=True) for lr, lines in runs.items()}
    tests = {name: _matters(each) for name, each in (found | lengths).items() if name.startswith(EMA)}
    chosen_once = [_matters(each) for name, each in (found | one_pair).items() if name.startswith(EMA)]
    shown, belay = (
        " and ".join(dict.fromkeys(_factor(each) for name, each in found.items() if name.startswith(arm)))
        for arm in (EMA, BELAY)
    )
    others = [_factor(each) for each in sorted(lengths.values(), key=lambda each: each.point or 0.0)]
    summary = (
        f"On the ring, a memory {FACTOR} times as long multiplies EMA's loss by {shown or MISSING} and BELAY's by "
        f"{belay or MISSING}. "
    )
    if (answer := combine(chosen_once)) is not combine([*tests.values()]):
        summary += f"With half-lives chosen once: {answer}."
    else:
        summary += f"In one run, half-lives differ {others[-1] if others else MISSING}-fold."
    numbers = tuple((f"{name}: the longer memory ÷ the shorter", each.size) for name, each in found.items())
    numbers += tuple((f"{name}: the worst half-life ÷ the best", each.size) for name, each in lengths.items())
    numbers += tuple((f"{name}: the same, chosen once for all seeds", each.size) for name, each in one_pair.items())
    numbers += (("if half-lives are chosen once for all seeds", describe_answer(chosen_once)),)
    return find(tests, summary, numbers)


def _factor(found: Comparison) -> str:
    """Return the ratio without its interval."""
    return found.size.split()[0] if found.size else MISSING


def _matters(found: Comparison) -> Outcome:
    """Whether the setting is shown to change the loss by more than the margin (True), or by less (False)."""
    if found.ratio is None:
        return None
    if found.ratio.low > MARGIN or found.ratio.high < 1 / MARGIN:
        return True
    return False if found.equal else None


def _study(runs: Sequence[Record], arm: str) -> StudyResults:
    """Return the runs of an arm on the ring in the form of a study, whose arms are the settings.

    So a rate is chosen as for images, but by the validation loss: the ring has no training loss of its averages.
    """
    made = []
    for r in select(runs, "run", arm=arm):
        losses = {"train": r["validation"], "test": r["test"]}
        final = {} if r["failed"] else {"w2": losses}
        made.append(
            {"kind": "run", "study": "ring", "arm": r["setting"], "lr": r["lr"], "seed": r["seed"], "final": final}
        )
    return StudyResults(made, "ring")


def _at_rates_of(study: StudyResults, chooser: str, setting: str) -> Losses:
    """Return the test losses of a setting, for each seed at the best rate of another setting."""
    rates = {seed: study.best_rate(chooser, without=seed) for seed in study.seeds}
    chosen = {seed: study.valid_losses(setting, lr) for seed, lr in rates.items() if lr is not None}
    return {seed: losses[seed] for seed, losses in chosen.items() if seed in losses}


def _rates(lines: Sequence[Record]) -> list[float]:
    """Return the learning rates of the runs whose averages have several half-lives."""
    return sorted({r["lr"] for r in select(lines, "network")})


def _compare_lengths(lines: Sequence[Record], *, once: bool = False) -> Comparison:
    """Compare the worst half-life within a factor of the best with the best, seed by seed.

    Which are the worst and the best for a seed, the losses of the other seeds say; with `once`, those of all seeds.
    """
    losses = {r["half_life"]: dict(enumerate(r["along"])) for r in lines}
    worst, best = {}, {}
    for seed in sorted(set.intersection(*(set(by_seed) for by_seed in losses.values()))):
        means = {life: _mean_loss(by_seed, without=None if once else seed) for life, by_seed in losses.items()}
        top = min(means, key=means.__getitem__)
        near = [life for life in means if life != top and 1 / FACTOR <= life / top <= FACTOR]
        if near:
            worst[seed] = losses[max(near, key=means.__getitem__)][seed]
            best[seed] = losses[top][seed]
    return compare(worst, best)


def _mean_loss(losses: Losses, without: int | None) -> float:
    """Return the mean loss of the seeds but one; its own if it is the only one. Infinite if a run was lost."""
    values = [loss for seed, loss in losses.items() if seed != without] or [*losses.values()]
    return math.inf if None in values else geometric_mean(values) or math.inf


CLAIMS = (
    Claim(
        "C15",
        "EMA is sensitive to its decay.",
        "Tests on the ring: EMA with decay 0.999 against 0.996, a memory four times as long, at the best learning rate "
        "of the latter and at each one's best; and, for averages of the same run, the worst half-life within a factor "
        f"of {FACTOR} of the best against the best, at each learning rate. Rates are chosen by the validation loss of "
        "the other seeds, and half-lives by their test loss, because no other is recorded. A test is passed if the "
        f"interval of the ratio, paired by seed, lies beyond {MARGIN - 1:.0%}, and failed if the two are shown equal "
        "within it. Holds if all are passed, in part if at least half are. BELAY's k over the same factor is shown "
        "beside it.",
        ("ring", "posthoc"),
        judge_decay,
        "ring-curves",
    ),
)
