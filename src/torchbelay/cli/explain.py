"""`torchbelay explain`: what a spring or an EMA does, as a paragraph and a table, or as JSON."""

import argparse
import json
import math
import shutil
import sys
import textwrap
import warnings
from typing import TYPE_CHECKING, Any

from torchbelay.physics import arguments
from torchbelay.physics.explain import explain_centred, explain_momentum, explain_stable_range
from torchbelay.physics.inner_momentum import theta_floor
from torchbelay.physics.limits import Limit
from torchbelay.physics.methods.centred import centred
from torchbelay.physics.run_length import Rule
from torchbelay.physics.spring import Spring

from .parser import add_verb, number, steps

if TYPE_CHECKING:
    from .parser import Commands

_NEEDED = ("k", "m1", "m2")
_SPRING = (*_NEEDED, "c1", "c2", "dt", "follow", "force")

_EXAMPLES = """\
examples:
  torchbelay explain --k 1 --m1 2000 --m2 500
  torchbelay explain --k 1 --m1 10 --m2 20 --curvature 202 --lr 0.01
  torchbelay explain --k 1 --m1 10 --m2 20 --c1 5 --c2 10
  torchbelay explain --k 1 --m1 2000 --m2 500 --steps 10000 --tuned-for 1e6
  torchbelay explain --decay 0.999 --json
  torchbelay explain --theta -0.5 --rate 0.01 --beta1 0.9 --curvature 10 --lr 0.1
"""


def add(commands: "Commands") -> None:
    """Declare the arguments of `torchbelay explain`."""
    parser = add_verb(
        commands,
        "explain",
        run=run,
        summary="say what a spring or an EMA does to weights, average and learning rate",
        description="Say what a spring does: give --k, --m1 and --m2; or, for an ordinary EMA, --decay or --half-life; "
        "or --theta and --rate.",
        examples=_EXAMPLES,
    )
    option = parser.add_argument_group("a spring").add_argument
    option("--k", type=number, help="spring constant")
    option("--m1", type=number, metavar="M", help="mass of the weights; inf for no pull on them")
    option("--m2", type=number, metavar="M", help="mass of the average")
    option("--c1", type=number, metavar="C", help="damping of the weights (default 2·m1/dt: no velocity)")
    option("--c2", type=number, metavar="C", help="damping of the average (default 2·m2/dt: no velocity)")
    option("--dt", type=number, help="time between two steps (default 1)")
    option(
        "--follow", choices=("before", "after"), help="the average follows the weights before (default) or after a step"
    )
    option("--force", choices=("derived", "printed"), help="the velocity gains 2α (default) or 1/(2α) times the update")
    option = parser.add_argument_group("or an ordinary EMA").add_argument
    option("--decay", type=number, metavar="D", help="weight of the old average in a step")
    option("--half-life", type=number, metavar="N", help="steps until that weight has become one half")
    option = parser.add_argument_group("or a member of the centre-of-mass family").add_argument
    option(
        "--theta",
        type=number,
        metavar="θ",
        help="sign and strength of the spring: below 0 it repels (Generalized Primal Averaging; schedule-free is its "
        "case c = 1/t), 0 is an EMA",
    )
    option("--rate", type=number, metavar="C", help="averaging rate, 1 − decay")
    option = parser.add_argument_group("what to say about it").add_argument
    option("--steps", type=steps, metavar="T", help="length of the run, for what is left of the start")
    option(
        "--tuned-for",
        type=steps,
        metavar="T0",
        help="length of the run that k was chosen for: says what k becomes for --steps, by the paper's k(T) rule",
    )
    option("--lr", type=number, help="the optimizer's learning rate")
    option(
        "--curvature", type=number, metavar="H", help="largest curvature of the loss, for SGD's stable learning rate"
    )
    option(
        "--beta1",
        type=number,
        metavar="B",
        help="the optimizer's momentum, Adam's β1 or that of SGD with dampening = momentum: what it changes, in words; "
        "torch's SGD has no dampening by default, and limits 1 − β1 times as large",
    )
    option("--json", action="store_true", help="one JSON object with every digit; infinity is the text inf")


