"""The part `penalty`: what θ = −0.5 costs on CIFAR-10, with and without Adam's momentum, at two averaging rates.

If the cost is noise, theory says how much of it is left without momentum or with a longer memory (`prediction`). H4 of
`claims/study.md` says that it shrinks. θ = −0.5 is Generalized Primal Averaging.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import product

from torchbelay.lab.hypotheses import GPA, Hypothesis, hypotheses_plate, judge
from torchbelay.lab.part import MISSING, Plate, Record, Settings, Table, Tick
from torchbelay.lab.statistics import CONFIDENCE, one_sided, t_quantile

from . import run as study_run
from .analysis import is_lost, select
from .comparison import Comparison, compare
from .prediction import BETAS, RATES, REFERENCE, THETA, Cell, Share, committed
from .studies import averaging_name

NAME = "penalty"
TITLE = "What θ < 0 costs on CIFAR-10, and why"

ELSEWHERE = {"H4 β1": (0.0, 0.0895), "H4 c": (0.9, 0.005)}  # the cell that each test compares with the reference
HOW_TO_READ = (
    f"The share of the cost that is left: 1 is the whole cost at β1 = {REFERENCE[0]:g}, c = {REFERENCE[1]:g}, 0 is "
    "none, and below 0 θ = −0.5 has the lower loss, a gain. Theory has a share and its bracket; it agrees if the "
    "measured interval meets the bracket."
)
Losses = dict[int, tuple[float | None, float | None]]  # by seed: of θ = −0.5 and of θ = 0; None: lost


def plan(settings: Settings) -> tuple[int, str]:
    """Return the units of work, and one line that says what would be run."""
    return study_run.plan(NAME, settings)


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Train and measure; if that is impossible here, return the records that come with the package."""
    return study_run.run(NAME, settings, tick)


def draw(records: Sequence[Record]) -> list[Plate]:
    """Return the tables; none without runs."""
    if not select(records, "run", study=NAME):
        return []
    title = "Does the penalty shrink as theory says?"
    return [_table(records), hypotheses_plate("penalty-hypotheses", title, judge(hypotheses(records)))]


def losses_by_cell(records: Iterable[Record]) -> dict[Cell, Losses]:
    """Return the test losses of the averages of θ = −0.5 and of θ = 0 in every cell, for the seeds that have both."""
    runs = select(records, "run", study=NAME)
    rates = sorted({r["rate"] for r in runs}, reverse=True)  # of a study that was made shorter, they are others
    named = dict(zip(RATES, rates, strict=True)) if len(rates) == len(RATES) else {}
    found: dict[Cell, Losses] = {}
    for (beta1, rate), actual in ((cell, named.get(cell[1])) for cell in product(BETAS, RATES)):
        weights = "w2" if rate == RATES[0] else averaging_name(rate)
        ones = {r["seed"]: r["final"]["w2"] for r in runs if _is(r, THETA, beta1) and r["rate"] == actual}
        others = {r["seed"]: r["final"][weights] for r in runs if _is(r, 0.0, beta1)}
        found[beta1, rate] = {seed: (_kept(ones[seed]), _kept(others[seed])) for seed in sorted({*ones} & {*others})}
    return found


def _is(r: Record, theta: float, beta1: float) -> bool:
    return bool(r["theta"] == theta and r["beta1"] == beta1)


def _kept(losses: Record) -> float | None:
    loss: float | None = losses["test"]
    return None if is_lost(loss) else loss


def compare_losses(losses: Losses) -> Comparison:
    """Compare the losses of θ = −0.5 with those of θ = 0, seed by seed."""
    ones, others = ({seed: pair[i] for seed, pair in losses.items()} for i in (0, 1))
    return compare(ones, others)


def compare_with_best(cells: dict[Cell, Losses], cell: Cell) -> Comparison | None:
    """Compare θ = −0.5 in a cell with the EMA of the cell in which EMA has the lowest mean loss; None without one."""
    whole = {each: _mean_of_ema(losses) for each, losses in cells.items()}
    best = min((each for each in whole if whole[each] is not None), key=lambda each: whole[each] or 0.0, default=None)
    if best is None:
        return None
    ones, others = ({seed: pair[i] for seed, pair in cells[at].items()} for at, i in ((cell, 0), (best, 1)))
    return compare(ones, others)


