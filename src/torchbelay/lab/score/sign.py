"""The sign of the spring: θ from −0.9 to +1 at one averaging rate, on an EDM score model of MNIST.

In the centre-of-mass form every method here is the same EMA of the same trajectory. They differ only in the point at
which the gradient is taken: beyond the centre of mass, away from the average (θ > 0, BELAY), at the centre of mass
(θ = 0, EMA), or nearer to the average. The last, θ < 0, is Generalized Primal Averaging, and schedule-free is its case
of an averaging rate 1/t. SGD's limit goes as 1/(1 + θ): is θ < 0 the robust side?
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from torchbelay.lab.hypotheses import GPA
from torchbelay.lab.part import MISSING, Plate, Record, Settings, Table, Tick
from torchbelay.lab.report import style
from torchbelay.lab.report.words import listed
from torchbelay.lab.statistics import CONFIDENCE, MARGIN, WORKS, Range

from . import run as study_run
from .analysis import StudyResults, median_loss
from .captions import (
    describe_lost_runs,
    describe_networks,
    difference_notes,
    format_range,
    settings_note,
    time_note,
)
from .comparison import CHANCE, Comparison, format_ratio
from .figures import LossAxis, draw_ratio, set_loss_axis, set_ratio_axis, set_ticks, theta_colour
from .tables import speed_plate

NAME = "sign"
TITLE = "The sign of the spring, on a score model of MNIST"


def plan(settings: Settings) -> tuple[int, str]:
    """Return the units of work, and one line that says what would be run."""
    return study_run.plan(NAME, settings)


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Train and measure; if that is impossible here, return the records that come with the package."""
    return study_run.run(NAME, settings, tick)


def draw(records: Sequence[Record]) -> list[Plate]:
    """Return the plates; a study without records has none."""
    study = StudyResults(records, NAME)
    with style.house():
        found = [_by_theta(study), _table(records, study)] if study else []
        return [plate for plate in [*found, speed_plate(records, NAME)] if plate is not None]


def arms_by_theta(study: StudyResults) -> dict[float, str]:
    """Return the arm of each θ, the smallest first."""
    return dict(sorted({float(run["theta"]): str(run["arm"]) for run in study.runs}.items()))


def ratios_to_zero(study: StudyResults, lr: float) -> dict[float, Comparison]:
    """Compare the average's test loss at each other θ with that at θ = 0, at one learning rate, seed by seed."""
    arms = arms_by_theta(study)
    if 0.0 not in arms:
        return {}
    found = {theta: study.compare(arm, arms[0.0], lr) for theta, arm in arms.items() if theta}
    return {theta: each for theta, each in found.items() if each.seeds}


def theta_text(theta: float) -> str:
    """Return θ with its sign, and with a typographic minus.

    >>> theta_text(-0.5), theta_text(0.0), theta_text(1.0)
    ('−0.5', '0', '+1')
    """
    return f"{theta:+g}".replace("-", "−") if theta else "0"


def lost_by_theta(study: StudyResults, lr: float) -> dict[float, tuple[int, int]]:
    """Return for each θ how many seeds are lost at a learning rate, and how many were run."""
    found = {
        theta: (study.lost_count(arm, lr), len(study.runs_at(arm, lr))) for theta, arm in arms_by_theta(study).items()
    }
    return {theta: (count, seeds) for theta, (count, seeds) in found.items() if seeds}


def zero_mostly_lost(study: StudyResults, lr: float) -> bool:
    """Whether θ = 0 loses at least half of its seeds at a rate: then counts replace ratios."""
    count, seeds = lost_by_theta(study, lr).get(0.0, (0, 1))
    return 2 * count >= seeds


# The figure -----------------------------------------------------------------------------------------------------------


