"""The sign of the spring: θ from −0.9 to +1 at one averaging rate, on an EDM score model of MNIST.

In the centre-of-mass form every method here is the same EMA of the same trajectory, but for where the gradient is
taken: θ beyond the centre of mass, away from the average (θ > 0, BELAY), at it (θ = 0, EMA), or nearer to the average
(θ < 0, as schedule-free and primal averaging have it). SGD's limit goes as 1/(1 + θ): is θ < 0 the robust side?
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torchbelay.lab.part import MISSING, Plate, Record, Settings, Table, Tick
from torchbelay.lab.report import style
from torchbelay.lab.statistics import CONFIDENCE, MARGIN, WORKS

from . import run as studied
from .analysis import CHANCE, Comparison, Study, middle, near_one
from .figures import (
    LossAxis,
    about,
    differs,
    hue_of,
    listed,
    loss_axis,
    lost,
    pair,
    ratio_axis,
    settings,
    ticks,
    times,
    width,
)
from .tables import speed

NAME = "sign"
TITLE = "The sign of the spring, on a score model of MNIST"


def plan(settings: Settings) -> tuple[int, str]:
    """How much work there is, and what it is."""
    return studied.plan(NAME, settings)


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Train and measure, or, where that cannot be done, the records that come with the package."""
    return studied.run(NAME, settings, tick)


def draw(records: Sequence[Record]) -> list[Plate]:
    """What there are records of."""
    study = Study(records, NAME)
    with style.house():
        found = [_by_theta(study), _table(records, study)] if study else []
        return [plate for plate in [*found, speed(records, NAME)] if plate is not None]


def thetas(study: Study) -> dict[float, str]:
    """The arm of each θ, the smallest first."""
    return dict(sorted({float(run["theta"]): str(run["arm"]) for run in study.runs}.items()))


def against_none(study: Study, lr: float) -> dict[float, Comparison]:
    """The average's test loss of each other θ over that of θ = 0, at a learning rate, seed by seed."""
    arms = thetas(study)
    if 0.0 not in arms:
        return {}
    found = {theta: study.compare(arm, arms[0.0], lr) for theta, arm in arms.items() if theta}
    return {theta: each for theta, each in found.items() if each.seeds}


def name_of(theta: float) -> str:
    """With a sign, and the minus that people print.

    >>> name_of(-0.5), name_of(0.0), name_of(1.0)
    ('−0.5', '0', '+1')
    """
    return f"{theta:+g}".replace("-", "−") if theta else "0"


def lost_by_theta(study: Study, lr: float) -> dict[float, tuple[int, int]]:
    """How many seeds each θ loses at a learning rate, of how many."""
    found = {theta: (study.lost(arm, lr), len(study.at(arm, lr))) for theta, arm in thetas(study).items()}
    return {theta: (count, seeds) for theta, (count, seeds) in found.items() if seeds}


def counts_decide(study: Study, lr: float) -> bool:
    """Whether θ = 0 loses at least half of its seeds there, so that there is little to take ratios to."""
    count, seeds = lost_by_theta(study, lr).get(0.0, (0, 1))
    return 2 * count >= seeds


# The figure -----------------------------------------------------------------------------------------------------------


