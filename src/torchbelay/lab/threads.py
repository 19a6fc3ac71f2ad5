"""The number of threads that torch works with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch work with one thread inside a block.

    Small tensors are fastest with one thread: several threads mostly wait for one another. On a machine whose cores
    were busy the difference was tenfold.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
