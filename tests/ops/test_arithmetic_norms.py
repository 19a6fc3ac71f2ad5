"""The norm of a list and the distance of two, as if each were one long vector in double precision."""

import pytest
import torch

from helpers import seams
from helpers.list_operations import PAIRS, SHAPES, doubled, every_dtype, f16, f32, f64
from helpers.problems import no_waiting
from torchbelay.ops import arithmetic
from torchbelay.ops.trade import ListTrade


@every_dtype
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("scratch", [1 << 24, 7])
def test_norm_and_distance_are_those_of_one_long_vector(draw, monkeypatch, dtype, size, scratch):
    x, y = ([size * draw.normal(shape, dtype) for shape in SHAPES] for _ in range(2))
    long_x, long_y = doubled(x), doubled(y)
    seams.limit_scratch(monkeypatch, scratch)
    norm, distance = arithmetic.norm(x), arithmetic.distance(x, y)
    assert norm.dtype == distance.dtype == f64
    assert norm.shape == distance.shape == ()
    # sums of about 150 squares in float64; the differences themselves are rounded to float32 if the dtype is not f64
    torch.testing.assert_close(norm, long_x.norm(), rtol=1e-14, atol=0)
    torch.testing.assert_close(distance, (long_x - long_y).norm(), rtol=1e-14 if dtype == f64 else 1e-7, atol=0)


def test_distance_between_dtypes_is_that_of_their_values(draw):
    x, y = ([draw.normal(shape, pair[i]) for pair in PAIRS for shape in SHAPES] for i in range(2))
    torch.testing.assert_close(arithmetic.distance(x, y), (doubled(x) - doubled(y)).norm(), rtol=1e-7, atol=0)


@every_dtype
def test_norm_does_not_overflow_where_its_square_would(device, dtype):
    large = 2.0**15 if dtype == f16 else 2.0**100
    x = [torch.full((64, 64), large, dtype=dtype, device=device)]
    assert arithmetic.norm(x).item() == 64 * large
    assert arithmetic.distance(x, [-t for t in x]).item() == 128 * large


def test_nothing_has_no_size():
    assert arithmetic.norm([]).item() == arithmetic.distance([], []).item() == 0


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU can be waited for")


@needs_cuda
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_no_norm_copy_or_trade_waits_for_the_device(draw):
    x, y = [draw.normal((3, 5), f32)], [draw.normal((3, 5), f32)]
    expected = [x[0].clone(), (x[0] - y[0]).norm().double(), y[0].norm().double()]
    with no_waiting():
        distance = arithmetic.distance(x, y)
        ListTrade(x, y).go()
        norm = arithmetic.norm(x)
        arithmetic.copy_(x, y)
    torch.testing.assert_close([x[0], distance, norm], expected)  # to float32's own tolerance
