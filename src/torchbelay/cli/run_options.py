"""The options of a run beside its reports: the decay of its average, and the optimizer's β1."""

import ast
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchbelay.physics.spring import Spring

NAME = "options.json"
_LONGEST = 1000  # characters of a method
_TOO_MUCH = (RecursionError, OverflowError)  # nested too deep, or too large a number
ADAM_BETA1 = 0.9  # of runs whose options do not have it: `torchbelay train` always had this one


@dataclass(frozen=True)
class RunOptions:
    """What `torchbelay train` wrote about a run."""

    path: Path
    decay: float
    beta1: float
    pulls: str | None  # the method, if its average pulls the weights: then it is not an EMA


def read_options(stats: Path) -> RunOptions | None:
    """Return the options of the run that wrote `stats`; None if there is no options.json beside it."""
    path = stats.parent / NAME
    if not path.is_file():
        return None
    cure = "give --decay and --beta1"
    try:
        resolved = json.loads(path.read_text(encoding="utf-8"))["resolved"]
        method = _spring(resolved["method"])
        beta1 = float(resolved.get("beta1", ADAM_BETA1))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SyntaxError, *_TOO_MUCH) as error:
        raise ValueError(f"cannot read the decay and β1 of the run from {path} ({error!r}); {cure}") from error
    return RunOptions(path, method.decay, beta1, repr(method) if method.theta else None)


def _spring(text: str) -> Spring:
    """Return the spring that a text tells, as `repr` writes it."""
    if len(text) > _LONGEST:
        raise ValueError(f"method is a text of {len(text):,} characters, and no spring")
    call = ast.parse(text, mode="eval").body
    name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
    if not isinstance(call, ast.Call) or name not in ("Spring", "Spring.ema"):
        raise ValueError(f"method={text!r} is not a spring")
    given = {str(each.arg): _value(each.value) for each in call.keywords}
    return Spring.ema(**given) if name == "Spring.ema" else Spring(**given)


def _value(node: ast.expr) -> Any:
    return math.inf if isinstance(node, ast.Name) and node.id == "inf" else ast.literal_eval(node)
