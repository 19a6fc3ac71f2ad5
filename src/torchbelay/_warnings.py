"""The library's own warning categories, so that a user can filter ours and nobody else's."""


class BelayWarning(UserWarning):
    """Every warning of this library.

    >>> import warnings
    >>> warnings.simplefilter("error", BelayWarning)  # for one who would rather stop than be told
    """


class UnstableSpringWarning(BelayWarning):
    """A spring whose free motion grows instead of coming to rest."""
