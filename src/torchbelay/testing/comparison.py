"""Comparison of states bit for bit: all that models, optimizers and averages hold, by name."""

import copy
import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]  # the contents of some objects, flat, by name


class Violation(Exception):  # noqa: N818  # a finding of the suite, not an error of the program
    """A contract does not hold; the message says how."""


def leaves(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield every leaf of nested mappings, lists and tuples with its path.

    >>> list(leaves("model", {"a": [1, 2]}))
    [('model/a/0', 1), ('model/a/1', 2)]
    """
    if isinstance(tree, Mapping | list | tuple):
        for key, branch in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from leaves(f"{path}/{key}", branch)
    else:
        yield path, tree


def local(t: Tensor) -> Tensor:
    """Return a tensor without its gradient; of a sharded tensor, the part on this process."""
    t = t.detach()
    return t.to_local() if hasattr(t, "to_local") else t


def snapshot(leaf: Any) -> Any:
    """Return a copy of a leaf."""
    return local(leaf).clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


def widen(t: Tensor) -> Tensor:
    """Return a copy of a tensor on the CPU in double precision."""
    return local(t).to("cpu", torch.promote_types(t.dtype, torch.float64), copy=True)


def can_average(p: Tensor) -> bool:
    """Whether a tensor holds real or complex floating-point numbers."""
    return p.is_floating_point() or p.is_complex()


def same(x: Any, y: Any) -> bool:
    """Whether two leaves are equal to the last bit: nan equals nan, 0 and −0 differ.

    >>> nan = torch.tensor(float("nan"))
    >>> same(nan, nan.clone()), same(torch.tensor(0.0), torch.tensor(-0.0))
    (True, False)
    """
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.dtype == y.dtype and x.shape == y.shape and torch.equal(_bits(x), _bits(y.to(x.device)))
    return type(x) is type(y) and bool(x == y)


def _bits(t: Tensor) -> Tensor:
    dense = t.to_dense() if t.is_sparse else t
    flat = dense.detach().resolve_conj().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8)


def differences(one: State, other: State) -> list[str]:
    """Return the names under which two states do not have the same bits.

    >>> differences({"a": 1, "b": 2}, {"a": 1, "c": 2})
    ['b', 'c']
    """
    return [name for name in {**one, **other} if not (name in one and name in other and same(one[name], other[name]))]


def require_unchanged(before: State, after: State, action: str) -> None:
    """Raise a `Violation` if an action has changed a bit."""
    if differing := differences(before, after):
        raise Violation(f"{action} changed {abridge(differing)}")


def abridge(names: list[str]) -> str:
    """Return the first three names and the number of the others, for a message.

    >>> abridge(["a", "b", "c", "d", "e"])
    "'a', 'b', 'c' and 2 more"
    """
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def reload(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state after `torch.save` and `torch.load(weights_only=True)`; a copy if a part is sharded."""
    if any(hasattr(leaf, "to_local") for _, leaf in leaves("", state)):
        return copy.deepcopy(state)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded
