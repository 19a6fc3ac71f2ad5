"""All averages of a model together: how they begin, restart, follow changes of the model, and are saved and loaded."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchbelay.ops import arithmetic
from torchbelay.physics.warnings import warn

from . import checkpoint, modules
from .average import Average, Entry, Wanted
from .clock import Clock
from .cohort import Cohort
from .finite import Guard
from .options import Options
from .parameters import Parameters
from .shard import local
from .validate import warn_of_feedback


class Averages:
    """The averages of a model, by name: the one that may pull, then the spectators."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, each: dict[str, Average], options: Options, clock: Clock
    ) -> None:
        self._model, self._optimizer, self._options, self._clock = model, optimizer, options, clock
        self.each = each
        self.parameters = Parameters(model, optimizer)
        self.guard = None if options.on_nonfinite == "ignore" else Guard(raises=options.on_nonfinite == "raise")
        self.began = False

    def __iter__(self) -> Iterator[Average]:
        return iter(self.each.values())

    def entries(self) -> Iterator[Entry]:
        """Yield the entries of all averages."""
        return (entry for average in self for entry in average.entries.values())

    def named_weights(self) -> list[tuple[str, Tensor]]:
        """Return the name and the tensor of every parameter that is averaged, each once."""
        return list({id(e.w1): (e.name, e.w1) for e in self.entries()}.values())

    def wanted(self) -> dict[str, list[Wanted]]:
        """Return what each average is to follow; refuses what cannot be averaged, and changes nothing."""
        return self.parameters.wanted(self.each.values())

    # Beginning ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self) -> None:
        """Let every average start as a copy of the weights."""
        wanted = self.wanted()
        if self.guard is not None:
            self.guard.check(_distinct(wanted))
        for name, found in wanted.items():
            self.each[name].adopt(found, born=self._clock.count, dtype=self._options.dtype)
        self.began = True
        self._copy_buffers()

    def begin_when_due(self) -> None:
        """Begin after step `start`; at weights that are not finite wait, or raise, as `on_nonfinite` says."""
        if self.began or self._clock.count < self._options.start:
            return
        if self.guard is not None:
            found = _distinct(self.wanted())
            if self.guard.raises:
                self.guard.look(found, self._clock.count)
            elif not self.guard.is_good(found):
                return
        self.begin()

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again at the weights as they are, if the averages have begun."""
        if self.guard is not None and self.began:
            self.guard.check([(e.name, e.w1) for e in self.entries()])
        for average in self:
            average.restart(self._clock.count)
        if self.began:
            self._copy_buffers()

    # Following the model -----------------------------------------------------------------------------------------

    def regroup(self) -> None:
        """Form the cohorts of every average anew."""
        for average in self:
            average.regroup()

    def adopt_changes(self) -> None:
        """Follow what was added to the optimizer or taken from it; refuses before anything changes."""
        parameters = self.parameters.renewed()
        wanted = parameters.wanted(self.each.values())
        if self.guard is not None and self.began:
            known = {id(e.w1) for e in self.entries()}
            late = [(name, w1) for name, w1 in _distinct(wanted) if id(w1) not in known]
            if late:
                self.guard.check(late)
        self.parameters = parameters
        if not self.began:
            return
        groups = parameters.groups()
        gone = {average.name: average.assign_groups(groups) for average in self}
        self.refresh_names()
        for average in self:
            self._adopt(average, wanted[average.name], gone[average.name])

    def _adopt(self, average: Average, wanted: list[Wanted], gone: list[str]) -> None:
        known = {id(entry.w1) for entry in average.entries.values()}
        new = [each for each in wanted if id(each.parameter) not in known]
        average.adopt(new, born=self._clock.count, dtype=self._options.dtype)
        if new:
            _report(
                f"{len(new)} parameter(s) were added to",
                new[0].name,
                f"adopted by {average.name!r} at their present values",
            )
        if gone:
            _report(f"{len(gone)} parameter(s) were taken from", gone[0], f"{average.name!r} averages them no more")
        if average.pulls:
            warn_of_feedback(new, self._optimizer, rounding=self._options.rounding)

    def refresh_names(self) -> None:
        """Call every entry by the name that the model has for its parameter now, and drop those that left the model.

        Refuses a parameter that left the model but is still trained.
        """
        names = {id(p): name for name, p in modules.named_parameters(self._model).items()}
        lost = [e for e in self.entries() if id(e.w1) not in names]
        if lost:
            trained = self.parameters.renewed().groups()
            for entry in lost:
                if id(entry.w1) in trained:
                    raise RuntimeError(
                        f"parameter {entry.name!r} has been replaced in the model (load_state_dict(assign=True)?), but "
                        "the optimizer still trains the old one: make the optimizer and Belay anew"
                    )
            for average in self:
                average.assign_groups(trained)
                average.regroup()
        for average in self:
            average.rename(names)

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

    def effective_lr(self, entry: Entry) -> float | None:
        """Return what is left of an entry's learning rate in the long run; None if there is none."""
        lr = self.parameters.lr(entry.group)
        return None if lr is None else lr * entry.effective_lr_scale(self._clock.count, lr, self._options.every)

    # Buffers -----------------------------------------------------------------------------------------------------

    def _copy_buffers(self) -> None:
        for average in self if self._options.buffers == "average" else ():
            average.buffers = {name: b.detach().clone() for name, b in modules.named_buffers(self._model).items()}

    def forget_buffers(self, keep: Tensor | None) -> None:
        """Drop the averages' own buffers, which `update_bn` found: a step has made them outdated.

        If only the device knows whether the step counts (`keep`), it overwrites them by the model's instead.
        """
        for average in self:
            if keep is None:
                average.buffers = {}
            elif average.buffers:
                now = modules.named_buffers(self._model)
                for name, own in average.buffers.items():
                    arithmetic.overwrite_(local(own), local(now.get(name, own)), keep)

    def _saved_buffers(self, average: Average) -> dict[str, Tensor]:
        """Return the buffers that a checkpoint has of an average; the model's if it has none of its own."""
        now = modules.named_buffers(self._model)
        if self._options.buffers == "average":
            return dict(average.buffers) or now
        stay = modules.persistent_buffers(self._model) if self._options.buffers == "copy" else {}
        return {name: average.buffers.get(name, now[name]) for name in stay if name in now}

    # Checkpoints -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def saved(self, swap: checkpoint.Swapped | None, memories: Mapping[int, tuple[float, ...]]) -> dict[str, Any]:
        """Return the averages as a checkpoint has them; averages that have not begun are the weights as they are."""
        averages = self.each
        if not self.began:
            averages = {name: self._blank(averages[name], found) for name, found in self.wanted().items()}
        return {
            name: checkpoint.saved(average, self._saved_buffers(average), swap, self._clock.count, memories)
            for name, average in averages.items()
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, once it is known to fit."""
        parameters = self.parameters if self.parameters.is_current() else self.parameters.renewed()
        wanted = parameters.wanted(self.each.values())
        expected = {name: self._expected(average, wanted[name]) for name, average in self.each.items()}
        buffers = {name: self._saved_buffers(average) for name, average in self.each.items()}
        checkpoint.check(state, self._options, expected, buffers)
        self.parameters = parameters
        self._clock.set(state["step"])
        self.began = bool(state["began"])
        for name, average in self.each.items():
            if not self.began:
                average.clear()
                continue
            if average.follows(wanted[name]):
                average.assign_groups(parameters.groups())
            else:
                average.clear()
                average.adopt(wanted[name], born=0, dtype=self._options.dtype)
            checkpoint.restore(average, state["averages"][name], state["step"])

    def _expected(self, average: Average, wanted: list[Wanted]) -> dict[str, Entry]:
        """Return the entries that a state must fit: those that exist, or those that would be made."""
        return average.entries if average.follows(wanted) else self._blank(average, wanted, device="meta").entries

    def _blank(self, average: Average, wanted: list[Wanted], device: str | None = None) -> Average:
        """Return what an average would be if it began now."""
        blank = Average(average.name, average.rule, pulls=average.pulls, hosted=average.hosted, every=average.every)
        blank.adopt(wanted, born=self._clock.count, dtype=self._options.dtype, device=device)
        return blank


def _distinct(wanted: Mapping[str, list[Wanted]]) -> list[tuple[str, Tensor]]:
    """Return names and parameters, each once however many averages want it."""
    return list({id(w.parameter): (w.name, w.parameter) for found in wanted.values() for w in found}.values())


def _report(what: str, first: str, result: str) -> None:
    warn(f"{what} the optimizer, {first!r} first: {result}")
