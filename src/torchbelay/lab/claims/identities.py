"""The claims about what BELAY is: C6 EMA as a limit, C7 the rule k(T), C8 momentum."""

from collections.abc import Sequence

from torchbelay.lab.part import Record
from torchbelay.lab.plane.invariance import runs_by_length, spread
from torchbelay.lab.plane.momentum import BOWL
from torchbelay.lab.plane.quadratic import HEAVY, PAPER
from torchbelay.lab.records import select
from torchbelay.lab.report.words import listed
from torchbelay.lab.statistics import fit_power

from .verdict import Claim, Finding, Records, find, need, need_one, need_some

EXACT = 1e-12  # relative; rounding over a few hundred steps is a hundred times smaller, another formula is far larger
SLOPE = 0.1  # the largest difference between a fitted power and the predicted one
SAME_PATH = 0.01  # the largest distance between paths that count as the same, relative to the start's distance
VERIFIED = 1e-9  # real runs against powers of a matrix; rounding over ten thousand steps is a thousand times smaller
TIMES_WORSE = 10  # without the rule, paths must be at least this many times as far apart
SAME_LOSS = 1.1  # the largest expected loss over the smallest, if all count as the same


def judge_ema_limit(records: Records) -> Finding:
    """Judge C6."""
    ema = need_one(select(records["momentum"], "ema"), "the EMA")
    limit = _need_power(select(records["momentum"], "limit"), "m1", "BELAY with two masses m1")
    power = fit_power([r["m1"] for r in limit], [r["difference"] for r in limit])
    late, same_step = ema["deviation_one_step_later"], ema["deviation_same_step"]
    same, delayed, tends = same_step <= EXACT, late <= EXACT, abs(power + 1) <= SLOPE
    if same:
        relation = f"BELAY is Eq. 1's EMA, within {same_step:.0e}"
    elif delayed:
        relation = f"BELAY is Eq. 1's EMA one step late (erratum E6), within {late:.0e}"
    else:
        relation = f"BELAY is {min(late, same_step):.0e} off Eq. 1's EMA, one step late or not"
    summary = (
        f"At m1 = ∞, {relation}. The difference goes as m1 to the power {_format_signed(power)}"
        f"{'' if tends else ': BELAY does not tend to that limit'}."
    )
    numbers = (
        ("difference from Eq. 1's EMA of the step before", f"{late:.1e}"),
        ("difference from Eq. 1's EMA of the same step", f"{same_step:.1e}"),
        ("the same with follow='after'", f"{ema['deviation_follow_after']:.1e}"),
        (f"power of m1, from {limit[0]['m1']:.0e} to {limit[-1]['m1']:.0e}", _format_signed(power)),
    )
    return find({"the EMA of Eq. 1 at m1 = ∞": same or delayed, "tends to it as 1/m1": tends}, summary, numbers)


def judge_invariance(records: Records) -> Finding:
    """Judge C7."""
    runs = records["invariance"]
    lengths = [r["steps"] for r in runs_by_length(runs, "path", HEAVY.name, "printed")]
    losses = [r["loss_w2"] for r in runs_by_length(runs, "noise", HEAVY.name, "printed")]
    real = [r["deviation_of_belay"] for r in runs if r.get("deviation_of_belay") is not None]
    simulated = [r for r in runs if r["kind"] == "noise" and r["runs"]]
    needed = {"paths": lengths, "losses with noise": losses, "real runs": real, "simulated losses": simulated}
    needed |= {rule: runs_by_length(runs, "path", HEAVY.name, rule) for rule in HEAVY.rules if rule.startswith("k of")}
    need({name: found for name, found in needed.items() if found}, needed)
    ruled = spread(runs_by_length(runs, "path", HEAVY.name, "printed"))
    fixed = {
        rule: spread(runs_by_length(runs, "path", HEAVY.name, rule)) for rule in HEAVY.rules if rule.startswith("k of")
    }
    refused = [f"{n:,}" for n in sorted(r["steps"] for r in runs if _is_refused(r))]
    checked = max(real)
    off = max(abs(r["simulated_w2"] - r["loss_w2"]) / r["standard_error"] for r in simulated)
    ratio = max(losses) / min(losses)
    alike, verified = ratio <= SAME_LOSS, checked <= VERIFIED
    tests = {
        "the same path for all T": ruled <= SAME_PATH and verified,
        "another path without the rule": min(fixed.values()) >= TIMES_WORSE * ruled and verified,
        "the same loss with noise": alike,
        "an average at every T": not refused,
    }
    direction = "fall" if losses[-1] < losses[0] else "grow"
    noisy = "stay the same" if alike else f"{direction} {ratio:,.0f}-fold"
    summary = (
        f"From {lengths[0]:,} to {lengths[-1]:,} steps, paths differ by {ruled:.2%} (at least "
        f"{min(fixed.values()):.0%} without the rule), noisy losses {noisy}"
        f"{f'; the rule fails at {listed(refused)} steps' if refused else ''}."
    )
    numbers = (
        ("largest distance between paths, with the rule", f"{ruled:.2%}"),
        *((f"largest distance between paths, {rule} for all", f"{value:.0%}") for rule, value in fixed.items()),
        ("difference of real runs from the computed paths", f"{checked:.0e}"),
        ("expected loss with noise, shortest and longest run", f"{losses[0]:.1e}, {losses[-1]:.1e}"),
        ("largest difference of simulated from expected losses, in standard errors", f"{off:.1f}"),
        (
            "steps at which the printed rule gives no average (paper's MNIST masses, erratum E5)",
            listed(refused, "none"),
        ),
    )
    return find(tests, summary, numbers)


