"""Advice in words: what to use, why, which learning rates it bears, and how it compares."""

import math
from typing import TYPE_CHECKING

from .methods.centred import centred
from .region import LOUD, QUIET
from .search import HIGHEST

if TYPE_CHECKING:
    from .recommend import Advice
    from .search import Setting

UNIT = "1/largest curvature"  # of learning rates, if nothing says how large the curvatures are
NO_CURVATURES = (
    "No curvatures were given: a typical spectrum stands for them, and learning rates are in units of "
    "1/(largest curvature). Give curvatures, or the learning rate that is best for an EMA."
)
TYPICAL = (
    "No curvatures were given: a typical spectrum stands for those of your network, which may be quite different. Take "
    "this for a first trial beside an EMA."
)


def rescaled(lr: float, largest: float, scale: float) -> str:
    """Return the warning about a known learning rate beside curvatures, which become `scale` times smaller by it."""
    return (
        f"The learning rate {lr:g}, best for an EMA, sets the size of the curvatures: of those given only the ratios "
        f"count, and the largest is taken as {largest / scale:.3g}, not {largest:.3g}."
    )


def explain(advice: "Advice") -> str:
    """Return the advice as paragraphs; `Advice.explain()` calls this."""
    guesses = [each for each in advice.warnings if each in (NO_CURVATURES, TYPICAL)]  # beside the first learning rate
    others = [each for each in advice.warnings if each not in guesses]
    parts = [
        _what(advice),
        *map(_warning, guesses),
        *_from_runs(advice),
        _why(advice),
        _range(advice),
        *_dampening(advice),
    ]
    parts.append(_comparison(advice))
    return "\n\n".join([*parts, *map(_warning, others), _worth(advice)])


def call(setting: "Setting") -> str:
    """Return the call that makes the method of a setting, with numbers of three digits."""
    method = setting.method
    if not isinstance(method, centred):
        return f"tb.methods.schedule_free({method.beta:g})"
    if method.theta == 0:
        rate = _rate(setting)
        digits = max(6, 2 - math.floor(math.log10(rate)))  # of a decay near 1: as many as 1 − decay needs for three
        return f"tb.methods.ema({1 - rate:.{digits}g})"
    return f"tb.methods.centred(theta={method.theta:.3g}, rate={_rate(setting):.3g})"


def _rate(setting: "Setting") -> float:
    assert isinstance(setting.method, centred)
    assert isinstance(setting.method.rate, float)
    return setting.method.rate


def _warning(text: str) -> str:
    return f"Warning: {text}"


def _lr(advice: "Advice", value: float) -> str:
    """Return a learning rate with its unit."""
    return f"{value:.3g}" if advice.lr_unit is None else f"{value:.3g}/(largest curvature)"


def _dampening(advice: "Advice") -> list[str]:
    """Return for which momentum the learning rates are, if there is any."""
    beta = advice.beta1
    if not beta:
        return []
    return [
        f"Learning rates around β1 = {beta:g} are those of Adam, or of SGD with dampening = momentum. If they follow "
        f"from curvatures, multiply them by {1 - beta:.4g} for SGD(momentum={beta:g}), which has no dampening by "
        "default."
    ]


def _is_idle(advice: "Advice") -> bool:
    """Whether the advice is an EMA that is nearly the weights themselves."""
    method = advice.best.method
    return isinstance(method, centred) and method.theta == 0 and _rate(advice.best) > 0.5


def _what(advice: "Advice") -> str:
    if _is_idle(advice):
        return f"Train without an average at a learning rate of {_lr(advice, advice.lr)}, for {advice.steps:,} steps."
    return f"Use {call(advice.best)} at a learning rate of {_lr(advice, advice.lr)}, for {advice.steps:,} steps."


def _from_runs(advice: "Advice") -> list[str]:
    """Return what one run or several say about the learning rate."""
    case = advice.region.case
    if case in ("any", "near"):
        return []
    if case in _NOISE:
        assert advice.share is not None
        share = f"{advice.share:.1%} of" if advice.share < 1 else "more than all that"
        what = "" if share.endswith("that") else " what"
        noise = f"noise adds {share}{what} the run had to gain to the loss of its weights"
        return [f"At the end of the run, {noise}. {_NOISE[case]}"]
    return [f"Of {advice.runs} runs, the one at a learning rate of {advice.near:.3g} ended best. {_LINE_SEARCH[case]}"]


_AGAIN = "Run there, and ask again with all runs."
_NOISE = {
    "low": f"Below {QUIET:.0%} the learning rate was low: the advice may be up to twice as high. {_AGAIN}",
    "right": f"From {QUIET:.0%} to {LOUD:.0%} is usual near the best learning rate of a network: the advice does not "
    "raise it. Only runs at half and at twice the rate can tell.",
    "high": f"Above {LOUD:.0%} the learning rate was high: the advice is a quarter to a half of it. {_AGAIN}",
}
_LINE_SEARCH = {
    "up": f"There is none near twice that rate, so it is tried next. {_AGAIN}",
    "down": f"There is none near half that rate, so it is tried next. {_AGAIN}",
    "between": "Lower and higher rates near it are no better: the advice is at the vertex of the parabola through the "
    "three.",
}