def _mean_of_ema(losses: Losses) -> float | None:
    """Return EMA's mean loss; None if a seed is lost, or there is none."""
    known = [other for _, other in losses.values() if other is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(losses) else None


def penalties(losses: Losses) -> dict[int, float]:
    """Return the logarithm of the ratio of losses by seed: infinite with one lost run, 0 with two."""
    found = {}
    for seed, (one, other) in losses.items():
        first, second = (math.inf if loss is None else math.log(loss) for loss in (one, other))
        found[seed] = difference(first, second)
    return found


def difference(one: float, other: float) -> float:
    """Return one − other; 0 if both are the same infinity.

    >>> difference(math.inf, 1.0), difference(math.inf, math.inf), difference(1.0, 2.0)
    (inf, 0.0, -1.0)
    """
    return 0.0 if one == other else one - other


def hypotheses(records: Iterable[Record]) -> list[Hypothesis]:
    """Return both tests of H4, not yet judged."""
    cells = {cell: penalties(losses) for cell, losses in losses_by_cell(records).items()}
    predicted = {(each.beta1, each.rate): each for each in committed()}
    found = []
    for name, cell in ELSEWHERE.items():
        here, there = cells[REFERENCE], cells[cell]
        seeds = sorted({*here} & {*there})
        gains = [difference(here[seed], there[seed]) for seed in seeds]
        claim = f"θ = −0.5 costs less at {_place(cell)} than at {_place(REFERENCE)}"
        share = measured_share(here, there, predicted[cell])
        numbers = f"share of the cost that is left: {share}" if seeds else "no seeds"
        tests = one_sided(gains), one_sided([-gain for gain in gains])
        absent = bool(seeds) and sum(here[seed] for seed in seeds) <= 0  # nothing could shrink
        found.append(Hypothesis(name, claim, numbers, len(seeds), *tests, absent=absent))
    return found


def _place(cell: Cell) -> str:
    return f"β1 = {cell[0]:g}, c = {cell[1]:g}"


def share_interval(here: dict[int, float], there: dict[int, float]) -> tuple[float, float, float] | None:
    """Return the share of the penalty that is left, seed by seed: mean, low and high; None if that has no meaning."""
    pairs = [(there[seed], here[seed]) for seed in sorted({*here} & {*there})]
    if len(pairs) < 2 or not all(math.isfinite(left) and 0 < whole < math.inf for left, whole in pairs):
        return None
    shares = [left / whole for left, whole in pairs]
    n = len(shares)
    mean = math.fsum(shares) / n
    spread = math.sqrt(math.fsum((share - mean) ** 2 for share in shares) / (n - 1) / n)
    reach = t_quantile((1 + CONFIDENCE) / 2, n - 1) * spread
    return mean, mean - reach, mean + reach


def agrees(interval: tuple[float, float, float], predicted: Share) -> bool:
    """Whether the interval of a measured share meets the bracket of the prediction."""
    _, low, high = interval
    return low <= predicted.high and high >= predicted.low


def measured_share(here: dict[int, float], there: dict[int, float], predicted: Share) -> str:
    """Return the share of the penalty that is left, beside the predicted one, in words.

    >>> theory = Share(0.0, 0.0895, 0.26, 0.19, 0.66)
    >>> measured_share({0: 0.1, 1: 0.1}, {0: 0.03, 1: 0.031}, theory)
    '0.30 (0.24 to 0.37); theory 0.26 (0.19 to 0.66), agrees'
    """
    expected = f"theory {predicted.share:.2g} ({predicted.low:.2g} to {predicted.high:.2g})"
    found = share_interval(here, there)
    if found is None:
        return f"no share, because the reference has no penalty at every seed; {expected}"
    verdict = "agrees" if agrees(found, predicted) else "disagrees"
    mean, low, high = (f"{value:.2f}".replace("-", "−") for value in found)
    return f"{mean} ({low} to {high}); {expected}, {verdict}"


def _table(records: Sequence[Record]) -> Plate:
    cells = losses_by_cell(records)
    predicted = {(each.beta1, each.rate): each for each in committed()}
    reference = penalties(cells[REFERENCE])
    rows = []
    for cell, losses in cells.items():
        means = [_mean([pair[i] for pair in losses.values()]) for i in (1, 0)]
        share = MISSING if cell == REFERENCE else measured_share(reference, penalties(losses), predicted[cell])
        beside = compare_losses(losses), compare_with_best(cells, cell)
        sizes = [each.size if each and each.size else MISSING for each in beside]
        rows.append((_place(cell), f"{len(losses)}", *means, *sizes, share))
    columns = ("", "seeds", "EMA", "θ = −0.5", "θ = −0.5 ÷ EMA", "÷ the best EMA", "share of the cost left")
    table = Table(columns, tuple(rows), prose=columns[-1:])
    run = select(records, "run", study=NAME)[0]
    notes = (
        f"EDM on a part of CIFAR-10, {run['steps']:,} steps of Adam at {run['lr']:g} on batches of {run['batch']}.",
        "Means are over the seeds that are not lost; ratios are taken seed by seed, with their 95% interval.",
        "The best EMA is that of the row in which EMA has the lowest mean loss. It is chosen on the losses that are "
        "compared, which favours EMA a little.",
        f"{HOW_TO_READ} It is a mean of ratios: the logarithm of θ = −0.5 ÷ EMA over that at "
        f"{_place(REFERENCE)}, seed by seed, with the 95% t-interval of its mean.",
        "The prediction was computed by formulas, and committed before the first run: `lab/score/prediction.py`.",
        "FID was not measured in these runs. In the part cifar10, which has the setting of the first row, it rises "
        "more than the loss.",
        GPA,
    )
    caption = (
        "Test loss of the average, with and without Adam's momentum β1, at two averaging rates c. "
        f"At {_place(REFERENCE)} θ = −0.5 has {rows[0][4]} times EMA's loss."
    )
    return Plate("penalty-table", "What θ = −0.5 costs", caption, table, notes)


def _mean(losses: Sequence[float | None]) -> str:
    known = [loss for loss in losses if loss is not None]
    lost = [f"{len(losses) - len(known)} of {len(losses)} lost"] * (len(known) < len(losses))
    return ", ".join([*([f"{sum(known) / len(known):.4f}"] if known else []), *lost]) or MISSING
