"""The figure and the tables of advice, from records alone."""

import math
from collections.abc import Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from torchbelay.lab.hypotheses import GPA
from torchbelay.lab.part import Plate, Record, Table
from torchbelay.lab.report import style
from torchbelay.physics.region import LOUD, NEAR, QUIET

from .analysis import Outcome, Outcomes, count_worse, problems, spread

GOAL = 1.1  # the largest regret of advice from known curvatures on quadratics
_TITLES = {
    "ring": "ring: score models of eight Gaussians",
    "classifier": "MNIST: a small classifier",
    "autoencoder": "MNIST: a small autoencoder",
    "denoiser": "MNIST: a small denoiser",
}


def draw_plates(records: Sequence[Record]) -> list[Plate]:
    """Draw all of them."""
    found = {name: Outcomes.of(records, name) for name in problems(records)}
    probed = {name: Outcomes.of(records, name, probed=True) for name in found}
    with style.house():
        return [_draw_regrets(found), _draw_table(found), *_draw_probed({k: v for k, v in probed.items() if v.all})]


def _draw_regrets(found: dict[str, Outcomes]) -> Plate:
    wide = min(2, len(found))
    rows = math.ceil(len(found) / wide)
    fig = style.figure(4.7 * wide, 0.6 + 3.4 * rows)
    grid = fig.subplots(rows, wide, squeeze=False)
    for ax, (name, outcomes) in zip(grid.flat, found.items(), strict=False):
        _draw_problem(ax, outcomes)
        ax.set_title(_TITLES[name])
    for ax in list(grid.flat)[len(found) :]:
        ax.remove()
    for ax in grid[:, 0]:
        ax.set_ylabel("loss of the average ÷ the grid's best")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=2, fontsize=8.5)
    first, last = _rounds(found)
    caption = (
        "The loss over a grid's best: of the run that asks (blue), of one that follows its advice (orange), and at a "
        f"search's end (green). One advice made {count_worse(first)} runs worse, to up to "
        f"{max(each.ratio for each in first):.2f} times the loss; {_within(last)} searches end within 10%."
    )
    return Plate(
        "advice-regret", "Advice from runs beside the first run, and the best of a grid", caption, fig, _notes(found)
    )


def _rounds(found: dict[str, Outcomes]) -> tuple[list[Outcome], list[Outcome]]:
    """Return the outcomes of all first advices, and those of the searches that began with them."""
    return [each for one in found.values() for each in one.all], [each for one in found.values() for each in one.ends]


def _within(outcomes: Sequence[Outcome]) -> str:
    return f"{sum(each.regret <= GOAL for each in outcomes)} of {len(outcomes)}"


def _draw_problem(ax: Axes, outcomes: Outcomes) -> None:
    lrs = outcomes.lrs
    ax.axhspan(1 / GOAL, GOAL, color="#eeeeee", lw=0, label="within 10% of the best")
    ax.plot(
        lrs,
        [fmean(each.run for each in outcomes.at(lr)) for lr in lrs],
        color=style.EMA_COLOUR,
        marker="s",
        ms=4,
        label="the run that asks, EMA .99 (mean)",
    )
    for label, at, colour, shape in (
        ("a run that follows its advice (mean; each seed)", outcomes.at, style.BELAY_COLOUR, "o"),
        ("the end of a search (mean; each seed)", outcomes.ends_at, style.MATCHED_COLOUR, "^"),
    ):
        ax.plot(lrs, [fmean(each.regret for each in at(lr)) for lr in lrs], color=colour)
        ax.plot([], [], color=colour, marker=shape, ms=4, label=label)
        points = [(lr, each.regret) for lr in lrs for each in at(lr)]
        ax.plot(*zip(*points, strict=True), shape, ms=4, color=colour, ls="", alpha=0.7)
    ax.set(xscale="log", yscale="log", xlabel="learning rate of the run")
    ax.xaxis.set_major_locator(FixedLocator(lrs))
    ax.yaxis.set_major_locator(FixedLocator([1, 1.2, 1.5, 2, 3, 5, 10]))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _table(found: dict[str, Outcomes], *, probed: bool = False) -> Table:
    more = ("Warned",) if probed else ("Noise", "Search ÷ best", "More runs")
    columns = ("", "Run ÷ best", "Advice ÷ best", "Advice ÷ run", "Made worse", *more)
    rows = [
        (
            f"{name}, {lr:g}",
            f"{fmean(each.run for each in mine):.2f}",
            _mean([each.regret for each in mine]),
            f"{fmean(each.ratio for each in mine):.2f}",
            count_worse(mine),
            *((f"{sum(each.warned for each in mine)} of {len(mine)}",) if probed else _more(outcomes, lr)),
        )
        for name, outcomes in found.items()
        for lr in outcomes.lrs
        if (mine := outcomes.at(lr))
    ]
    return Table(columns, tuple(rows))


def _more(outcomes: Outcomes, lr: float) -> tuple[str, str, str]:
    """Return the noise of the runs at a rate, what searches from there led to, and how many runs these took."""
    shares = [each.share for each in outcomes.at(lr) if each.share is not None]
    noise = f"{min(shares):.1%} to {max(shares):.1%}" if shares else "–"
    took = [count for each, count in zip(outcomes.ends, outcomes.took, strict=True) if each.lr == lr]
    runs = f"{min(took)}" if min(took) == max(took) else f"{min(took)} to {max(took)}"
    return noise, _mean([each.regret for each in outcomes.ends_at(lr)]), runs


