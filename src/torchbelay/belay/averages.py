"""All averages of a model together: how they begin, restart, follow changes of the model, and are saved and loaded."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchbelay.physics.warnings import warn

from . import beginnings, buffers, checkpoint, family, modules, renaming, revision
from .average import MAIN, Average, Entry, Wanted
from .clock import Clock
from .cohort import Cohort
from .finite import Guard
from .options import Options
from .parameters import Names, Parameters
from .shard import local, part_for
from .team import all_or_none, common_facts, share
from .validate import pulled_by, refuse_pulled_twice, warn_of_feedback, warn_of_rounding


class Checked(NamedTuple):
    """A state that is known to fit, and the parameters and the averages that it fits."""

    state: Mapping[str, Any]
    averages: Mapping[str, Mapping[str, Any]]
    parameters: Parameters
    wanted: dict[str, list[Wanted]]
    expected: dict[str, Average]


class Averages:
    """The averages of what an optimizer trains, by name: the one that may pull, then the spectators.

    What makes tensors that stay leaves inference_mode first: a tensor made there can be written to nowhere else.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, each: dict[str, Average], options: Options, clock: Clock
    ) -> None:
        self._model, self.optimizer, self._options, self.clock = model, optimizer, options, clock
        self.each, self.slices, self.team = each, next(iter(each.values())).slices, options.team
        self.relatives: family.Relatives = family.nobody
        self.parameters = Parameters(model, optimizer)
        self.guard = None if options.on_nonfinite == "ignore" else Guard(raises=options.on_nonfinite == "raise")
        self.began = False
        self._wanted: dict[str, list[Wanted]] = {}  # as last found: a model may have changed since
        self.buffer_slots: dict[str, modules.BufferSlot] = {}  # as of the last `fit_buffers()`

    def __iter__(self) -> Iterator[Average]:
        return iter(self.each.values())

    def entries(self) -> Iterator[Entry]:
        """Yield the entries of all averages."""
        return (entry for average in self for entry in average.entries.values())

    def named_weights(self) -> list[tuple[str, Tensor]]:
        """Return the name and the tensor of every parameter that is averaged, each once."""
        return list({id(e.w1): (e.name, e.w1) for e in self.entries()}.values())

    def followed(self) -> list[tuple[str, Tensor]]:
        """Return the name and the tensor of every parameter that is averaged, or will be when the averages begin."""
        return self.named_weights() if self.began else _distinct(self._wanted)

    def wanted(self, names: Names | None = None) -> dict[str, list[Wanted]]:
        """Return what each average is to follow; refuses what cannot be averaged, and changes nothing."""
        self._wanted = self._parameters_now().wanted(self.each.values(), names)
        return self._wanted

    def wanted_by(self, average: Average) -> list[Wanted]:
        """Return what an average would follow; refuses what cannot be averaged, and changes nothing."""
        return self._parameters_now().wanted([average])[average.name]

    def held(self) -> dict[int, int]:
        """Return the parameters that the optimizer holds now, by their ids, with their groups."""
        return self._parameters_now().groups()

    def _parameters_now(self) -> Parameters:
        """Return the parameters that the optimizer holds now: it may have got or lost some since the last step."""
        return self.parameters if self.parameters.is_current() else self.parameters.renewed()

    # Beginning ---------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def begin(self, names: Names | None = None) -> None:
        """Let every average start as a copy of the weights."""
        with all_or_none(self.team):
            wanted = self.wanted(names)
            if self.guard is not None:
                self.guard.check(_distinct(wanted))
        try:
            for name, found in wanted.items():
                self.each[name].adopt(found, born=self.clock.count, dtype=self._options.dtype)
            share(self.team, self.entries())
            self.began = True
        finally:  # all of them or none: an average that has begun would pull
            for average in () if self.began else self:
                average.clear()
        self.fit_buffers()

    def begin_when_due(self) -> None:
        """Begin after step `start`; at weights that are not finite wait, or raise, as `on_nonfinite` says."""
        if self.began or self.clock.count < self._options.start:
            return
        refuse_pulled_twice([*self._wanted[MAIN], *family.followed(self.relatives())])  # weights may have moved since
        if self.guard is not None:
            found = _distinct(self.wanted())
            if self.guard.raises:
                self.guard.look(found, self.clock.count)
            elif not self.guard.is_good(found):
                return
        self.begin()

    def check_restart(self) -> None:
        """Refuse to begin again at weights that are not finite, if `on_nonfinite` says so; changes nothing."""
        if self.guard is not None and self.began:
            self.guard.check([(e.name, e.w1) for e in self.entries()])

    @torch.inference_mode(False)
    @torch.no_grad()
    def restart(self) -> None:
        """Begin again at the weights as they are, if the averages have begun; `check_restart()` has been asked."""
        for average in self:
            average.restart(self.clock.count)
        share(self.team, self.entries())
        self.fit_buffers()

    # Following the model -----------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def regroup(self) -> None:
        """Form the cohorts of every average anew."""
        for average in self:
            average.regroup()

    def names(self) -> dict[int, str]:
        """Return the names of the parameters that the average may pull, by their ids."""
        return {id(e.w1): e.name for e in self.each[MAIN].entries.values()}

    def pulled(self) -> dict[int, str]:
        """Return the names of the parameters that the average pulls, by their ids."""
        return pulled_by(self.followed_by_main())

    def followed_by_main(self) -> list[Wanted]:
        """Return what the average that may pull follows, or is to follow when it begins."""
        if not self.began:
            return self._wanted[MAIN]
        return [Wanted(e.name, e.w1, e.method, e.group) for e in self.each[MAIN].entries.values()]

    @torch.inference_mode(False)
    @torch.no_grad()
    def adopt_changes(self, check: Callable[[list[Wanted]], None]) -> None:
        """Follow what was added to the optimizer or taken from it; refuses before anything changes.

        `check` may refuse what the average is to follow, too.
        """
        parameters, known = self.parameters.renewed(), {id(e.w1) for e in self.entries()}
        with all_or_none(self.team) as facts:
            wanted = parameters.wanted(self.each.values())
            check(wanted[MAIN])
            family.refuse_held_twice(self._model, self, parameters.groups(), self.relatives())
            refuse_pulled_twice([*wanted[MAIN], *family.followed(self.relatives())])
            if self.guard is not None and self.began:
                self.guard.check([(name, w1) for name, w1 in _distinct(wanted) if id(w1) not in known])
            facts |= common_facts(self.team, self._model, [wanted[MAIN]], self._options.common())
        if self.began:
            groups = parameters.groups()
            family.exchange(self, groups, self.relatives())
            gone = {average.name: average.assign_groups(groups) for average in self}
            self.refresh_names()
            for average in self:
                self._adopt(average, wanted[average.name], gone[average.name])
        self._wanted = wanted
        self.parameters = parameters  # at the end: what was stopped before is done again

    def _adopt(self, average: Average, wanted: list[Wanted], gone: list[str]) -> None:
        known = {id(entry.w1) for entry in average.entries.values()}
        new = [each for each in wanted if id(each.parameter) not in known]
        average.adopt(new, born=self.clock.count, dtype=self._options.dtype)
        share(self.team, [average.entries[each.name] for each in new])
        if new:
            adopted = f"adopted by {average.name!r} at their present values"
            _report(f"{len(new)} parameter(s) were added to", new[0].name, adopted)
        if gone:
            _report(f"{len(gone)} parameter(s) were taken from", gone[0], f"{average.name!r} averages them no more")
        if average.pulls:
            warn_of_rounding(new, rounding=self._options.rounding)
            warn_of_feedback(new, self.optimizer)

    def refresh_names(self, names: Names | None = None, *, restarts: bool = False) -> None:
        """Call every entry by the name that the model has for its parameter now, and drop those that left the model.

        Refuses a parameter that left the model but is still trained. Unless an average `restarts` now, warns if it is
        not that of what the parameter has become.
        """
        names = modules.names_by_id(self._model) if names is None else names
        # Not what only the optimizer has lost: the next step tells the user of that.
        lost = renaming.lost(self.entries(), names, self.parameters)
        for average in self if lost else ():
            average.drop(lost)
            average.regroup()
        baked = [] if restarts else renaming.baked(self.entries(), names)
        for average in self:
            average.rename(names)
        renaming.warn_of_baked(baked)

    # Learning rates ----------------------------------------------------------------------------------------------

    def lr(self, cohort: Cohort) -> float:
        """Return the learning rate of a cohort with one optimizer group; 0 if there is none and none is needed."""
        assert cohort.group is not None
        lr = self.parameters.lr(cohort.group)
        if lr is None and cohort.varies == "lr":
            raise ValueError(
                f"{cohort.method!r} needs the learning rate: give it as before_step(lr=...), or give the "
                "optimizer's groups an 'lr'"
            )
        return 0.0 if lr is None else lr

    # Buffers -----------------------------------------------------------------------------------------------------

    def fit_buffers(self) -> None:
        """Let averaged buffers fit the model's: new ones begin, and all are on the model's device."""
        if self._options.buffers != "average" or not self.began:
            return
        self.buffer_slots = modules.first_slots(self._model)
        now = {name: b for name, slot in self.buffer_slots.items() if (b := slot.holder[slot.key]) is not None}
        for average in self:
            buffers.fit(average, now, self._options.dtype, lambda: self.clock.count, self._buffers_lr())

    def check_buffers(self) -> None:
        """Refuse what cannot be a buffer's method, before the averages begin; changes nothing."""
        if self._options.buffers == "average":
            for average in self:
                self.new_followers(average)

    def new_followers(self, average: Average) -> dict[str, Cohort]:
        """Return what would move the buffers of an average that began now."""
        now = modules.named_buffers(self._model) if self._options.buffers == "average" else {}
        return buffers.followers(average, now, self.clock.count, self._buffers_lr())

    def _buffers_lr(self) -> float:
        return 0.0 if self.optimizer is None else self.parameters.lr(0) or 0.0

    def forget_buffers(self, keep: Tensor | None) -> None:
        """Drop the averages' own buffers, which `update_bn` found: a step has made them outdated.

        If only the device knows whether the step counts (`keep`), it overwrites them by the model's instead.
        """
        now = {} if keep is None else modules.named_buffers(self._model)
        for average in self:
            average.buffers = buffers.overwritten(average.buffers, now, keep)

    # Checkpoints -------------------------------------------------------------------------------------------------

    def saved(self, swap: checkpoint.Swapped | None, memories: checkpoint.Memories) -> dict[str, Any]:
        """Return the averages as a checkpoint has them; averages that have not begun are the weights as they are."""
        # Workers take new parameters in together, at a step.
        current = self.began and (self.team is not None or self.parameters.is_current())
        averages = self.each if current else family.as_held(self, self.wanted, self.relatives(), self._blank)
        now, step = buffers.checkpointed(self._model, self._options), self.clock.count
        models = now if swap is None else now | swap.own_buffers()
        found = {}
        for name, average in averages.items():
            changed = swap is not None and swap.average.name == name and swap.changed_buffers()
            present = swap.buffers() if swap is not None and changed else {}
            kept = {}
            for each, b in now.items():
                own = average.buffers.get(each)
                value, dtype = present.get(each, own), buffers.checkpointed_dtype(own, b, self._options)
                if value is None and average.buffers:  # beside others that are the average's, this one is the model's
                    value = models[each]
                kept[each] = torch.zeros_like(b, dtype=dtype) if value is None else value.detach().to(dtype)
            rows = checkpoint.rows(average.followers, step, memories)
            found[name] = checkpoint.saved(average, swap, step, memories) | {
                "buffers": kept,
                "own_buffers": rows if self._options.buffers == "average" else int(bool(present or average.buffers)),
            }
        beginnings.add(found, self.each, averages)
        return found

    def checked(self, state: Mapping[str, Any], names: Names | None = None, notes: list[str] | None = None) -> Checked:
        """Return a state that fits, or, if `notes` are given, is made to fit, as they then say; refuse any other."""
        parameters = self._parameters_now()
        wanted = parameters.wanted(self.each.values(), names)
        refuse_pulled_twice([*wanted[MAIN], *family.followed(self.relatives())])
        self.fit_buffers()
        expected = {name: self._expected(average, wanted[name]) for name, average in self.each.items()}
        now, options = buffers.checkpointed(self._model, self._options), self._options
        homes = {
            name: {b: (t, buffers.checkpointed_dtype(average.buffers.get(b), t, options)) for b, t in now.items()}
            for name, average in self.each.items()
        }
        if notes is not None:
            state = revision.revised(state, self._options, expected, homes, notes)
        saved = checkpoint.checked(state, self._options, expected, homes)
        beginnings.check(self.each, saved, expected)
        return Checked(state, saved, parameters, wanted, expected)

    def load(self, checked: Checked) -> None:
        """Go on from a state that fits."""
        state, saved, self.parameters, self._wanted, _ = checked
        self.clock.set(state["step"])
        self.began = bool(state["began"])
        for name, average in self.each.items():
            if not self.began:
                average.clear()
                continue
            if average.follows(self._wanted[name]):
                average.assign_groups(self.parameters.groups())
            else:
                average.clear()
                average.adopt(self._wanted[name], born=0, dtype=self._options.dtype)
            checkpoint.restore(average, saved[name], state["step"])
            average.changed |= saved[name].get("changed") is True
        beginnings.load(self.each, saved)
        if self.began:
            self.fit_buffers()
            for name, average in self.each.items():
                self._load_buffers(average, saved[name], state["step"])

    def _load_buffers(self, average: Average, saved: Mapping[str, Any], step: int) -> None:
        """Write the buffers of a checked state, beside the model's."""
        if self._options.buffers == "average":
            average.followers = checkpoint.restored_followers(average, saved, step)
            for each, own in average.buffers.items() if saved["own_buffers"] != 0 else ():
                local(own).copy_(part_for(saved["buffers"][each], own))
        else:
            now = buffers.checkpointed(self._model, self._options) if saved["own_buffers"] else {}
            average.buffers = {
                each: saved["buffers"][each].detach().to(local(b).device, copy=True) for each, b in now.items()
            }

    def _expected(self, average: Average, wanted: list[Wanted]) -> Average:
        """Return the average that a state must fit: as it is, or as it would be made."""
        return average if average.follows(wanted) else self._blank(average, wanted, device="meta")

    def _blank(self, average: Average, wanted: list[Wanted], device: str | None = None) -> Average:
        """Return what an average would be if it began now."""
        blank = average.like(average.rule)
        blank.adopt(wanted, born=self.clock.count, dtype=self._options.dtype, device=device)
        blank.followers = average.followers if self.began else self.new_followers(average)
        return blank


def _distinct(wanted: Mapping[str, list[Wanted]]) -> list[tuple[str, Tensor]]:
    """Return names and parameters, each once however many averages want it."""
    return list({id(w.parameter): (w.name, w.parameter) for found in wanted.values() for w in found}.values())


def _report(what: str, first: str, result: str) -> None:
    warn(f"{what} the optimizer, {first!r} first: {result}")