def _why(advice: "Advice") -> str:
    loss, method, ema = advice.loss, advice.best.method, advice.alternatives["EMA"]
    share = loss.noise / loss.total if loss.total else 0.0  # without noise the loss may be 0 to the last digit
    said = [
        f"The loss above the minimum falls from {advice.problem.start:.3g} to {loss.total:.3g}, and {share:.0%} of "
        "what remains is noise."
    ]
    if not isinstance(method, centred):
        return (
            f"{said[0]} Gradients are taken near the average of all weights so far, which needs no averaging rate: "
            "Generalized Primal Averaging with c = 1/t."
        )
    span, theta = 1 / _rate(advice.best), method.theta
    assert isinstance(theta, float)
    if theta and (span < 2 or share < 0.01):
        said.append("There is little noise to average: the spring is of use for the speed.")
    elif span < 2:
        said.append("An EMA is of no use here: the noise is too small, or the learning rate too low for it to matter.")
    elif loss.noise == 0:
        said.append("There is no noise to average: at most, the average evens out errors that swing.")
    else:
        said.append(
            f"The average reaches back over about {span:,.0f} steps, {span / advice.steps:.0%} of the run: with a "
            "longer memory more of the start would be left, with a shorter one more of the noise."
        )
    if theta == 0:
        where = f"with θ ≤ {HIGHEST:g}" if advice.near is None else "near the learning rate of the run"
        if math.isfinite(advice.region.highest_theta):
            where = "with θ ≤ 0 near the rates of the run"
        kind = "No" if _is_idle(advice) else "It is an ordinary EMA: no"
        said.append(f"{kind} centred(θ) {where} is better by more than 3%.")
        if advice.region.is_end(_rate(advice.best)) and not _is_idle(advice):
            said.append("Its averaging rate is as far from the run's as it may be: ask again from a run with it.")
    elif theta < 0:
        said.append(
            f"θ = {theta:.3g} repels: gradients are taken between the average and the trajectory. This is Generalized "
            f"Primal Averaging, of which schedule-free is the case c = 1/t. The learning rate is "
            f"{advice.lr / ema.lr:.3g} times that of the best EMA."
        )
        if advice.is_at_the_lowest_theta:
            said.append(
                f"That is three quarters of the floor of θ = {advice.floor:.3g}, and the advice goes no lower; on this "
                "quadratic a lower one may leave less loss."
            )
        elif advice.beta1:
            said.append(
                f"The optimizer's momentum β1 = {advice.beta1:g} sets a floor of θ = {advice.floor:.3g} at this rate; "
                "the advice stays above three quarters of it."
            )
    else:
        said.append(f"θ = {theta:.3g} attracts, as BELAY does: the average pulls the weights back.")
        if theta > 0.99 * HIGHEST:
            said.append("The advice goes no higher; on this quadratic a higher one may leave less loss.")
    return " ".join(said)


def _range(advice: "Advice") -> str:
    low, high = advice.best.lrs
    ema = advice.alternatives["EMA"]
    wide = f"a factor of {advice.best.width:.2g}"
    if advice.best.method != ema.method:
        wide += f" (EMA: {ema.width:.2g})"
    free = not isinstance(advice.best.method, centred)
    above = "its first steps let the loss grow" if free else "it diverges on the quadratic"
    learning_rates = "Learning rates" if advice.near is None else "On the quadratic, learning rates"
    if advice.lr >= advice.best.limit:
        return (
            f"The quadratic that fits the best run diverges above {_lr(advice, advice.best.limit)}, and runs were made "
            "at higher rates: all losses here are those of the same quadratic with smaller curvatures."
        )
    return (
        f"{learning_rates} from {_lr(advice, low)} to {_lr(advice, high)}, {wide}, leave at most 10% more loss. Above "
        f"{_lr(advice, advice.best.limit)} {above}."
    )


def _comparison(advice: "Advice") -> str:
    said = []
    for name, other in advice.alternatives.items():
        if other.method == advice.best.method:
            continue
        around = " around an optimizer with β1 = 0" if name == "schedule-free" and advice.beta1 else ""
        left = (
            f"{other.loss.total / advice.loss.total:.3g} times this loss"
            if advice.loss.total
            else (f"a loss of {other.loss.total:.3g}")
        )
        lr = _lr(advice, other.lr)
        said.append(f"{name}, {call(other)} at its best learning rate {lr}{around}, leaves {left}.")
    return "On the same quadratic: " + " ".join(said)


def _worth(advice: "Advice") -> str:
    """Return what the advice is worth on a network."""
    said = (
        "All of this is exact for a quadratic with noisy gradients, that of schedule-free to about 3% if most of its "
        "loss is noise. A network decides: its curvature drifts, which favours shorter averages. "
    )
    if advice.measured:
        said += (
            "On the small network that we tried, with Adam, advice from measured curvatures was often bad: it made "
            "many of the runs worse, and its loss was up to many times the best. "
        )
    if advice.near is not None:
        said += (
            "On the small networks that we tried, advice from one run made the loss several times lower at best, and "
            "sometimes higher. Asked again with all runs so far, it ended within 10% of the best of a grid in more "
            "than half of the cases. "
        )
    if _is_idle(advice):
        return f"{said}Run an EMA beside it."
    return f"{said}Try two and four times the averaging rate as well, and run an EMA beside it."
