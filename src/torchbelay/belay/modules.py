"""The names that a model gives its tensors, whatever wraps the model.

Wrappers (DDP, torch.compile, FSDP1, activation checkpointing) are recognised by their type and looked through, at the
root and inside; names are never cut, so that an attribute of the user's own called `module` keeps its name.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .shard import is_sharded, loaded, reshard

# Where each wrapper is defined, and the attribute that holds the wrapped module. The classes are looked up among loaded
# modules: a model cannot be wrapped by a class that has not been imported.
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"),
)


def _wrapped_under(module: nn.Module) -> str | None:
    """Return the attribute that holds the wrapped module; None if `module` is not a wrapper."""
    for where, name, attribute in _WRAPPERS:
        if isinstance(module, loaded(where, name)):
            return attribute
    return None


def walk(root: nn.Module) -> Iterator[tuple[str, list[str], nn.Module]]:
    """Yield every unwrapped module as (its clean prefix, the prefixes that lead to it through wrappers, the module)."""

    def visit(module: nn.Module, clean: str, spelled: str) -> Iterator[tuple[str, list[str], nn.Module]]:
        spellings = [spelled]
        while (attribute := _wrapped_under(module)) is not None:
            module = getattr(module, attribute)
            spellings.append(f"{spellings[-1]}{attribute}.")
        yield clean, spellings, module
        for name, child in module._modules.items():
            if child is not None:
                yield from visit(child, f"{clean}{name}.", f"{spellings[-1]}{name}.")

    return visit(root, "", "")


def named_parameters(root: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by clean name; a tied one once, under its first name.

    Under FSDP2 these are the sharded parameters, which the optimizer holds: gathered ones are freed first.
    """
    reshard(root)
    return _first_names(root, lambda module: module._parameters)


def named_buffers(root: nn.Module) -> dict[str, Tensor]:
    """Return buffers by clean name, each once."""
    return _first_names(root, lambda module: module._buffers)


def persistent_buffers(root: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that the model's own checkpoints hold, by clean name."""
    return _first_names(
        root, lambda m: {name: b for name, b in m._buffers.items() if name not in m._non_persistent_buffers_set}
    )


def _first_names(root: nn.Module, slots: Callable[[nn.Module], dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for prefix, _, module in walk(root):
        for name, tensor in slots(module).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                found[prefix + name] = tensor
    return found


def copied(tensor: Tensor) -> Tensor:
    """Return a copy of its own."""
    return tensor.detach().clone()


def state_dict_with(
    root: nn.Module, replaced: dict[int, Tensor], take: Callable[[Tensor], Any] = copied
) -> dict[str, Any]:
    """Return copies of what the plain model's own `state_dict()` holds, with some tensors (by id) replaced by others.

    The model's own method is called, with hooks and extra state, while its slots hold the other tensors; no weight is
    written. `take` copies one tensor after the other, and each original is freed at once, so that there are never two
    copies of everything. What is tied in the model is tied in its state.
    """
    reshard(root)
    modules = list(walk(root))
    clean_of = {spelled: clean for clean, spellings, _ in modules for spelled in spellings}
    _, (*_, lead), inner = modules[0]  # asked of the innermost root, its own wrappers do not appear in the keys
    with _slots_hold(root, replaced):
        found = inner.state_dict()
    replaced.clear()

    def clean(key: str) -> str:
        head, dot, leaf = (lead + key).rpartition(".")
        return clean_of.get(head + dot, (head + dot).removeprefix(lead)) + leaf  # a hook may have made a key of its own

    out: OrderedDict[str, Any] = OrderedDict()
    # the versions by which modules migrate old layouts, under the name of each module
    versions = getattr(found, "_metadata", {})
    out._metadata = {clean(key + ".").removesuffix("."): value for key, value in versions.items()}  # type: ignore[attr-defined]
    owners = {prefix + name: id(p) for prefix, _, module in modules for name, p in module._parameters.items()}
    tied: dict[tuple[Any, ...], Any] = {}
    while found:
        key = next(iter(found))
        value = found.pop(key)
        name = clean(key)
        if isinstance(value, Tensor):
            same = _identity(value) or (owners.get(name, name),)
            if same not in tied:
                tied[same] = take(value)
            out[name] = tied[same]
        else:
            out[name] = value
    return out


def _identity(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return where a tensor lies and how it is laid out; None if its address does not identify it."""
    if is_sharded(tensor) or tensor.layout != torch.strided or not tensor.numel():
        return None
    return tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride()


@contextmanager
def _slots_hold(root: nn.Module, replaced: dict[int, Tensor]) -> Iterator[None]:
    """Let the modules' parameter and buffer slots point to other tensors for a moment."""
    undo: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for _, _, module in walk(root):
            for slots in (module._parameters, module._buffers):
                for name, tensor in slots.items():
                    if id(tensor) in replaced:
                        undo.append((slots, name, tensor))
                        slots[name] = replaced[id(tensor)]  # type: ignore[assignment]
        yield
    finally:
        for slots, name, tensor in reversed(undo):
            slots[name] = tensor
