"""Lists that trade contents or are overwritten, to the last bit."""

from math import nan

import pytest
import torch

from helpers import seams
from helpers.list_operations import DTYPES, PAIRS, SHAPES, embed, every_dtype, f32
from torchbelay.ops import arithmetic


@every_dtype
@pytest.mark.parametrize("layouts", [("contiguous", "contiguous"), ("strided", "transposed"), ("channels_last",) * 2])
@pytest.mark.parametrize("scratch", [1 << 24, 7])
def test_exchange_swaps_every_bit_and_twice_is_nothing(draw, same_bits, monkeypatch, dtype, layouts, scratch):
    seams.limit_scratch(monkeypatch, scratch)
    old_x, old_y = ([draw.bits(shape, dtype) for shape in SHAPES] for _ in range(2))
    (x, around_x), (y, around_y) = (
        zip(*(embed(t, layout) for t in old), strict=True)
        for old, layout in zip((old_x, old_y), layouts, strict=True)
    )  # fmt: skip
    for expected_x, expected_y in [(old_y, old_x), (old_x, old_y)]:
        arithmetic.exchange_(x, y)
        assert same_bits(x, expected_x)
        assert same_bits(y, expected_y)
    for inside, buffer in zip(x + y, around_x + around_y, strict=True):
        inside.fill_(nan)
        assert same_bits([buffer], [torch.full_like(buffer, nan)])


def test_exchange_takes_lists_of_mixed_dtypes(draw, same_bits):
    x, y = ([draw.bits((5,), dtype) for dtype in DTYPES] for _ in range(2))
    old_x, old_y = ([t.clone() for t in ts] for ts in (x, y))
    arithmetic.exchange_(x, y)
    assert same_bits(x, old_y)
    assert same_bits(y, old_x)


@pytest.mark.parametrize("dtypes", [*PAIRS, (f32, f32)], ids=str)
def test_copy_rounds_to_the_dtype_that_is_there(draw, same_bits, dtypes):
    to, source = ([draw.normal(shape, dtype) for shape in SHAPES] for dtype in dtypes)
    expected = [t.to(dtypes[0]) for t in source]
    old = [t.clone() for t in source]
    arithmetic.copy_(to, source)
    assert same_bits(to, expected)
    assert same_bits(source, old)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("keep", [None, 0.0, 1.0])
def test_overwrite_takes_any_dtype_and_only_steps_that_took_place(draw, same_bits, dtype, keep, device):
    for shape in SHAPES:
        to, source = (100 * draw.normal(shape)).to(dtype), (100 * draw.normal(shape)).to(dtype)
        expected = to.clone() if keep == 0 else source.clone()
        arithmetic.overwrite_(to, source, keep if keep is None else torch.tensor(keep, device=device))
        assert same_bits([to], [expected])


def test_exchange_and_copy_take_empty_lists():
    x, y = [], []
    arithmetic.exchange_(x, y)
    arithmetic.copy_(x, y)
    assert x == y == []


@pytest.mark.parametrize("function", [arithmetic.exchange_, lambda x, y: arithmetic.lerp_(x, y, 0.5)])
def test_lists_of_unequal_length_are_refused(draw, function):
    with pytest.raises(ValueError, match="zip"):
        function([draw.normal((2,))], [draw.normal((2,)), draw.normal((2,))])