def _is_refused(record: Record) -> bool:
    """Whether the printed rule gives no average for this record's number of steps, with the paper's masses."""
    return bool(record["kind"] == "refused" and record["masses"] == PAPER.name)


def judge_momentum(records: Records) -> Finding:
    """Judge C8."""
    found = records["momentum"]
    gradients = select(found, "gradient")
    bowl = need_some([r["deviation"] for r in gradients if r["function"] == BOWL.name], f"gradients on {BOWL.name}")
    straight = max(bowl)
    curved = _need_power([r for r in gradients if r["function"] != BOWL.name], "distance", "gradients elsewhere")
    power = fit_power([r["distance"] for r in curved], [r["deviation"] for r in curved])
    printed = need_one(select(found, "gradient as printed"), "the gradient as printed")
    form = need_one([r for r in select(found, "form") if r["name"] == "momentum"], "the form of a momentum step")
    affine, first_order = straight <= EXACT, abs(power - 2) <= SLOPE
    is_momentum, positive = form["deviation"] <= EXACT, form["nu"] > 0
    tests = {
        "the average's gradient is the average gradient on a quadratic loss": affine,
        "else the error goes as the distance squared": first_order,
        "the step is a momentum step": is_momentum,
        "it adds momentum": is_momentum and positive,
    }
    nu = _format_signed(form["nu"])
    summary = f"On a quadratic loss, the average's gradient is {'' if affine else 'not '}the average gradient"
    summary += "." if first_order else f"; on another loss the error goes as the distance to the power {power:.2f}."
    if is_momentum:
        summary += f" BELAY's step is a momentum step with {nu} times torch's momentum"
        summary += "." if positive else ": subtracted, not added."
    else:
        summary += f" BELAY's step is {form['deviation']:.0e} off a momentum step."
    heavy_ball = need_one([r for r in select(found, "method") if r["name"] == "heavy ball"], "the heavy ball")
    numbers = (
        ("gradient at the average off the average gradient, quadratic loss", f"{straight:.1e}"),
        ("the same with weights as printed, which do not sum to 1", f"{printed['deviation']:.1e}"),
        ("power of the distance by which that error grows, Rosenbrock", f"{power:.2f}"),
        ("BELAY off a momentum step, Rosenbrock", f"{form['deviation']:.1e}"),
        ("its momentum, and the share of it in the step", f"{form['beta']:.3f}, {nu}"),
        ("torch's momentum off the repulsive spring", f"{heavy_ball['deviation']:.1e}"),
    )
    return find(tests, summary, numbers)


def _need_power(found: Sequence[Record], field: str, what: str) -> Sequence[Record]:
    """Return records from which a power can be fitted: a field has two values or more."""
    return found if len({r[field] for r in found}) > 1 else need_some([], what)


def _format_signed(x: float) -> str:
    """Return a number with two digits after the point and a real minus sign."""
    return f"{x:.2f}".replace("-", "−")


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "C6",
        "The exponential moving average is BELAY with an infinite mass m1.",
        f"Two tests. At m1 = ∞, every average equals the EMA of Eq. 1, of the same step or of the step before, within "
        f"{EXACT:.0e}. As m1 grows, BELAY's difference from it goes as m1 to a power within {SLOPE} of −1. Holds if "
        "both are passed, in part if one is.",
        ("momentum",),
        judge_ema_limit,
        "momentum-limits",
    ),
    Claim(
        "C7",
        "k = C/T makes the result independent of the number of steps T.",
        f"Four tests. In the same training time (learning rate as 1/T), the paths of w2 for all T lie within "
        f"{SAME_PATH:.0%} of the start's distance with the rule; without it they lie at least {TIMES_WORSE} times as "
        f"far apart (both only count if real runs agree with the computed paths within {VERIFIED:.0e}). The expected "
        f"loss at a constant learning rate with noise varies by at most a factor of {SAME_LOSS}. The printed rule "
        "gives an average at every T with the paper's masses. Holds if all four are passed, in part if at least half "
        "are.",
        ("invariance",),
        judge_invariance,
        "invariance-lengths",
    ),
    Claim(
        "C8",
        "A linearised BELAY step is a momentum step.",
        f"Four tests. For a quadratic loss, the gradient at an average is the average of the gradients, within "
        f"{EXACT:.0e}. For another loss, the error goes as the distance to a power within {SLOPE} of 2. BELAY's w1 "
        f"equals that of a momentum method, within {EXACT:.0e}. That method takes a positive share of its momentum. "
        "Holds if all four are passed, in part if at least half are.",
        ("momentum",),
        judge_momentum,
        "momentum-methods",
    ),
)
