"""Which tensors are dense: the strides against the places of all elements, one by one."""

from itertools import product

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from torchbelay.ops.strides import is_dense

dimensions = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 13)), max_size=4)


@given(dimensions)
@example([(3, 1), (1, 7), (4, 3)])  # dense: the stride of a dimension of one element does not count
@example([(2, 4), (3, 1)])  # a gap between the rows
@example([(2, 2), (2, 1), (3, 4)])
@example([(3, 0), (2, 1)])  # expanded
@example([(0, 5), (3, 2)])
def test_a_tensor_is_dense_if_its_elements_fill_one_range_each_once(sizes: list[tuple[int, int]]) -> None:
    shape, strides = [n for n, _ in sizes], [stride for _, stride in sizes]
    t = torch.empty(100).as_strided(shape, strides)
    places = [
        sum(i * stride for i, stride in zip(index, strides, strict=True))
        for index in product(*(range(n) for n in shape))
    ]
    assert is_dense(t) == (sorted(places) == list(range(len(places))))


def test_conjugated_and_reversed_dimensions_are_dense() -> None:
    t = torch.randn(2, 3, 4, dtype=torch.complex64)
    assert is_dense(t.permute(2, 0, 1).conj())
    assert is_dense(torch.empty(2, 3, 5, 5).to(memory_format=torch.channels_last))
    assert not is_dense(t.real)