def _by_theta(study: Study) -> Plate:
    arms = thetas(study)
    fig = style.figure(9.0, 5.8)
    axes: Any = fig.subplots(2, len(study.lrs), sharex=True, squeeze=False)
    everything = [loss for arm in study.arms for lr in study.lrs for loss in study.losses(arm, lr).values()]
    ratios = [each for lr in study.lrs if not counts_decide(study, lr) for each in against_none(study, lr).values()]
    for ax, below, lr in zip(axes[0], axes[1], study.lrs, strict=True):
        axis = loss_axis(ax, everything, [NAME])
        _losses(ax, study, lr, axis)
        ax.set_title(f"learning rate {lr:g}")
        if counts_decide(study, lr):
            _counts(below, study, lr)
        else:
            ratio_axis(below, ratios)
            below.set_ylabel("ratio to θ = 0" if ax is axes[0, 0] else "")
            for x, (theta, arm) in enumerate(arms.items()):
                if theta and 0.0 in arms:
                    pair(below, x, (arm, arms[0.0]), study.kept(arm, lr), study.kept(arms[0.0], lr))
        below.set_xlabel("θ")
        below.set_xticks(range(len(arms)), [name_of(theta) for theta in arms], fontsize=8)
        below.set_xlim(-0.6, len(arms) - 0.4)
    axes[0, 0].set_ylabel("test loss of the average")
    rate = listed([f"1/{1 / value:.0f}" for value in sorted({run["rate"] for run in study.runs})])
    caption = (
        f"{answer(study)} θ = 0 is EMA and θ > 0 BELAY's side; the averaging rate is {rate} everywhere. Whether this "
        "carries over to other images: see θ −0.5 in the part on CIFAR-10."
    )
    notes = (
        "Above: the test loss of the average, of each seed (dots, joined by hairs) and in the median (bars); in the "
        f"strip, how many seeds are lost. {lost(study)}",
        f"Below: its ratio to that of θ = 0, seed by seed, with the {CONFIDENCE:.0%} interval (grey: within "
        f"{MARGIN - 1:.0%}); or, where θ = 0 loses at least half of its seeds, how many each loses, with Fisher's "
        "exact one-sided p against θ = 0, which takes them as independent although they share their seeds.",
    )
    return Plate("sign-theta", "Is θ < 0 the robust side?", caption.strip(), fig, notes)


def _losses(ax: Any, study: Study, lr: float, axis: LossAxis) -> None:
    """Every seed's loss at every θ, and how many are lost."""
    arms = thetas(study)
    for seed in study.seeds:
        seen = [study.kept(arm, lr).get(seed) for arm in arms.values()]
        hair = [math.nan if loss is None else loss for loss in seen]
        ax.plot(range(len(arms)), hair, color="#999999", linewidth=0.5, alpha=0.6)
    for x, (theta, arm) in enumerate(arms.items()):
        known = [loss for loss in study.kept(arm, lr).values() if loss is not None]
        count, seeds = lost_by_theta(study, lr).get(theta, (0, 0))
        ax.plot([x] * len(known), known, ".", color=hue_of(theta), markersize=5)
        if 2 * count < seeds:
            ax.plot(
                x, middle(study.losses(arm, lr).values()), "_", color=hue_of(theta), markersize=13, markeredgewidth=2
            )
        if count:
            words = f"{count} of {seeds}"
            ax.text(x, axis.rows[NAME], words, fontsize=7.5, ha="center", va="center", color="#333")


def _counts(ax: Any, study: Study, lr: float) -> None:
    """How many seeds each θ loses, and how likely chance alone would set it so far from θ = 0."""
    pairs = against_none(study, lr)
    most = max(seeds for _, seeds in lost_by_theta(study, lr).values())
    for x, theta in enumerate(thetas(study)):
        if theta in (found := lost_by_theta(study, lr)):
            count, seeds = found[theta]
            ax.bar(x, count, width=0.62, color=hue_of(theta))
            fewer = theta in pairs and pairs[theta].only_other_lost > pairs[theta].only_one_lost
            words = f"{count} of {seeds}" if count else "none"
            words += f"\np {pairs[theta].p_loses_fewer:.2g}" if fewer else ""
            ax.annotate(words, (x, count), (0, 3), textcoords="offset points", ha="center", va="bottom", fontsize=6.5)
    ax.set(ylim=(0, 1.3 * most), ylabel="seeds lost", axisbelow=True)
    ticks(ax.yaxis, range(most + 1))
    ax.grid(axis="x", visible=False)


# Words ----------------------------------------------------------------------------------------------------------------


def answer(study: Study) -> str:
    """What the figure shows, the largest rate first: who loses seeds, or who is lower or higher than θ = 0."""
    return " ".join(filter(None, (_answer_at(study, lr) for lr in reversed(study.lrs))))


