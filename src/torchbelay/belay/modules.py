"""The names that a model gives its tensors, whatever wraps the model.

Wrappers (DDP, torch.compile, FSDP1, activation checkpointing, Fabric) are recognised by their type and looked through,
at the root and inside; names are never cut, so that an attribute of the user's own called `module` keeps its name.
Several models that are averaged as one (`Several`) have no prefixes: each model is a root.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .aliases import aliased
from .models import Several, each_of, refuse_clash
from .overlap import has_memory, in_memory_of, place
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
    attribute_of: Attribute = cache(_wrapped_under)
    if isinstance(root, Several):
        for i, model in enumerate(each_of(root)):
            _visit(model, "", f"{i}.", attribute_of, found)
    else:
        _visit(root, "", "", attribute_of, found)
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
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for prefix, _, module in walk(root):
        for key, tensor in module._parameters.items():
            if tensor is not None and id(tensor) not in seen:
                if prefix + key in found:
                    refuse_clash(prefix + key)
                seen.add(id(tensor))
                found[prefix + key] = tensor
    return found


def names_by_id(root: nn.Module) -> dict[int, str]:
    """Return the clean names of parameters by their ids."""
    return {id(p): name for name, p in named_parameters(root).items()}


class BufferSlot(NamedTuple):
    """A place in which a module has a buffer, or could have one."""

    name: str  # clean, and of no other buffer
    holder: dict[str, Tensor | None]  # a module's buffers
    key: str
    persistent: bool  # the module's own checkpoints hold it


def held(slots: Any, key: str) -> Any:
    """Return what a module has in one of its slots; None if there is no such slot."""
    try:
        return slots[key]  # a scripted module's has no get()
    except KeyError:
        return None


def buffer_slots(root: nn.Module) -> list[BufferSlot]:
    """Return every slot of a buffer, also several of a buffer that modules share."""
    found: list[BufferSlot] = []
    owners: dict[str, Tensor] = {}
    for prefix, spellings, module in walk(root):
        for key, tensor in module._buffers.items():
            name, persistent = prefix + key, key not in module._non_persistent_buffers_set
            if tensor is not None and owners.setdefault(name, tensor) is not tensor:
                if persistent:
                    refuse_clash(name)
                # A table that each stage of a pipeline has for itself: no export holds it, so any name will do.
                name = f"{name} of model {spellings[0].split('.')[0]}"
            found.append(BufferSlot(name, module._buffers, key, persistent))
    return found


def first_slots(root: nn.Module) -> dict[str, BufferSlot]:
    """Return where the model has each buffer, by clean name, each buffer once."""
    found: dict[int, BufferSlot] = {}
    for slot in buffer_slots(root):
        if (tensor := slot.holder[slot.key]) is not None:
            found.setdefault(id(tensor), slot)
    return {slot.name: slot for slot in found.values()}


def named_buffers(root: nn.Module) -> dict[str, Tensor]:
    """Return buffers by clean name, each once."""
    return {name: slot.holder[slot.key] for name, slot in first_slots(root).items()}  # type: ignore[misc]


def refuse_clashes(root: nn.Module) -> None:
    """Refuse several models that have one name for different tensors of an export."""
    names = named_parameters(root) if isinstance(root, Several) else {}
    for name in persistent_buffers(root) if names else ():
        if name in names:
            refuse_clash(name)


def persistent_buffers(root: nn.Module) -> dict[str, Tensor]:
    """Return those of the named buffers that the model's own checkpoints hold."""
    slots = first_slots(root)
    return {name: slot.holder[slot.key] for name, slot in slots.items() if slot.persistent}  # type: ignore[misc]


def parameters(root: nn.Module) -> Iterator[Tensor]:
    """Yield what is in the parameters' slots of all modules; shared ones several times."""
    return (t for _, _, module in walk(root) for t in module._parameters.values() if t is not None)


def tensors(root: nn.Module) -> Iterator[Tensor]:
    """Yield what is in the slots of all modules; shared tensors several times."""
    for _, _, module in walk(root):
        yield from (t for slots in (module._parameters, module._buffers) for t in slots.values() if t is not None)