def _mean(regrets: Sequence[float]) -> str:
    return f"{fmean(regrets):.2f} ({spread(regrets)})"


def _draw_table(found: dict[str, Outcomes]) -> Plate:
    first, last = _rounds(found)
    caption = (
        "Losses of the average, by the learning rate of the run that gave the advice: means over seeds and ranges. "
        f"{_within(first)} first advices are within 10% of the grid's best, and {_within(last)} searches."
    )
    return Plate("advice-table", "The regret of advice from a run", caption, _table(found), _notes(found))


def _draw_probed(found: dict[str, Outcomes]) -> list[Plate]:
    """Return the table of advice from measured curvatures, if there is any."""
    everything = [each for outcomes in found.values() for each in outcomes.all]
    if not everything:
        return []
    within = sum(each.regret <= GOAL for each in everything)
    caption = (
        "Advice from the curvatures at the end of a run, by the learning rate of the run: means over seeds and ranges. "
        f"{within} of {len(everything)} advices are within 10% of the grid's best, and {count_worse(everything)} are "
        "worse than the run."
    )
    notes = (
        _grid_words(found),
        "The advice knows what recommend --probe --batch knows: Hessian-vector products at the end of a run with an "
        "EMA, in the units of Adam's steps, and the size of a batch. Warned: it came with a warning, which was not "
        "heeded.",
        *_problem_words(found),
    )
    return [
        Plate(
            "advice-probe", "The regret of advice from measured curvatures", caption, _table(found, probed=True), notes
        )
    ]


def _notes(found: dict[str, Outcomes]) -> tuple[str, ...]:
    about = next(iter(found.values())).about
    return (
        _grid_words(found),
        f"The advice knows what recommend --from-run knows: 18 reports of one run with an EMA of decay "
        f"{about['decay']:g}, on other examples than the losses shown.",
        f"From one run: at most {NEAR:g} times its learning rate if noise is at most {QUIET:.0%} of what the run had "
        f"to gain, at most that rate itself up to {LOUD:.0%}, and above it a quarter to a half of it. The averaging "
        f"rate changes at most by a factor of {NEAR:g}.",
        "Searches: each advice is from all runs so far, and is followed by an EMA. They end if lower and higher "
        f"rates near that of the best run are no better, or after {about['rounds']} advices. A run whose losses cannot "
        "be fitted counts as lost. The run with the best reports is kept. Advice with θ < 0 is followed too, beside an "
        "EMA that the next advice is from.",
        "How the rules came about: the bounds on noise were chosen on the ring, the classifier and three other "
        "problems, the search after a trial without it on the ring, the classifier and the autoencoder. The denoiser "
        "was not looked at before; one that predicts the noise in place of the image was, and every learning rate was "
        "within 2% of its best. Then a review found that the search took rates at which a quadratic diverges for runs "
        "that were worse. All was measured again after that, with other seeds. Later the search for the best setting "
        "of a quadratic was mended, which had stopped too soon, and all was measured again with the same seeds.",
        "The best of the grid is the setting with the lowest mean loss over the seeds; a seed's own best may be lower.",
        *(
            f"{name}: an EMA of decay {about['decay']:g} at the best of its learning rates has {one.tuned:.2f} times "
            "the loss of the grid's best."
            for name, one in found.items()
        ),
        *_problem_words(found),
    )


def _grid_words(found: dict[str, Outcomes]) -> str:
    about = next(iter(found.values())).about
    size = len(about["thetas"]) * len(about["rates"]) * len(about["lrs"])
    return (
        f"The grid has {size} settings: θ of {_listed(about['thetas'])}, averaging rates of {_listed(about['rates'])}, "
        f"and the {len(about['lrs'])} learning rates; its best has the lowest mean over seeds. {GPA}"
    )


def _problem_words(found: dict[str, Outcomes]) -> tuple[str, ...]:
    """Return what was trained, when, and which runs gave no advice."""

    def words(name: str, outcomes: Outcomes) -> str:
        about, (theta, rate, lr) = outcomes.about, outcomes.best
        return (
            f"{name}: networks of {about['weights']:,} weights, {about['steps']:,} steps of Adam on batches of "
            f"{about['batch']}, {about['seeds']} seeds; the grid's best is θ = {theta:g}, averaging rate {rate:g}, "
            f"learning rate {lr:g}.".replace("-", "−")
        )

    return (
        *(words(name, outcomes) for name, outcomes in found.items()),
        *_origin({name: outcomes.about for name, outcomes in found.items() if "date" in outcomes.about}),
        *(
            f"{name}: {len(outcomes.refusals)} runs gave no advice, as this one: {outcomes.refusals[0]['why']}."
            for name, outcomes in found.items()
            if outcomes.refusals
        ),
    )


def _listed(values: Sequence[float]) -> str:
    *first, last = (f"{value:g}".replace("-", "−") for value in values)
    return f"{', '.join(first)} and {last}" if first else last


def _origin(abouts: dict[str, Record]) -> tuple[str, ...]:
    """Return when and on what networks of MNIST were trained, and why they were not trained anew."""
    if not abouts:
        return ()
    about = next(iter(abouts.values()))
    took = ", ".join(f"{name} {each['device_s']} s" for name, each in abouts.items())
    made = f"Time of the networks of MNIST: {took}, on a {about['device']} in {about['date']} (torch {about['torch']})."
    return (
        f"{made} These are the records that come with the package: {about['why']}" if "committed" in about else made,
    )
