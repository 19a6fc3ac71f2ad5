"""How a tensor's elements lie in its memory."""

from torch import Tensor


def is_dense(t: Tensor) -> bool:
    """Whether a tensor has every element between its first and its last, each once, in any order of dimensions.

    Its shape and strides alone are read. An expanded tensor is not dense, because its elements share places.

    >>> import torch
    >>> x = torch.empty(3, 4)
    >>> is_dense(x.T), is_dense(x[:, :2]), is_dense(x[:1].expand(3, 4))
    (True, False, False)
    """
    if t.is_contiguous():
        return True
    reach = 1
    for stride, n in sorted(zip(t.stride(), t.shape, strict=True)):
        if n > 1 and stride != reach:
            return False
        reach *= n
    return True
