"""Lists that trade contents there and back, or are overwritten, to the last bit."""

from math import nan

import pytest
import torch

from helpers import seams
from helpers.interrupting import ROOMS, Interruption, every_line, raising_at
from helpers.list_operations import DTYPES, PAIRS, SHAPES, embed, every_dtype, f32
from helpers.operations import Scarcity
from torchbelay.ops import arithmetic
from torchbelay.ops.trade import ListTrade

FILES = [ROOMS[1]]


@every_dtype
@pytest.mark.parametrize("layouts", [("contiguous", "contiguous"), ("strided", "transposed"), ("channels_last",) * 2])
@pytest.mark.parametrize("scratch", [1 << 24, 7])
def test_every_bit_trades_places_and_comes_back(draw, same_bits, monkeypatch, dtype, layouts, scratch):
    seams.limit_scratch(monkeypatch, scratch)
    old_x, old_y = ([draw.bits(shape, dtype) for shape in SHAPES] for _ in range(2))
    (x, around_x), (y, around_y) = (
        zip(*(embed(t, layout) for t in old), strict=True)
        for old, layout in zip((old_x, old_y), layouts, strict=True)
    )  # fmt: skip
    trade = ListTrade(x, y)
    for move, expected_x, expected_y in [
        (trade.back, old_x, old_y), (trade.go, old_y, old_x), (trade.go, old_y, old_x), (trade.back, old_x, old_y),
        (trade.back, old_x, old_y), (trade.go, old_y, old_x),
    ]:  # fmt: skip
        move()
        assert same_bits(x, expected_x)
        assert same_bits(y, expected_y)
    for inside, buffer in zip(x + y, around_x + around_y, strict=True):
        inside.fill_(nan)
        assert same_bits([buffer], [torch.full_like(buffer, nan)])


def test_lists_of_mixed_dtypes_trade_places(draw, same_bits):
    x, y = ([draw.bits((5,), dtype) for dtype in DTYPES] for _ in range(2))
    old_x, old_y = ([t.clone() for t in ts] for ts in (x, y))
    ListTrade(x, y).go()
    assert same_bits(x, old_y)
    assert same_bits(y, old_x)


@pytest.mark.parametrize("scratch", [1 << 24, 7, 1])
@pytest.mark.parametrize("forth", [True, False])
def test_a_trade_that_is_interrupted_at_any_line_goes_on_or_goes_back(draw, same_bits, monkeypatch, scratch, forth):
    seams.limit_scratch(monkeypatch, scratch)
    x, y = ([draw.bits(shape, f32) for shape in [(), (0,), (3, 5)]] for _ in range(2))
    old_x, old_y = ([t.clone() for t in ts] for ts in (x, y))

    def there_and_back() -> None:
        trade.go()
        trade.back()

    trade = ListTrade(x, y)
    for line in every_line(there_and_back, FILES):
        with raising_at(line, FILES) as place, pytest.raises(Interruption):
            there_and_back()
        if forth:
            trade.go()
            assert same_bits(x, old_y), place
            assert same_bits(y, old_x), place
        trade.back()
        assert same_bits(x, old_x), place
        assert same_bits(y, old_y), place


@pytest.mark.parametrize("elements", [1, 2, 8])
def test_what_is_traded_comes_back_in_pieces_for_which_there_is_memory(draw, same_bits, elements):
    x, y = ([draw.bits(shape, f32) for shape in [(), (0,), (3, 5), (9,), (1, 7, 1)]] for _ in range(2))
    old_x, old_y = ([t.clone() for t in ts] for ts in (x, y))
    trade = ListTrade(x, y)
    trade.go()
    with Scarcity(elements) as memory:
        trade.back()
    assert memory.refused
    assert same_bits(x, old_x)
    assert same_bits(y, old_y)
    trade.go()
    assert same_bits(x, old_y)
    assert same_bits(y, old_x)


def test_memory_that_runs_out_on_the_way_there_is_said(draw, same_bits, monkeypatch):
    seams.limit_scratch(monkeypatch, 5)
    x, y = ([draw.bits(shape, f32) for shape in [(2, 2), (5,)]] for _ in range(2))
    old_x, old_y = ([t.clone() for t in ts] for ts in (x, y))
    trade = ListTrade(x, y)
    with Scarcity(4) as memory, pytest.raises(MemoryError):
        trade.go()
    assert memory.refused
    assert not same_bits(x, old_x)
    trade.back()
    assert same_bits(x, old_x)
    assert same_bits(y, old_y)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.bool], ids=str)
def test_bits_differ_or_not_whatever_they_mean(draw, dtype):
    x = [draw.bits(shape, dtype) if dtype in DTYPES else draw.normal(shape).to(dtype) for shape in SHAPES]
    y = [t.clone() for t in x]
    assert arithmetic.differ(x, y) == [False] * len(x)
    for i in range(len(x)):
        if y[i].numel():
            flipped = arithmetic.bits(y[i]).reshape(-1)[-1:]
            flipped ^= 1
            arithmetic.bits(y[i]).reshape(-1)[-1:].copy_(flipped)
    assert arithmetic.differ(x, y) == [bool(t.numel()) for t in x]


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


def test_trades_and_copies_take_empty_lists():
    x, y = [], []
    ListTrade(x, y).go()
    arithmetic.copy_(x, y)
    assert x == y == []


@pytest.mark.parametrize("function", [ListTrade, lambda x, y: arithmetic.lerp_(x, y, 0.5)])
def test_lists_of_unequal_length_are_refused(draw, function):
    with pytest.raises(ValueError, match="zip"):
        function([draw.normal((2,))], [draw.normal((2,)), draw.normal((2,))])