def run(args: argparse.Namespace) -> int:
    """Print a paragraph and a table about a spring, or one JSON object."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            setting = _setting(args)
            messages = [str(warning.message) for warning in caught]  # before other springs are derived from this one
            facts = _facts(setting, args.lr, args.curvature, args.steps, args.tuned_for)
            if args.beta1 is not None:
                facts |= _momentum_facts(setting, facts, args.beta1)
        except (ValueError, TypeError) as error:
            args.parser.error(str(error))
        except ArithmeticError:
            args.parser.error("these numbers are too large or too small to compute with; use moderate ones")
    for message in messages:
        print(f"{args.parser.prog}: warning: {message}", file=sys.stderr)
    if args.json:
        print(json.dumps(_without_inf(facts), indent=2, allow_nan=False))
        return 0
    width = max(40, shutil.get_terminal_size().columns)
    print(textwrap.fill(facts["explanation"], width), end="\n\n")
    rows = _rows(facts, ema=args.decay is not None or args.half_life is not None)
    margin = max(len(label) for label, _ in rows) + 2
    for label, value in rows:
        print(textwrap.fill(value, width, initial_indent=label.ljust(margin), subsequent_indent=" " * margin))
    return 0


def _setting(args: argparse.Namespace) -> Spring | Limit | centred:
    """Return what the arguments describe: by k and masses, by decay, by half-life, or by θ and rate."""
    given = {name: value for name in _SPRING if (value := getattr(args, name)) is not None}
    ema = {name: value for name in ("decay", "half_life") if (value := getattr(args, name)) is not None}
    if args.tuned_for is not None:
        if args.k is None:
            raise ValueError("--tuned-for is the run that k was chosen for; leave it out, or give --k, --m1 and --m2")
        if args.steps is None:
            raise ValueError("--tuned-for needs --steps, the length of the run that k is wanted for")
    if args.theta is not None or args.rate is not None:
        if extra := [name.replace("_", "-") for name in (*given, *ema)]:
            raise ValueError(f"--theta and --rate are a whole setting by themselves; leave out --{', --'.join(extra)}")
        if args.theta is None or args.rate is None:
            raise ValueError(f"--{'theta' if args.theta is None else 'rate'} missing; give --theta and --rate")
        return centred(args.theta, args.rate)
    if ema:
        if given:
            raise ValueError(f"--decay or --half-life is a whole setting by itself; leave out --{', --'.join(given)}")
        if args.half_life is None:
            arguments.number("decay", args.decay, low=0, high=1, open_low=False, open_high=False)
            if args.decay in (0, 1):
                return Limit(args.decay)
        return Spring.ema(args.decay, half_life=args.half_life)
    if missing := [name for name in _NEEDED if name not in given]:
        raise ValueError(
            f"--{', --'.join(missing)} missing; give --k, --m1 and --m2, or --decay, or --half-life, "
            "or --theta and --rate"
        )
    return Spring(**given)


def _facts(
    s: Spring | Limit | centred,
    lr: float | None,
    curvature: float | None,
    steps: int | None,
    tuned_for: int | None = None,
) -> dict[str, Any]:
    """Return all facts about a setting, under the names that --json prints."""
    facts = _family_facts(s) if isinstance(s, centred) else _spring_facts(s)
    scale = facts["effective_lr_scale"]
    if lr is not None:
        facts |= {"lr": arguments.number("lr", lr, low=0), "effective_lr": scale * lr}
    if curvature is not None:
        limit = _stable_lr(s, curvature)
        facts |= {"curvature": curvature, "max_stable_lr": limit, "max_stable_lr_of_sgd": 2 / curvature}
        if lr is not None:
            facts["lr_is_stable"] = lr < limit
    if steps is not None:  # with velocities decay^T is the law of the long run
        decay = facts["decay"]
        facts |= {"steps": steps, "left_after_steps": decay**steps if decay <= 1 else math.inf}
        if tuned_for is not None and isinstance(s, Spring):
            rules: tuple[Rule, ...] = ("printed", "exact")
            facts["tuned_for"] = tuned_for
            facts["k_for_steps"] = {rule: _rescaled(s, steps, tuned_for, rule) for rule in rules}
    return facts


def _spring_facts(s: Spring | Limit) -> dict[str, Any]:
    scale = s.effective_lr_scale
    try:
        matched = {"decay": s.matched_ema().decay, "lr_scale": scale}
    except ValueError:
        matched = None
    facts: dict[str, Any] = {"spring": {name: getattr(s, name) for name in _SPRING}, "explanation": s.explain()}
    facts |= {"regime": s.regime, "alpha": s.alpha, "beta": s.beta, "kappa1": s.kappa1, "kappa2": s.kappa2}
    facts |= {"decay": s.decay, "half_life": s.half_life, "theta": s.theta}
    return facts | {"effective_lr_scale": scale, "matched_ema": matched}


def _family_facts(method: centred) -> dict[str, Any]:
    assert isinstance(method.rate, float)
    decay = 1 - method.rate
    facts: dict[str, Any] = {"centred": {"theta": method.theta, "rate": method.rate}}
    facts |= {"explanation": explain_centred(method), "regime": "velocity-free", "decay": decay, "theta": method.theta}
    facts["half_life"] = math.log(0.5) / math.log1p(-method.rate)
    return facts | {"effective_lr_scale": 1.0, "matched_ema": {"decay": decay, "lr_scale": 1.0}}


def _stable_lr(s: Spring | Limit | centred, curvature: float, momentum: float = 0.0) -> float:
    return (s.coupling(1, 0.0) if isinstance(s, centred) else s).max_stable_lr(curvature, momentum)


def _momentum_facts(s: Spring | Limit | centred, facts: dict[str, Any], beta1: float) -> dict[str, Any]:
    """Return what the optimizer's momentum changes: a longer explanation, the floor of θ and the stable range."""
    beta = arguments.number("beta1", beta1, low=0, high=1, open_low=False)
    limit, coupling = _stable_lr(s, 1.0, beta), s.coupling(1, 0.0)
    if has_velocity := isinstance(s, Spring) and s.has_velocity:
        words = explain_stable_range(limit, s.effective_lr_scale, s.theta, beta)
    else:
        words = explain_momentum(coupling, beta)
    found = {"explanation": f"{facts['explanation']} {words}", "beta1": beta, "stable_range_with_beta1": limit}
    if 0 < coupling.rate <= 1 and coupling.b and not has_velocity:
        found["theta_floor"] = theta_floor(beta, coupling.rate, "after" if coupling.q else "before")
    if "curvature" in facts:
        found["max_stable_lr_with_beta1"] = limit / facts["curvature"]
        if "lr" in facts:
            found["lr_is_stable_with_beta1"] = facts["lr"] < found["max_stable_lr_with_beta1"]
    return found


