"""The command `torchbelay`. It needs nothing but the library itself; all but `explain` need the extra `lab`.

A subcommand is a function `NAME(args)` that returns the exit status, and an `_add_NAME(commands)`, listed in
`_COMMANDS`, that declares its arguments. What was typed wrongly ends in one line on stderr and exit status 2.
"""

import argparse
import io
import json
import math
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from torchbelay import __version__
from torchbelay.physics import arguments
from torchbelay.physics.spring import Spring

from .parser import Parser, in_lab, number, seed, steps
from .score import SCORE_COMMANDS

TUNED_FOR = 1_000_000  # steps: the T0 of the paper's k(T) rule

_NEEDED = ("k", "m1", "m2")
_SPRING = (*_NEEDED, "c1", "c2", "dt", "follow", "force")


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (by default the process's own) and return the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that has no α must not end the command
    try:
        status = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has seen enough; leave nothing for the interpreter to flush
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE, as shells report it
    return status


def _run(argv: list[str] | None) -> int:
    parser = Parser(
        "torchbelay",
        description="Weight averaging as two masses on a damped spring.",
        epilog="example: torchbelay explain --k 1 --m1 2000 --m2 500     (torchbelay COMMAND --help has more)",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in _COMMANDS:
        add(commands)
    try:
        args, unknown = parser.parse_known_args(argv)
        if unknown:  # said here, because argparse would say it in the name of the whole command
            getattr(args, "parser", parser).error(f"unknown argument: {' '.join(unknown)}")
        if not hasattr(args, "run"):
            parser.print_help(sys.stderr)
            return 2
        return int(args.run(args))
    except SystemExit as end:  # argparse's way of being done
        return int(end.code or 0)


# torchbelay explain ------------------------------------------------------------------------------------------------

_EXAMPLES = """\
examples:
  torchbelay explain --k 1 --m1 2000 --m2 500
  torchbelay explain --k 1 --m1 10 --m2 20 --curvature 202 --lr 0.01
  torchbelay explain --k 1 --m1 10 --m2 20 --c1 5 --c2 10
  torchbelay explain --k 1 --m1 inf --m2 500 --steps 10000
  torchbelay explain --decay 0.999 --json
"""


def _add_explain(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "explain",
        help="say what a spring or an EMA does to weights, average and learning rate",
        description="Say what a spring does: give --k, --m1 and --m2; or, for an ordinary EMA, --decay or --half-life.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("a spring").add_argument
    add("--k", type=number, help="spring constant")
    add("--m1", type=number, metavar="M", help="mass of the weights; with inf they are not pulled")
    add("--m2", type=number, metavar="M", help="mass of the average")
    add("--c1", type=number, metavar="C", help="damping of the weights (default 2·m1/dt: no velocity)")
    add("--c2", type=number, metavar="C", help="damping of the average (default 2·m2/dt: no velocity)")
    add("--dt", type=number, help="time between two steps (default 1)")
    add(
        "--follow", choices=("before", "after"), help="the average follows the weights before (default) or after a step"
    )
    add("--force", choices=("derived", "printed"), help="the velocity gains 2α (default) or 1/(2α) times the update")
    add = parser.add_argument_group("or an ordinary EMA").add_argument
    add("--decay", type=number, metavar="D", help="weight of the old average in a step")
    add("--half-life", type=number, metavar="N", help="steps until that weight has become one half")
    add = parser.add_argument_group("what to say about it").add_argument
    add("--steps", type=steps, metavar="T", help="length of the run, for what is left of the start and the k(T) rule")
    add("--lr", type=number, help="the optimizer's learning rate")
    add("--curvature", type=number, metavar="H", help="largest curvature of the loss, for SGD's stable learning rate")
    add("--json", action="store_true", help="one JSON object with every digit; infinity is the text inf")
    parser.set_defaults(run=explain, parser=parser)


def explain(args: argparse.Namespace) -> int:
    """`torchbelay explain`: a paragraph and a table about a spring, or one JSON object."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            spring = _spring(args)
            said = [str(warning.message) for warning in caught]  # not those about springs derived from it
            facts = _facts(spring, args.lr, args.curvature, args.steps)
        except (ValueError, TypeError) as error:
            args.parser.error(str(error))
        except ArithmeticError:
            args.parser.error("these numbers are too large or too small to compute with; use moderate ones")
    for message in said:
        print(f"{args.parser.prog}: warning: {message}", file=sys.stderr)
    if args.json:
        print(json.dumps(_without_inf(facts), indent=2, allow_nan=False))
        return 0
    width = max(40, shutil.get_terminal_size().columns)
    print(textwrap.fill(facts["explanation"], width), end="\n\n")
    rows = _rows(facts)
    margin = max(len(label) for label, _ in rows) + 2
    for label, value in rows:
        print(textwrap.fill(value, width, initial_indent=label.ljust(margin), subsequent_indent=" " * margin))
    return 0


def _spring(args: argparse.Namespace) -> Spring:
    """The spring that the arguments describe, in one of the three ways."""
    given = {name: value for name in _SPRING if (value := getattr(args, name)) is not None}
    if args.decay is not None or args.half_life is not None:
        if given:
            raise ValueError(f"--decay or --half-life is a whole setting by itself; leave out --{', --'.join(given)}")
        return Spring.ema(args.decay, half_life=args.half_life)
    if missing := [name for name in _NEEDED if name not in given]:
        raise ValueError(f"--{', --'.join(missing)} missing; give --k, --m1 and --m2, or --decay, or --half-life")
    return Spring(**given)


def _facts(s: Spring, lr: float | None, curvature: float | None, steps: int | None) -> dict[str, Any]:
    """Everything that there is to say, under the names that --json prints."""
    scale = s.effective_lr_scale
    try:
        matched = {"decay": s.matched_ema().decay, "lr_scale": scale}
    except ValueError:
        matched = None
    facts: dict[str, Any] = {"spring": {name: getattr(s, name) for name in _SPRING}, "explanation": s.explain()}
    facts |= {"regime": s.regime, "alpha": s.alpha, "beta": s.beta, "kappa1": s.kappa1, "kappa2": s.kappa2}
    facts |= {"decay": s.decay, "half_life": s.half_life, "theta": s.theta}
    facts |= {"effective_lr_scale": scale, "matched_ema": matched}
    if lr is not None:
        facts |= {"lr": arguments.number("lr", lr, low=0), "effective_lr": scale * lr}
    if curvature is not None:
        limit = s.max_stable_lr(curvature)
        facts |= {"curvature": curvature, "max_stable_lr": limit, "max_stable_lr_of_sgd": 2 / curvature}
        if lr is not None:
            facts["lr_is_stable"] = lr < limit
    if steps is not None:  # with velocities decay^T is the law of the long run
        facts |= {"steps": steps, "left_after_steps": s.decay**steps if s.decay <= 1 else math.inf}
        facts["k_for_steps"] = {
            "printed": _carried_over(s, steps, "printed"),
            "exact": _carried_over(s, steps, "exact"),
        }
    return facts


def _carried_over(s: Spring, steps: int, rule: Literal["printed", "exact"]) -> dict[str, Any]:
    """The k(T) rule for this setting, had it been tuned for TUNED_FOR steps; or why the rule does not apply."""
    try:
        if s.has_velocity:
            raise ValueError("the rule is about velocity-free springs; leave c1 and c2 out")
        m1, m2 = s.m1 / s.dt**2, s.m2 / s.dt**2  # the rule has Δt = 1, and only k·Δt²/m matters
        carried = Spring.for_steps(steps, m1=m1, m2=m2, k0=s.k, T0=TUNED_FOR, rule=rule)
    except ValueError as why:
        return {"k": None, "decay": None, "refused": str(why)}
    return {"k": carried.k, "decay": carried.decay, "refused": None}


def _rows(f: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts as lines of a table."""
    absolute = f", {f['effective_lr']:.4g} at lr {f['lr']:g}" if "lr" in f else ""
    matched = "none"
    if ema := f["matched_ema"]:
        matched = f"decay {ema['decay']:.10g} at {ema['lr_scale']:.4g} of the learning rate{absolute}"
    rows = [
        ("regime", f["regime"]),
        ("α, β", f"{f['alpha']:.10g}, {f['beta']:.10g}"),
        ("κ1 + κ2", f"{f['kappa1'] + f['kappa2']:.6g}"),
        ("decay a step", f"{f['decay']:.10g}"),
        ("half-life", f"{f['half_life']:.6g} steps"),
        ("θ = m2/m1", f"{f['theta']:.6g}"),
        ("effective learning rate", f"{f['effective_lr_scale']:.4g} of the optimizer's{absolute}"),
        ("matched EMA", matched),
    ]
    if "curvature" in f:
        verdict = ""
        if "lr" in f:
            verdict = f"; lr {f['lr']:g} is {'below it' if f['lr_is_stable'] else 'not below it: SGD diverges'}"
        rows.append((f"stable at curvature {f['curvature']:g}", f"lr < {f['max_stable_lr']:.4g}{verdict}"))
        rows.append(("  plain SGD, or EMA", f"lr < {f['max_stable_lr_of_sgd']:.4g}"))
    if "steps" in f:
        about = "" if f["regime"] == "velocity-free" else "about "
        shown = f"{f['steps']:,}" if f["steps"] < 1e15 else f"{f['steps']:.6g}"
        rows.append((f"left after {shown} steps", f"{about}{f['left_after_steps']:.4g} of the start"))
        tuned = f", if k = {f['spring']['k']:.6g} was tuned for {TUNED_FOR:,} steps"
        for rule, at in f["k_for_steps"].items():
            value = f"refused: {at['refused']}" if at["refused"] else f"{at['k']:.6g}, decay {at['decay']:.6g}{tuned}"
            rows.append((f"k by the {rule} rule", value))
    return rows


def _without_inf(value: Any) -> Any:
    """JSON has no infinity: it becomes the text "inf", which float() reads."""
    if isinstance(value, dict):
        return {key: _without_inf(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# torchbelay reproduce ----------------------------------------------------------------------------------------------

_REPRODUCE_EXAMPLES = """\
examples:
  torchbelay reproduce                       everything, in some minutes, into the folder report
  torchbelay reproduce fig2 robustness       two parts of it; the same command again goes on where it was stopped
  torchbelay reproduce --quick --out trial   a small version of everything, to see that it works
  torchbelay reproduce --dry-run             what would be run
  torchbelay reproduce cifar10 --data cifar-10-binary.tar.gz --budget 10m --out trial

Without a GPU, or without the data, mnist, sign and cifar10 show the records that come with the package.
"""


def _add_reproduce(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "reproduce",
        help="run the paper's experiments and write a report that says which of its claims hold",
        description="Run the paper's experiments, with the controls that it lacks, and write DIR/index.html.",
        epilog=_REPRODUCE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parts = "fig1, fig2, fig3, robustness, momentum, invariance, overhead, ring, mnist, sign, cifar10 or all (default)"
    parser.add_argument("parts", nargs="*", metavar="PART", help=parts)
    parser.add_argument("--out", default="report", metavar="DIR", help="where to (default: report)")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of everything random (default: 0)")
    parser.add_argument("--quick", action="store_true", help="a small version; its verdicts mean little")
    parser.add_argument("--force", action="store_true", help="run again what is there already")
    parser.add_argument("--jobs", type=steps, metavar="N", help="parts at a time (default: as many as there are cores)")
    parser.add_argument("--dry-run", action="store_true", help="list what would be run, and run nothing")
    add = parser.add_argument_group("mnist, sign and cifar10, which train on images on a GPU").add_argument
    add("--data", type=Path, metavar="PATH", help="a copy of the data set (default: TORCHBELAY_DATA, or the cache)")
    add("--inception", type=Path, metavar="PATH", help="FID's weights (default: torch-fidelity downloads them)")
    add("--budget", metavar="B", help="of each: a time, as 10m, or images a network, as 100kimg; masses follow")
    parser.set_defaults(run=reproduce, parser=parser)


def reproduce(args: argparse.Namespace) -> int:
    """`torchbelay reproduce`: the laboratory."""

    def load() -> Callable[[], int]:
        from torchbelay.lab.part import Settings
        from torchbelay.lab.reproduce import reproduce as run
        from torchbelay.lab.score.training.budget import Budget

        def work() -> int:
            if args.budget is not None:
                Budget.parse(args.budget)  # now, not after the parts that have none
            on_gpu = {"data": args.data, "inception": args.inception, "budget": args.budget, "anew": args.force}
            settings = Settings(seed=args.seed, quick=args.quick, **on_gpu)
            options = {"jobs": args.jobs or _cores(), "force": args.force, "dry_run": args.dry_run}
            return run(args.parts, Path(args.out), settings, **options)

        return work

    again = "the same command without --force" if args.force else "the same command"
    return in_lab(args, load, f"stopped; what is finished is kept, and {again} goes on")


def _cores() -> int:
    """How many this process may use, which in a container can be fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_COMMANDS = (_add_explain, _add_reproduce, *SCORE_COMMANDS)

if __name__ == "__main__":
    sys.exit(main())
