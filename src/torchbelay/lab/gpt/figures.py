"""The figures and tables of the language model."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from matplotlib.ticker import LogLocator, StrMethodFormatter

from torchbelay.lab.answer import Answer
from torchbelay.lab.hypotheses import GPA, hypotheses_plate
from torchbelay.lab.part import MISSING, Plate, Record, Table
from torchbelay.lab.records import select
from torchbelay.lab.report import style
from torchbelay.lab.report.words import listed
from torchbelay.lab.score.figures import theta_colour
from torchbelay.lab.statistics import CONFIDENCE, ratio
from torchbelay.physics.inner_momentum import stable_range, theta_floor
from torchbelay.physics.methods import centred

from .analysis import CURVES, NEAR, Runs, format_ratio, judged, ratio_of
from .arms import ARMS, CONSTANT, COSINE, QUARTER, WATCHING, Arm
from .effects import effects_plate

_OTHERS = {"cosine": "#CC79A7", "schedule-free": "#009E73", "Lookahead": "#E69F00"}
NAMES = {CONSTANT.name: "θ = 0 (EMA)", "θ = +0.25": "θ = +0.25 (BELAY)"}


def draw(records: Sequence[Record]) -> list[Plate]:
    """Return the plates."""
    (about,) = select(records, "protocol")
    runs = Runs(records)
    found = (
        _curves(runs, about),
        _floor(runs, about),
        _arms(runs, about),
        effects_plate(runs, about),
        _hypotheses(runs),
    )
    return [plate for plate in found if plate is not None]


def colour(arm: Arm) -> str:
    """Return the colour of an arm: that of its θ, or its own."""
    return _OTHERS[arm.name] if arm.theta is None else theta_colour(arm.theta)


def title(arm: str) -> str:
    """Return the name of an arm as the figure has it."""
    return NAMES.get(arm, arm)


def _curves(runs: Runs, about: Record) -> Plate:
    fig = style.figure(9.0, 4.2)
    left, right = fig.subplots(1, 2)
    known = [r["losses"]["w2"] for r in runs.judging if r["losses"]["w2"] is not None]
    for name in runs.arms:
        _draw_curve(left, runs, ARMS[name])
        if ARMS[name] not in CURVES:
            _draw_tuning(left, runs, ARMS[name])
    left.set(ylabel="loss of the average, nats per byte")
    if known:
        left.set_ylim(0.99 * min(known), 1.2 * min(known))
        left.legend(fontsize=7)
    left.set_title("On other text than for tuning")
    _draw_sharpness(right, runs, about["rate"])
    right.set_title("Curvature at the end, times the rate")
    for ax in (left, right):
        ax.set(xscale="log", xlabel="learning rate")
        ax.minorticks_off()
        ax.set_xticks(runs.lrs, [f"{lr:g}" for lr in runs.lrs])
    excess, above = _limit_words(runs, about["rate"])
    notes = (
        f"Left: a line joins the means over seeds; bars are {CONFIDENCE:.0%} intervals of the mean's ratio to the best "
        "loss of all, and a rate at which a seed is lost has no point. Dotted: arms that are judged at their best rate "
        "alone; at the others, the loss of their first seed for tuning.",
        "Right: the learning rate times the eigenvalue of largest size of the Hessian in the units of Adam's steps. "
        "Dotted: the limits that the theorem on inner momentum gives each θ on a quadratic.",
        f"The curvature was measured once per point, after the last of {about['steps']:,} steps of the first seed for "
        "tuning. At earlier steps it is not known.",
        _floor_words(runs, about["rate"]),
        *above,
        *_without_point(runs),
        GPA,
        *_at_largest(runs),
        *_words(about),
    )
    caption = (
        "Loss of the average over the learning rate (left), and the curvature at the end beside the limits of a "
        f"quadratic (right){excess}. {_range_words(runs)}"
    )
    return Plate("gpt-rates", "Which spring bears the widest range of learning rates?", caption, fig, notes)


def _floor_words(runs: Runs, rate: float) -> str:
    """Return where θ's floor is drawn, and which arms lie below their floor."""
    family = [arm for arm in map(ARMS.__getitem__, runs.arms) if arm.theta is not None]
    floor = f"{theta_floor(CONSTANT.beta1, rate):.2f}".replace("-", "−")
    below = [title(arm.name) for arm in family if arm.theta is not None and arm.theta < theta_floor(arm.beta1, rate)]
    found = f"below it: {listed(below)}" if below else "every θ drawn lies above it"
    measured = any(_sharpness(runs, arm) for arm in family)
    where = "the next figure has it" if measured else "it is not a line of this figure"
    return (
        f"θ's floor is a bound on θ, and no axis here is θ: {where}. At β1 = "
        f"{CONSTANT.beta1:g} and averaging rate {rate:g} it is {floor}; {found}."
    )


