"""A module that is an average: its parameters lie in the average's memory, and it follows whatever the average does.

A parameter of the module shares the memory of the average if both have one dtype. If not, it is a copy in the dtype of
the model's weights, and every step renews it. A parameter that is not averaged shares the model's own memory. The user
may move or cast the module: then it is a copy that every step renews, until device and dtype agree again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy

from torchbelay.ops import arithmetic

from . import company, modules
from .aliases import Alias, aliased
from .average import Entry, WholeAverage
from .buffers import shown
from .live_buffers import BufferValues, renew_buffers
from .live_snapshot import Snapshot
from .models import Loose
from .options import Options
from .replica import Memo, Replica, Twin, pairs, replicated, without_graphs
from .shard import is_sharded, local, reshard


class Place(NamedTuple):
    """Where and what a tensor is."""

    storage: int  # not the address: `share_memory()` puts a storage elsewhere, with all that lies in it
    offset: int
    device: torch.device
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(eq=False)
class Bond:
    """What is known of one parameter of the module."""

    place: Place | None = None  # where it was put; if it is not there any more, the user has moved or replaced it
    free: bool = True  # the user has not made it something else than the model's is, so it becomes what the model's is
    private: bool = False  # it has memory of its own there, and does not share that of average or model
    seen: object = None  # what was last copied to it, if that is not averaged


@dataclass(frozen=True)
class Origin:
    """What a live module is made from."""

    model: nn.Module
    average: WholeAverage
    options: Options
    regroup: Callable[[], None]  # forms the cohorts anew: tensors of the average have been replaced
    training: "tuple[ref[object], ...]"  # the Belay and its optimizers: a model may hold them, its average does not

    def __post_init__(self) -> None:
        if isinstance(self.model, Loose):
            raise ValueError("module() needs a model, and Belay was given tensors without one; use tensors()")
        for name, p in modules.named_parameters(self.model).items():
            if _lies_in_others(local(p)):
                raise ValueError(
                    f"module() shares memory, and parameter {name!r} has none: {type(p).__name__} keeps its elements "
                    "in other tensors, as quantized weights do; use averaged(), or average_state_dict()"
                )


class LiveModule:
    """A module that follows an average for as long as somebody holds it, or a part of it."""

    def __init__(self, origin: Origin, module: nn.Module) -> None:
        self._origin, self._model, self.average = origin, origin.model, origin.average
        self._renews_buffers = origin.options.buffers != "ignore"
        self._replica, self._module = Replica(origin.model, module), ref(module)
        self._is_sharded = any(map(is_sharded, module.parameters()))
        self._known: Snapshot | None = None

    def is_alive(self) -> bool:
        """Whether somebody holds the module, or a part of it."""
        return self._replica.is_alive()

    def contains(self, module: nn.Module) -> bool:
        """Whether one of the module's parts is a part of this one too."""
        others = set(module.modules())
        return any(made in others for _, made in self._replica.twins())

    def shares(self, parameters: set[int]) -> bool:
        """Whether the model has one of these parameters, given by their ids."""
        return any(id(p) in parameters for p in self._model.parameters())

    def left_out_of(self, model: nn.Module) -> Memo:
        """Return None for each part of the module, by their ids, if it follows an average of this very model."""
        return {id(made): None for _, made in self._replica.twins()} if model is self._model else {}

    @torch.inference_mode(False)
    @torch.no_grad()
    def prepare(self) -> None:
        """Get the parts that the model has got; parts that cannot be copied raise here, before anything has moved."""
        if self._known is None or not self._known.is_model():
            self._renewed_twins()

    @torch.inference_mode(False)
    @torch.no_grad()
    def follow(self, *, moved: bool, part: WholeAverage | None = None, first: bool = False) -> None:
        """Let the module be what the average is now.

        `moved`: weights or averages may have been written to; only this `part` of the average, if it is given. `first`:
        buffers that are copied once are copied now.
        """
        own = company.own_tensors()
        parameters = None if self._known is None or own else self._known.renew(part)
        if parameters is None:
            parameters = self._look(own, first=first)
        if moved:
            increment_version(parameters)  # autograd then sees what shared memory hides from it

    def _look(self, own: Mapping[int, Tensor], *, first: bool) -> list[Tensor]:
        """Bind every tensor of the module to what it must be now, and return the parameters; `own`, see `company`."""
        if self._is_sharded:
            self._reshard()
        twins = self._renewed_twins()
        entries = {id(e.w1): e for e in self.average.entries.values()}
        buffers = {id(buffer): value for buffer, value in shown(self._model, self.average.buffers)}
        replaced = dict(own) | buffers | {key: e.w2 for key, e in entries.items()}
        aliases = {} if self._is_sharded else aliased(modules.tensors(self._model), replaced)
        binding = _Binding(self._origin.options.home)
        for twin, key, p, q in pairs(twins):
            if not is_lazy(p) and not is_lazy(q):
                bond, entry = twin.bonds.setdefault(key, Bond()), entries.get(id(p))
                binding.bind(bond, p, q, entry, own.get(id(p), p), aliases.get(id(p)))
        writes = binding.carry_out(self._origin.regroup)
        if self._renews_buffers or first or aliases:
            everything = self._renews_buffers or first
            values = BufferValues(buffers, own, aliases)
            written = renew_buffers(self._model, twins, values, binding.home, everything=everything)
            writes += written if self._renews_buffers else []
        is_simple = (
            not own and not aliases and not self._is_sharded and all(map(_has_address, self._model.parameters()))
        )
        self._known = Snapshot(twins, self.average, writes, binding.watched) if is_simple else None
        return binding.parameters

    def _reshard(self) -> None:
        """Let FSDP modules hold their shards: what they gathered belongs to the last step."""
        reshard(self._model)
        whole = self._module()
        for made in [whole] if whole is not None else [made for _, made in self._replica.twins()]:
            reshard(made)

    def _renewed_twins(self) -> list[tuple[Twin, nn.Module]]:
        """Return the parts that somebody holds, made anew where the model consists of other parts now."""
        twins = self._replica.twins()
        if not twins or self._replica.is_current():
            return twins
        known: Memo = {id(p): q for _, _, p, q in pairs(twins) if not is_lazy(q)}
        try:
            self._replica.renew(_memo(self._origin) | known)
        except Exception as problem:
            raise RuntimeError(
                f"the model, {type(self._model).__name__}, has other parts now, and the module that follows its "
                f"average {self.average.name!r} cannot get them ({type(problem).__name__}: {problem}); drop that "
                "module, and use averaged()"
            ) from problem
        return self._replica.twins()


