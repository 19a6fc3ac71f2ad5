"""The figure and the tables of advice, from records alone."""

from collections.abc import Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from torchbelay.lab.hypotheses import GPA
from torchbelay.lab.part import Plate, Record, Table
from torchbelay.lab.report import style
from torchbelay.physics.run_fit import FAR, NOISY

from .analysis import Outcome, Outcomes, count_worse, problems, spread

GOAL = 1.1  # the largest regret of advice from known curvatures on quadratics
_TITLES = {"ring": "ring: score models of eight Gaussians", "MNIST": "MNIST: a small classifier"}
_ADVICE = style.BELAY_COLOUR


def draw_plates(records: Sequence[Record]) -> list[Plate]:
    """Draw all of them."""
    found = {name: Outcomes.of(records, name) for name in problems(records)}
    probed = {name: Outcomes.of(records, name, probed=True) for name in found}
    with style.house():
        return [_draw_regrets(found), _draw_table(found), *_draw_probed({k: v for k, v in probed.items() if v.all})]


def _draw_regrets(found: dict[str, Outcomes]) -> Plate:
    fig = style.figure(9.4, 4.0)
    for ax, (name, outcomes) in zip(fig.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        _draw_problem(ax, outcomes)
        ax.set_title(_TITLES[name])
    fig.axes[0].set_ylabel("loss of the average ÷ the grid's best")
    fig.axes[0].legend(loc="upper center", fontsize=8.5)
    everything = [each for outcomes in found.values() for each in outcomes.all]
    low = [each for outcomes in found.values() for each in outcomes.low]
    high = [each for outcomes in found.values() for each in outcomes.high]
    caption = (
        f"Advice from a run at half of its best rate or less made {count_worse(low)} worse; at the best rate or above "
        f"it, {count_worse(high)}. A warning of the fit came with "
        f"{sum(each.warned for each in everything if each.worse)} of the {sum(each.worse for each in everything)} that "
        f"became worse, and with {sum(each.warned for each in everything if not each.worse)} others."
    )
    return Plate(
        "advice-regret", "Advice from a run beside the run, and the best of a grid", caption, fig, _notes(found)
    )


def _draw_problem(ax: Axes, outcomes: Outcomes) -> None:
    lrs = outcomes.lrs
    ax.axhspan(1 / GOAL, GOAL, color="#eeeeee", lw=0, label="within 10% of the best")
    runs, advices = zip(*(_means(outcomes.at(lr)) for lr in lrs), strict=True)
    ax.plot(lrs, runs, color=style.EMA_COLOUR, marker="s", ms=4, label="the run, EMA .99")
    ax.plot(lrs, advices, color=_ADVICE, label="the advice from it")
    for warned, fill in ((False, _ADVICE), (True, "white")):
        mine = [each for each in outcomes.all if each.warned is warned]
        label = "one seed, warned" if warned else "one seed, no warning"
        x, y = [each.lr for each in mine], [each.regret for each in mine]
        ax.plot(x, y, "o", ms=4.5, color=_ADVICE, mfc=fill, ls="", label=label)
    ax.set(xscale="log", yscale="log", xlabel="learning rate of the run")
    ax.xaxis.set_major_locator(FixedLocator(lrs))
    ax.yaxis.set_major_locator(FixedLocator([1, 1.2, 1.5, 2, 3, 5, 10]))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _means(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Return the mean losses of the runs and of the advices."""
    return fmean(each.run for each in outcomes), fmean(each.regret for each in outcomes)


def _table(found: dict[str, Outcomes]) -> Table:
    columns = ("", "Run ÷ best", "Advice ÷ best", "Advice ÷ run", "Made worse", "Warned")
    rows = [
        (
            f"{name}, {lr:g}",
            f"{fmean(each.run for each in mine):.2f}",
            f"{fmean(each.regret for each in mine):.2f} ({spread([each.regret for each in mine])})",
            f"{fmean(each.ratio for each in mine):.2f}",
            count_worse(mine),
            f"{sum(each.warned for each in mine)} of {len(mine)}",
        )
        for name, outcomes in found.items()
        for lr in outcomes.lrs
        if (mine := outcomes.at(lr))
    ]
    return Table(columns, tuple(rows))


def _draw_table(found: dict[str, Outcomes]) -> Plate:
    within = sum(each.regret <= GOAL for outcomes in found.values() for each in outcomes.all)
    total = sum(len(outcomes.all) for outcomes in found.values())
    caption = (
        "Losses of the average, by the learning rate of the run that gave the advice: means over seeds and ranges. "
        f"Only {within} of {total} advices are within 10% of the grid's best: the advice is where to begin."
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
    return [Plate("advice-probe", "The regret of advice from measured curvatures", caption, _table(found), notes)]


def _notes(found: dict[str, Outcomes]) -> tuple[str, ...]:
    about = next(iter(found.values())).about
    return (
        _grid_words(found),
        f"The advice knows what recommend --from-run knows: 18 reports of one run with an EMA of decay "
        f"{about['decay']:g}, on other examples than the losses shown.",
        f"Warned: at the end of the run the loss of the weights is more than {NOISY:g} times that of the average, or "
        f"the quadratic explains the losses to {FAR:.0%} or worse. The first number was chosen on some of these runs.",
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
        *(_origin(outcomes.about) for outcomes in found.values() if "date" in outcomes.about),
        *(
            f"{name}: {len(outcomes.refusals)} runs gave no advice, as this one: {outcomes.refusals[0]['why']}."
            for name, outcomes in found.items()
            if outcomes.refusals
        ),
    )


def _listed(values: Sequence[float]) -> str:
    *first, last = (f"{value:g}".replace("-", "−") for value in values)
    return f"{', '.join(first)} and {last}" if first else last


def _origin(about: Record) -> str:
    """Return when and on what MNIST was trained, and why it was not trained anew."""
    made = f"MNIST took {about['device_s']} s on a {about['device']} in {about['date']} (torch {about['torch']})."
    return f"{made} These are the records that come with the package: {about['why']}" if "committed" in about else made
