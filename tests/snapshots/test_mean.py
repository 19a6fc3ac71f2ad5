"""The mean of a part of a tensor: its numbers in every dtype, and NaN, infinity and overflow."""

import math
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import same_bits
from torchbelay.snapshots import open_checkpoint
from torchbelay.snapshots.mean import NotFiniteError, Part, Source, Workspace, mean

WEIGHTS = (0.5, -0.25, 0.75)


def sources(folder: Path, tensors: list[torch.Tensor], weights: tuple[float, ...] = WEIGHTS) -> list[Source]:
    made = []
    for number, (tensor, weight) in enumerate(zip(tensors, weights, strict=True)):
        torch.save({"w": tensor}, folder / f"{number}.pt")
        made.append(Source(open_checkpoint(folder / f"{number}.pt"), "w", weight))
    return made


def find(
    folder: Path, tensors: list[torch.Tensor], weights: tuple[float, ...] = WEIGHTS, wide: torch.dtype = torch.float32
) -> torch.Tensor:
    dtype = tensors[-1].dtype
    part = Part("w", 0, tensors[-1].numel())
    return mean(sources(folder, tensors, weights), part, Workspace(), wide=wide, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_it_is_the_mean_in_float64_rounded_once(tmp_path: Path, dtype: torch.dtype, wide: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(1000).to(dtype) for _ in WEIGHTS]
    exact = sum(weight * tensor.double() for weight, tensor in zip(WEIGHTS, tensors, strict=True))
    found = find(tmp_path, tensors, wide=wide)
    assert found.dtype == dtype
    if wide == torch.float64:
        assert (found == exact.to(dtype)).float().mean() > 0.999  # the order of the sum may change the last bit of 64
    rounding = exact.abs() * torch.finfo(dtype).eps / 2
    spread = sum(abs(weight) * tensor.double().abs() for weight, tensor in zip(WEIGHTS, tensors, strict=True))
    assert ((found.double() - exact).abs() <= 1.0001 * rounding + 8 * spread * torch.finfo(torch.float32).eps).all()


def test_complex_numbers_are_averaged_as_pairs(tmp_path: Path) -> None:
    tensors = [torch.randn(9, dtype=torch.complex64) for _ in WEIGHTS]
    exact = sum(weight * tensor for weight, tensor in zip(WEIGHTS, tensors, strict=True))
    torch.testing.assert_close(find(tmp_path, tensors), exact)


def test_float64_is_averaged_in_float64(tmp_path: Path) -> None:
    tensors = [torch.tensor([1.0 + number * 1e-12], dtype=torch.float64) for number in range(3)]
    assert find(tmp_path, tensors, wide=torch.float64).item() == pytest.approx(1 + 1.25e-12, abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", [1, 7, 8, 1001])
def test_equal_checkpoints_come_out_unchanged_to_the_last_bit(tmp_path: Path, dtype: torch.dtype, length: int) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(length) * 10.0 ** torch.randint(-5, 5, (length,))).to(dtype)
    tensor[0] = -0.0
    weights = (1 / 3, 1 / 3, 1 - 2 / 3)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert same_bits(find(tmp_path, [tensor] * 3, weights, wide), tensor)


def test_elements_that_are_equal_stay_equal_if_others_are_not(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(100) for _ in range(3)]
    for tensor in tensors:
        tensor[::2] = tensors[0][::2]
    found = find(tmp_path, tensors, (0.1, 0.2, 0.7))
    assert torch.equal(found[::2], tensors[0][::2])
    assert not torch.equal(found[1::2], tensors[2][1::2])


def test_dtypes_may_differ_and_the_asked_one_is_returned(tmp_path: Path) -> None:
    tensors = [torch.full((3,), 1.0, dtype=torch.bfloat16), torch.full((3,), 3.0), torch.full((3,), 3.0).half()]
    found = find(tmp_path, tensors, (0.5, 0.25, 0.25))
    assert (found.dtype, found.tolist()) == (torch.float16, [2.0] * 3)
    listed = sources(tmp_path, [tensors[1]] * 2, (0.5, 0.5))
    same = mean(listed, Part("w", 0, 3), Workspace(), wide=torch.float32, dtype=torch.bfloat16)
    assert (same.dtype, same.tolist()) == (torch.bfloat16, [3.0] * 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_nan_and_infinity_are_refused_with_file_tensor_and_place(tmp_path: Path, bad: float, number: int) -> None:
    tensors = [torch.randn(10) for _ in range(3)]
    tensors[number][4] = bad
    message = (
        rf"{number}\.pt: 'w' holds NaN or infinity \(values: 1, the first is number 4\); leave this checkpoint out"
    )
    with pytest.raises(NotFiniteError, match=message):
        find(tmp_path, tensors)


def test_the_same_infinity_everywhere_is_part_of_the_model_and_the_same_nan_is_not(tmp_path: Path) -> None:
    mask = torch.tensor([0.0, -math.inf])
    assert torch.equal(find(tmp_path, [mask] * 3), mask)
    with pytest.raises(NotFiniteError, match=r"0\.pt: 'w' holds NaN"):
        find(tmp_path, [torch.tensor([math.nan])] * 3)


def test_a_difference_beyond_float32_is_computed_in_float64(tmp_path: Path) -> None:
    tensors = [torch.tensor([3e38]), torch.tensor([-3e38])]
    assert find(tmp_path, tensors, (0.75, 0.25)).item() == pytest.approx(1.5e38)


def test_a_mean_beyond_the_dtype_is_refused(tmp_path: Path) -> None:
    tensors = [torch.tensor([-60000.0]).half(), torch.tensor([60000.0]).half()]
    with pytest.raises(NotFiniteError, match=r"the merge of 'w' is too large for torch\.float16; use other weights"):
        find(tmp_path, tensors, (-1.0, 2.0))