def _draw_curve(ax: Any, runs: Runs, arm: Arm) -> None:
    points = []
    for lr in runs.lrs:
        losses = [*runs.losses(arm.name, lr).values()]
        known = [loss for loss in losses if loss is not None]
        if known and len(known) == len(losses):
            mean = sum(known) / len(known)
            spread = ratio(known, [mean] * len(known))
            reach = (
                (mean - mean * spread.low / spread.mean, mean * spread.high / spread.mean - mean)
                if spread
                else (0.0, 0.0)
            )
            points.append((lr, mean, *reach))
    if points:
        x, y, low, high = zip(*points, strict=True)
        line = "--" if arm is QUARTER else "-"  # its colour is near that of θ = −0.5
        ax.errorbar(
            x,
            y,
            (low, high),
            color=colour(arm),
            linestyle=line,
            marker="o",
            markersize=3,
            label=title(arm.name),
            capsize=2,
        )


def _draw_tuning(ax: Any, runs: Runs, arm: Arm) -> None:
    """Draw the loss of the first seed for tuning over the rate, on the text for judging."""
    label = None if any(r["arm"] == arm.name for r in runs.judging) else f"{title(arm.name)}, tuning"
    found = [r for r in runs.tuning if r["arm"] == arm.name and r["fresh"] is not None]
    first = sorted((r["lr"], r["fresh"]) for r in found if r["seed"] == min(r["seed"] for r in found))
    if first:
        ax.plot(*zip(*first, strict=True), color=colour(arm), linestyle=":", linewidth=1, label=label)


def _sharpness(runs: Runs, arm: Arm) -> list[Record]:
    """Return the runs of an arm whose curvature at the end was measured and is positive, as that of a limit is."""
    found = [r for r in runs.tuning if r["arm"] == arm.name and (r.get("sharpness") or 0) > 0]
    return sorted(found, key=lambda r: r["lr"]) if arm.theta is not None else []


def _without_point(runs: Runs) -> tuple[str, ...]:
    """Return which runs have no point because their curvature is negative, and how good they are, as a note."""
    measured, negative, words = 0, 0, []
    for arm in (arm for arm in ARMS.values() if arm.theta is not None):
        found = [r for r in runs.tuning if r["arm"] == arm.name and r.get("sharpness") is not None]
        own = sorted((r for r in found if r["sharpness"] <= 0), key=lambda r: r["lr"])
        measured, negative = measured + len(found), negative + len(own)
        if own:
            best = min(loss for r in found if (loss := r["losses"]["w2"]) is not None)
            losses = listed([f"{_mean([r['losses']['w2']])} at {r['lr']:g}" for r in own])
            words.append(f"{title(arm.name)} with a loss of {losses} ({best:.4f} at the best rate)")
    if not negative:
        return ()
    return (
        f"{negative} of {measured} measured runs have no point, because their eigenvalue of largest size is negative: "
        f"{'; '.join(words)}. These losses are of the seed that was measured, on the text for tuning.",
    )


def _limit(arm: Arm, rate: float) -> float:
    """Return the largest rate × curvature at which the arm is stable on a quadratic."""
    assert arm.theta is not None
    return stable_range(centred(theta=arm.theta, rate=rate).coupling(1, 1.0), arm.beta1)


def _draw_sharpness(ax: Any, runs: Runs, rate: float) -> None:
    for arm in ARMS.values():
        if found := _sharpness(runs, arm):
            points = [(r["lr"], r["lr"] * r["sharpness"]) for r in found]
            ax.plot(*zip(*points, strict=True), color=colour(arm), marker="o", markersize=3, label=title(arm.name))
            ax.axhline(_limit(arm, rate), color=colour(arm), linestyle=":", linewidth=1)
    ax.set(yscale="log", ylabel="x = rate × curvature")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0, 7.0)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=7)


