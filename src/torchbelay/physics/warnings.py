"""The library's warnings: categories that users can filter, reported at the line of the user's code."""

import sys
import warnings

# Packages whose frames can lie between the user's line and `warn`.
_INTERNAL = ("torchbelay", "torch", "lightning", "contextlib", "dataclasses", "weakref")


class BelayWarning(UserWarning):
    """The parent of all warnings of this library.

    >>> import warnings
    >>> warnings.simplefilter("error", BelayWarning)  # stop at the first warning
    """


class UnstableSpringWarning(BelayWarning):
    """A spring whose free motion grows instead of coming to rest."""


def warn(message: str, category: type[BelayWarning] = BelayWarning) -> None:
    """Warn at the user's line: the innermost frame that is not of this library or of torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _INTERNAL:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
