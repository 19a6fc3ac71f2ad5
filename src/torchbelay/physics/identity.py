"""What a method is, as a text that a checkpoint can hold: its class, and the fields that differ from their defaults.

Equal methods have equal texts, in any process and whatever numbers they were written with: `half_life=50` is
`half_life=50.0`. What no text can tell (a lambda, a repr with an address) is known by the couplings of some steps.
"""

import ast
import copy
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cached_property
from numbers import Real
from typing import Any

from .method import Method, Remembers
from .spring import Spring

# The steps at which a checkpoint has the couplings of a method that no text can tell. They are always the same ones:
# the texts are names in distributed checkpoints.
SAMPLED = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
_LR = 1e-3  # at which they are taken
_OTHER_LRS = (1e-5, 0.1)  # at which that of the first step is taken too, if it depends on the learning rate
_DIGITS = 12  # that they keep, behind the point too: libraries of mathematics differ in the last ones
_SAMPLE = re.compile(r"at_\d+(_lr_\d+)?")

# Fields with defaults that format 1 of checkpoints wrote out. They are written at any value, so that the names in
# distributed checkpoints of that format are still found. A field that is added later stays out at its default.
_WRITTEN = {
    "centred": {"follow"},
    "easgd": {"alpha", "rho"},
    "ema": {"decay", "half_life", "half_life_samples", "batch_size", "warmup", "power", "follow"},
    "lookahead": {"k", "alpha"},
    "power_ema": {"gamma", "sigma_rel"},
    "schedule_free": {"beta", "r", "weight_lr_power"},
    "swa": {"every"},
}
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}", re.IGNORECASE)
_TOKEN = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.])")


class _UntoldError(Exception):
    """A part of a method that has no text which another process would give it too."""


def describe(method: object) -> str:
    """Return a method as a text that is equal for equal methods; refuse one that cannot be told.

    A dataclass is its name and the fields that differ from their defaults, without those with `compare=False`. Another
    class with a repr of its own is that repr, and one without is its name and its public attributes.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Mine:
    ...     rate: float
    ...     follow: str = "after"
    >>> describe(Mine(1)) == describe(Mine(1.0)), describe(Mine(0.5))
    (True, 'Mine(rate=0.5)')
    """
    try:
        return _text(method)
    except (_UntoldError, RecursionError) as problem:
        raise ValueError(
            f"no text can tell what the method {type(method).__qualname__} is ({_reason(problem)}): make it a "
            "dataclass whose fields are numbers, texts or such dataclasses; a schedule is a small dataclass with "
            "__call__"
        ) from problem


def describe_or_sample(method: Method) -> str:
    """Return a method as a text, whatever it is; of one that no text can tell, what is known of it.

    That is its fields, in which a function is only a function, its inertias, and `sample(method)`. Two methods with the
    same text may still differ at other steps.

    >>> from dataclasses import dataclass
    >>> from types import SimpleNamespace
    >>> @dataclass
    ... class Mine:
    ...     rate: object
    ...     varies = "never"
    ...     def coupling(self, step, lr):
    ...         return SimpleNamespace(a=0, b=self.rate(step), p=1, q=0)
    >>> describe_or_sample(Mine(lambda step: 0.1))
    'Mine(rate=function, at_1=(0.0, 0.1, 1.0, 0.0))'
    """
    with suppress(_UntoldError, RecursionError):
        return _text(method)
    parts = [f"{name}={_text_or_kind(getattr(method, name), whole=whole)}" for name, whole in _attributes(method)]
    told = {part.split("=")[0] for part in parts}
    inertias = {name: getattr(method, name, None) for name in ("inertia1", "inertia2") if name not in told}
    parts += [f"{name}={_text_or_kind(value, whole=False)}" for name, value in inertias.items() if value is not None]
    parts += [f"{name}={text}" for name, text in sample(method).items()]
    return f"{_name(type(method))}({', '.join(parts)})"


def why_untold(method: object) -> str | None:
    """Return the part of a method because of which no text can tell it; None if one can.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Mine:
    ...     rate: object
    >>> why_untold(Mine(0.5)), str(why_untold(Mine(lambda step: 0.1)))[:19]
    (None, 'Mine.rate=<function')
    """
    try:
        _text(method)
    except (_UntoldError, RecursionError) as problem:
        return _reason(problem)
    return None


def _reason(problem: Exception) -> str:
    return "it contains itself" if isinstance(problem, RecursionError) else str(problem)


