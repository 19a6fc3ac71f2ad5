"""What happens around an optimizer's step: every average moves exactly when the weights do."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import _checkpoint, _model
from ._average import Average, Cohort, Entry, Found, buffer_weight
from ._clock import Clock
from ._roster import Roster
from ._validate import warn_of_feedback
from ._warnings import BelayWarning
from .ops import foreach
from .ops.around import Motion, choose
from .options import Options


@dataclass
class Work:
    """A step under way: what is to be done to which tensors once the optimizer has stepped."""

    moves: list[tuple[Cohort, Motion, list[Tensor] | None]] = field(default_factory=list)
    buffers: list[tuple[Tensor, Tensor, float]] = field(default_factory=list)  # the average's, the model's, its share
    keep: Tensor | None = None  # 0 on the device if mixed-precision training skips the step, else 1
    skipped: bool = False  # the same, known on the host
    retried: bool = False  # a step before this one raised


class Stepper:
    """The averages of a model, moved by `before()` and `after()` around each update of its weights."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, averages: dict[str, Average], options: Options
    ) -> None:
        self._model, self._optimizer, self._options = model, optimizer, options
        self.averages = averages
        self.around = choose(options.impl)
        self.clock = Clock()
        self.began = False
        self.lr: float | None = None  # of a step taken by hand
        self._roster = Roster(model, optimizer)
        self._work: Work | None = None
        self._ahead: Tensor | None = None  # 1 where the averages have moved for a step that has not come to an end

    # The step ----------------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> bool:
        """Whether `before()` has been called and `after()` not yet."""
        return self._work is not None

    @torch.no_grad()
    def before(self) -> None:
        """Decide what the coming step does, and do what must be done before it; w1 is never touched."""
        if not self._roster.is_current():
            self._adopt_changes(self._roster.renewed())
        for average in self.averages.values():
            if any(cohort.w1[0].device != cohort.w2[0].device for cohort in average.cohorts):
                average.regroup()
        # set by GradScaler, for optimizers that skip a step by themselves
        found_inf = getattr(self._optimizer, "found_inf", None)
        work = Work(retried=self._ahead is not None)
        if found_inf is not None:
            if self._is_constant():
                work.keep = (found_inf.reshape(()) == 0).to(torch.float32)
            elif bool(found_inf):
                self._work = Work(skipped=True)
                return
        if self.began:
            step = None if self._is_constant() else self.clock.count + 1
            for average in self.averages.values():
                self._plan(average, step, work)
        self._work = work
        self._move_ahead(work)

    def _plan(self, average: Average, step: int | None, work: Work) -> None:
        """Decide what the step does to an average's tensors, and keep the weights where that needs them."""
        moves: list[tuple[Cohort, Motion, list[Tensor] | None]] = []
        for cohort in average.cohorts:
            motion = cohort.motion(cohort.born + 1 if step is None else step, self._lr_of(cohort), self._options.every)
            if motion is None:
                continue
            if motion.coupling.pulls and not average.pulls:
                raise ValueError(f"the spectator {average.name!r} may only watch, but {cohort.method!r} pulls now")
            kept = [w.detach().clone() for w in cohort.w1] if self.around.needs_copy(motion) else None
            moves.append((cohort, motion, kept))
        work.moves += moves
        if moves and moves[0][0] is average.cohorts[0] and self._options.buffers == "average":
            # buffers have no gradient and no group: they go with the first of the average's parameters
            weight, now = buffer_weight(moves[0][1].coupling), _model.named_buffers(self._model)
            work.buffers += [(own, now[name], weight) for name, own in average.buffers.items() if name in now]

    def _move_ahead(self, work: Work) -> None:
        """Do what is done before the optimizer steps, except what a step that then raised has done already."""
        keep, done = work.keep, self._ahead
        if done is not None:
            keep = 1 - done if keep is None else keep * (1 - done)
        for cohort, motion, _ in work.moves:
            self.around.before(cohort.w1, cohort.w2, motion, keep)
        if work.keep is None:
            self._ahead = torch.ones(())
        else:
            self._ahead = work.keep if done is None else torch.maximum(work.keep, done.to(work.keep))

    @torch.no_grad()
    def after(self) -> None:
        """Move everything, now that the optimizer has stepped."""
        work, self._work = self._work, None
        assert work is not None
        if work.skipped:
            return
        if work.retried and work.keep is not None and self._ahead is not None:
            self._ahead = self._ahead * (1 - work.keep)  # still ahead if this one, too, came to nothing
        else:
            self._ahead = None
        for cohort, motion, kept in work.moves:
            self.around.after(cohort.w1, cohort.w2, kept, motion, work.keep)
        for own, buffer, weight in work.buffers:
            if own.is_floating_point() or own.is_complex():
                foreach.lerp_([own], [buffer], weight, work.keep)
            else:
                foreach.overwrite_(own, buffer, work.keep)
        if self._options.buffers == "copy":
            self._forget_buffers(work.keep)
        self.clock.tick(work.keep)
        if not self.began and self.clock.count >= self._options.start:
            self.begin()

    def _forget_buffers(self, keep: Tensor | None) -> None:
        """A step has passed: what `update_bn` had found for an average is out of date, unless the step was skipped."""
        for average in self.averages.values():
            if keep is None:
                average.buffers = {}
            elif average.buffers:
                now = _model.named_buffers(self._model)
                for name, own in average.buffers.items():
                    foreach.overwrite_(own, now.get(name, own), keep)

    def _is_constant(self) -> bool:
        """Whether every step is like every other, so that nobody need know its number."""
        cohorts = [cohort for average in self.averages.values() for cohort in average.cohorts]
        return self.began and self._options.every == 1 and all(cohort.varies == "never" for cohort in cohorts)

    def _lr_of(self, cohort: Cohort) -> float:
        if cohort.group is None:
            return 0.0  # nobody looks at it; a learning rate that is a tensor would have to be waited for
        lr = self._nominal_lr(cohort.group)
        if lr is None and cohort.varies == "lr":
            raise ValueError(
                f"{cohort.method!r} needs the learning rate: give it as before_step(lr=...), or give the "
                "optimizer's groups an 'lr'"
            )
        return lr or 0.0

    def _nominal_lr(self, group: int) -> float | None:
        """The learning rate of a group, if anybody says one."""
        lr = self.lr if self._optimizer is None else self._roster.lr(group)
        return None if lr is None else float(lr)

    def effective_lr(self, entry: Entry) -> float | None:
        """What is left of it in the long run."""
        lr = self._nominal_lr(entry.group)
        return None if lr is None else lr * entry.effective_lr_scale(self.clock.count, lr, self._options.every)

    # What is averaged --------------------------------------------------------------------------------------------

    def wanted(self) -> dict[str, list[Found]]:
        """What each average is to follow; refuses what cannot be averaged, changing nothing."""
        return self._roster.wanted(self.averages.values(), every=self._options.every)

    @torch.no_grad()
    def begin(self) -> None:
        """Let every average start as a copy of the weights."""
        for name, found in self.wanted().items():
            self.averages[name].adopt(found, born=self.clock.count, dtype=self._options.dtype)
        self.began = True
        self._copy_buffers()

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again at the weights as they are, if the averages have begun."""
        self.forget_the_step()
        for average in self.averages.values():
            average.restart(self.clock.count)
        if self.began:
            self._copy_buffers()

    @property
    def ahead(self) -> int:
        """1 if the averages have moved for a step that then raised; a checkpoint must know."""
        return 0 if self._ahead is None else int(self._ahead)

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, once it is known to fit."""
        roster = self._roster if self._roster.is_current() else self._roster.renewed()
        wanted = roster.wanted(self.averages.values(), every=self._options.every)
        expected = {name: self._expected(average, wanted[name]) for name, average in self.averages.items()}
        _checkpoint.check(state, self._options, expected, _model.named_buffers(self._model))
        self._roster, self._work, self.clock = roster, None, Clock(state["step"])
        self._ahead = torch.ones(()) if state["ahead"] else None
        for name, average in self.averages.items():
            saved = state["averages"][name]
            self.began = bool(saved["weights"])
            if not self.began:
                average.clear()
                continue
            if _follows(average, wanted[name]):
                average.regrouped(roster.groups())
            else:
                average.clear()
                average.adopt(wanted[name], born=0, dtype=self._options.dtype)
            _checkpoint.restore(average, saved, state["step"])

    def _expected(self, average: Average, wanted: list[Found]) -> dict[str, Entry]:
        """The entries that a state must fit: those there are, or those there would be."""
        if _follows(average, wanted):
            return average.entries
        blank = Average(average.name, average.rule, pulls=average.pulls)
        blank.adopt(wanted, born=0, dtype=self._options.dtype, device="meta")
        return blank.entries

    def forget_the_step(self) -> None:
        """Drop a step that was begun."""
        self._work, self._ahead = None, None

    def _copy_buffers(self) -> None:
        for average in self.averages.values() if self._options.buffers == "average" else ():
            average.buffers = {name: b.detach().clone() for name, b in _model.named_buffers(self._model).items()}

    def _adopt_changes(self, roster: Roster) -> None:
        wanted = roster.wanted(self.averages.values(), every=self._options.every)
        self._roster = roster
        if not self.began:
            return
        groups = roster.groups()
        gone = {name: average.regrouped(groups) for name, average in self.averages.items()}
        self.refresh_names()
        for name, average in self.averages.items():
            followed = {id(entry.w1) for entry in average.entries.values()}
            new = [found for found in wanted[name] if id(found[1]) not in followed]
            average.adopt(new, born=self.clock.count, dtype=self._options.dtype)
            if new:
                _tell(
                    f"{len(new)} parameter(s) were added to", new[0][0], f"adopted by {name!r} at their present values"
                )
            if gone[name]:
                _tell(
                    f"{len(gone[name])} parameter(s) were taken from", gone[name][0], f"{name!r} averages them no more"
                )
            if average.pulls:
                warn_of_feedback(new, self._optimizer)

    def refresh_names(self) -> None:
        """Call every entry by the name that the model has for its parameter now."""
        names = {id(p): name for name, p in _model.named_parameters(self._model).items()}
        lost = [e for average in self.averages.values() for e in average.entries.values() if id(e.w1) not in names]
        if lost:
            trained = self._roster.renewed().groups()
            for entry in lost:
                if id(entry.w1) in trained:
                    raise RuntimeError(
                        f"parameter {entry.name!r} has been replaced in the model (load_state_dict(assign=True)?), but "
                        "the optimizer still trains the old one: make the optimizer and Belay anew"
                    )
            for average in self.averages.values():
                average.regrouped(trained)
                average.regroup()
        for average in self.averages.values():
            average.rename(names)


def _follows(average: Average, wanted: list[Found]) -> bool:
    """Whether the average has these very parameters, under these names."""
    return {e.name: id(e.w1) for e in average.entries.values()} == {name: id(p) for name, p, _, _ in wanted}


def _tell(what: str, first: str, so: str) -> None:
    warnings.warn(f"{what} the optimizer, {first!r} first: {so}", BelayWarning, stacklevel=2)
