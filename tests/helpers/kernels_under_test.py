"""What the tests of the kernels share. They run on a GPU, or in Triton's interpreter if there is none."""

from math import nan, sin
from typing import Any

import torch
from torch import Tensor

from helpers.backends_under_test import Tensors, bf16, f16, f32, normal
from helpers.seams import choose
from torchbelay.ops.triton.table import BLOCK

STEPS = 9
SHAPES = [(3, 5), (), (0, 2), (1,), (BLOCK + 3,)]
PAIRS = [(f32, f32), (bf16, f32), (f16, f32), (bf16, bf16), (f16, f16), (f32, bf16), (f32, f16), (bf16, f16)]


def kernel() -> Any:
    """A new backend of kernels."""
    return choose("triton")


def rate(step: int) -> float:
    """A learning rate that rises and falls."""
    return 0.1 * (1.5 + sin(step))


def lists(shapes=SHAPES, dtypes=(f32, f32), *, born: int = 0) -> Tensors:
    w1 = [normal(shape, dtypes[0], seed=i) for i, shape in enumerate(shapes)]
    w2 = [normal(shape, dtypes[1], seed=100 + i) for i, shape in enumerate(shapes)]
    return Tensors(w1, w2, born=born)


def updates(step: int, shapes=SHAPES, dtype: torch.dtype = f32) -> list[Tensor]:
    return [normal(shape, dtype, seed=1000 * step + i) for i, shape in enumerate(shapes)]


def close(found: list[Tensor], expected: list[Tensor], *, factor: float = 1.0) -> None:
    """Equal but for float32's rounding, `factor` times that of a few operations on numbers of order 10."""
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=2e-6 * factor, atol=2e-6 * factor)


def embedded(t: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The same values inside a larger buffer of nan, and that buffer."""
    buffer = torch.full((t.numel() + 64,), nan, device=t.device, dtype=t.dtype)
    inner = buffer[32 : 32 + t.numel()] if layout != "misaligned" else buffer[33 : 33 + t.numel()]
    view = (
        inner.view(t.shape[::-1]).permute(tuple(range(t.dim()))[::-1])
        if layout == "transposed"
        else inner.view(t.shape)
    )
    view.copy_(t)
    return view, buffer