def sample(method: Method) -> dict[str, str]:
    """Return couplings of a method as texts, by names such as at_10 for step 10; nothing if it cannot be asked.

    A step without a coupling, as beyond the end of a table, has the name of the error. A method that does not say when
    its coupling varies may count how often it is asked, and is not asked out of turn.
    """
    varies = getattr(method, "varies", None)
    asked = [(f"at_{step}", step, _LR) for step in (SAMPLED[:1] if varies == "never" else SAMPLED)]
    if varies == "lr":
        asked += [(f"at_1_lr_{i}", 1, lr) for i, lr in enumerate(_OTHER_LRS)]
    if varies not in ("never", "step", "lr"):
        return {}
    trials = [(name, _trial(method), step, lr) for name, step, lr in asked]  # each knows nothing of the others
    return {name: _coupling_text(trial, step, lr) for name, trial, step, lr in trials if trial is not None}


def sampled_steps(method: Method) -> list[int]:
    """Return the steps at which `sample` found a coupling."""
    found = {name: text for name, text in sample(method).items() if text.startswith("(")}
    return [step for step in SAMPLED if f"at_{step}" in found]


def _trial(method: Method) -> Method | None:
    """Return a copy that may be asked out of turn; None if the method cannot be copied.

    Its lists, generators and the like are copied as well: nothing of what it is asked may be remembered.
    """
    try:
        if isinstance(method, Remembers):
            return method.fresh()
        made = copy.copy(method)
        if made is method:
            return None
        for name, value in [*getattr(made, "__dict__", {}).items()]:
            if not hasattr(value, "__array__"):  # arrays and tensors may be large, and are seldom changed
                object.__setattr__(made, name, copy.copy(value))
        return made
    except Exception:
        return None


def same(saved: str, here: str) -> bool:
    """Whether two texts say the same, their numbers compared as numbers.

    >>> same("ema(half_life=50)", "ema(half_life=50.0)"), same("tag='50'", "tag='50.0'")
    (True, False)
    """
    return saved == here or _TOKEN.sub(_canonical, saved) == _TOKEN.sub(_canonical, here)


def difference(saved: Any, here: str) -> tuple[Any, str]:
    """Return two texts for a message: what two calls of one name have in common is left out.

    Of couplings at several steps, the first that differs is shown. `saved` comes from a checkpoint. If it is damaged,
    it is returned as it is.

    >>> difference("ema(decay=0.9, warmup=None)", "ema(decay=0.99, warmup=None)")
    ('ema(decay=0.9, …)', 'ema(decay=0.99, …)')
    >>> difference("swa(every=1)", "ema(decay=0.99)")
    ('swa(every=1)', 'ema(decay=0.99)')
    """
    was, now = _named_arguments(saved), _named_arguments(here)
    if was is None or now is None or was[0] != now[0]:
        return saved, here
    (name, first), (_, second) = was, now
    left_out = {key for key in first.keys() & second.keys() if same(first[key], second[key])}
    left_out |= {*[key for key in first | second if key not in left_out and _SAMPLE.fullmatch(key)][1:]}
    if not left_out:
        return saved, here
    one, other = ([f"{key}={text}" for key, text in each.items() if key not in left_out] for each in (first, second))
    return f"{name}({', '.join([*one, '…'])})", f"{name}({', '.join([*other, '…'])})"


def _named_arguments(text: Any) -> tuple[str, dict[str, str]] | None:
    """Return the name of a call and its arguments, all of them named; None if the text is not such a call."""
    if not isinstance(text, str):  # damaged
        return None
    text = text.replace("<locals>.", "")  # in the names of classes that a function defines
    try:
        call = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # a repr that is not Python, or damaged
        return None
    if not isinstance(call, ast.Call) or call.args:
        return None
    found = {each.arg: ast.get_source_segment(text, each.value) for each in call.keywords}
    return ast.unparse(call.func), {key: value for key, value in found.items() if key and value}


def _canonical(token: re.Match[str]) -> str:
    text = token[0]
    if text[0] in "'\"":
        return text
    return _number(float(text) if re.search("[.e]", text) else _whole(text))


def _whole(digits: str) -> int | str:
    try:
        return int(digits)
    except ValueError:  # more digits than Python converts
        return digits


