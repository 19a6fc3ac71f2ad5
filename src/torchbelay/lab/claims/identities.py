"""Verdicts on what the paper says BELAY is and costs: C5 overhead, C6 EMA, C7 the rule k(T), C8 momentum."""

from torchbelay.lab.arms import BELAY, EMA, PLAIN
from torchbelay.lab.overhead import bytes_per_weight as bytes_a_weight
from torchbelay.lab.overhead import cost
from torchbelay.lab.plane.invariance import runs_by_length as chosen
from torchbelay.lab.plane.invariance import spread
from torchbelay.lab.plane.momentum import BOWL
from torchbelay.lab.plane.quadratic import HEAVY, PAPER
from torchbelay.lab.records import select as of
from torchbelay.lab.statistics import fit_power as slope

from .verdict import Answer, Claim, Finding, Records, of_parts

NEGLIGIBLE = 0.05  # more time or memory than this share is not
EXACT = 1e-12  # relative; a few hundred steps of rounding are a hundred times smaller, another formula is far larger
SLOPE = 0.1  # how far a fitted power may be from the predicted one
SAME_PATH = 0.01  # of the start's distance
VERIFIED = 1e-9  # real runs beside powers of a matrix; ten thousand steps of rounding are a thousand times smaller
TIMES_WORSE = 10  # without the rule, at the least, if it is the rule that does it
SAME_LOSS = 1.1  # the largest expected loss by the smallest


def _overhead(records: Records) -> Finding:
    costs = records["overhead"]
    networks = list(dict.fromkeys(r["network"] for r in costs))
    times = {name: cost(costs, name, BELAY)["timing_s"] for name in networks}
    belay, ema, plain = (cost(costs, networks[0], arm) for arm in (BELAY, EMA, PLAIN))
    stays, with_ema, alone = (bytes_a_weight(record) for record in (belay, ema, plain))
    during = belay["bytes_during_update"] / belay["weights"]
    more, more_than_ema = stays / alone - 1, stays / with_ema - 1
    kept = [t["to_plain"]["high"] <= 1 + NEGLIGIBLE for t in times.values()]
    kept += [more <= NEGLIGIBLE, more_than_ema <= NEGLIGIBLE]
    longer = ", ".join(f"{t['to_plain']['ratio'] - 1:+.1%} for the {name} network" for name, t in times.items())
    summary = (
        f"Time of a training step: {longer}. Memory: {stays - alone:.1f} bytes for each weight on top of the "
        f"{alone:.0f} of training with AdamW ({more:+.0%}), {_beside_ema(more_than_ema)}; and {during:.1f} more while "
        "the optimizer steps."
    )
    numbers = []
    for name, t in times.items():
        for against, said in (("to_plain", "no averaging"), ("to_ema", "EMA")):
            r = t[against]
            numbers.append((f"time, {name} network, ÷ {said}", f"{r['ratio']:.3f} ({r['low']:.3f} to {r['high']:.3f})"))
    numbers.append(("bytes for each weight: none, EMA, BELAY", f"{alone:.1f}, {with_ema:.1f}, {stays:.1f}"))
    numbers.append(("more during the update", f"{during:.1f}"))
    return Finding(of_parts(kept), summary, tuple(numbers))


def _beside_ema(more: float) -> str:
    return "the same as an EMA" if abs(more) < 0.001 else f"{more:+.0%} beside an EMA"


