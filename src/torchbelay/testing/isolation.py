"""Isolation of what this package runs from the caller: random generators and warnings."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchbelay.physics.warnings import BelayWarning


@contextmanager
def isolated(silenced: type[Warning] = BelayWarning) -> Iterator[None]:
    """Restore the caller's generators afterwards, and silence warnings of this kind inside.

    By default those about the method, which is given on purpose.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore", silenced)
        yield