class _Binding:
    """What one call of `follow` does to the parameters."""

    def __init__(self, home: torch.device | None) -> None:
        self.home = home
        self.parameters: list[Tensor] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._steady: list[tuple[Tensor, Tensor]] = []  # copies that every step makes
        self.watched: list[Tensor] = []  # what is copied only if it has changed
        self._adopted: list[tuple[Entry, Tensor]] = []

    def bind(
        self, bond: Bond, p: Tensor, q: Tensor, entry: Entry | None, own: Tensor, alias: Alias | None = None
    ) -> None:
        """Let q, a parameter of the module, be the average of p; if p is not averaged, p's own value, `own`.

        `alias`: p is not averaged but lies in the memory of what is, so that q is this instead, and moves at each step.
        """
        value = own if alias is None else alias.value
        source = value.detach() if entry is None else entry.w2
        if is_sharded(q):
            self._bind_sharded(bond, q, entry, source, value)
            return
        self.parameters.append(q)
        if source.layout != torch.strided:  # has no memory of its own to look at
            q.data = source
            return
        there = source.device if self.home is None else self.home
        if bond.place is None or bond.place != _place(q):
            # A parameter that `make` has just made lies in the model's memory, wherever the average is.
            made = bond.place is None and (_shares_memory(q, p) or not q.numel())
            bond.free = made or (q.dtype, q.device, q.stride()) == (p.dtype, there, p.stride())
            bond.private = not (_shares_memory(q, p) or _shares_memory(q, source))
        dtype, device = (p.dtype, there) if bond.free else (q.dtype, q.device)
        stays = (alias is None or alias.is_view) and (dtype, device) == (source.dtype, source.device)
        if stays and (bond.free or _is_alike(q, source)) and _is_plain(q):
            if not _is_alias(q, source):
                q.data = source
            bond.private = False
        else:
            if not bond.private or (q.dtype, q.device, q.shape) != (dtype, device, source.shape):
                q.data = torch.empty_like(source, dtype=dtype, device=device)
                bond.private, bond.seen = True, None
            self._copy(bond, q, source, value, moves=alias is not None or entry is not None)
        bond.place = _place(q)

    def _bind_sharded(self, bond: Bond, q: Tensor, entry: Entry | None, source: Tensor, own: Tensor) -> None:
        """Let the average lie in the memory of q: what FSDP gathers from is fixed, so it cannot be the other way."""
        if local(q).shape != local(source).shape:
            raise RuntimeError(
                f"a parameter has the shape {tuple(source.shape)} now, and the module that follows its average has "
                f"{tuple(q.shape)}: drop that module, and bind one of the new shapes by module(into=...)"
            )
        if _is_alias(local(q), local(source)):
            return
        if entry is not None and _is_alike(local(q), local(source)):
            self._adopted.append((entry, q))
        else:
            self._copy(bond, local(q), local(source), own, moves=entry is not None)

    def _copy(self, bond: Bond, q: Tensor, source: Tensor, own: Tensor, *, moves: bool) -> None:
        """Copy what moves at every step, and what does not if it has changed."""
        if moves or source.is_inference():  # of which torch does not count the writes
            self._steady.append((q, source))
            return
        self.watched.append(source)
        # A write to a sharded tensor may be counted by the whole or by its local part.
        if bond.seen != (seen := (_place(source), own._version, local(own)._version)):
            self._copies.append((q, source))
            bond.seen = seen

    def carry_out(self, regroup: Callable[[], None]) -> list[tuple[Tensor, Tensor]]:
        """Write what is to be written, and return what every step is to write again."""
        pairs = self._copies + self._steady + [(local(q), local(e.w2)) for e, q in self._adopted]
        arithmetic.copy_([q for q, _ in pairs], [source for _, source in pairs])
        for e, q in self._adopted:
            e.w2 = q.detach()
        if self._adopted:
            regroup()
        return self._steady


