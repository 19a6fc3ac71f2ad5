"""A `with` block that says so if it is never entered: `belay.averaged()` on a line of its own would change nothing."""

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import _GeneratorContextManager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torchbelay.physics.warnings import warn

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Block(_GeneratorContextManager[T]):
    """What `contextlib.contextmanager` makes of a generator; if it is dropped without a `with`, a warning says so.

    It may decorate a function too, and is then entered in every call.
    """

    def __init__(self, generate: Callable[..., Iterator[T]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(generate, args, kwargs)  # type: ignore[arg-type]  # generators are annotated as iterators
        self._name = generate.__name__
        self._telling = weakref.finalize(self, _tell, self._name)
        self._telling.atexit = False

    def __enter__(self) -> T:
        self._telling.detach()  # at once: a signal that comes while Python finalizes something would be lost
        return super().__enter__()

    def __call__(self, function: F) -> F:
        """Let a function be called in such a block."""
        self._telling.detach()
        if any(is_later(function) for is_later in _LATER):
            raise TypeError(
                f"{self._name}() cannot decorate {getattr(function, '__name__', function)!r}, whose body runs after "
                f"its call; write `with belay.{self._name}():` inside of it"
            )
        return super().__call__(function)


_LATER = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def must_enter(generate: Callable[P, Iterator[T]]) -> Callable[P, Block[T]]:
    """Make such blocks of a method, as `contextlib.contextmanager` does.

    >>> class Door:
    ...     @must_enter
    ...     def open(self):
    ...         yield "open"
    >>> with Door().open() as state:
    ...     print(state)
    open
    """

    @wraps(generate)
    def make(*args: P.args, **kwargs: P.kwargs) -> Block[T]:
        return Block(generate, args, kwargs)

    return make


def _tell(name: str) -> None:
    warn(
        f"{name}() without a `with` does nothing: the model keeps its own weights. Write `with belay.{name}():`, and "
        "evaluate inside the block"
    )
