"""float32 copies of 16-bit averages: the numbers of float32, in whatever pieces and layouts they are computed."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from torchbelay.compat import fractions as module
from torchbelay.compat.fractions import Fractions
from torchbelay.compat.tensors import wide

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHARES = (0.3, 0.001, 1.0, 0.002, 0.5)


def gapped(*shape: int) -> Tensor:
    """A tensor whose elements do not lie side by side."""
    return torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]


def averages() -> list[Tensor]:
    """16-bit tensors of all kinds of sizes and layouts, and some that are not of 16 bits."""
    return [
        torch.randn(3, 5).to(BF16),
        torch.randn(40).to(BF16),
        torch.randn(7).to(F16),
        torch.empty(0, dtype=F16),
        torch.randn(()).to(F16),
        torch.randn(2, 6, 5, 4).to(BF16).to(memory_format=torch.channels_last),
        torch.randn(9, 8).to(BF16).t(),
        gapped(4, 9).to(BF16),
        gapped(3, 2).bfloat16()[:, :1],
        torch.randn(6),
        torch.randn(3).double(),
        torch.tensor(4),
        torch.zeros(1, dtype=BF16).expand(3).clone(),
        torch.randn(33).to(BF16),
    ]


def weights_like(some: list[Tensor], *, contiguous: bool, dtype: torch.dtype | None) -> list[Tensor]:
    made = []
    for a in some:
        w = torch.randint(9, ()) if not a.is_floating_point() else torch.randn(a.shape).to(dtype or a.dtype)
        made.append(w if contiguous else torch.empty_like(a, dtype=w.dtype).copy_(w))
    return made


@pytest.mark.parametrize("dtype", [None, F32, BF16])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("run", [1, 8, 30, 64, 1 << 18])
def test_averages_are_those_of_float32_whatever_the_pieces(
    monkeypatch: pytest.MonkeyPatch, run: int, contiguous: bool, dtype: torch.dtype | None
) -> None:
    monkeypatch.setattr(module, "RUN", run)
    moved, fractions = averages(), Fractions()
    expected = [a.to(wide(a.dtype), copy=True) for a in moved]
    for share in SHARES:
        weights = weights_like(moved, contiguous=contiguous, dtype=dtype)
        fractions.follow(moved, weights, share)
        expected = [
            a.lerp(w.to(a.dtype), share) if a.is_floating_point() else w for a, w in zip(expected, weights, strict=True)
        ]
        for a, e in zip(moved, expected, strict=True):
            torch.testing.assert_close(a, e.to(a.dtype), rtol=0, atol=0)


def test_a_share_too_small_for_16_bits_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RUN", 16)
    average, weight, fractions = torch.ones(50, dtype=BF16), torch.full((50,), 2.0, dtype=BF16), Fractions()
    for _ in range(100):
        fractions.follow([average], [weight], 0.001)
    assert average.tolist() == pytest.approx([2 - 0.999**100] * 50, rel=2**-8)


@pytest.mark.parametrize("run", [8, 1 << 18])
def test_only_what_somebody_wrote_counts_as_the_16_bits_have_it(monkeypatch: pytest.MonkeyPatch, run: int) -> None:
    monkeypatch.setattr(module, "RUN", run)
    some = [torch.ones(3, dtype=BF16), torch.ones(21, dtype=BF16)]
    weights, fractions = [torch.full_like(a, 2.0) for a in some], Fractions()
    fractions.follow(some, weights, 0.001)
    assert all((a == 1).all() for a in some)
    some[1].data[17] = 1.0078125  # the next number of bfloat16
    some[0].data[0] = float("nan")
    for found in (fractions.widen(some), Fractions.widen(copy.deepcopy(fractions), some)):
        assert found[0].tolist() == pytest.approx([float("nan"), 1.001, 1.001], nan_ok=True)
        assert found[1].tolist() == pytest.approx([1.0078125 if i == 17 else 1.001 for i in range(21)])


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))])
def test_twins_go_on_alike_and_apart(twin: Any) -> None:
    moved, fractions = averages(), Fractions()
    fractions.follow(moved, weights_like(moved, contiguous=True, dtype=None), 0.01)
    others, other = twin((moved, fractions))
    before = [t.clone() for t in fractions.widen(moved)]
    weights = weights_like(moved, contiguous=True, dtype=None)
    other.follow(others, weights, 0.01)
    torch.testing.assert_close(fractions.widen(moved), before, rtol=0, atol=0)
    fractions.follow(moved, weights, 0.01)
    torch.testing.assert_close(moved, others, rtol=0, atol=0)
    torch.testing.assert_close(fractions.widen(moved), other.widen(others), rtol=0, atol=0)


def test_averages_may_change_their_layout_between_two_updates() -> None:
    a = torch.randn(2, 3, 4, 5).to(BF16)
    expected, fractions = a.float(), Fractions()
    for layout in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
        a = a.to(memory_format=layout)
        w = torch.randn(a.shape).to(BF16)
        fractions.follow([a], [w], 0.01)
        expected = expected.lerp(w.float(), 0.01)
        torch.testing.assert_close(fractions.widen([a])[0], expected, rtol=0, atol=0)
        assert a.is_contiguous(memory_format=layout)


def test_fractions_follow_averages_that_change_their_dtype_or_number() -> None:
    fractions, first = Fractions(), torch.ones(2, dtype=torch.bfloat16)
    (wide,) = fractions.widen([first])
    wide.add_(0.001)  # less than bfloat16 can tell from 1
    fractions.round_into([first])
    assert first.tolist() == [1.0, 1.0]
    assert fractions.widen([first])[0][0].item() == pytest.approx(1.001)
    second = torch.full((3,), 7.0, dtype=torch.float16)
    assert [t.dtype for t in fractions.widen([first, second, torch.ones(1)])] == [torch.float32] * 3
    assert fractions.widen([second])[0].tolist() == [7.0] * 3
    third = torch.ones(2, dtype=torch.float64)
    assert fractions.widen([third])[0] is third


def test_only_what_was_overwritten_is_taken_from_a_16_bit_average() -> None:
    fractions, average = Fractions(), torch.ones(2, dtype=torch.bfloat16)
    fractions.widen([average])[0].add_(0.001)
    fractions.round_into([average])
    average[1] = 5.0
    assert fractions.widen([average])[0].tolist() == pytest.approx([1.001, 5.0])
