"""Putting an average into the model for a while, and the weights back, or into the model for good."""

from collections.abc import Iterable
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchbelay.ops import arithmetic, planes
from torchbelay.ops.backend import Backend
from torchbelay.ops.trade import Trade
from torchbelay.physics.readouts import Readout

from . import modules
from .average import Entry, WholeAverage
from .overlap import has_memory, in_memory_of, place, sharing_memory
from .readout import Reading
from .shard import is_sharded, loaded, local, reshard, with_local
from .signals import signals_held
from .swapped_buffers import Buffers, Change, fitting

_numbers = count()  # of swaps: one that begins inside another has a larger one


class _Late(NamedTuple):
    """Weights that were set aside inside the block, by the ids of their parameters."""

    weights: dict[int, Tensor]
    done: bool = False  # the average is in its own memory again


class _Rider(NamedTuple):
    """What is not averaged, in the memory of weights: it goes with these, unless it is moved inside."""

    slots: dict[str, Any]  # of its module
    key: str
    own: Tensor  # the local part
    place: tuple[Any, ...]

    def put_back(self) -> None:
        """Write its own value if it is elsewhere now."""
        now = self.slots.get(self.key)
        if now is not None and place(local(now)) != self.place:
            _place(now, self.own)


class Swap:
    """An average that can be put into the model by `enter()`; `undo()` puts the weights back, bit for bit.

    If weights and average have one dtype, they trade places in place. If not, the average is rounded into the model and
    the weights are set aside, so that neither loses a bit; so are weights that share memory with others, and all of
    them if the average has 24 bits, if a reading of the average takes their place, or if the average is `held`:
    somebody looks at its memory, where the weights must not be. If replicas share the average, its slices are gathered
    in the model, and the weights are set aside: so that to leave is no collective, and one rank alone may do it after
    an exception.

    To make a swap changes nothing, and refuses what cannot be swapped. `undo()` may be called at any time after that,
    and again if it was interrupted: it does what is left to do.
    """

    @torch.inference_mode(False)  # an evaluation under inference_mode must not leave such tensors behind
    @torch.no_grad()
    def __init__(
        self,
        model: nn.Module,
        average: WholeAverage,
        backend: Backend,
        *,
        buffers: bool,
        held: bool = False,
        reading: Reading | None = None,
    ) -> None:
        self.average, self._model, self._reading, self.number = average, model, reading, next(_numbers)
        reshard(model)  # an FSDP root that keeps what it gathered would not see the swap
        average.refuse_other_shapes()
        _refuse_unwritable(average)
        # All that needs memory comes first: when it runs out, nothing has moved yet.
        self._homes = {id(e.w1): local(e.w1).detach() for e in average.entries.values()}  # where the weights were
        # if these traded contents one by one, they would mix them
        homes = {key: home for key, home in self._homes.items() if has_memory(home)}
        shared = {key for cluster in sharing_memory(homes) for key in cluster}
        others = [each for each in modules.slots(model, buffers=not buffers) if id(each[2]) not in self._homes]
        riding = in_memory_of((e.w1 for e in average.entries.values()), (t for *_, t in others)) if others else set()
        self._riders = [
            _Rider(at, key, local(t).detach().clone(), place(local(t))) for at, key, t in others if id(t) in riding
        ]
        self._traded: list[Entry] = []
        self._aside: dict[int, Tensor] = {}
        for e in average.entries.values():
            apart = not _is_like_weights(e) or is_sharded(e.w1) is not is_sharded(e.w2)
            if not (held or apart or reading is not None or id(e.w1) in shared):
                self._traded.append(e)
            else:
                self._aside[id(e.w1)] = self._homes[id(e.w1)].clone()
        self._trade: Trade | None = backend.trade(
            [self._homes[id(e.w1)] for e in self._traded], [local(e.w2) for e in self._traded]
        )
        self._w2 = {id(e.w1): e.w2 for e in self._traded}
        self._late: _Late | None = None  # what was traded first and set aside inside
        self._buffers = Buffers(model) if buffers else None
        self.is_inside = False  # the average is in the model, all of it
        self._left = False  # and the weights are back

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that hold the average inside."""
        return [e.w1 for e in self.average.entries.values()]

    @torch.inference_mode(False)
    @torch.no_grad()
    def enter(self) -> None:
        """Put the average into the model."""
        entries = self.average.entries.values()
        if self._reading is not None:
            homes = {id(e.w1): e.part_of(self._homes[id(e.w1)]) for e in entries}
            self._reading.write(homes, self.weights, lambda e: e.value)
        elif self._trade is not None:
            self._trade.go()
            _copy_to_weights(e for e in entries if id(e.w1) in self._aside)
        self.average.gather()
        if self._buffers is not None:
            self._buffers.put(fitting(self.average.buffers, self._buffers.own()))
        forget_computed()
        self.is_inside = True

    @torch.inference_mode(False)
    @torch.no_grad()
    def set_aside(self) -> None:
        """Put the average back into its own memory too, inside the block: somebody is about to look there."""
        if self.is_inside and self._late is None:
            self._late = _Late({id(e.w1): local(e.w2).clone() for e in self._traded})
        self._finish_late()

    def _finish_late(self) -> None:
        """Copy the average to its own memory, which held the weights; may be repeated."""
        if self._late is not None and not self._late.done:
            arithmetic.copy_([local(e.w2) for e in self._traded], [self._homes[id(e.w1)] for e in self._traded])
            self._late = self._late._replace(done=True)

    @torch.inference_mode(False)
    @torch.no_grad()
    def undo(self) -> None:
        """Give the model its own weights and buffers; buffers that were changed meanwhile become the average's.

        Those that were changed under a readout belong to it alone, and are dropped.
        """
        if self._left:
            return
        try:
            if self.is_inside and self._reading is None:
                self._keep_changed_buffers()
        finally:
            self.is_inside = False
            self._put_back()
            self._left = True
            # An exception may keep the swap alive; it must not look as if somebody held the average.
            self._trade, self._traded, self._w2 = None, [], {}

    def _keep_changed_buffers(self) -> None:
        # One of another shape means something else than the model's, and would never be used.
        changed = {} if self._buffers is None else fitting(self._buffers.changed(), self._buffers.own())
        for name in fitting(self.average.buffers, changed):
            changed[name] = changed[name].to(self.average.buffers[name].dtype)
        if changed:
            self.average.buffers = self.average.buffers | changed

    def _put_back(self) -> None:
        reshard(self._model)  # what was gathered of the average inside must not be trained
        aside = self._aside
        if self._late is not None:
            self._finish_late()
            aside = aside | self._late.weights
        elif self._trade is not None:
            self._trade.back()
        changes: set[Change] = set()
        for e in self.average.entries.values():
            home, now = self._homes[id(e.w1)], local(e.w1)
            own = aside.get(id(e.w1), home)
            moved = place(home) != place(now)
            if own is not home and moved and has_memory(home):
                home.copy_(own)  # other tensors may still lie there
            if own is not home or moved:
                _place(e.w1, own)
            changes |= {(home.device, now.device), (home.dtype, now.dtype)}
        for rider in self._riders:
            rider.put_back()
        if self._buffers is not None:
            self._buffers.restore(changes)
        forget_computed()

    # What others ask of it ---------------------------------------------------------------------------------------

    @property
    def readout(self) -> Readout | None:
        """The readout that is in the model; None if the average itself is."""
        return None if self._reading is None else self._reading.readout

    def changed_buffers(self) -> bool:
        """Whether a buffer of the average was written to or replaced since the swap."""
        return self._reading is None and self._buffers is not None and bool(self._buffers.changed())

    def buffers(self) -> dict[str, Tensor]:
        """Return copies of the buffers as they are in the model now."""
        return {} if self._buffers is None else self._buffers.all()

    def own_buffers(self) -> dict[str, Tensor]:
        """Return the model's own buffers, by name, while the average's are in the model."""
        return {} if self._buffers is None else self._buffers.own()

    def weights(self, entry: Entry) -> Tensor:
        """Return the local part of w1 of an entry of any average, wherever it is at present."""
        for aside in (self._aside, {} if self._late is None else self._late.weights):
            if id(entry.w1) in aside:
                return aside[id(entry.w1)]
        return local(self._w2.get(id(entry.w1), entry.w1))

    def own_weights(self) -> dict[int, Tensor]:
        """Return the model's own weights, by the ids of the parameters that they belong to."""
        return {id(e.w1): with_local(e.w1.detach(), self.weights(e)) for e in self.average.entries.values()}

    def own_tensors(self) -> dict[int, Tensor]:
        """Return the model's own weights and buffers, by the ids of the parameters and buffers that they belong to."""
        return self.own_weights() | ({} if self._buffers is None else self._buffers.own_by_id())

    def value(self, entry: Entry, average: str) -> Tensor:
        """Return w2 of an entry of the average of that name, wherever it is at present."""
        is_home = self._late is None or not self._late.done  # where the weights were, and not in its own memory
        if is_home and average == self.average.name and id(entry.w1) in self._w2:
            return with_local(entry.w2, self._homes[id(entry.w1)])
        return entry.value