def _number(value: Any) -> str:
    """Return a number as a float's repr; what no float holds keeps its own."""
    try:
        x = float(value)
    except OverflowError:
        return repr(value)
    return repr(x + 0.0) if x == value or x != x else str(value)  # −0 + 0 is 0


def _text(value: Any, *, whole: bool = False) -> str:
    """Return a value as a text; a number is written as a float, or as an int if it is `whole` and can be."""
    kind: Any = type(value)
    if value is None or isinstance(value, bool | str):
        return repr(value)
    if isinstance(value, Real) or (hasattr(value, "__float__") and getattr(value, "ndim", None) == 0):
        exact: Any = value if isinstance(value, Real) else float(value)
        return repr(int(exact)) if whole and exact == exact // 1 else _number(exact)
    if kind in (list, tuple):
        return ("[{}]" if kind is list else "({})").format(", ".join(map(_text, value)))
    if kind is dict:
        return "{" + ", ".join(f"{_text(key)}: {_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, Enum | type):
        return f"{kind.__qualname__}.{value.name}" if isinstance(value, Enum) else value.__qualname__
    if kind is Spring:
        return repr(value)  # the call that makes it, without defaults; format 1 had it
    if is_dataclass(kind) or kind.__repr__ is object.__repr__:
        return _call(value)
    return _own_repr(value)


def _own_repr(value: Any) -> str:
    """Return the repr of an object whose class has one, if it says all and the same in every process."""
    found = repr(value)
    if _ADDRESS.search(found) or hasattr(value, "__array__") or isinstance(value, set | frozenset):
        raise _UntoldError(found[:200])
    return found


def _call(value: Any) -> str:
    """Return an object as the call that would make it."""
    kind = type(value)
    parts = []
    for attribute, whole in _attributes(value):
        try:
            parts.append(f"{attribute}={_text(getattr(value, attribute), whole=whole)}")
        except _UntoldError as problem:
            raise _UntoldError(f"{kind.__qualname__}.{attribute}={problem}") from None
    if not parts and not is_dataclass(kind):
        if kind is object:
            raise _UntoldError("an object without attributes")
        return _name(kind)
    return f"{_name(kind)}({', '.join(parts)})"


def _name(kind: type) -> str:
    return kind.__qualname__ if is_dataclass(kind) else f"{kind.__module__}.{kind.__qualname__}"


def _text_or_kind(value: Any, *, whole: bool) -> str:
    """Return a value as a text; one that no text can tell is the name of its class."""
    try:
        return _text(value, whole=whole)
    except (_UntoldError, RecursionError):
        return type(value).__qualname__


def _coupling_text(method: Method, step: int, lr: float) -> str:
    """Return the coupling of a step as a text; the name of the error if there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nothing is done with this coupling, and a filter must not change the text
            found = method.coupling(step, lr)
            return _text(tuple(round(float(f"{x:.{_DIGITS}g}"), _DIGITS) for x in (found.a, found.b, found.p, found.q)))
    except Exception as problem:
        return type(problem).__qualname__


def _attributes(value: Any) -> Iterator[tuple[str, bool]]:
    """Yield the names that make an object what it is, and whether each is declared as a whole number."""
    kind = type(value)
    declared = {f.name: f for f in fields(value)} if is_dataclass(kind) else {}
    written = _WRITTEN.get(kind.__name__, set()) if kind.__module__.startswith("torchbelay.") else set()
    for name, f in declared.items():
        if f.compare and (name in written or _differs(f, getattr(value, name))):
            yield name, _is_whole(f)
    if "__dataclass_fields__" in vars(kind):
        return
    slots = [name for each in kind.__mro__ for name in getattr(each, "__slots__", ()) if hasattr(value, name)]
    for name in [*getattr(value, "__dict__", {}), *slots]:
        computed = isinstance(getattr(kind, name, None), cached_property)
        remembered = isinstance(value, Remembers) and name == "memory"
        if not (name in declared or name.startswith("_") or computed or remembered):
            yield name, False


def _differs(f: Field[Any], value: Any) -> bool:
    """Whether a field has another value than its default."""
    if f.default_factory is not MISSING:
        default = f.default_factory()
    elif f.default is not MISSING:
        default = f.default
    else:
        return True
    try:
        return value is not default and _text(value) != _text(default)
    except (_UntoldError, RecursionError):
        return True


def _is_whole(f: Field[Any]) -> bool:
    """Whether a field is declared as an int."""
    words = re.findall(r"\w+", str(f.type))
    return "int" in words and "float" not in words
