"""Checks of arguments: every message names the argument, its value and the cure."""

import math
from collections.abc import Collection
from numbers import Complex, Integral, Real
from typing import Any


def number(
    name: str, value: float, *, low: float, high: float = math.inf, open_low: bool = True, open_high: bool = True
) -> float:
    """Return `value` as a float if low < value < high (≤ at an end that is not open), else raise.

    With `high` infinite, every finite number above `low` is accepted. Infinity and nan are always refused.
    """
    x = plain(name, value)
    above = x > low if open_low else x >= low
    if above and (x < high or (not open_high and x == high)):
        return x
    bound = f"{name} {'>' if open_low else '≥'} {low:g}" + (
        f" and {name} {'<' if open_high else '≤'} {high:g}" if high < math.inf else ", finite"
    )
    raise ValueError(f"{name}={value!r} is out of range; it needs {bound}")


def plain(name: str, value: Any) -> float:
    """Return `value` as a plain float, infinite if it is beyond the range of floats; raise if it is no real number.

    >>> plain("decay", 1), plain("k", 10**400)
    (1.0, inf)
    """
    if type(value) is float:
        return value
    if not _is_real(value):
        raise TypeError(f"{name}={value!r} is not a number; give a float")
    try:
        return float(value)
    except OverflowError:  # an int beyond the range of floats
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError):  # an array or a tensor of several
        raise TypeError(f"{name}={value!r} is not one number; give a float") from None


def _is_real(value: Any) -> bool:
    """Whether `float()` of a value is that number: not of a text, a truth value or a complex number.

    Arrays and tensors are asked for their dtype, because `float()` takes a complex one if its imaginary part is 0 or
    drops that part. numpy's dtypes have a kind, and torch's have none.
    """
    if isinstance(value, bool | str) or (isinstance(value, Complex) and not isinstance(value, Real)):
        return False
    dtype = getattr(value, "dtype", None)
    if getattr(dtype, "kind", "f") in "bcmMSU" or getattr(dtype, "is_complex", False) or str(dtype) == "torch.bool":
        return False
    return hasattr(value, "__float__")


def keep(
    owner: object, name: str, *, low: float, high: float = math.inf, open_low: bool = True, open_high: bool = True
) -> float:
    """Check a number of a frozen dataclass as `number` does, and store it there as a plain float.

    A tensor or an array that its owner changes later would change the dataclass as well.
    """
    return store(
        owner, name, number(name, getattr(owner, name), low=low, high=high, open_low=open_low, open_high=open_high)
    )


def store(owner: object, name: str, value: float) -> float:
    """Set a field of a frozen dataclass to a checked number, and return it."""
    object.__setattr__(owner, name, value)
    return value


def share(name: str, value: float, new: float) -> float:
    """Return the weight of the new point in an average, which `name` set, if rounding left it below 1, else raise."""
    if new < 1:
        return new
    raise ValueError(f"{name}={value!r} makes an average that keeps nothing of what it was; use a larger {name}")


def positive_or_inf(name: str, value: float) -> float:
    """Return `value` as a float if it is positive or infinite, else raise."""
    if plain(name, value) == math.inf:
        return math.inf
    try:
        return number(name, value, low=0)
    except ValueError:
        raise ValueError(f"{name}={value!r} is out of range; it needs {name} > 0, or inf") from None


def whole(name: str, value: Any, *, low: int) -> int:
    """Return `value` as an int if it is a whole number of at least `low`, else raise.

    >>> whole("steps", 7, low=2)
    7
    """
    if isinstance(value, bool) or not isinstance(value, Integral):  # those of numpy are Integral
        raise TypeError(f"{name}={value!r} is not a whole number; give an int of at least {low}")
    if value < low:
        raise ValueError(f"{name}={value!r} is too small; it needs {name} ≥ {low}")
    return int(value)


def one_of(name: str, value: str, choices: Collection[str]) -> str:
    """Return `value` if it is one of `choices`, else raise."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, choices))}")
    return value


def exactly_one(**given: object) -> str:
    """Return the name of the one argument that is not None; raise if none or several are given."""
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        got = ", ".join(f"{name}={given[name]!r}" for name in names) or "none of them"
        raise ValueError(f"give exactly one of {', '.join(given)}; got {got}")
    return names[0]