def _floor(runs: Runs, about: Record) -> Plate | None:
    """Draw theorem 2's limit and floor over θ, with the learning rate × curvature of the runs."""
    rate, beta = about["rate"], CONSTANT.beta1
    found = [(arm, r) for arm in ARMS.values() if arm.beta1 == beta for r in _sharpness(runs, arm)]
    if not found:
        return None
    floor = theta_floor(beta, rate)
    fig = style.figure(6.4, 4.0)
    ax: Any = fig.subplots()
    fine = [-0.98 + 1.53 * i / 400 for i in range(401)]
    limits = [stable_range(centred(theta=theta, rate=rate).coupling(1, 1.0), beta) for theta in fine]
    ax.plot(fine, limits, color="#333333", label="limit of theorem 2")
    ax.axvline(floor, color="#333333", linestyle=":", label=f"floor {floor:.2f}".replace("-", "−"))
    rates = sorted({r["lr"] for _, r in found})
    for arm, r in found:
        size = 3.0 + 1.2 * rates.index(r["lr"])
        x = r["lr"] * r["sharpness"]
        ax.plot(arm.theta, x, "o", color=colour(arm), markersize=size, markerfacecolor="none")
    ax.plot([], [], "o", color="#777777", markerfacecolor="none", label="runs; larger: a larger rate")
    ax.set(yscale="log", xlim=(-1.0, 0.6), xlabel="θ    (repels ← 0 = EMA → attracts)", ylabel="x = rate × curvature")
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.legend(fontsize=8, loc="lower right")
    low = list(dict.fromkeys(title(arm.name) for arm, _ in found if arm.theta is not None and arm.theta < floor))
    above = sum(r["lr"] * r["sharpness"] > _limit(arm, rate) for arm, r in found)
    caption = (
        "The largest stable rate × curvature of a quadratic over θ (line) and θ's floor (dotted), with the curvature "
        f"of the runs at their end (circles). Below the floor: {listed(low) or 'no run'}; above the limit: {above} of "
        f"{len(found)}."
    )
    notes = (
        f"Theorem 2 at the study's momentum, β1 = {beta:g}, and averaging rate, c = {rate:g}; left of the floor the "
        "range collapses.",
        f"Rates of the circles: {listed([f'{lr:g}' for lr in rates])}, where there is a point. The curvature is that "
        "of the figure before, in the units of Adam's steps.",
        *_without_point(runs),
        GPA,
    )
    return Plate("gpt-floor", "The limit and the floor of θ", caption, fig, notes)


def _above_limits(runs: Runs, rate: float) -> list[tuple[str, list[Record], int]]:
    """Return, for each arm with points, its runs above the limit of a quadratic and the number of its points."""
    return [
        (title(arm.name), [r for r in found if r["lr"] * r["sharpness"] > _limit(arm, rate)], len(found))
        for arm in ARMS.values()
        if (found := _sharpness(runs, arm))
    ]


def _limit_words(runs: Runs, rate: float) -> tuple[str, tuple[str, ...]]:
    """Return how many points lie above the limit of a quadratic, for the caption; and what follows, as a note."""
    found = _above_limits(runs, rate)
    above = [r for _, some, _ in found for r in some]
    if not above:
        return "", ()
    count = f"{len(above)} of {sum(points for _, _, points in found)} points"
    each = listed([f"{name} {len(some)} of {points}" for name, some, points in found])
    lost = sum(r["losses"]["w2"] is None for r in above)
    follows = (
        f"{lost} of those runs diverged."
        if lost
        else "None of those runs diverged, so the limit for a quadratic is not one for this network."
    )
    return f"; {count} lie above theirs", (f"{count} at the right lie above the limit of their θ: {each}. {follows}",)


def _at_largest(runs: Runs) -> tuple[str, ...]:
    """Return what each curve ends at, which may be far above the figure."""
    lr, words = runs.lrs[-1], []
    for arm in CURVES:
        losses = [*runs.losses(arm.name, lr).values()]
        lost = sum(loss is None for loss in losses)
        if losses:
            words.append(f"{title(arm.name)} {_mean(losses)}" + (f" ({lost} of {len(losses)} lost)" if lost else ""))
    return (f"At {lr:g}, the mean losses are: {listed(words)}.",) if words else ()


def _range_words(runs: Runs) -> str:
    """Return which hypotheses about the range of rates hold, as a sentence."""
    found = [h for h in judged(runs) if h.id.startswith("H2")]
    if any(h.answer in (Answer.OPEN, Answer.UNDECIDED) and not h.judged for h in found):
        return "Too few seeds have all their runs for a verdict."
    wider = [h.id.removeprefix("H2 ") for h in found if h.answer is Answer.HOLDS]
    if not wider:
        return f"No θ < 0 is shown to have a wider range of rates within {NEAR - 1:.0%} of its best than EMA."
    return f"The range of rates within {NEAR - 1:.0%} of the best is wider than EMA's with {listed(wider)}."


