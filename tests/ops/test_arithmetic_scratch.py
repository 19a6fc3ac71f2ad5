"""The scratch buffer: operations on long lists go piece by piece, and give the same."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import seams
from helpers.list_operations import NAMES, bf16, copied, every_operation, f32, f64, joined, make_state
from helpers.operations import Allocations, Memory
from torchbelay.ops.trade import ListTrade


def long_shapes(scratch: int) -> list[tuple[int, ...]]:
    """Some shapes that fit, and some that are longer than the buffer in either direction."""
    return [(1, 2 * scratch + 5), (2 * scratch + 5, 1), (3, 5, 2), (), (0, 4), (7,)]


scratch_sizes = pytest.mark.parametrize("scratch", [1, 7, 64])


@every_operation
@pytest.mark.parametrize("keep", [None, 1.0])
@scratch_sizes
def test_a_smaller_scratch_buffer_gives_the_same(draw, same_bits, monkeypatch, operation, keep, scratch):
    whole = joined(*(make_state(draw, pair, long_shapes(scratch)) for pair in [(bf16, f32), (f64, f64)]))
    cut = copied(whole)
    keep = keep if keep is None else torch.tensor(keep)
    operation.apply(whole, keep)
    seams.limit_scratch(monkeypatch, scratch)
    operation.apply(cut, keep)
    for name in NAMES:
        assert same_bits(whole[name], cut[name])


@every_operation
@pytest.mark.parametrize("keep", [None, 1.0])
@scratch_sizes
def test_no_scratch_buffer_exceeds_the_bound(draw, monkeypatch, operation, keep, scratch):
    state = make_state(draw, (bf16, f32), long_shapes(scratch))
    seams.limit_scratch(monkeypatch, scratch)
    with Allocations() as allocations:
        operation.apply(state, keep if keep is None else torch.tensor(keep, device=draw.device))
    assert max(allocations.sizes) <= scratch
    assert max(allocations.sizes) > scratch / 2  # and it is used


def test_a_trade_stays_within_the_bound_too(draw, monkeypatch):
    x, y = ([draw.normal(shape) for shape in long_shapes(64)] for _ in range(2))
    seams.limit_scratch(monkeypatch, 64)
    with Allocations() as allocations:
        ListTrade(x, y).go()
    assert 32 < max(allocations.sizes) <= 64


@pytest.mark.thorough
@settings(deadline=None)  # a scratch buffer of one element makes many pieces
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.just((1, 300)) | st.just((300, 1))),
    scratch=st.integers(1, 100),
)
def test_pieces_of_any_shapes_trade_each_element_once_and_fit(shapes, scratch):
    numbered = [torch.arange(prod(shape), dtype=f32).reshape(shape) for shape in shapes]
    labelled = [torch.full(shape, -1.0 - i) for i, shape in enumerate(shapes)]
    old = [t.clone() for t in numbered], [t.clone() for t in labelled]
    with pytest.MonkeyPatch.context() as patch, Memory() as memory:
        seams.limit_scratch(patch, scratch)
        ListTrade(numbered, labelled).go()
    assert all(map(torch.equal, numbered, old[1]))
    assert all(map(torch.equal, labelled, old[0]))
    assert memory.peak <= scratch * f32.itemsize  # though every piece may have several tensors