def _ema(records: Records) -> Finding:
    (ema,) = of(records["momentum"], "ema")
    limit = of(records["momentum"], "limit")
    power = slope([r["m1"] for r in limit], [r["difference"] for r in limit])
    late, same_step = ema["deviation_one_step_later"], ema["deviation_same_step"]
    same, delayed, tends = same_step <= EXACT, late <= EXACT, abs(power + 1) <= SLOPE
    if same:
        what = f"At m1 = ∞ BELAY is the EMA of Eq. 1, to {same_step:.0e}"
    elif delayed:
        what = (
            f"At m1 = ∞ BELAY is the EMA of Eq. 1 one step late (erratum E6): to {late:.0e} that of the step before, "
            f"{same_step:.1%} off that of the same step"
        )
    else:
        what = f"At m1 = ∞ BELAY is {min(late, same_step):.0e} off the EMA of Eq. 1, one step late or not"
    reach = "tends to it" if tends else "does not tend to it"
    summary = f"{what}. As m1 grows BELAY {reach}: the difference goes as m1 to the power {_signed(power)}."
    numbers = (
        ("off Eq. 1's EMA of the step before", f"{late:.1e}"),
        ("off Eq. 1's EMA of the same step", f"{same_step:.1e}"),
        ("the same with follow='after'", f"{ema['deviation_follow_after']:.1e}"),
        (f"power of m1, from {limit[0]['m1']:.0e} to {limit[-1]['m1']:.0e}", _signed(power)),
    )
    return Finding(of_parts([same or delayed, tends]), summary, numbers)


def _invariance(records: Records) -> Finding:
    runs = records["invariance"]
    ruled = spread(chosen(runs, "path", HEAVY.name, "printed"))
    fixed = {rule: spread(chosen(runs, "path", HEAVY.name, rule)) for rule in HEAVY.rules if rule.startswith("k of")}
    losses = [r["loss_w2"] for r in chosen(runs, "noise", HEAVY.name, "printed")]
    lengths = [r["steps"] for r in chosen(runs, "path", HEAVY.name, "printed")]
    refused = sorted(r["steps"] for r in runs if r["kind"] == "refused" and r["masses"] == PAPER.name)
    checked = max(r["deviation_of_belay"] for r in runs if r.get("deviation_of_belay") is not None)
    simulated = [r for r in runs if r["kind"] == "noise" and r["runs"]]
    off = max(abs(r["simulated_w2"] - r["loss_w2"]) / r["standard_error"] for r in simulated)
    path = ruled <= SAME_PATH and min(fixed.values()) >= TIMES_WORSE * ruled and checked <= VERIFIED
    ratio = max(losses) / min(losses)
    alike = ratio <= SAME_LOSS
    answer = Answer.FAILS if not path else Answer.HOLDS if alike and not refused else Answer.IN_PART
    summary = (
        f"In the same training time (learning rate as 1/T) the paths of w2 for {lengths[0]:,} to {lengths[-1]:,} steps "
        f"are {ruled:.2%} of the way apart with the rule, and {min(fixed.values()):.0%} or more without. At a constant "
        f"learning rate with noise the loss {'is the same' if alike else f'differs by a factor of {ratio:,.0f}'}"
        f"{'' if alike else (', and falls with T' if losses[-1] < losses[0] else ', and grows with T')}."
    )
    if refused:
        at = ", ".join(f"{steps:,}" for steps in refused)
        summary += f" With the paper's MNIST masses the printed rule makes no average at {at} steps (erratum E5)."
    numbers = (
        ("paths apart, with the rule", f"{ruled:.2%}"),
        *((f"paths apart, {rule} for all", f"{value:.0%}") for rule, value in fixed.items()),
        ("real runs through Belay off the matrices", f"{checked:.0e}"),
        ("expected loss with noise, shortest and longest run", f"{losses[0]:.1e}, {losses[-1]:.1e}"),
        ("simulated losses off the expected ones, in standard errors, at most", f"{off:.1f}"),
        ("printed rule refused at", ", ".join(f"{steps:,}" for steps in refused) or "no length"),
    )
    return Finding(answer, summary, numbers)