def _by_theta(study: StudyResults) -> Plate:
    arms = arms_by_theta(study)
    fig = style.figure(9.0, 5.8)
    axes: Any = fig.subplots(2, len(study.lrs), sharex=True, squeeze=False)
    everything = [loss for arm in study.arms for lr in study.lrs for loss in study.losses(arm, lr).values()]
    ratios = [
        each for lr in study.lrs if not zero_mostly_lost(study, lr) for each in ratios_to_zero(study, lr).values()
    ]
    for ax, below, lr in zip(axes[0], axes[1], study.lrs, strict=True):
        axis = set_loss_axis(ax, everything, [NAME])
        _draw_losses(ax, study, lr, axis)
        ax.set_title(f"learning rate {lr:g}")
        if zero_mostly_lost(study, lr):
            _draw_counts(below, study, lr)
        else:
            set_ratio_axis(below, ratios)
            if ax is axes[0, 0]:
                below.legend(handles=_ratio_handles(), fontsize=7.5, loc="upper right")
            below.set_ylabel("ratio to θ = 0" if ax is axes[0, 0] else "")
            for x, (theta, arm) in enumerate(arms.items()):
                if theta and 0.0 in arms:
                    draw_ratio(
                        below, x, (arm, arms[0.0]), study.valid_losses(arm, lr), study.valid_losses(arms[0.0], lr)
                    )
        below.set_xlabel("θ")
        below.set_xticks(range(len(arms)), [theta_text(theta) for theta in arms], fontsize=8)
        below.set_xlim(-0.6, len(arms) - 0.4)
    axes[0, 0].set_ylabel("test loss of the average")
    axes[0, 0].legend(handles=_loss_handles(), fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, 0.88))
    rate = listed([f"1/{1 / value:.0f}" for value in sorted({run["rate"] for run in study.runs})])
    main = _summary_at(study, study.lrs[-1], evidence=False)
    caption = (
        "Test loss of the average from a cold start (above); its ratio to θ = 0 (EMA) or the seeds lost (below)."
        f"{f' {main}' if main else ''}"
    )
    notes = (
        *([summary] if (summary := summarize(study)) else []),
        "θ > 0 is BELAY's side. θ < 0 is Generalized Primal Averaging; schedule-free is its case of an averaging rate "
        f"1/t. Here the averaging rate is {rate} everywhere. The part on CIFAR-10 tries θ −0.5 on other images.",
        "These are cold starts. The part warmup has the control: θ = 0 and −0.5, cold and with warm-up, on other seeds "
        "and in shorter runs.",
        "Above: dots are seeds, joined by thin lines, and bars are medians; the strip counts lost seeds. "
        f"{describe_lost_runs(study)}",
        f"Below: the ratio to θ = 0, seed by seed, with its {CONFIDENCE:.0%} interval (grey: within {MARGIN - 1:.0%}). "
        "If θ = 0 loses at least half of its seeds, bars count the lost seeds instead, with McNemar's exact one-sided "
        "p against θ = 0, which compares the runs of a seed.",
    )
    return Plate("sign-theta", "Is θ < 0 the robust side, from a cold start?", caption, fig, notes)


def _draw_losses(ax: Any, study: StudyResults, lr: float, axis: LossAxis) -> None:
    """Draw every seed's loss at every θ, and count the lost seeds in the strip."""
    arms = arms_by_theta(study)
    for seed in study.seeds:
        seen = [study.valid_losses(arm, lr).get(seed) for arm in arms.values()]
        hair = [math.nan if loss is None else loss for loss in seen]
        ax.plot(range(len(arms)), hair, color="#999999", linewidth=0.5, alpha=0.6)
    for x, (theta, arm) in enumerate(arms.items()):
        known = [loss for loss in study.valid_losses(arm, lr).values() if loss is not None]
        count, seeds = lost_by_theta(study, lr).get(theta, (0, 0))
        ax.plot([x] * len(known), known, ".", color=theta_colour(theta), markersize=5)
        if 2 * count < seeds:
            ax.plot(
                x,
                median_loss(study.losses(arm, lr).values()),
                "_",
                color=theta_colour(theta),
                markersize=13,
                markeredgewidth=2,
            )
        if count:
            words = f"{count} of {seeds}"
            ax.text(x, axis.rows[NAME], words, fontsize=7.5, ha="center", va="center", color="#333")


