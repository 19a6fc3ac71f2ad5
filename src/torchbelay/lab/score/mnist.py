"""Table 1, Figure 4 and the appendix: NCSNv2 on MNIST, over learning rates and with the controls that the paper lacks.

The paper trains at one rate, 5e-2. Here EMA, the EMA that is matched to BELAY and BELAY itself are trained over a range
of rates, every arm on the same batches and noise, and then for longer at the best rates and at the paper's.
"""

from collections.abc import Sequence
from typing import Any

from torchbelay.lab.arms import BELAY, EMA, MATCHED, PLAIN
from torchbelay.lab.part import Plate, Record, Settings, Tick
from torchbelay.lab.report import style

from . import run as studied
from .analysis import ARMS, HEAVIER, PAPER_LR, Comparison, Study, compare, confounded, fid_at_best
from .figures import (
    LEFT_OUT,
    PAIRED,
    about,
    colour,
    curve,
    differs,
    listed,
    loss_axis,
    lost,
    marker,
    over_training,
    pair,
    plain_curve,
    ratio_axis,
    settings,
    ticks,
    times,
)
from .tables import printed, result, results, samples, sampling, speed

NAME = "mnist"
TITLE = "MNIST: BELAY and EMA on a score model"

PAPER = {BELAY: ("0.042", "0.040", "15.2"), EMA: ("0.056", "0.061", "18.1")}  # train, test, FID: Table 1 at rate 5e-2
PAIRS = ((BELAY, EMA), (BELAY, MATCHED), (MATCHED, EMA))
NOMINAL, EFFECTIVE = "nominal learning rate", "effective learning rate"


