"""Lists of averages and weights of any dtypes."""

import pytest
import torch

from torchbelay.compat import tensors


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


def test_a_share_of_nothing_leaves_the_average_also_beside_weights_that_are_not_finite() -> None:
    averages = [torch.ones(2), torch.ones(2, dtype=torch.bfloat16)]
    tensors.follow_(averages, [torch.full((2,), torch.nan), torch.full((2,), torch.inf)], 0.0)
    assert [a.tolist() for a in averages] == [[1.0, 1.0]] * 2


def test_nothing_at_all_may_be_followed() -> None:
    tensors.follow_([], [], 0.5)
    tensors.copy_([], [])
    assert tensors.start([]) == []


def test_what_is_copied_keeps_the_order() -> None:
    averages, weights = [torch.tensor(float(i)) for i in range(4)], [torch.tensor(10.0 + i) for i in range(4)]
    (moving, ends), (rest, sources) = tensors.part(averages, weights, [True, False, False, True])
    assert [t.item() for t in (*moving, *ends, *rest, *sources)] == [0, 3, 10, 13, 1, 2, 11, 12]
