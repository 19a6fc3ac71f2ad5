"""Fingerprints of tensors differ if a bit does."""

import pytest
import torch

from torchbelay.snapshots import fingerprints as module
from torchbelay.snapshots.fingerprints import fingerprints

ORDERS = [(0, 1, 2, 3), (1, 0, 2, 3), (2, 3, 0, 1), (1, 2, 3, 0), (3, 2, 1, 0)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128, torch.int64, torch.uint8]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.float8_e4m3fn], ids=str)
def test_they_are_the_sums_of_their_definition(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 8)
    module._numbers.cache_clear()
    tensor = (50 * torch.randn(5, 4, generator=torch.Generator().manual_seed(0))).to(dtype)
    data = tensor.contiguous().view(torch.uint8).flatten().tolist()
    size = min(4, torch.empty(0, dtype=dtype).real.element_size())
    whole = [int.from_bytes(bytes(data[i : i + size]), "little", signed=True) for i in range(0, len(data), size)]
    numbers, factor, expected = module._numbers(tensor.device).tolist(), module._FACTOR, 0
    assert len(numbers) == 8
    assert all(number % 2 for number in numbers)
    for start in range(0, len(whole), 8):
        expected = expected * factor + sum(a * b for a, b in zip(numbers, whole[start : start + 8], strict=False))
    assert (int(fingerprints([tensor])) - expected) % 2**64 == 0
    module._numbers.cache_clear()


@pytest.mark.parametrize("bit", range(64))
def test_every_bit_counts_in_one_number_and_in_several(bit: int) -> None:
    plain = torch.zeros(70_000, dtype=torch.int64)
    before = int(fingerprints([plain]))
    flipped = -(1 << 63) if bit == 63 else 1 << bit
    for places in ([0], [69_999], [3, 4], [0, 65_536], slice(None)):
        changed = plain.clone()
        changed[places] = flipped
        assert int(fingerprints([changed])) != before


def test_numbers_that_trade_places_are_noticed() -> None:
    plain = torch.arange(200_000, dtype=torch.float32)
    swapped, rolled = plain.clone(), plain.roll(32_768)
    swapped[[5, 150_000]] = plain[[150_000, 5]]
    assert len(set(fingerprints([plain, swapped, rolled, plain.flip(0), -plain]).tolist())) == 5
    assert bool((fingerprints([plain]) == fingerprints([plain.clone()])).all())


def test_values_that_are_no_numbers_and_tensors_of_any_layout_have_one() -> None:
    nans = torch.tensor([float("nan"), float("inf"), -0.0])
    assert int(fingerprints([nans])) == int(fingerprints([nans.clone()]))
    assert int(fingerprints([nans])) != int(fingerprints([nans.abs()]))
    plain = torch.randn(2, 3, 4, 5)
    alike = fingerprints([plain, plain.to(memory_format=torch.channels_last), torch.nn.Parameter(plain)])
    assert len(set(alike.tolist())) == 1
    assert fingerprints([torch.empty(0, 3), torch.tensor(0.0)]).tolist() == [0, 0]
    assert fingerprints([]).tolist() == []


def test_a_view_that_is_conjugate_or_negative_has_that_of_its_values() -> None:
    plain = torch.randn(3, 4, dtype=torch.complex64)
    for view in (plain.conj(), plain.conj().imag, plain.mT.conj()):
        assert view.is_conj() or view.is_neg()
        assert int(fingerprints([view])) == int(fingerprints([view.clone().resolve_conj().resolve_neg()]))
    assert int(fingerprints([plain.conj()])) != int(fingerprints([plain]))


def test_the_sum_over_ranks_differs_if_parts_trade_places() -> None:
    parts = torch.randn(4, 100).unbind()
    whole = [sum(int(fingerprints([parts[i]], rank)) for rank, i in enumerate(order)) for order in ORDERS]
    assert len({each % 2**64 for each in whole}) == len(ORDERS)
    assert int(fingerprints([parts[0]], 0)) == int(fingerprints([parts[0]]))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_have_those_of_their_whole_numbers() -> None:
    quantized = [torch.quantize_per_tensor(torch.randn(4), 0.1, 0, dtype) for dtype in (torch.qint8, torch.qint32)]
    assert fingerprints(quantized).tolist() == fingerprints([each.int_repr() for each in quantized]).tolist()
