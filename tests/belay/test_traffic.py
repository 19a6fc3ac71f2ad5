"""What a shared average stores and sends, as plain numbers; tests/helpers/rank_checks/sharing.py counts the same."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchbelay.belay import traffic

SHAPES = st.lists(st.integers(0, 40), max_size=4).map(tuple)
GPT2 = [(50257, 768), (1024, 768), *[(2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072)] * 12]


@given(st.integers(0, 100), st.integers(1, 9))
def test_ranks_cut_a_dimension_as_torch_chunk_does(size: int, ranks: int) -> None:
    rows = torch.arange(size)
    chunks = [*rows.chunk(ranks), *[rows[:0]] * ranks][:ranks] if size else [rows] * ranks
    for rank, chunk in enumerate(chunks):
        assert torch.equal(rows.narrow(0, *traffic.chunk(size, ranks, rank)), chunk)


@given(SHAPES, st.integers(1, 9))
def test_the_slices_of_all_ranks_are_the_tensor_and_none_is_larger_than_the_first(shape, ranks) -> None:
    d = traffic.dimension(shape, ranks)
    if d is None:
        assert not shape or not prod(shape)
        return
    rest = prod(shape) // shape[d]
    sizes = [rest * traffic.chunk(shape[d], ranks, rank)[1] for rank in range(ranks)]
    assert sum(sizes) == prod(shape)
    assert max(sizes) == sizes[0] == traffic.largest_slice(shape, ranks)
    best = min(prod(shape) // size * -(-size // ranks) for size in shape)
    assert sizes[0] <= 1.125 * best


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 64])
def test_a_real_model_is_shared_evenly(ranks: int) -> None:
    whole = 4 * sum(map(prod, GPT2))
    assert whole / ranks <= traffic.stored(GPT2, ranks, itemsize=4) <= 1.005 * whole / ranks
    sent = traffic.gathered(GPT2, ranks, itemsize=4)
    assert sent.given == pytest.approx(whole / ranks, rel=0.01)
    assert sent.received == (ranks - 1) * sent.given
    assert sent.messages <= 2 + whole / traffic.BUCKET * 2


def test_messages_are_bounded_and_hold_every_tensor_once_in_order() -> None:
    slots = [traffic.slot(shape, 4, 4) for shape in GPT2] + [0]
    found = traffic.buckets(slots, 4)
    assert [place for places in found for place in places] == list(range(len(GPT2)))
    for places in found:
        assert len(places) == 1 or sum(slots[i] for i in places) * 4 <= traffic.BUCKET
    assert all(slot % traffic.ALIGNMENT == 0 for slot in slots)


def test_what_is_empty_is_not_sent_and_a_single_number_is() -> None:
    assert traffic.gathered([], 4, 4) == (0, 0, 0)
    assert traffic.gathered([(0, 3)], 4, 4) == (0, 0, 0)
    assert traffic.gathered([()], 4, 4) == (1, traffic.ALIGNMENT, 3 * traffic.ALIGNMENT)
    assert traffic.stored([()], 4, 4) == 4  # a number is whole on every rank