def _momentum(records: Records) -> Finding:
    found = records["momentum"]
    gradients = of(found, "gradient")
    straight = max(r["deviation"] for r in gradients if r["function"] == BOWL.name)
    curved = [r for r in gradients if r["function"] != BOWL.name]
    power = slope([r["distance"] for r in curved], [r["deviation"] for r in curved])
    (printed,) = of(found, "gradient as printed")
    (form,) = (r for r in of(found, "form") if r["name"] == "momentum")
    affine, first_order = straight <= EXACT, abs(power - 2) <= SLOPE
    is_momentum, usual = form["deviation"] <= EXACT, form["nu"] > 0
    if not (affine or is_momentum):
        answer = Answer.FAILS
    else:
        answer = Answer.HOLDS if affine and first_order and is_momentum and usual else Answer.IN_PART
    nu, off = _signed(form["nu"]), f"{form['deviation']:.0e}"
    summary = (
        f"Linearised, the gradient at an average is {'' if affine else 'not '}the average of the gradients (to "
        f"{straight:.0e}; the error goes as the distance to the power {power:.2f}). "
    )
    if is_momentum:
        summary += (
            f"BELAY's own step, linearised or not, is a momentum step (to {off}), with {nu} of the momentum where "
        )
        summary += "torch's SGD has 1" + ("." if usual else ": it subtracts what momentum adds.")
    else:
        summary += f"BELAY's own step is {off} off a momentum step."
    (heavy_ball,) = (r for r in of(found, "method") if r["name"] == "heavy ball")
    numbers = (
        ("gradient at the average off the average gradient, quadratic loss", f"{straight:.1e}"),
        ("the same with weights as printed, which do not sum to 1", f"{printed['deviation']:.1e}"),
        ("power of the distance, Rosenbrock", f"{power:.2f}"),
        ("BELAY off a momentum step, Rosenbrock", f"{form['deviation']:.1e}"),
        ("its momentum, and the share of it in the step", f"{form['beta']:.3f}, {nu}"),
        ("torch's momentum off the repulsive spring", f"{heavy_ball['deviation']:.1e}"),
    )
    return Finding(answer, summary, numbers)


def _signed(x: float) -> str:
    return f"{x:.2f}".replace("-", "−")


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "C5",
        "BELAY's overhead in time and memory is negligible.",
        f"Four parts: the time of a training step over that without an average (the upper end of the 95% interval) for "
        f"a small MLP and for a convolutional network, and the bytes that stay from step to step over those without an "
        f"average and over those of an EMA; each at most {NEGLIGIBLE:.0%} more. Holds if all four do, in part if some "
        "do.",
        ("overhead",),
        _overhead,
        "overhead",
    ),
    Claim(
        "C6",
        "The exponential moving average is BELAY with an infinite mass m1.",
        f"Two parts: at m1 = ∞ every average equals that of Eq. 1, of the same step or of the one before, within "
        f"{EXACT:.0e}; and the difference of BELAY from it goes as a power of m1 within {SLOPE} of −1. Holds if both "
        "do, in part if one does.",
        ("momentum",),
        _ema,
        "momentum-limits",
    ),
    Claim(
        "C7",
        "k = C/T makes the result independent of the number of steps T.",
        f"Does not hold unless, in the same training time, the paths of w2 for all T are within {SAME_PATH:.0%} of the "
        f"start's distance with the rule, {TIMES_WORSE} times as far apart without, and real runs within "
        f"{VERIFIED:.0e} of them. Holds if also the expected loss at a constant learning rate with noise is the same "
        f"within a factor of {SAME_LOSS}, and the printed rule makes an average at every T with the paper's masses; "
        "else in part.",
        ("invariance",),
        _invariance,
        "invariance-lengths",
    ),
    Claim(
        "C8",
        "A linearised BELAY step is a momentum step.",
        f"Four parts: for a quadratic loss the gradient at an average is the average of the gradients within "
        f"{EXACT:.0e}; for another loss the error goes as the distance to a power within {SLOPE} of 2; BELAY's w1 "
        f"equals that of a momentum method within {EXACT:.0e}; and that takes a positive share of its momentum. Holds "
        "if all four do, in part if the first or the third does.",
        ("momentum",),
        _momentum,
        "momentum-methods",
    ),
)