def slots(root: nn.Module, *, buffers: bool) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield the slots of all parameters, and of all buffers too if asked, with what is in them."""
    for _, _, module in walk(root):
        for holder in (module._parameters, module._buffers) if buffers else (module._parameters,):
            yield from ((holder, key, t) for key, t in holder.items() if t is not None)


def in_weights(root: nn.Module, given: Iterable[Tensor]) -> set[int]:
    """Return the ids of those tensors that are parameters of the model, or have an element in common with one.

    The parameter decides what such memory holds: what lies there is no buffer in its own right.
    """
    found = list(given)
    return in_memory_of(parameters(root), found) if found else set()


def refuse_lazy(name: str, tensor: Any) -> None:
    """Refuse a tensor that cannot be copied because it has no shape yet."""
    if is_lazy(tensor):
        raise ValueError(
            f"{name!r} has no shape yet (a lazy module) and cannot be copied: call the model once on a batch before "
            "that, or make the layer with its sizes"
        )


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
    owners = {prefix + name: id(p) for prefix, _, module in walk(root) for name, p in module._parameters.items()}
    with slots_hold(root, replaced):
        states = [_clean_state_dict(model) for model in each_of(root)]
    replaced.clear()
    for name, value in (item for found in states for item in found.items()):
        refuse_lazy(name, value)
    out: OrderedDict[str, Any] = OrderedDict()
    # the versions by which modules migrate old layouts, under the name of each module
    out._metadata = {}  # type: ignore[attr-defined]
    tied: dict[tuple[Any, ...], Any] = {}
    for found in states:
        out._metadata = found._metadata | out._metadata  # type: ignore[attr-defined]
        while found:
            name, value = found.popitem(last=False)
            if isinstance(value, Tensor):
                same = _identity(value) or (owners.get(name, name),)
                if same not in tied:
                    tied[same] = take(value)
                value = tied[same]
            if out.setdefault(name, value) is not value:
                refuse_clash(name)
    return out


def _clean_state_dict(model: nn.Module) -> OrderedDict[str, Any]:
    """Return what a model's own `state_dict()` holds, by clean names."""
    modules = list(walk(model))
    clean_of = {spelled: clean for clean, spellings, _ in modules for spelled in spellings}
    _, (*_, lead), inner = modules[0]  # asked of the innermost root, its own wrappers do not appear in the keys
    found = inner.state_dict()

    def clean(key: str) -> str:
        head, dot, leaf = (lead + key).rpartition(".")
        return clean_of.get(head + dot, (head + dot).removeprefix(lead)) + leaf  # a hook may have made a key of its own

    out: OrderedDict[str, Any] = OrderedDict((clean(key), value) for key, value in found.items())
    versions = getattr(found, "_metadata", {})
    out._metadata = {clean(key + ".").removesuffix("."): value for key, value in versions.items()}  # type: ignore[attr-defined]
    return out


def _identity(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return where a tensor lies and how it is laid out; None if its address does not identify it."""
    return place(tensor) if has_memory(tensor) and not is_sharded(tensor) else None


@contextmanager
def slots_hold(root: nn.Module, replaced: dict[int, Tensor]) -> Iterator[None]:
    """Let the modules' parameter and buffer slots point to other tensors for a moment.

    Slots whose tensors lie in the memory of those follow; `replaced` gets what they point to.
    """
    aliases = aliased(tensors(root), replaced)
    replaced.update((key, alias.value) for key, alias in aliases.items())
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


@contextmanager
def plain(root: nn.Module) -> Iterator[nn.Module]:
    """Give the model inside its wrappers, and take those around its parts away for a moment: its names are clean."""
    reshard(root)
    modules = [module for _, _, module in walk(root)]
    undo: list[tuple[dict[str, Any], str, Any]] = []
    try:
        try:
            for module in modules:
                for name, child in module._modules.items():
                    if child is not None and _wrapped_under(type(child)) is not None:
                        undo.append((module._modules, name, child))
                        module._modules[name] = next(walk(child))[2]
            yield modules[0]
        finally:
            _put_back(undo)
    finally:
        _put_back(undo)


def _put_back(undo: list[tuple[dict[str, Any], str, Any]]) -> None:
    for slots, name, tensor in undo:
        if slots[name] is not tensor:
            slots[name] = tensor
