"""A slice of an average in a state of a Belay: torch.distributed.checkpoint saves it, and torch.save must not.

A program that trains replicas often lets the first rank alone save. From a file of torch.save the other slices would be
missing, which would show when the training goes on from it and not before.
"""

from typing import Any, NoReturn

from torch import Tensor
from torch.distributed.tensor import DTensor


class SliceTensor(DTensor):
    """A DTensor that refuses to be pickled."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "this state of a Belay has a slice of each average, and what this rank pickles would be without the slices "
            "of the others; take belay.state_dict(full=True) on every rank and let the first one save it, or save the "
            "Belay by torch.distributed.checkpoint"
        )

    def __deepcopy__(self, memo: Any) -> "SliceTensor":
        found = memo[id(self)] = sealed(self.clone())
        return found


def sealed(t: Tensor) -> SliceTensor:
    """Return a DTensor with the same local part that refuses to be pickled."""
    return SliceTensor(t._local_tensor, t._spec, requires_grad=False)  # type: ignore[attr-defined,no-untyped-call]
