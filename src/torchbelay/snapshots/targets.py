"""What can be asked for after training: any method of the family, a mean of the last weights, a decayed rate.

A target is told by a call, as `ema(half_life=2000)`. It is read without running any code.
"""

import ast
import inspect
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from torchbelay.belay.cohort import inertias
from torchbelay.physics import arguments, methods, schedules
from torchbelay.physics.identity import describe
from torchbelay.physics.method import Method, uncalled
from torchbelay.physics.spring import Spring

from .least_squares import Life
from .profiles import Swings, couplings, pair, pulls, watching

Shape = Literal["linear", "cosine", "1-sqrt"]


@dataclass(frozen=True)
class window:
    """The mean of the weights after each of the last `steps` steps: SWA that begins late, or LAWA.

    P(s) = (T − s + 1)/n over the last n steps, and 1 before them.

    >>> from torchbelay.snapshots.profiles import profile
    >>> mean = aim_at(window(4), 6).life
    >>> profile(mean.filter, mean.born, 6).tolist()
    [1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """

    steps: int

    def __post_init__(self) -> None:
        arguments.whole("steps", self.steps, low=1)


@dataclass(frozen=True)
class decay:
    """The weights as if the updates of the last `steps` steps had been made at a learning rate that decays to 0.

    P(s) = f((s − 1 − T + n)/n) over the last n steps, and 1 before them:

        "linear"    f(x) = 1 − x                 the same as `window`
        "cosine"    f(x) = (1 + cos(π·x))/2
        "1-sqrt"    f(x) = 1 − √x

    A run at a constant learning rate can so be ended anywhere. The gradients stay those of the run; a run whose rate
    really decays takes others.

    Reference: Tian et al., "WSM: decay-free learning rate schedule via checkpoint merging for LLM pre-training", 2025.

    >>> from torchbelay.snapshots.profiles import profile
    >>> ended = aim_at(decay(4, "cosine"), 5).life
    >>> [round(x, 3) for x in profile(ended.filter, ended.born, 5).tolist()]
    [1.0, 1.0, 0.854, 0.5, 0.146]
    """

    steps: int
    shape: Shape = "linear"

    def __post_init__(self) -> None:
        arguments.whole("steps", self.steps, low=1)
        arguments.one_of("shape", self.shape, get_args(Shape))


Target = Method | window | decay

_SCHEDULES: dict[str, Callable[..., Any]] = {name: getattr(schedules, name) for name in schedules.__all__}
_TARGETS: dict[str, Callable[..., Target]] = {
    **{name: getattr(methods, name) for name in methods.__all__ if name != "Method"},
    "Spring": Spring,
    "Spring.ema": Spring.ema,
    "Spring.critical": Spring.critical,
    "window": window,
    "decay": decay,
}


# Names may be written as in a program that has imported torchbelay, or what it holds.
_PREFIX = re.compile(r"^(?:(?:tb|torchbelay)\.)?(?:(?:methods|schedules|snapshots)\.)?")


class Aim(NamedTuple):
    """A target at a step: the couplings of its steps, (steps, 4), its velocities, and the steps before its birth."""

    numbers: Tensor
    swings: Swings
    born: int

    @property
    def pulls(self) -> bool:
        """Whether the target changes the weights."""
        return pulls(self.numbers, self.swings)

    @property
    def life(self) -> Life:
        """The target in a run that nothing pulls; if it pulls itself, with weights of its own."""
        if self.pulls or any(self.swings):
            return Life(pair(self.numbers, self.swings), self.born)
        return Life(watching(self.numbers), self.born)


def aim_at(target: Target, at: int, begin: int = 0) -> Aim:
    """Return a target at a step. A method begins with the run, or where its averages last began again, at `begin`."""
    if not isinstance(target, window | decay):
        return Aim(couplings(target, at - begin), inertias(target), begin)
    n = target.steps
    if n > at - begin:
        since = f" since reset() at step {begin}" if begin else ""
        raise ValueError(
            f"{target} asks for more steps than the {at - begin} that the run had by then{since}; give fewer steps"
        )
    if isinstance(target, window):
        return Aim(couplings(methods.swa(), n), (None, None), at - n)
    x = torch.arange(n, dtype=torch.float64) / n
    left = {"linear": 1 - x, "cosine": (1 + torch.cos(math.pi * x)) / 2, "1-sqrt": 1 - x.sqrt()}[target.shape]
    # it takes the share q of every update and does not follow the weights
    numbers = torch.stack([torch.zeros_like(x), torch.zeros_like(x), torch.ones_like(x), left], 1)
    return Aim(numbers, (None, None), at - n)


