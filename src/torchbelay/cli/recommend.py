"""`torchbelay recommend`: which θ, averaging rate and learning rate to take for a run, in words or as JSON."""

import argparse
import json
import math
import shutil
import sys
import textwrap
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .loading import LoadError, load_function
from .parser import add_verb, number, steps

if TYPE_CHECKING:
    from torchbelay.physics.recommend import Advice
    from torchbelay.physics.search import Setting
    from torchbelay.physics.spectrum import Spectrum

    from .parser import Commands

_EXAMPLES = """\
examples:
  torchbelay recommend --steps 1e5 --beta1 0.9 --lr 3e-4          your EMA works best at 3e-4: what else to try
  torchbelay recommend --steps 2000 --curvatures 200 20 2 0.2     SGD on a loss with these curvatures
  torchbelay recommend --steps 2000 --curvatures 200 20 2 0.2 --noise 4 --batch 32 --start 2.3
  torchbelay recommend --steps 1e5 --from-run runs/a/stats.jsonl                     a run of torchbelay train
  torchbelay recommend --steps 1e5 --from-run mine.jsonl --decay 0.999 --beta1 0.9   a run of your own
  torchbelay recommend --steps 1e5 --from-run runs/*/stats.jsonl --lost 0.01         several runs: a line search
  torchbelay recommend --steps 10000 --batch 256 --probe train.py:probe     measures the curvatures of your own model

A line of the file of --from-run is a JSON object with step, lr, the loss of the weights (w1, or loss) and the loss of
the average (w2). torchbelay train writes such files, and the decay and β1 of the run in options.json beside them.

The function of --probe takes no arguments and returns (model, loss) for SGD, or (model, loss, optimizer) for an Adam
that has stepped; loss() is the loss on a large fixed batch.

The advice is exact for a quadratic with noisy gradients. In the output of --json, lr_unit is null if learning rates are
those of the optimizer, or what they are multiples of.
"""


def add(commands: "Commands") -> None:
    """Declare the arguments of `torchbelay recommend`."""
    parser = add_verb(
        commands,
        "recommend",
        run=run,
        summary="say which θ, averaging rate and learning rate to take for a run, and why",
        description="Search θ, the averaging rate and the learning rate on a noisy quadratic, and say what is best.",
        examples=_EXAMPLES,
    )
    option = parser.add_argument
    option("--steps", type=steps, metavar="T", required=True, help="length of the run")
    option(
        "--beta1",
        type=number,
        metavar="B",
        help="the optimizer's momentum, Adam's β1 or that of SGD with dampening = momentum (default: that of --probe "
        "or of the run's options.json, or 0); torch's SGD has no dampening by default, and rates 1 − β1 times as large",
    )
    option("--lr", type=number, help="the learning rate that is best for an EMA, if you know it: scales all rates")
    option("--json", action="store_true", help="one JSON object with every digit; infinity is the text inf")
    option = parser.add_argument_group("the loss (default: a typical spectrum)").add_argument
    option("--curvatures", type=number, nargs="+", metavar="H", help="eigenvalues of the loss's Hessian")
    option(
        "--probe",
        metavar="FILE.py:FUNCTION",
        help="measure them on your model instead: a function of a file, or MODULE:FUNCTION, that returns (model, loss)",
    )
    option(
        "--noise", type=number, metavar="S", help="variance of one example's gradient over the curvature (default: 1)"
    )
    option("--batch", type=number, metavar="N", help="examples per step (default: 128)")
    option("--start", type=number, metavar="L", help="loss above its minimum at the beginning (default: 1)")
    option = parser.add_argument_group("or a run to learn it from").add_argument
    option(
        "--from-run",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="reports of a run, one JSON object per line; of several runs that differ in rates alone for a line search",
    )
    option(
        "--decay",
        type=number,
        nargs="+",
        metavar="D",
        help="the decay of that run's EMA, or one per run, to tell noise from the minimum (default: that of the run's "
        "options.json)",
    )
    option(
        "--lost",
        type=number,
        nargs="+",
        metavar="LR",
        help="learning rates of other runs, whose loss became infinite or did not fall",
    )


def run(args: argparse.Namespace) -> int:
    """Print the advice in words, or one JSON object."""
    try:
        measured = _probe(args)
        advice, read = _advice(args, measured)
        words = advice.explain()
    except (LoadError, ValueError, TypeError, ArithmeticError) as error:
        args.parser.error(str(error))
    if args.json:
        print(json.dumps(_facts(advice, measured, read), indent=2, allow_nan=False))
        return 0
    first = read if measured is None else measured.explain()
    if first:
        words = f"{first}\n\n{words}"
    width = max(40, shutil.get_terminal_size().columns)
    print("\n\n".join(textwrap.fill(part, width, break_on_hyphens=False) for part in words.split("\n\n")))
    return 0


