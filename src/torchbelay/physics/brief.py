"""A dataclass as the call that makes it, without defaults: the repr of methods, readouts and schedules."""

from dataclasses import MISSING, Field, fields
from typing import Any


def brief(self: Any) -> str:
    """Return the call that makes a dataclass, with the fields that differ from their defaults.

    Checkpoints do not know methods by this text but by `identity.describe`.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class mine:
    ...     rate: float
    ...     follow: str = "after"
    ...     __repr__ = brief
    >>> mine(0.5), mine(0.5, "before")
    (mine(rate=0.5), mine(rate=0.5, follow='before'))
    """
    shown = ((f.name, getattr(self, f.name)) for f in fields(self) if f.repr and not _is_default(self, f))
    return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in shown)})"


def _is_default(value: Any, field: Field[Any]) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return default is not MISSING and bool(getattr(value, field.name) == default)
