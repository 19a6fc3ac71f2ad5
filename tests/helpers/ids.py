"""Names of a test's parameters that are the same in every process: pytest-xdist compares them."""

import re


def without_address(value: object) -> str:
    """Return the repr of a value, without the addresses of functions in it."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
