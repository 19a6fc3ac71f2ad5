"""The backend of kernels: what goes in one launch, what goes the foreach way, and the exchange of weights."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this platform")

from helpers.backends_under_test import WHERE, Tensors, bf16, f16, f32, normal, still, take
from helpers.kernels_under_test import close, embedded, kernel, lists
from helpers.problems import same
from helpers.seams import Motion, launches
from torchbelay.ops import arithmetic
from torchbelay.ops.triton.table import BLOCK, fits
from torchbelay.physics.coupling import Coupling

# One launch


def test_one_launch_whatever_the_dtypes_and_the_number_of_averages(monkeypatch) -> None:
    cohorts = [lists([(5,), (BLOCK + 1,)], pair) for pair in ((f32, f32), (bf16, f32), (f16, f32))]
    watching = [Tensors(each.w1, [w.clone() for w in each.w2]) for each in cohorts]
    alone = [[each.copy() for each in some] for some in (cohorts, watching)]
    for some, others in zip(*alone, strict=True):
        others.w1 = some.w1
    pull, ema = Motion(Coupling(0.1, 0.2, 0.9, 0.2)), Motion(Coupling(0.0, 0.3, 1.0, 0.3))
    counted = launches(monkeypatch)
    take(kernel(), [*(still(each, pull) for each in cohorts), *(still(each, ema) for each in watching)])
    assert counted.count == 1
    for pulled, watch in zip(*alone, strict=True):
        take(kernel(), [still(pulled, pull)])
        take(kernel(), [still(watch, ema)])
    assert counted.count == 7
    for mine, theirs in zip([*cohorts, *watching], [each for some in alone for each in some], strict=True):
        # an average that watches sees the pulled weights before they are rounded to 16 bits
        half = torch.finfo(mine.w1[0].dtype).eps
        torch.testing.assert_close(mine.all(), theirs.all(), rtol=half, atol=half)


def test_a_tensor_that_an_average_leaves_out_is_left_to_the_others() -> None:
    mine = lists([(5,), (6,), (7,)])
    watching = Tensors([mine.w1[1]], [mine.w2[1].clone()])
    expected = [w2 + 0.2 * (w1 - w2) for w1, w2 in zip(mine.w1, mine.w2, strict=True)]
    second = watching.w2[0] + 0.3 * (mine.w1[1] - watching.w2[0])
    move = [still(mine, Motion(Coupling(0.0, 0.2, 1.0, 0.2))), still(watching, Motion(Coupling(0.0, 0.3, 1.0, 0.3)))]
    take(kernel(), move)
    close([*mine.w2, *watching.w2], [*expected, second])


# What does not fit


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128], ids=str)
def test_other_dtypes_go_the_foreach_way(dtype: torch.dtype) -> None:
    drawn = torch.randn(2, 7, generator=torch.Generator().manual_seed(0), dtype=dtype).to(WHERE)
    mine, theirs = (Tensors([drawn[0].clone()], [drawn[1].clone()]) for _ in range(2))
    backend, c = kernel(), Coupling(0.1, 0.2, 0.9, 0.2)
    assert backend.used_for(mine) == "foreach"
    take(backend, [still(mine, Motion(c))])
    arithmetic.pull_together_(theirs.w1, theirs.w2, c.a, c.b)
    assert all(map(same, mine.all(), theirs.all()))


def test_a_tensor_with_gaps_goes_the_foreach_way() -> None:
    w1, w2 = torch.randn(2, 6, 4, device=WHERE)
    mine = Tensors([w1[:, ::2]], [w2[:, ::2].clone()])
    assert kernel().used_for(mine) == "foreach"
    assert not fits(torch.zeros(4, 4, device=WHERE), torch.zeros(4, 4, device=WHERE).t())  # laid out differently
    expected = mine.w2[0] + 0.5 * (mine.w1[0] - mine.w2[0])
    take(kernel(), [still(mine, Motion(Coupling(0.0, 0.5, 1.0, 0.5)))])
    close(mine.w2, [expected])


# Exchange


@pytest.mark.parametrize("layout", ["contiguous", "misaligned", "transposed"])
@pytest.mark.parametrize("dtype", [f32, bf16, f16, torch.float64, torch.complex64], ids=str)
def test_every_bit_trades_places(layout: str, dtype: torch.dtype) -> None:
    shapes = [(), (0,), (1,), (3, 5), (2 * BLOCK + 7,)]
    generator = torch.Generator().manual_seed(1)

    def any_bits(shape: tuple[int, ...]) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        drawn = torch.randint(256, (size,), generator=generator, dtype=torch.uint8).view(dtype).view(shape).to(WHERE)
        return embedded(drawn, layout)[0]

    x, y = [any_bits(s) for s in shapes], [any_bits(s) for s in shapes]
    old = [t.clone() for t in x], [t.clone() for t in y]
    kernel().trade(x, y).go()
    assert all(map(same, x, old[1]))
    assert all(map(same, y, old[0]))


def test_weights_of_several_dtypes_trade_places_together() -> None:
    x, y = ([normal((9,), dtype, seed=s) for dtype in (f32, bf16, torch.float64, f16)] for s in (0, 1))
    old = [t.clone() for t in x]
    kernel().trade(x, y).go()
    assert all(map(same, y, old))