def _loss_handles() -> list[Line2D]:
    """Return the marks of a chart of losses, for its legend."""
    return [
        Line2D([], [], color="#777777", linestyle="", marker="_", markersize=13, markeredgewidth=2, label="median"),
        Line2D([], [], color="#999999", linewidth=0.5, marker=".", markersize=5, label="one seed"),
    ]


def _ratio_handles() -> list[Artist]:
    """Return the marks of a chart of ratios, for its legend."""
    return [
        Line2D([], [], color="#777777", marker="s", markersize=5, label=f"ratio, {CONFIDENCE:.0%} interval"),
        Line2D([], [], color="#777777", linestyle="", marker=".", alpha=0.5, markersize=4, label="one seed"),
        Patch(color="#e9e9e9", label=f"within {MARGIN - 1:.0%} of θ = 0"),
    ]


def _draw_counts(ax: Any, study: StudyResults, lr: float) -> None:
    """Draw how many seeds each θ loses, with McNemar's p if it loses fewer than θ = 0."""
    pairs = ratios_to_zero(study, lr)
    most = max(seeds for _, seeds in lost_by_theta(study, lr).values())
    for x, theta in enumerate(arms_by_theta(study)):
        if theta in (found := lost_by_theta(study, lr)):
            count, seeds = found[theta]
            ax.bar(x, count, width=0.62, color=theta_colour(theta))
            fewer = theta in pairs and pairs[theta].only_other_lost > pairs[theta].only_one_lost
            look: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "bottom", "fontsize": 8}
            ax.annotate(f"{count}/{seeds}", (x, count), (0, 3), **look)
            if fewer:
                words = f"p = {pairs[theta].p_loses_fewer:.2g}"
                ax.annotate(words, (x, count), (0, 17), rotation=90, **look)
    explained = "p: McNemar's one-sided test\nagainst θ = 0"
    ax.text(0.03, 0.99, explained, transform=ax.transAxes, fontsize=8, va="top", color="#555555")
    ax.set(ylim=(0, 1.45 * most), ylabel="seeds lost", axisbelow=True)
    set_ticks(ax.yaxis, range(most + 1))
    ax.grid(axis="x", visible=False)


# Words ----------------------------------------------------------------------------------------------------------------


def summarize(study: StudyResults) -> str:
    """Return a sentence per rate, the largest first: which θ lose seeds, or have a lower or higher loss than θ = 0."""
    return " ".join(filter(None, (_summary_at(study, lr) for lr in reversed(study.lrs))))


def _summary_at(study: StudyResults, lr: float, *, evidence: bool = True) -> str:
    """Return the sentence of one rate; with `evidence`, it gives the p of fewer lost seeds."""
    pairs, counts = ratios_to_zero(study, lr), lost_by_theta(study, lr)
    if any(count for count, _ in counts.values()):
        return f"At {lr:g}, {_lost_seeds_text(counts)}{_fewer_lost_text(pairs) if evidence else ''}."
    lower = listed(
        [f"{theta_text(theta)} ({format_ratio(each.point or 0)})" for theta, each in pairs.items() if each.below]
    )
    higher = listed(
        [f"{theta_text(theta)} ({format_ratio(each.point or 0)})" for theta, each in pairs.items() if each.above]
    )
    texts = [f"lower at θ = {lower}"] * bool(lower) + [f"higher at θ = {higher}"] * bool(higher)
    return f"At {lr:g} no seed is lost; the loss, over that at θ = 0, is {' and '.join(texts)}." if texts else ""


def _lost_seeds_text(counts: Mapping[float, tuple[int, int]]) -> str:
    """Return how many seeds each θ loses, the most first.

    >>> _lost_seeds_text({-0.5: (0, 5), -0.25: (0, 5), 0.0: (4, 5), 1.0: (5, 5)})
    'all 5 seeds are lost at θ = +1, 4 of 5 at 0 and none at −0.5 and −0.25'
    """
    named: dict[tuple[int, int], list[str]] = {}
    for theta, found in counts.items():
        named.setdefault(found, []).append(theta_text(theta))
    words: list[str] = []
    for (count, seeds), names in sorted(named.items(), reverse=True):
        many = "none" if not count else f"all {seeds}" if count == seeds else f"{count} of {seeds}"
        words.append(f"{many} {'at' if words else 'seeds are lost at θ ='} {listed(names)}")
    return listed(words)


