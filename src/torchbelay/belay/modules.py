"""The names that a model gives its tensors, whatever wraps the model.

Wrappers (DDP, torch.compile, FSDP1, activation checkpointing, Fabric) are recognised by their type and looked through,
at the root and inside; names are never cut, so that an attribute of the user's own called `module` keeps its name.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
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
    ("lightning.fabric.wrappers", "_FabricModule", "_forward_module"),
    ("lightning_fabric.wrappers", "_FabricModule", "_forward_module"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"),
)


def _wrapped_under(kind: type) -> str | None:
    """Return the attribute that holds the wrapped module; None if `kind` is not a class of wrappers."""
    for where, name, attribute in _WRAPPERS:
        if issubclass(kind, loaded(where, name)):
            return attribute
    return None


Attribute = Callable[[type], str | None]
Found = list[tuple[str, list[str], nn.Module]]


def walk(root: nn.Module) -> Iterator[tuple[str, list[str], nn.Module]]:
    """Yield every unwrapped module as (its clean prefix, the prefixes that lead to it through wrappers, the module)."""
    found: Found = []
    # remembered for this walk only: a model has many modules of few classes
    _visit(root, "", "", cache(_wrapped_under), found)
    return iter(found)


def _visit(module: nn.Module, clean: str, spelled: str, attribute_of: Attribute, found: Found) -> None:
    # A function inside `walk` would refer to itself, and keep what it found alive until the garbage collector runs.
    spellings = [spelled]
    while (attribute := attribute_of(type(module))) is not None:
        module = getattr(module, attribute)
        spellings.append(f"{spellings[-1]}{attribute}.")
    found.append((clean, spellings, module))
    for name, child in module._modules.items():
        if child is not None:
            _visit(child, f"{clean}{name}.", f"{spellings[-1]}{name}.", attribute_of, found)


def wrappers(root: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Return every wrapper with the module that it wraps, at the root and inside; those inside others come first."""
    attribute_of: Attribute = cache(_wrapped_under)
    found = [(module, getattr(module, name)) for module in root.modules() if (name := attribute_of(type(module)))]
    return found[::-1]


def named_parameters(root: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by clean name; a tied one once, under its first name.

    Under FSDP2 these are the sharded parameters, which the optimizer holds: gathered ones are freed first.
    """
    reshard(root)
    return _first_names((prefix, module._parameters) for prefix, _, module in walk(root))


def named_buffers(root: nn.Module) -> dict[str, Tensor]:
    """Return buffers by clean name, each once."""
    return _first_names((prefix, module._buffers) for prefix, _, module in walk(root))


def persistent_buffers(root: nn.Module) -> dict[str, Tensor]:
    """Return those of the named buffers that the model's own checkpoints hold."""
    modules = [(prefix, module) for prefix, _, module in walk(root) if module._buffers]
    transient = {prefix + name for prefix, module in modules for name in module._non_persistent_buffers_set}
    named = _first_names((prefix, module._buffers) for prefix, module in modules)
    return {name: buffer for name, buffer in named.items() if name not in transient}


def _first_names(slots: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for prefix, tensors in slots:
        for name, tensor in tensors.items():
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
    # Twice, for an exception may come at any line, also of putting the tensors back.
    try:
        try:
            for _, _, module in walk(root):
                for slots in (module._parameters, module._buffers):
                    for name, tensor in slots.items():
                        if id(tensor) in replaced:
                            undo.append((slots, name, tensor))
                            slots[name] = replaced[id(tensor)]  # type: ignore[assignment]
            yield
        finally:
            _put_back(undo)
    finally:
        _put_back(undo)


def _put_back(undo: list[tuple[dict[str, Any], str, Any]]) -> None:
    for slots, name, tensor in undo:
        if slots[name] is not tensor:
            slots[name] = tensor
