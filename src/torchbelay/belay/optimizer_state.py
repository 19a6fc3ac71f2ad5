"""The averages in the state of their optimizer: whoever saves and loads the optimizer saves and loads them too.

In what `optimizer.state_dict()` returns, and nowhere else:

state[i]["torchbelay/AVERAGE/KIND/NAME"]    a tensor; KIND is that of a Belay's state: weights, velocities1, buffers, …
param_groups[g]["torchbelay"]               all numbers and names, as a text in JSON
param_groups[g]["torchbelay/FACT"]          1; what must be the same in the Belay that loads, as `checkpoint.made_with`

The empty name of an AVERAGE is that of the model's own weights and buffers, which are there with `Parts.weights_ride`.

A tensor is in the state of its own parameter, except buffers, and averages of parameters that are frozen or have no
state: these are with the first parameter that is neither. torch.distributed.checkpoint drops the state of frozen
parameters on loading, and Adam takes a parameter that has any state for one that has Adam's.

The live state of the optimizer keeps its layout. On loading, a hook takes these entries out before torch casts them to
the dtypes of the parameters. Each optimizer of a Belay carries the averages of what it trains.
"""

import json
from collections.abc import Mapping
from urllib.parse import quote

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchbelay.physics.warnings import warn

from . import checkpoint, modules, own_weights
from .averages import Checked
from .checks import without_strict
from .own_weights import Named
from .packing import (
    KEY,
    PREFIX,
    TENSORS,
    State,
    carried,
    given,
    is_carried,
    named_tensors,
    numbers,
    steps_of,
    unpacked,
    without,
)
from .part import Part
from .parts import Parts

_NAME = "_torchbelay_state"  # the attribute of an optimizer that holds what it carries
_MODEL = ""  # in the place of an average's name: the model itself


def check(parts: Parts, *, replace: bool) -> None:
    """Refuse what cannot be saved with its optimizer; changes nothing."""
    if parts.team is not None:
        raise ValueError(
            "save_with_optimizer=True does not go with workers=: all workers must load at once; save "
            "belay.state_dict() beside the optimizer's, one file per worker"
        )
    for part in parts.each:
        if part.optimizer is None:
            raise ValueError(
                "save_with_optimizer=True needs an optimizer, and optimizer is None; save belay.state_dict() yourself"
            )
        if vars(part.optimizer).get(_NAME) is not None and not replace:
            raise ValueError(
                f"another Belay is saved with this {type(part.optimizer).__name__} already; make its averages "
                "spectators of one Belay, or detach() it first, or give replace=True, or save the state_dict() of one "
                "of them yourself"
            )


def attach(parts: Parts) -> None:
    """Let each optimizer carry the averages of what it trains."""
    parts.saved_with_optimizer = True
    try:
        for part in parts.each:
            assert part.optimizer is not None
            _attach(parts, part, part.optimizer)
    except BaseException:
        parts.member.detach()
        raise


def _attach(parts: Parts, part: Part, optimizer: Optimizer) -> None:
    before = vars(optimizer).get(_NAME)
    if before is not None:
        before.parts.member.detach()
    carried = OptimizerState(parts, part, optimizer)
    setattr(optimizer, _NAME, carried)
    part.stepper.at_detach.append(carried.remove)
    carried.register()
    if not is_carried(optimizer.state_dict()):
        raise ValueError(
            f"{type(optimizer).__name__} has a state_dict() of its own, in which the averages are missing; leave "
            "save_with_optimizer out, and save belay.state_dict() yourself"
        )


def watch(parts: Parts) -> None:
    """Warn if an optimizer loads averages and none of its Belays takes them."""

    def look(optimizer: Optimizer, state: State) -> None:
        if _NAME not in vars(optimizer) and is_carried(state):
            warn(
                "this optimizer's state carries averages, which are not loaded: make Belay with "
                "save_with_optimizer=True, as it was when they were saved"
            )

    for part in parts.each:
        if part.optimizer is not None:
            part.stepper.at_detach.append(part.optimizer.register_load_state_dict_pre_hook(look).remove)


class UnfitError(ValueError):
    """Averages in the state of an optimizer that do not fit the Belay which they are loaded into."""