def _advice(args: argparse.Namespace, measured: "Spectrum | None") -> "tuple[Advice, str | None]":
    """Return the advice for the loss, or the runs, that the arguments describe, and what was read about the runs."""
    from torchbelay.physics.recommend import recommend

    from .runs import read_runs

    if args.from_run is None:
        for name in ("decay", "lost"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name} is about the runs of --from-run; leave it out, or give --from-run")
        curvatures = measured or args.curvatures
        return recommend(args.steps, curvatures=curvatures, beta1=args.beta1, lr=args.lr, **_given(args)), None
    extra = [*_given(args), *(name for name in ("curvatures", "lr") if getattr(args, name) is not None)]
    if extra:
        raise ValueError(f"--from-run finds these by itself; leave out --{', --'.join(extra)}")
    runs = read_runs(args.from_run, args.decay, args.beta1)
    lost = args.lost or ()
    return recommend(args.steps, curvatures=runs.fits, beta1=runs.beta1, lost=lost, caveats=runs.caveats), runs.read


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the arguments say about the loss, apart from its curvatures."""
    return {name: value for name in ("noise", "batch", "start") if (value := getattr(args, name)) is not None}


def _probe(args: argparse.Namespace) -> "Spectrum | None":
    """Return the curvatures of the model that --probe leads to; None without it."""
    if args.probe is None:
        return None
    for name in ("curvatures", "from_run", "decay", "lost"):
        if getattr(args, name) is not None:
            raise ValueError(f"--probe measures the curvatures; leave out --{name.replace('_', '-')}")
    from torchbelay.physics.recommend import recommend

    # What is wrong with the other arguments shows before the work.
    recommend(args.steps, curvatures=[1.0], beta1=args.beta1, lr=args.lr, **_given(args))
    if not all(args.probe.rpartition(":")):
        raise LoadError(f"{args.probe!r} is not FILE.py:FUNCTION; give a file and a function in it, as train.py:probe")
    from torchbelay.curvature import measure_curvatures

    try:
        with redirect_stdout(sys.stderr):  # what the user's code prints is no part of the answer
            model, loss, optimizer = _made(load_function(args.probe, "returns (model, loss)")(), args.probe)
            return measure_curvatures(model, loss, optimizer=optimizer, progress=_show)
    except LoadError:
        raise
    except (Exception, SystemExit) as error:  # most likely of the user's own code
        raise LoadError(f"{args.probe} failed with {type(error).__name__}: {error}") from error
    finally:
        _show(0, 0)


def _made(value: Any, target: str) -> tuple[Any, Any, Any]:
    """Return the model, the loss and the optimizer, if there is one, that the function of --probe returned."""
    if isinstance(value, tuple | list) and len(value) in (2, 3):
        model, loss, *rest = value
        return model, loss, rest[0] if rest else None
    raise LoadError(
        f"{target} returned {type(value).__name__}; it must return (model, loss) or (model, loss, optimizer)"
    )


def _show(done: int, total: int) -> None:
    """Show on a terminal how many products are made; with a total of 0, clear the line."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[KHessian-vector product {done} of {total}" if total else "\r\x1b[K")
        sys.stderr.flush()


def _facts(advice: "Advice", measured: "Spectrum | None", read: str | None) -> dict[str, Any]:
    """Return the advice under the names that --json prints."""
    others = {name: _setting(each) for name, each in advice.alternatives.items()}
    return {
        "steps": advice.steps,
        "beta1": advice.beta1,
        "lr_unit": advice.lr_unit,
        **_setting(advice.best),
        "theta_floor": advice.floor,
        **({} if advice.near is None else _learnt(advice)),
        "alternatives": others,
        **({} if measured is None else {"probe": asdict(measured)}),
        **({} if read is None else {"read": read}),
        "warnings": list(advice.warnings),
        "explanation": advice.explain(),
    }


def _learnt(advice: "Advice") -> dict[str, Any]:
    """Return what the runs say that the advice is from."""
    share = None if advice.share is None or not math.isfinite(advice.share) else advice.share
    return {"near": advice.near, "runs": advice.runs, "noise_share": share, "case": advice.region.case}


def _setting(setting: "Setting") -> dict[str, Any]:
    from torchbelay.physics import recommend_words

    method = setting.method
    return {
        "method": recommend_words.call(setting),
        "theta": getattr(method, "theta", None),
        "rate": getattr(method, "rate", None),
        "lr": setting.lr,
        "loss": {"bias": setting.loss.bias, "noise": setting.loss.noise, "total": setting.loss.total},
        "lrs_within_10_percent": list(setting.lrs),
        "max_stable_lr": "inf" if setting.limit == math.inf else setting.limit,
    }
