"""Which method each parameter gets: one for all, or those of the user's own function."""

import inspect
from collections.abc import Callable

from torch import Tensor

from torchbelay.physics.method import Method, uncalled

Rule = Callable[[str, Tensor], Method | None]


def as_rule(method: Method | Rule) -> Rule:
    """Return a function (name, parameter) -> method, for one method or for the user's own function."""
    if (maker := uncalled(method)) is not None:
        raise TypeError(f"method={maker} was not called; give the method that it makes, as {maker}(...)")
    if isinstance(method, Method):
        return lambda name, tensor: method
    if callable(method):
        _check_arguments(method)
        return method
    raise TypeError(
        f"method={method!r} is neither an averaging method (an object with coupling(step, lr), as Spring) nor a "
        "function (name, parameter) -> method or None; give a method, as methods.ema(0.999)"
    )


def _check_arguments(rule: Rule) -> None:
    """Refuse a function that cannot be called with a name and a parameter."""
    try:
        signature = inspect.signature(rule)
    except ValueError:  # some functions of C have none
        return
    try:
        signature.bind("name", None)
    except TypeError as problem:
        raise TypeError(
            f"method={rule!r} is a function of {signature}, and it is called with a name and a parameter ({problem}): "
            "give a function (name, parameter) -> method or None, or a method, as Spring.ema(decay=0.999)"
        ) from None