class OptimizerState:
    """Adds the averages of one optimizer to its state when it is saved, and takes them out when it is loaded."""

    def __init__(self, parts: Parts, part: Part, optimizer: Optimizer) -> None:
        self.parts, self._part, self._optimizer = parts, part, optimizer
        self._loading: tuple[State, Named] | None = None  # what is known to fit, while torch loads the rest
        self._handles: list[RemovableHandle] = []

    def register(self) -> None:
        """Follow what is saved and loaded, until `remove()`, which may come after an exception at any line here."""
        self._handles.append(self._optimizer.register_state_dict_post_hook(self._add))
        self._handles.append(self._optimizer.register_load_state_dict_pre_hook(self._take))
        self._handles.append(self._optimizer.register_load_state_dict_post_hook(self._load))

    def remove(self) -> None:
        """Let the optimizer be as it was."""
        for handle in self._handles:
            handle.remove()
        vars(self._optimizer).pop(_NAME, None)
        self._handles, self._loading, self.parts.saved_with_optimizer = [], None, False

    # Saving ------------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def _add(self, optimizer: Optimizer, found: State) -> State:
        """Return an optimizer's state with the averages in it; what torch made of the live state is not changed."""
        names = modules.names_by_id(self.parts.model)
        state, homes = self._state(names), _Homes(optimizer, found)
        own = {key: dict(each) if isinstance(each, Mapping) else each for key, each in found["state"].items()}
        indices = {names[key]: index for key, index in homes.indices.items() if key in names}
        everything = state["averages"] | (
            {_MODEL: own_weights.taken(self.parts.model, self._part, state)} if self.parts.weights_ride else {}
        )
        for average, saved in everything.items():
            for kind in TENSORS:
                for name, tensor in saved.get(kind, {}).items():
                    index = homes.carrier if kind == "buffers" else indices.get(name, homes.carrier)
                    own.setdefault(index, {})[f"{PREFIX}{quote(average, safe='')}/{kind}/{name}"] = tensor
        text = json.dumps(numbers(state) | {"optimizer_steps": steps_of(found)})
        facts = {PREFIX + fact: 1 for fact in state["made_with"]}
        groups = list(found["param_groups"])
        groups[homes.group] = {**groups[homes.group], KEY: text, **facts}
        return {**found, "state": own, "param_groups": groups}

    def _state(self, names: dict[int, str]) -> State:
        """Return the state of the averages of this optimizer, as a Belay of this one alone would have it.

        `names` are those of the parameters now, by id. Weights that changed without a step are not warned of: those of
        a model that is being loaded have.
        """
        part, parts = self._part, self.parts
        parts.wait()
        with parts.member.lock:
            if parts.member.settled_swap() is None:
                part.averages.refresh_names(names)
                part.averages.fit_buffers()
            parts.warn_of_torn()
            averages = part.averages.saved(parts.member.swap, part.stepper.memories)
        return {
            "format": checkpoint.FORMAT,
            "step": part.clock.count,
            "ahead": 0,
            "began": int(part.averages.began),
            "options": part.options.saved(),
            "made_with": checkpoint.made_with(averages, part.options),
            "averages": averages,
        }

    # Loading -----------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def _take(self, optimizer: Optimizer, found: State) -> State:
        """Return an optimizer's state without the averages, once they are known to fit."""
        self._loading = None
        names = modules.names_by_id(self.parts.model)
        held = [names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names]
        texts, tensors = given(held) or carried(found)
        if not texts:
            warn(
                "this optimizer's state has no averages, which Belay would go on from: they stay as they are. It was "
                "saved without save_with_optimizer=True, or by something that drops what it does not know. Load them "
                "by belay.load_state_dict(), or begin again at the weights by belay.reset()"
            )
            return without(found)
        self.parts.refuse_now("optimizer.load_state_dict")
        self.parts.wait()
        state, steps = unpacked(texts[0], tensors)
        own = own_weights.by_kind(named_tensors(tensors, _MODEL))
        try:
            fitting = self._checked(state)
            own_weights.check(self.parts.model, self._part, state, own)
        except ValueError as problem:
            why = without_strict(problem)
            raise UnfitError(
                f"the averages in this optimizer's state do not fit, and nothing was loaded: {why}. "
                "To change the method, build Belay as it was, load the optimizer, and call belay.change()"
            ) from problem
        checkpoint.warn_of_untold(fitting.expected.values())
        now = steps_of(found)
        if steps is not None and now is not None and now != steps:
            warn(
                f"the optimizer took {now - steps:g} steps after these averages were saved with it, by a run without "
                "Belay: they are those of an earlier step; begin again at the weights by belay.reset()"
            )
        self._loading = state, own
        return without(found)

    def _checked(self, state: State) -> Checked:
        return self._part.averages.checked(state)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _load(self, optimizer: Optimizer) -> None:
        """Go on from the averages that were taken out, now that torch has loaded the rest."""
        loading, self._loading = self._loading, None
        if loading is not None:
            own_weights.write(self.parts.model, self._part, *loading)
            self._part.load(self._checked(loading[0]))
            self.parts.live.follow(moved=True)


class _Homes:
    """Where the tensors of each parameter's average are in an optimizer's state."""

    def __init__(self, optimizer: Optimizer, found: State) -> None:
        rows = [
            (g, p, index)
            for g, (group, saved) in enumerate(zip(optimizer.param_groups, found["param_groups"], strict=True))
            for p, index in zip(group["params"], saved["params"], strict=True)
        ]
        known = {index for index, entries in found["state"].items() if isinstance(entries, Mapping) and entries}
        steady = [(g, index) for g, p, index in rows if p.requires_grad and (index in known or not known)]
        self.group, self.carrier = (steady or [(g, index) for g, _, index in rows])[0]
        firm = {index for _, index in steady}
        self.indices = {id(p): index if index in firm else self.carrier for _, p, index in rows}
