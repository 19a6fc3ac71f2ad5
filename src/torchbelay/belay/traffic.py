"""What an average that replicas share stores on a rank, and what a step sends: plain numbers, no tensors.

Each of N ranks keeps a slice of every average, along one dimension of the tensor. The ranks cut a dimension of size s
as `torch.chunk` does: each gets ⌈s/N⌉ rows, until none are left. A step that pulls gathers the weights: each rank puts
its slices into a message, and every message reaches all ranks.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]

BUCKET = 1 << 26  # bytes of weights that one message of all ranks carries, unless one tensor has more
ALIGNMENT = 16  # bytes: each slice begins at a multiple of this in its message
_WORSE = 1.125  # how much more the rows of a tensor may weigh than the best cut, because rows lie together in memory


class Traffic(NamedTuple):
    """What one step sends: the number of all-gathers, and the bytes that a rank gives to them and gets from others."""

    messages: int
    given: int
    received: int


def chunk(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return where the rows of a rank begin, and how many they are.

    >>> [chunk(5, 4, rank) for rank in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    rows = -(-size // ranks)
    start = min(rank * rows, size)
    return start, min(rows, size - start)


@lru_cache(maxsize=4096)  # a step asks again for every tensor
def dimension(shape: Shape, ranks: int) -> int | None:
    """Return the dimension along which a tensor is cut; None if every rank keeps all of it, because it has no rows.

    The first one is taken unless another gives the largest slice much less.

    >>> dimension((50257, 768), 8), dimension((1, 197, 768), 8), dimension((), 8)
    (0, 2, None)
    """
    if not prod(shape) or not len(shape):
        return None
    largest = [_along(shape, ranks, d) for d in range(len(shape))]
    return 0 if largest[0] <= _WORSE * min(largest) else largest.index(min(largest))


def largest_slice(shape: Shape, ranks: int) -> int:
    """Return the elements of a tensor that a rank keeps, for the ranks that keep the most: the first one does.

    >>> largest_slice((50257, 768), 8) / (50257 * 768 / 8) < 1.0002
    True
    """
    d = dimension(shape, ranks)
    return prod(shape) if d is None else _along(shape, ranks, d)


def stored(shapes: Iterable[Shape], ranks: int, itemsize: int) -> int:
    """Return the bytes of one average on the rank that keeps the most of it.

    Velocities, initial weights and every spectator take as much again; averaged buffers are whole on every rank.

    >>> stored([(1024, 1024), (1024,)], ranks=4, itemsize=4) == (1024 * 1024 + 1024) * 4 // 4
    True
    """
    return sum(largest_slice(shape, ranks) for shape in shapes) * itemsize


@lru_cache(maxsize=4096)
def slot(shape: Shape, ranks: int, itemsize: int) -> int:
    """Return the bytes that a tensor takes in the message of a rank; every rank sends a single number, too."""
    return -(-largest_slice(shape, ranks) * itemsize // ALIGNMENT) * ALIGNMENT


def buckets(slots: Sequence[int], ranks: int) -> list[list[int]]:
    """Return which tensors, by their places, go into each message; empty tensors go into none.

    >>> buckets([1 << 20, 0, 1 << 26, 1 << 20], ranks=4)
    [[0], [2], [3]]
    """
    found: list[list[int]] = []
    size = BUCKET
    for place, each in enumerate(slots):
        if not each:
            continue
        if size + each * ranks > BUCKET:
            found.append([])
            size = 0
        found[-1].append(place)
        size += each * ranks
    return found


def gathered(shapes: Iterable[Shape], ranks: int, itemsize: int) -> Traffic:
    """Return what it takes to gather weights on one device: a step in which all of them are pulled, or `averaged()`.

    A step in which averages only watch sends nothing.

    >>> gathered([(1024, 1024), (1024,)], ranks=4, itemsize=4)
    Traffic(messages=1, given=1049600, received=3148800)
    """
    slots = [slot(shape, ranks, itemsize) for shape in shapes]
    return Traffic(len(buckets(slots, ranks)), sum(slots), (ranks - 1) * sum(slots))


def _along(shape: Shape, ranks: int, d: int) -> int:
    return prod(shape) // shape[d] * -(-shape[d] // ranks)
