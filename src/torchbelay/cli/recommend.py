"""`torchbelay recommend`: which θ, averaging rate and learning rate to take for a run, in words or as JSON."""

import argparse
import json
import math
import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchbelay.physics import recommend_words
from torchbelay.physics.recommend import Advice, Setting, recommend
from torchbelay.physics.run_fit import fit_run

from .parser import add_verb, number, steps

if TYPE_CHECKING:
    from .parser import Commands

_EXAMPLES = """\
examples:
  torchbelay recommend --steps 1e5 --beta1 0.9 --lr 3e-4          your EMA works best at 3e-4: what else to try
  torchbelay recommend --steps 2000 --curvatures 200 20 2 0.2     SGD on a loss with these curvatures
  torchbelay recommend --steps 2000 --curvatures 200 20 2 0.2 --noise 4 --batch 32 --start 2.3
  torchbelay recommend --steps 1e5 --beta1 0.9 --from-run runs/a/stats.jsonl --decay 0.999

A line of the file of --from-run is a JSON object with step, lr, the loss of the weights (w1, or loss) and the loss of
the average (w2); torchbelay train writes such files. The advice is exact for a quadratic with noisy gradients.
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
    option("--beta1", type=number, default=0.0, metavar="B", help="the optimizer's momentum, Adam's β1 (default: 0)")
    option("--lr", type=number, help="the learning rate that is best for an EMA, if you know it: scales all rates")
    option("--json", action="store_true", help="one JSON object with every digit; infinity is the text inf")
    option = parser.add_argument_group("the loss (default: a typical spectrum)").add_argument
    option("--curvatures", type=number, nargs="+", metavar="H", help="eigenvalues of the loss's Hessian")
    option(
        "--noise", type=number, metavar="S", help="variance of one example's gradient over the curvature (default: 1)"
    )
    option("--batch", type=number, metavar="N", help="examples per step (default: 128)")
    option("--start", type=number, metavar="L", help="loss above its minimum at the beginning (default: 1)")
    option = parser.add_argument_group("or a run to learn it from").add_argument
    option("--from-run", type=Path, metavar="FILE", help="reports of a run, one JSON object per line")
    option("--decay", type=number, metavar="D", help="the decay of that run's EMA, to tell noise from the minimum")


def run(args: argparse.Namespace) -> int:
    """Print the advice in words, or one JSON object."""
    try:
        advice = _advice(args)
        words = advice.explain()
    except (ValueError, TypeError) as error:
        args.parser.error(str(error))
    except ArithmeticError:
        args.parser.error("these numbers are too large or too small to compute with; use moderate ones")
    if args.json:
        print(json.dumps(_facts(advice), indent=2, allow_nan=False))
        return 0
    width = max(40, shutil.get_terminal_size().columns)
    print("\n\n".join(textwrap.fill(part, width) for part in words.split("\n\n")))
    return 0


def _advice(args: argparse.Namespace) -> Advice:
    """Return the advice for the loss, or the run, that the arguments describe."""
    given = {name: value for name in ("noise", "batch", "start") if (value := getattr(args, name)) is not None}
    if args.from_run is None:
        if args.decay is not None:
            raise ValueError("--decay is that of the run of --from-run; leave it out, or give --from-run")
        return recommend(args.steps, curvatures=args.curvatures, beta1=args.beta1, lr=args.lr, **given)
    extra = [*given, *(name for name in ("curvatures", "lr") if getattr(args, name) is not None)]
    if extra:
        raise ValueError(f"--from-run finds these by itself; leave out --{', --'.join(extra)}")
    found = fit_run(_read(args.from_run), decay=args.decay, beta1=args.beta1)
    return recommend(args.steps, curvatures=found.problem, beta1=args.beta1, near=found.lr, caveats=found.caveats)


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of reports; those without losses are left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    found = []
    for count, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path} is not JSON in line {count}: {error}; give one object per line") from error
        if not isinstance(value, dict):
            raise ValueError(f"{path} has no object in line {count}; give one object per line")
        found.append(value)
    return found


def _facts(advice: Advice) -> dict[str, Any]:
    """Return the advice under the names that --json prints."""
    others = {name: _setting(each) for name, each in advice.alternatives.items()}
    return {
        "steps": advice.steps,
        "beta1": advice.beta1,
        **_setting(advice.best),
        "theta_floor": advice.floor,
        "alternatives": others,
        "warnings": list(advice.warnings),
        "explanation": advice.explain(),
    }


def _setting(setting: Setting) -> dict[str, Any]:
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
