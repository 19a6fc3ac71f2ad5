"""The library's own warnings: of its own categories, so that a user can filter ours alone, and at the user's line."""

import sys
import warnings

_ON_THE_WAY = (
    "torchbelay",
    "torch",
    "contextlib",
    "dataclasses",
)  # between a user's line and what we have to say about it


class BelayWarning(UserWarning):
    """Every warning of this library.

    >>> import warnings
    >>> warnings.simplefilter("error", BelayWarning)  # for one who would rather stop than be told
    """


class UnstableSpringWarning(BelayWarning):
    """A spring whose free motion grows instead of coming to rest."""


def warn(message: str, category: type[BelayWarning] = BelayWarning) -> None:
    """Warn at the line that led here, whatever of this library and of torch lies between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _ON_THE_WAY:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