def _rescaled(s: Spring, steps: int, tuned_for: int, rule: Rule) -> dict[str, Any]:
    """Return k and decay for a run of this length, if k was tuned for another; or why the rule is refused."""
    try:
        if s.has_velocity:
            raise ValueError("the rule is about velocity-free springs; leave c1 and c2 out")
        m1, m2 = s.m1 / s.dt**2, s.m2 / s.dt**2  # the rule has Δt = 1, and only k·Δt²/m matters
        rescaled = Spring.for_steps(steps, m1=m1, m2=m2, k0=s.k, T0=tuned_for, rule=rule)
    except ValueError as why:
        return {"k": None, "decay": None, "refused": str(why)}
    return {"k": rescaled.k, "decay": rescaled.decay, "refused": None}


def _rows(f: dict[str, Any], *, ema: bool) -> list[tuple[str, str]]:
    """Return the facts as (label, value), the lines of a table; an EMA that was given as such is no spring."""
    absolute = f", {f['effective_lr']:.4g} at lr {f['lr']:g}" if "lr" in f else ""
    matched = "none"
    if found := f["matched_ema"]:
        matched = f"decay {found['decay']:.10g} at {found['lr_scale']:.4g} of the learning rate{absolute}"
    rows = [] if ema else [("regime", f["regime"])]
    if "alpha" in f and not ema:
        rows += [("α, β", f"{f['alpha']:.10g}, {f['beta']:.10g}"), ("κ1 + κ2", f"{f['kappa1'] + f['kappa2']:.6g}")]
    rows += [("decay per step", f"{f['decay']:.10g}"), ("half-life", f"{f['half_life']:.6g} steps")]
    if not ema:
        rows.append(("θ = m2/m1" if "spring" in f else "θ", f"{f['theta']:.6g}"))
    rows.append(("effective learning rate", f"{f['effective_lr_scale']:.4g} of the optimizer's{absolute}"))
    if not ema:
        rows.append(("matched EMA", matched))
    if "curvature" in f:
        verdict = "" if "beta1" in f else _verdict(f, "lr_is_stable")  # the optimizer that is used decides
        rows.append((f"stable at curvature {f['curvature']:g}", f"lr < {f['max_stable_lr']:.4g}{verdict}"))
        rows.append(("  plain SGD, or EMA", f"lr < {f['max_stable_lr_of_sgd']:.4g}"))
    if "beta1" in f:
        rows.append((f"stable with β1 = {f['beta1']:g}", f"lr·curvature < {f['stable_range_with_beta1']:.4g}"))
        if "max_stable_lr_with_beta1" in f:
            verdict = _verdict(f, "lr_is_stable_with_beta1")
            rows.append((f"  at curvature {f['curvature']:g}", f"lr < {f['max_stable_lr_with_beta1']:.4g}{verdict}"))
        if f["beta1"]:
            rows.append((f"  SGD(momentum={f['beta1']:g})", f"{1 - f['beta1']:.4g} of that: torch's has no dampening"))
        if "theta_floor" in f:
            rows.append(("floor of θ", f"{f['theta_floor']:.4g}"))
    if "steps" in f:
        about = "" if f["regime"] == "velocity-free" else "about "
        rows.append((f"left after {_count(f['steps'])} steps", f"{about}{f['left_after_steps']:.4g} of the start"))
    if "tuned_for" in f:
        tuned = f", as k = {f['spring']['k']:.6g} was tuned for {_count(f['tuned_for'])} steps"
        for rule, at in f["k_for_steps"].items():
            value = f"refused: {at['refused']}" if at["refused"] else f"{at['k']:.6g}, decay {at['decay']:.6g}{tuned}"
            rows.append((f"k by the {rule} rule", value))
    return rows


def _count(steps: int) -> str:
    return f"{steps:,}" if steps < 1e15 else f"{steps:.6g}"


def _verdict(f: dict[str, Any], name: str) -> str:
    """Return whether the learning rate is below the limit, if there is one."""
    if name not in f:
        return ""
    return f"; lr {f['lr']:g} is {'below it' if f[name] else 'not below it: SGD diverges'}"


def _without_inf(value: Any) -> Any:
    """Replace infinity, which JSON does not have, by the text "inf", which float() reads."""
    if isinstance(value, dict):
        return {key: _without_inf(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