def label(target: Target) -> str:
    """Return a target as the shortest call that makes it.

    >>> label(methods.ema(half_life=2000)), label(decay(500))
    ('ema(half_life=2000.0)', 'decay(500)')
    """
    if isinstance(target, window):
        return f"window({target.steps})"
    if isinstance(target, decay):
        return f"decay({target.steps})" if target.shape == "linear" else f"decay({target.steps}, {target.shape!r})"
    call = ast.parse(describe(target), mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in _TARGETS:
        return describe(target)
    fields = inspect.signature(_TARGETS[call.func.id]).parameters
    told = []
    for keyword in call.keywords:
        default = fields[keyword.arg or ""].default
        if default is inspect.Parameter.empty or _value(keyword.value) != default:
            told.append(f"{keyword.arg}={ast.unparse(keyword.value)}")
    return f"{call.func.id}({', '.join(told)})"


# Texts --------------------------------------------------------------------------------------------------------------


def parse(text: str) -> Target:
    """Return the target that a text tells; only calls of the known names with plain values are read.

    >>> parse("ema(half_life=2000)") == methods.ema(half_life=2000)
    True
    >>> parse("tb.methods.ema(half_life=2000)") == parse("methods.ema(half_life=2000)") == parse("ema(half_life=2000)")
    True
    >>> parse("window(1000)"), parse("Spring(k=1, m1=inf, m2=500)").m1
    (window(steps=1000), inf)
    """
    family = parse_family(text)
    if len(family) != 1:
        raise ValueError(f"{text!r} tells {len(family)} targets; give one value for each argument")
    return family[0]


def parse_family(text: str) -> list[Target]:
    """Return all targets that a text tells; a list in place of a value tells one target per value.

    >>> [label(each) for each in parse_family("window([100, 200])")]
    ['window(100)', 'window(200)']
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as problem:
        raise ValueError(f"{text!r} is not a call such as ema(half_life=2000); {_choices()}") from problem
    name = _PREFIX.sub("", ast.unparse(call.func)) if isinstance(call, ast.Call) else ""
    if not isinstance(call, ast.Call) or name not in _TARGETS:
        raise ValueError(f"{text!r} is not a call of a known target, as ema(half_life=2000); {_choices()}")
    found = [_call(_TARGETS[name], call, chosen) for chosen in itertools.product(*map(_values, _arguments(call)))]
    if not found:
        raise ValueError(f"{text!r} has a list without values, which tells no target; give one value or more")
    return found


def _arguments(call: ast.Call) -> list[ast.expr]:
    """Return the values of all arguments of a call, as they are written."""
    if any(keyword.arg is None for keyword in call.keywords):
        raise ValueError(f"{ast.unparse(call)!r} has an argument **…; write every argument out")
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _call(make: Callable[..., Any], call: ast.Call, values: Sequence[Any]) -> Any:
    """Return what a known function makes of these values, in the order of `_arguments`."""
    plain, named = values[: len(call.args)], values[len(call.args) :]
    try:
        return make(*plain, **dict(zip([each.arg or "" for each in call.keywords], named, strict=True)))
    except TypeError as problem:
        raise ValueError(f"{ast.unparse(call)!r}: {problem}") from problem


def check(target: object) -> Target:
    """Return what was given as a target: an object, or a text; refuse anything else."""
    if isinstance(target, str):
        return parse(target)
    if (maker := uncalled(target)) is not None:
        raise TypeError(f"target={maker} was not called; give what it makes, as {maker}(...)")
    if isinstance(target, window | decay | Method):
        return target
    raise TypeError(f"target={target!r} is neither a method nor a window nor a decay; {_choices()}")


def _choices() -> str:
    return f"choose from {', '.join(_TARGETS)}"


def _values(node: ast.expr) -> list[Any]:
    return [_value(each) for each in node.elts] if isinstance(node, ast.List) else [_value(node)]


def _value(node: ast.expr) -> Any:
    """Return a number, a text, True, False, None, inf or a schedule; refuse everything else."""
    if isinstance(node, ast.Name) and node.id == "inf":
        return math.inf
    if isinstance(node, ast.Call) and (name := _PREFIX.sub("", ast.unparse(node.func))) in _SCHEDULES:
        return _call(_SCHEDULES[name], node, [_value(each) for each in _arguments(node)])
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError) as problem:
        raise ValueError(f"{ast.unparse(node)!r} is not a plain value; give a number or a text") from problem
    if value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError(f"{ast.unparse(node)!r} is not a number or a text")
    return value