def _has_address(p: Tensor) -> bool:
    return not is_lazy(p) and p.layout == torch.strided


def _lies_in_others(p: Tensor) -> bool:
    """Whether a tensor has no memory that could be looked at, and keeps its elements in other tensors."""
    if not _has_address(p):
        return False
    try:
        p.untyped_storage().data_ptr()
    except RuntimeError:
        return True
    return False


def _is_plain(q: Tensor) -> bool:
    return type(q) in (Tensor, nn.Parameter)


def _place(t: Tensor) -> Place:
    return Place(t.untyped_storage()._cdata, int(t.storage_offset()), t.device, t.dtype, t.shape, t.stride())


def _shares_memory(q: Tensor, source: Tensor) -> bool:
    """Whether two tensors lie in the same memory, anywhere in it."""
    there, here = q.untyped_storage(), source.untyped_storage()
    return there.data_ptr() == here.data_ptr() and q.device == source.device and there.nbytes() > 0


def _is_alias(q: Tensor, source: Tensor) -> bool:
    return q.data_ptr() == source.data_ptr() and _is_alike(q, source)


def _is_alike(q: Tensor, source: Tensor) -> bool:
    """Whether two tensors may share memory as they are."""
    return (q.dtype, q.device, q.shape, q.stride()) == (source.dtype, source.device, source.shape, source.stride())


def make(origin: Origin) -> nn.Module:
    """Return a module of the model's class, in eval mode and without gradients, that shares the model's parameters."""
    model = origin.model
    if any(map(is_sharded, modules.named_parameters(model).values())):
        raise ValueError(
            f"module() cannot copy {type(model).__name__}, which is sharded; build a second one, shard it by the same "
            "calls, and give it as module(into=...)"
        )
    try:
        return frozen(replicated(model, _memo(origin)))
    except Exception as problem:
        raise RuntimeError(
            f"module() makes a deep copy of the model, {type(model).__name__}, all but its weights, and that failed "
            f"({type(problem).__name__}: {problem}); use averaged(), or, without a copy, "
            "torch.func.functional_call(model, dict(belay.tensors()), ...)"
        ) from problem


def frozen(module: nn.Module) -> nn.Module:
    """Put a module in eval mode and turn its gradients off."""
    for p in module.parameters():
        if not is_lazy(p):
            p.requires_grad_(False)
    return module.eval()


def _memo(origin: Origin) -> Memo:
    """Return parameters that share the model's memory, by the ids of the model's; others than plain ones are copied."""
    found = without_graphs(origin.model) | {id(each()): None for each in origin.training if each() is not None}
    for p in origin.model.parameters():
        if type(p) is nn.Parameter:
            # `data` has a version of its own: a write to the average must not look like a write to the weights
            found[id(p)] = nn.Parameter(p.data, requires_grad=False)
    for member in company.members():
        for each in member.live.modules:  # which the user may have made a part of the model; no part of its own copy
            found |= each.left_out_of(origin.model)
    return found
