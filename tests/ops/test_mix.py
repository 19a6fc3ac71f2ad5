"""`arithmetic.mix_`: mixtures of lists of tensors, against sums in float64."""

from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import problems, seams
from torchbelay.ops import arithmetic

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
SHAPES = [(), (7,), (3, 5), (0, 4), (2, 3, 2)]


def lists(dtypes: list[torch.dtype], seed: int = 0) -> list[list[Tensor]]:
    """Lists of random tensors, one list per dtype."""
    draw = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtypes[0].is_complex else torch.float64
    return [[torch.randn(shape, generator=draw, dtype=wide).to(dtype) for shape in SHAPES] for dtype in dtypes]


def blank(dtype: torch.dtype) -> list[Tensor]:
    return [torch.full(shape, nan, dtype=dtype) for shape in SHAPES]


def exact(i: int, *terms: tuple[float, list[Tensor]]) -> Tensor:
    """The i-th mixture in float64."""
    wide = torch.complex128 if terms[0][1][i].is_complex() else torch.float64
    return torch.stack([share * tensors[i].to(wide) for share, tensors in terms]).sum(0)


def error(found: Tensor, wanted: Tensor, scale: float) -> float:
    """The largest error, in units of the last place of numbers of this size."""
    if not found.numel():
        return 0.0
    return float((found.to(wanted.dtype) - wanted).abs().max()) / (torch.finfo(found.dtype).eps * scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(share=st.floats(0, 1), alpha=st.floats(0, 2), seed=st.integers(0, 2**16))
@settings(max_examples=30)
def test_a_mixture_is_the_sum_of_its_shares(dtype: torch.dtype, share: float, alpha: float, seed: int) -> None:
    """In any dtype: rounded once at the end, from an arithmetic of float32 at least."""
    w0, w1, w2 = lists([dtype] * 3, seed)
    for terms in (((share, w2), (1 - share, w1)), ((1.0, w2), (alpha, w1), (-alpha, w0))):
        to = blank(dtype)
        arithmetic.mix_(to, *terms)
        for i, found in enumerate(to):
            assert error(found, exact(i, *terms), 20) < 1.5


@given(seed=st.integers(0, 2**16))
@settings(max_examples=20)
def test_a_mixture_is_linear_in_its_states(seed: int) -> None:
    """f(x + y) = f(x) + f(y), and f(c·x) = c·f(x), in float64."""
    x, y = lists([torch.float64] * 3, seed), lists([torch.float64] * 3, seed + 1)
    shares = (-0.7, 1.1, 0.6)

    def mixed(states: list[list[Tensor]]) -> list[Tensor]:
        to = blank(torch.float64)
        arithmetic.mix_(to, *zip(shares, states, strict=True))
        return to

    both = [[s + t for s, t in zip(a, b, strict=True)] for a, b in zip(x, y, strict=True)]
    tripled = [[3 * t for t in state] for state in x]
    for sum_, three, fx, fy in zip(mixed(both), mixed(tripled), mixed(x), mixed(y), strict=True):
        torch.testing.assert_close(sum_, fx + fy, rtol=0, atol=1e-14)
        torch.testing.assert_close(three, 3 * fx, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shares", [(0.65, 0.35, 0.0), (1.0, 0.6, -0.6), (0.1, 0.2, 0.7), (1.5, -0.5, 0.0)], ids=str)
def test_states_that_are_equal_stay_what_they_are_bit_for_bit(
    dtype: torch.dtype, shares: tuple[float, float, float]
) -> None:
    (w,) = lists([dtype])
    to = blank(dtype)
    arithmetic.mix_(to, *((share, [t.clone() for t in w]) for share in shares))
    assert all(map(problems.same, to, w))


@pytest.mark.parametrize("whole", [0, 1, 2])
def test_a_share_of_1_beside_zeros_is_a_copy_and_nothing_passes_through_a_zero(whole: int) -> None:
    states = [[torch.tensor([nan, inf, -0.0, 1e-45, 3.0])] for _ in range(3)]
    states[whole] = [torch.tensor([-0.0, 1e-45, -inf, 1.0, 2.0])]
    to = [torch.zeros(5)]
    arithmetic.mix_(to, *((float(i == whole), state) for i, state in enumerate(states)))
    assert problems.same(to[0], states[whole][0])


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_weights_are_mixed_in_float32_and_rounded_once(narrow: torch.dtype) -> None:
    """w1 has 16 bits, and the averages are float32."""
    w1, w2, w0 = lists([narrow, torch.float32, torch.float32])
    to, wide = blank(narrow), blank(torch.float32)
    arithmetic.mix_(to, (1.0, w2), (0.3, w1), (-0.3, w0))
    arithmetic.mix_(wide, (1.0, w2), (0.3, [t.float() for t in w1]), (-0.3, w0))
    assert all(problems.same(t, w.to(narrow)) for t, w in zip(to, wide, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_tensors_are_mixed_piece_by_piece_to_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    w0, w1, w2 = lists([torch.float32, dtype, torch.float32])
    whole, parts = blank(dtype), blank(dtype)
    arithmetic.mix_(whole, (1.0, w2), (0.3, w1), (-0.3, w0))
    seams.limit_scratch(monkeypatch, 4)
    arithmetic.mix_(parts, (1.0, w2), (0.3, w1), (-0.3, w0))
    assert all(map(problems.same, parts, whole))


def test_layouts_may_differ() -> None:
    w1, w2 = torch.randn(4, 3, 5, 5), torch.randn(4, 3, 5, 5)
    to = torch.empty(4, 3, 5, 5).to(memory_format=torch.channels_last)
    arithmetic.mix_(
        [to], (0.7, [w2.to(memory_format=torch.channels_last)]), (0.3, [w1.transpose(2, 3).contiguous().mT])
    )
    wanted = torch.empty(4, 3, 5, 5)
    arithmetic.mix_([wanted], (0.7, [w2]), (0.3, [w1]))
    assert torch.equal(to, wanted)
    assert to.is_contiguous(memory_format=torch.channels_last)


def test_empty_lists_are_mixed_too() -> None:
    arithmetic.mix_([], (0.7, []), (0.3, []))
    arithmetic.mix_([], (1.0, []), (0.0, []))
