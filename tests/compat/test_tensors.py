"""Lists of averages and weights of any dtypes."""

import pytest
import torch

from torchbelay.compat import tensors
from torchbelay.compat.tensors import Fractions


@pytest.mark.parametrize("average", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("weight", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_averages_follow_weights_of_any_dtype_and_keep_their_own(average: torch.dtype, weight: torch.dtype) -> None:
    averages = [torch.ones(3, dtype=average), torch.ones((), dtype=average), torch.ones(0, dtype=average)]
    tensors.follow_(averages, [torch.full_like(a, 2.0, dtype=weight) for a in averages], 0.25)
    assert [a.tolist() for a in averages] == [[1.25] * 3, 1.25, []]
    assert {a.dtype for a in averages} == {average}


def test_weights_that_need_gradients_may_be_followed_and_overwritten() -> None:
    average, weight = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.ones(2))
    tensors.follow_([average], [weight], 0.5)
    assert average.tolist() == [0.5, 0.5]
    tensors.copy_([weight], [average])
    assert weight.tolist() == [0.5, 0.5]
    assert weight.grad_fn is None


def test_nothing_at_all_may_be_followed() -> None:
    tensors.follow_([], [], 0.5)
    tensors.copy_([], [])
    assert tensors.start([]) == []


def test_what_is_copied_keeps_the_order() -> None:
    averages, weights = [torch.tensor(float(i)) for i in range(4)], [torch.tensor(10.0 + i) for i in range(4)]
    (moving, ends), (rest, sources) = tensors.part(averages, weights, [True, False, False, True])
    assert [t.item() for t in (*moving, *ends, *rest, *sources)] == [0, 3, 10, 13, 1, 2, 11, 12]


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
