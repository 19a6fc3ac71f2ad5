"""How many threads torch works with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Small tensors are done soonest by one thread: several spend their time waiting for one another.

    On a machine whose cores are busy the difference was tenfold.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
