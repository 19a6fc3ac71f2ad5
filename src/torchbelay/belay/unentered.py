"""A `with` block that says so if it is never entered: `belay.averaged()` on a line of its own would change nothing."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from torchbelay.physics.warnings import warn

if TYPE_CHECKING:
    from contextlib import _GeneratorContextManager

P = ParamSpec("P")
T = TypeVar("T")


def must_enter(generate: "Callable[P, Iterator[T]]") -> "Callable[P, _GeneratorContextManager[T]]":
    """Make a `contextlib.contextmanager` of a method, which warns when a block of it is dropped without a `with`.

    >>> class Door:
    ...     @must_enter
    ...     def open(self):
    ...         yield "open"
    >>> with Door().open() as state:
    ...     print(state)
    open
    """

    @wraps(generate)
    def make(*args: P.args, **kwargs: P.kwargs) -> "_GeneratorContextManager[T]":
        @contextmanager
        @wraps(generate)
        def run() -> Iterator[T]:
            telling.detach()  # a signal that comes while Python finalizes something would be lost
            yield from generate(*args, **kwargs)

        made = run()
        telling = weakref.finalize(made, _tell, generate.__name__)
        telling.atexit = False
        return made

    return make


def _tell(name: str) -> None:
    warn(
        f"{name}() without a `with` does nothing: the model keeps its own weights. Write `with belay.{name}():`, and "
        "evaluate inside the block"
    )