def _fewer_lost_text(pairs: Mapping[float, Comparison]) -> str:
    """Return which θ lose significantly fewer seeds than θ = 0, as a clause; empty if none does."""
    found = {theta_text(theta): each.p_loses_fewer for theta, each in pairs.items() if each.p_loses_fewer <= CHANCE}
    values = listed([f"{p:.2g}" for p in sorted({*found.values()})])
    verb = "loses" if len(found) == 1 else "lose"
    return f"; θ = {listed([*found])} {verb} fewer than θ = 0 (McNemar's exact one-sided p = {values})" if found else ""


# The table ------------------------------------------------------------------------------------------------------------


def _table(records: Sequence[Record], study: StudyResults) -> Plate:
    arms, ranges = arms_by_theta(study), study.working_ranges(study.arms)
    columns = ["", *(text for lr in study.lrs for text in (f"{lr:g}: loss", f"{lr:g}: ÷ θ = 0")), "Works over"]
    rows = []
    for theta, arm in arms.items():
        cells = [f"θ = {theta_text(theta)}"]
        for lr in study.lrs:
            cells += [_loss_cell(study, arm, lr), _ratio_cell(study, theta, lr)]
        rows.append((*cells, format_range(ranges[arm][0])))
    caption = (
        "The median test loss of the average at each θ, its ratio to θ = 0, and the learning rates that work. "
        f"{_widest_text({theta: ranges[arm][0] for theta, arm in arms.items()})}"
    )
    notes = (
        "Loss: the median test loss of the average, or how many seeds are lost.",
        f"÷ θ = 0: the ratio, seed by seed, with its {CONFIDENCE:.0%} interval, which is not corrected for the number "
        "of comparisons. If the two lose different numbers of seeds: McNemar's exact one-sided p of the difference.",
        f"Works over: the learning rates at which every seed's loss is at most {WORKS:g} times the best median of all; "
        "≥ if the range may extend beyond the rates tried.",
        GPA,
        describe_networks(study),
        *difference_notes(records, NAME),
        *settings_note(records, NAME),
        *time_note(study),
    )
    return Plate("sign-table", "The numbers of each θ", caption, Table(tuple(columns), tuple(rows)), notes)


def _widest_text(ranges: Mapping[float, Range | None]) -> str:
    """Return which θ work over the widest range of rates, as a sentence."""
    known = {theta: found for theta, found in ranges.items() if found is not None}
    if not known:
        return "No θ works at any of the rates."
    widest = max(known.values(), key=lambda found: found.width)
    names = [theta_text(theta) for theta, found in known.items() if math.isclose(found.width, widest.width)]
    return f"The widest range, {format_range(widest)}, is that of θ = {listed(names)}."


def _loss_cell(study: StudyResults, arm: str, lr: float) -> str:
    """Return the median loss, or how many seeds are lost."""
    losses = [*study.losses(arm, lr).values()]
    count, seeds = study.lost_count(arm, lr), len(losses)
    if not losses:
        return MISSING
    if 2 * count >= seeds:
        return f"{count} of {seeds} lost"
    return f"{median_loss(losses):#.3g}" + (f", {count} of {seeds} lost" if count else "")


def _ratio_cell(study: StudyResults, theta: float, lr: float) -> str:
    """Return the ratio to θ = 0, or the p of a different number of lost seeds."""
    found = ratios_to_zero(study, lr).get(theta)
    if found is None:
        return MISSING if theta or zero_mostly_lost(study, lr) else "1"
    fewer, more = found.only_other_lost > found.only_one_lost, found.only_one_lost > found.only_other_lost
    if fewer or more:
        p = found.p_loses_fewer if fewer else found.p_loses_more
        return f"{'fewer' if fewer else 'more'} lost, p = {p:.2g}"
    return found.size or MISSING