def _arms(runs: Runs, about: Record) -> Plate | None:
    columns = ("", "Best rate", "Loss of the average", "÷ EMA, each at its best", "Loss of the weights", "Seeds lost")
    if not runs.tuned(CONSTANT.name):
        return None
    rows = []
    reference = (CONSTANT.name, runs.best_lr(CONSTANT.name))
    for arm in filter(runs.tuned, runs.arms):
        lr = runs.best_lr(arm)
        losses, own = ([*runs.losses(arm, lr, weights).values()] for weights in ("w2", "w1"))
        beside = "1" if arm == CONSTANT.name else format_ratio(ratio_of(runs, (arm, lr), reference))
        lost = f"{sum(loss is None for loss in losses)} of {len(losses)}"
        rows.append((title(arm), f"{lr:g}", _mean(losses), beside, _mean(own), lost))
    at = reference[1]
    others = [f"{name}: {_mean([*runs.losses(CONSTANT.name, at, name).values()])}" for name in WATCHING]
    notes = (
        "The best rate of an arm is that of the lowest mean loss of its average on the seeds and the text for tuning; "
        "all other numbers are of other seeds and other text.",
        *_weights_at_best(runs),
        f"Averages that only watch the run with EMA of rate {about['rate']:g}: {listed(others)}.",
        f"{GPA} θ = 0 at the same rate is the EMA that is matched to BELAY.",
        *_words(about),
    )
    caption = (
        "Each arm at its best learning rate: the loss of its average and of its weights, in nats per byte. "
        f"{_lowest_words(runs)}"
    )
    return Plate("gpt-arms", "Every arm at its best rate", caption, Table(columns, tuple(rows)), notes)


def _lowest_words(runs: Runs) -> str:
    """Return which arm's average has the lowest mean loss, and its ratio to EMA's, as a sentence."""
    best = {arm: runs.best_lr(arm) for arm in filter(runs.tuned, runs.arms)}
    losses = {arm: [*runs.losses(arm, lr).values()] for arm, lr in best.items()}
    means = {arm: fmean(found) for arm, each in losses.items() if (found := [x for x in each if x is not None])}
    if not means:
        return "No arm has a loss at its best rate yet."
    first = min(means, key=lambda arm: means[arm])
    if first == CONSTANT.name:
        return f"The lowest mean loss of an average is EMA's, {means[first]:.4f}."
    beside = format_ratio(ratio_of(runs, (first, best[first]), (CONSTANT.name, best[CONSTANT.name])))
    return f"The lowest mean loss of an average, {means[first]:.4f}, is that of {title(first)}; ÷ EMA it is {beside}."


def _weights_at_best(runs: Runs) -> tuple[str, ...]:
    """Return the loss of the cosine's weights at their own best rate: it is the usual training, without an average."""
    if not runs.tuned(COSINE.name):
        return ()
    lr = runs.best_lr(COSINE.name, "w1")
    mean = _mean([*runs.losses(COSINE.name, lr, "w1").values()])
    return (f"Cosine without an average, at its own best rate {lr:g}: {mean}.",)


def _mean(losses: Sequence[float | None]) -> str:
    known = [loss for loss in losses if loss is not None]
    return f"{sum(known) / len(known):.4f}" if known else MISSING


def _hypotheses(runs: Runs) -> Plate:
    return hypotheses_plate("gpt-hypotheses", "Does the sign matter with the controls in?", judged(runs))


def _words(about: Record) -> tuple[str, ...]:
    size = about["bytes"]
    unfinished = () if about["complete"] else ("The study is not complete: some arms lack runs.",)
    return (
        *unfinished,
        f"A GPT over bytes, {about['layers']} layers of {about['width']}, context {about['context']}, batch "
        f"{about['batch']}, {about['steps']:,} steps, the first {about['warmup']} of them warm-up, AdamW, gradients "
        "clipped at 1.",
        f"Python code of {about['packages']} packages, split by package: {size['train'] / 1e6:.1f} MB to train on, "
        f"{size['tune'] / 1e6:.1f} to tune and {size['judge'] / 1e6:.1f} to judge. SHA-256 {about['digest'][:16]}.",
        f"{about['device']}, torch {about['torch']}, {about['device_s']:,} s, {about['date']}.",
    )