def plan(settings: Settings) -> tuple[int, str]:
    """How much work there is, and what it is."""
    return studied.plan(NAME, settings)


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Train and measure, or, where that cannot be done, the records that come with the package."""
    return studied.run(NAME, settings, tick)


def draw(records: Sequence[Record]) -> list[Plate]:
    """What there are records of; studies that were not run have no figure."""
    with style.house():
        found = [_rates(records), _pairs(records), _table(records), samples(records, NAME, "Figure 4: samples")]
        return [plate for plate in [*found, _masses(records), speed(records, NAME)] if plate is not None]


# Loss against learning rate -------------------------------------------------------------------------------------------


def _rates(records: Sequence[Record]) -> Plate | None:
    study = Study(records, "rates", ARMS)
    if not study:
        return None
    fig = style.figure(9.0, 4.6)
    axes: Any = fig.subplots(1, 2, sharey=True)
    rows = [arm for each in study.arms for arm in ((PLAIN, EMA) if each == EMA else (each,))]
    everything = [loss for arm in study.arms for lr in study.lrs for loss in _both(study, arm, lr)]
    for ax, effective in zip(axes, (False, True), strict=True):
        axis = loss_axis(ax, everything, rows, (float(test) for _, test, _ in PAPER.values()))
        for arm in study.arms:
            rates = study.rates(arm)
            x = [study.effective(arm, lr) for lr in rates] if effective else rates
            own, average = ([[*study.losses(arm, lr, w).values()] for lr in rates] for w in ("w1", "w2"))
            if arm == EMA:
                look: dict[str, Any] = {"linewidth": 1.0, "marker": "s", "markersize": 3, "label": PLAIN}
                curve(ax, x, own, style.PLAIN_COLOUR, axis, PLAIN, **look)
            else:
                plain_curve(ax, x, own, colour(arm), linewidth=0.9, linestyle=":")
            curve(ax, x, average, colour(arm), axis, arm, linewidth=2, marker=marker(arm), markersize=5, label=arm)
        ax.set(xscale="log", xlabel=EFFECTIVE if effective else NOMINAL)
        ticks(ax.xaxis, study.lrs)
        ax.tick_params(axis="x", labelsize=8)
    for name, (_, test, _) in PAPER.items():
        at = (PAPER_LR, float(test))
        axes[0].plot(*at, "*", color=colour(name), markersize=11, markeredgecolor="white", zorder=5)
        axes[0].annotate(
            f"paper, {name}", at, xytext=(-7, -1), textcoords="offset points", fontsize=8, ha="right", va="center"
        )
    axes[0].set_ylabel("test loss, mean over pixels")
    axes[1].legend(fontsize=8, loc="lower right", labelspacing=0.3)
    best = [f"{lr:g} ({arm})" for arm in study.arms if (lr := study.best_rate(arm)) is not None]
    caption = (
        "Test loss against the nominal learning rate (left) and the effective one, at which the centre of mass moves "
        f"(right). {lost(study)} The lowest training loss without a lost seed is at {', '.join(best)}. Stars: what the "
        f"paper prints for {PAPER_LR:g}."
    )
    notes = (
        "Bold: the average w2; thin: the weights w1 (grey: those of EMA, that is no averaging; dotted: of the others). "
        "The median over the seeds, and the band from the best to the worst; a cross in the strip: at least half of "
        "the seeds are lost.",
        about(study),
        *(differs(records, study.name) if Study(records, "table1", ARMS) else ()),  # else Table 1 is of these runs
        *settings(records, study.name),
        *times(study),
    )
    return Plate("mnist-rates", "Loss against learning rate", caption, fig, notes)


def _both(study: Study, arm: str, lr: float) -> list[float | None]:
    return [*study.losses(arm, lr).values(), *study.losses(arm, lr, "w1").values()]


# Paired differences ---------------------------------------------------------------------------------------------------


def _pairs(records: Sequence[Record]) -> Plate | None:
    study = Study(records, "rates", ARMS)
    there = [(one, other) for one, other in PAIRS if one in study.arms and other in study.arms]
    if not there:
        return None
    chosen = {arm: study.at_best(arm) for arm in study.arms}
    best = {key: compare(chosen[key[0]], chosen[key[1]]) for key in there}
    along = {key: [study.compare(*key, lr) for lr in study.lrs] for key in there if key[0] == BELAY}
    fig = style.figure(9.0, 3.9)
    axes: Any = fig.subplots(1, 1 + len(along), width_ratios=[0.8, *[1.0] * len(along)], squeeze=False)
    ratio_axis(axes[0, 0], [*best.values()])
    for x, key in enumerate(best):
        pair(axes[0, 0], x, key, chosen[key[0]], chosen[key[1]])
    names = [f"{one}\n÷ {other}".replace("matched ", "matched\n") for one, other in best]
    axes[0, 0].set_xticks(range(len(best)), names, fontsize=8)
    axes[0, 0].set(title="each at its own best rate", ylabel="ratio of test losses", xlim=(-0.6, len(best) - 0.4))
    for ax, key in zip(axes[0, 1:], along, strict=True):
        ratio_axis(ax, [each for row in along.values() for each in row])
        for lr in study.lrs:
            pair(ax, lr, key, study.kept(key[0], lr), study.kept(key[1], lr))
        ax.set(xscale="log", xlabel=NOMINAL, title=f"{key[0]} ÷ {key[1]}")
        ax.set_xlim(study.lrs[0] / 1.6, study.lrs[-1] * 1.6)
        ticks(ax.xaxis, study.lrs)
        ax.tick_params(axis="x", labelsize=7)
    at_best = "; ".join(f"{one} ÷ {other} {found.said(one, other)}" for (one, other), found in best.items())
    here = {key: row[study.lrs.index(PAPER_LR)] for key, row in along.items() if PAPER_LR in study.lrs}
    at_paper = "; ".join(f"{one} ÷ {other} {found.said(one, other)}" for (one, other), found in here.items())
    caption = (
        f"Left, each at the rate that the other seeds choose for it by their training loss: {at_best}. Right, at the "
        f"same nominal rate; at the paper's, {PAPER_LR:g}: {at_paper or 'not run'}. What is left against the matched "
        "EMA, which has BELAY's effective rate and memory, is BELAY itself."
    )
    notes = (f"{PAIRED}. {LEFT_OUT} Test losses of the average w2.",)
    return Plate("mnist-pairs", "BELAY against its controls, seed by seed", caption, fig, notes)


# Table 1 --------------------------------------------------------------------------------------------------------------


def _table(records: Sequence[Record]) -> Plate | None:
    study = Study(records, "table1", (*ARMS, *HEAVIER)) or Study(records, "rates", ARMS)
    if not study:
        return None
    long = study.name == "table1"
    rows = [printed(f"{arm} at {PAPER_LR:g}", *PAPER[arm]) for arm in (BELAY, EMA)]
    for arm in study.arms:
        wanted = dict.fromkeys(study.rates(arm) if long else (study.best_rate(arm), PAPER_LR))
        rows += [result(records, study, arm, lr) for lr in wanted if lr is not None and study.at(arm, lr)]
    which = f"Ours are the long runs, at the rates that the short ones found best and at the paper's.{_tuned(study)}"
    if not long:
        which = (
            "The long runs with FID have not been run yet: until they are, ours are the short ones, at each arm's best "
            "rate and at the paper's, and nothing here can be set beside the paper's FID."
        )
    caption = (
        f"{which} Mean ± standard deviation over the seeds that are not lost. w2 is the average, w1 are the weights; "
        f"which of them the paper measured it does not say. {sampling(records, study.name) if long else ''} "
        f"{_fids(records, study)} FIDs of MNIST can be compared within one study only."
    )
    notes = (about(study), *differs(records, study.name), *(times(study) if long else ()))
    title = "Table 1: losses and FID beside the paper's"
    if not long:
        title = "Table 1: losses beside the paper's; the long runs with FID are still to come"
    return Plate("mnist-table1", title, " ".join(caption.split()), results(rows), notes)


def _tuned(study: Study) -> str:
    """What a heavier BELAY among the long runs is, as a sentence."""
    there = [arm for arm in study.arms if arm in HEAVIER]
    return f" {listed(there)} is BELAY tuned on the short ones, in rate and mass." if there else ""


def _fids(records: Sequence[Record], study: Study) -> str:
    """BELAY's FID over its rivals', as a sentence; that of the tuned one too."""
    pairs = [(BELAY, EMA), (BELAY, MATCHED), *((arm, EMA) for arm in study.arms if arm in HEAVIER)]
    best = {arm: fid_at_best(records, study, arm) for arm in study.arms}
    every = {(a, b): compare(best[a], best[b]) for a, b in pairs if a in best and b in best}
    found = {key: each for key, each in every.items() if each.seeds}
    said = "; ".join(f"{_said(*key, each)}{_of(each.seeds, study)}" for key, each in found.items())
    why = confounded(records, study, [*best])
    return f"FID of w2, each at its own best rate, seed by seed: {said}.{f' {why}.' if why else ''}" if found else ""


def _said(one: str, other: str, found: Comparison) -> str:
    """The ratio of two arms and what they lost."""
    return f"{one} ÷ {other}{':' if found.point is None else ''} {found.said(one, other)}"


def _of(seeds: int, study: Study) -> str:
    """How many seeds images were made of, if those are fewer than were trained."""
    return f", {seeds} of {len(study.seeds)} seeds drawn" if seeds < len(study.seeds) else ""


# The appendix's masses ------------------------------------------------------------------------------------------------


def _masses(records: Sequence[Record]) -> Plate | None:
    arms = (EMA, BELAY, *HEAVIER)
    study = Study(records, "m1", arms) or Study(records, "rates", arms)
    lrs = [lr for lr in study.lrs if any(study.at(arm, lr) for arm in HEAVIER)]
    drawn = [lr for lr in lrs if any(study.lost(arm, lr) < len(study.at(arm, lr)) for arm in study.arms)]
    if not lrs:
        return None
    fig = style.figure(9.0 if len(drawn) > 1 else 7.0, 3.9)
    axes: Any = fig.subplots(1, max(1, len(drawn)), squeeze=False)
    for ax, lr in zip(axes[0], drawn or lrs[:1], strict=True):
        over_training(ax, study, lr)
        ax.set(xlabel="step", title=f"learning rate {lr:g}")
    axes[0, 0].set_ylabel("test loss, mean over pixels")
    axes[0, 0].legend(fontsize=8)
    against = [
        f"at {lr:g} {arm} ÷ EMA {study.compare(arm, EMA, lr).said(arm, EMA)}"
        for lr in drawn
        for arm in study.arms
        if arm != EMA and study.compare(arm, EMA, lr).seeds
    ]
    nothing = listed([f"{lr:g}" for lr in lrs if lr not in drawn])
    ends = f" Test loss of w2 at the end: {'; '.join(against)}." if against else ""
    caption = (
        "The heavier the model (m1), the less it feels the average; EMA is the limit. BELAY without a number has the "
        "paper's m1 of 2e3. Bold: the median of the average w2 over the seeds, which are the hairs; dotted: of the "
        f"weights w1.{ends}{f' At {nothing} every run of every arm is lost.' if nothing else ''}"
    )
    return Plate("mnist-m1", "Appendix: BELAY's mass m1", caption, fig)