@torch.inference_mode(False)
@torch.no_grad()
def overwrite(model: nn.Module, average: WholeAverage) -> None:
    """Let the model hold the average for good, all of it: a copy that is interrupted is made again."""
    average.refuse_other_shapes()
    _refuse_unwritable(average)
    buffers = Buffers(model) if average.buffers else None
    done = False
    with signals_held():
        try:
            _copy(average, buffers)
            done = True
        finally:
            if not done:
                _copy(average, buffers)


def _copy(average: WholeAverage, buffers: Buffers | None) -> None:
    entries = average.entries.values()
    for same in (True, False):
        _copy_to_weights(e for e in entries if _is_like_weights(e) is same)
    average.gather()
    if buffers is not None:
        buffers.put(fitting(average.buffers, buffers.own()))
    forget_computed()


def _refuse_unwritable(average: WholeAverage) -> None:
    """Refuse weights that no average can be written to, before anything has moved."""
    for e in average.entries.values():
        home = local(e.w1)
        why, cure = _why_unwritable(home)
        if why:
            raise RuntimeError(
                f"the parameter {e.name!r} {why}, and its average cannot be written there; {cure}, or use "
                "average_state_dict()"
            )


def _why_unwritable(home: Tensor) -> tuple[str, str]:
    """Return why no average can be written to weights, and the cure; empty texts if it can."""
    if any(n > 1 and stride == 0 for n, stride in zip(home.shape, home.stride(), strict=True)):
        return "is expanded: elements share a place in memory", "give it memory of its own, by p.data = p.data.clone()"
    if home.is_inference():
        return "was made under torch.inference_mode", "copy.deepcopy the model outside of that, and train the copy"
    if home.is_conj() or home.is_neg():
        cure = "give it memory of its own, by p.data = p.data.resolve_conj().resolve_neg()"
        return "is a conjugate or negative view, whose bits are not its values", cure
    return "", ""


def _is_like_weights(e: Entry) -> bool:
    """Whether an average has the dtype of its weights, so that they can trade places."""
    return e.low is None and e.w1.dtype == e.w2.dtype


def _copy_to_weights(entries: Iterable[Entry]) -> None:
    """Overwrite weights with their average."""
    found = list(entries)
    plain, split = ([e for e in found if (e.low is None) is whole] for whole in (True, False))
    arithmetic.copy_([e.part for e in plain], [local(e.w2) for e in plain])
    low = [local(e.low) for e in split if e.low is not None]
    planes.copy_([e.part for e in split], [local(e.w2) for e in split], low)


def forget_computed() -> None:
    """Drop what torch computed from weights and would use again: autocast's copies, and cached parametrizations."""
    torch.clear_autocast_cache()
    cache = loaded("torch.nn.utils.parametrize", "_cache")
    if cache:
        cache.clear()


def _place(w1: Tensor, own: Tensor) -> None:
    """Write weights to a parameter wherever it is now; if that is impossible, it gets the memory that they are in."""
    now = local(w1)
    if now.shape == own.shape:
        try:
            now.copy_(own)
        except RuntimeError:  # memory that cannot be written to
            pass
        else:
            return
    w1.data = with_local(w1, own)