def _answer_at(study: Study, lr: float) -> str:
    pairs, counts = against_none(study, lr), lost_by_theta(study, lr)
    if any(count for count, _ in counts.values()):
        return f"At {lr:g}, {_who_loses(counts)}{_shown_to_lose_fewer(pairs)}."
    lower = listed([f"{name_of(theta)} ({near_one(each.point or 0)})" for theta, each in pairs.items() if each.below])
    higher = listed([f"{name_of(theta)} ({near_one(each.point or 0)})" for theta, each in pairs.items() if each.above])
    said = [f"lower at θ = {lower}"] * bool(lower) + [f"higher at θ = {higher}"] * bool(higher)
    return f"At {lr:g} no seed is lost; the loss, over that at θ = 0, is {' and '.join(said)}." if said else ""


def _who_loses(counts: Mapping[float, tuple[int, int]]) -> str:
    """How many seeds each θ loses, those that lose the most first.

    >>> _who_loses({-0.5: (0, 5), -0.25: (0, 5), 0.0: (4, 5), 1.0: (5, 5)})
    'all 5 seeds are lost at θ = +1, 4 of 5 at 0 and none at −0.5 and −0.25'
    """
    named: dict[tuple[int, int], list[str]] = {}
    for theta, found in counts.items():
        named.setdefault(found, []).append(name_of(theta))
    words: list[str] = []
    for (count, seeds), names in sorted(named.items(), reverse=True):
        many = "none" if not count else f"all {seeds}" if count == seeds else f"{count} of {seeds}"
        words.append(f"{many} {'at' if words else 'seeds are lost at θ ='} {listed(names)}")
    return listed(words)


def _shown_to_lose_fewer(pairs: Mapping[float, Comparison]) -> str:
    """Which θ lose so many fewer seeds than θ = 0 that chance is no likely reason."""
    found = {name_of(theta): each.p_loses_fewer for theta, each in pairs.items() if each.p_loses_fewer <= CHANCE}
    values = listed([f"{p:.2g}" for p in sorted({*found.values()})])
    verb = "loses" if len(found) == 1 else "lose"
    return f"; θ = {listed([*found])} {verb} fewer than θ = 0 (Fisher's exact one-sided p = {values})" if found else ""


# The table ------------------------------------------------------------------------------------------------------------


def _table(records: Sequence[Record], study: Study) -> Plate:
    arms, ranges = thetas(study), study.widths(study.arms)
    columns = ["", *(text for lr in study.lrs for text in (f"{lr:g}: loss", f"{lr:g}: ÷ θ = 0")), "Works over"]
    rows = []
    for theta, arm in arms.items():
        cells = [f"θ = {name_of(theta)}"]
        for lr in study.lrs:
            cells += [_loss(study, arm, lr), _ratio(study, theta, lr)]
        rows.append((*cells, width(ranges[arm][0])))
    caption = (
        "Loss: the median test loss of the average, or how many seeds are lost. ÷ θ = 0: the ratio, seed by seed, with "
        f"its {CONFIDENCE:.0%} interval (not widened for how many there are), or, where the two do not lose as many "
        "seeds, Fisher's exact one-sided p of that. Works over: the learning rates at which every seed has at most "
        f"{WORKS:g} times the best median of all; ≥ where that may go on beyond the rates tried."
    )
    notes = (about(study), *differs(records, NAME), *settings(records, NAME), *times(study))
    return Plate("sign-table", "The numbers of each θ", caption, Table(tuple(columns), tuple(rows)), notes)


def _loss(study: Study, arm: str, lr: float) -> str:
    losses = [*study.losses(arm, lr).values()]
    count, seeds = study.lost(arm, lr), len(losses)
    if not losses:
        return MISSING
    if 2 * count >= seeds:
        return f"{count} of {seeds} lost"
    return f"{middle(losses):#.3g}" + (f", {count} of {seeds} lost" if count else "")


def _ratio(study: Study, theta: float, lr: float) -> str:
    found = against_none(study, lr).get(theta)
    if found is None:
        return MISSING if theta or counts_decide(study, lr) else "1"
    fewer, more = found.only_other_lost > found.only_one_lost, found.only_one_lost > found.only_other_lost
    if fewer or more:
        p = found.p_loses_fewer if fewer else found.p_loses_more
        return f"{'fewer' if fewer else 'more'} lost, p = {p:.2g}"
    return found.size or MISSING
