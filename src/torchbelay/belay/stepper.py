"""What happens around an optimizer's step: every average moves exactly when the weights do."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchbelay.ops import arithmetic
from torchbelay.ops.backend import Around, Motion, Move, Ready, choose, is_capturing
from torchbelay.ops.host import Host
from torchbelay.physics.coupling import Coupling
from torchbelay.physics.method import Remembers
from torchbelay.physics.warnings import warn

from . import checkpoint, modules
from .averages import Average, Cohort, Entry, Found, buffer_weight
from .clock import Clock
from .finite import Guard
from .options import Options
from .parameters import Roster
from .shard import local
from .validate import warn_of_feedback

REST = Motion(Coupling(0.0, 0.0, 1.0, 0.0))


class Fusing(Protocol):
    """An optimizer that may take the averages along in its own pass over memory."""

    def expect_averages(self, stepper: "Stepper") -> bool:
        """Whether it will, in its coming step, call either `lead()` or `carried_along()`."""


@dataclass
class Work:
    """A step under way: what is to be done to which tensors once the optimizer has stepped."""

    moves: list[Move] = field(default_factory=list)
    ready: Ready | None = None  # prepared, and what is done before the step is done
    carried: bool = False  # the optimizer has done it all in a pass of its own
    buffers: list[tuple[Tensor, Tensor, float]] = field(default_factory=list)  # the average's, the model's, its share
    keep: Tensor | None = None  # 0 on the device if mixed-precision training skips the step, else 1
    skipped: bool = False  # the same, known on the host
    retried: bool = False  # a step before this one raised
    memories: list[tuple[Remembers, tuple[float, ...]]] = field(default_factory=list)  # methods, as they were before

    def forget(self) -> None:
        """Let methods that keep learning rates forget that they were asked: the step has not been."""
        for method, memory in self.memories:
            method.remember(memory)


class Stepper:
    """The averages of a model, moved by `before()` and `after()` around each update of its weights."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, averages: dict[str, Average], options: Options
    ) -> None:
        self._model, self._optimizer, self._options = model, optimizer, options
        self.averages = averages
        self._host = Host(options.impl) if options.hosted else None
        self.around: Around = self._host or choose(options.impl, rounding=options.rounding)
        self._guard = None if options.on_nonfinite == "ignore" else Guard(raises=options.on_nonfinite == "raise")
        self.carried = False  # whether the optimizer took the averages along in the last step
        self._fusing: Fusing | None = optimizer if hasattr(optimizer, "expect_averages") else None
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
            if not average.is_current():
                average.regroup()
        # set by GradScaler, for optimizers that skip a step by themselves
        found_inf = getattr(self._optimizer, "found_inf", None)
        if self._work is not None:
            self._work.forget()
        work = Work(retried=self._ahead is not None)
        ask, replayed = self._must_ask(), self._is_capturing()
        if replayed and (self._host is not None or self._options.on_nonfinite == "raise"):
            raise RuntimeError(
                "a captured graph cannot replay averages with device='cpu' or on_nonfinite='raise', which need the "
                "host at every step; take the step outside the graph"
            )
        if replayed and ask:
            raise RuntimeError(
                "a captured graph cannot replay this average: its numbers come from the host at every step (a method "
                "that sees the learning rate or says nothing of itself, averages that have not begun, averaged "
                "buffers, or weights that go the foreach way); take the step outside the graph"
            )
        if found_inf is not None:
            if not ask and (replayed or _waits(found_inf)):
                work.keep = (found_inf.reshape(()) == 0).to(torch.float32)
            elif bool(found_inf):
                self._work = Work(skipped=True)
                return
        if self.began:
            known = ask or (work.keep is None and self.clock.is_certain and not replayed)
            step = self.clock.count + 1 if known and not self._is_constant() else None
            for average in self.averages.values():
                self._plan(average, step, work)
        self._work = work
        alone = work.retried or self._fusing is None or self._guard is not None
        if alone or not self._fusing.expect_averages(self):  # type: ignore[union-attr]
            self.lead()

    def _plan(self, average: Average, step: int | None, work: Work) -> None:
        """Decide what the step, of this number if the host knows it, does to an average's tensors."""
        moves: list[Move] = []
        for cohort in average.cohorts:
            score = cohort.score(self._options.every) if self.around.counts(cohort) else None
            motion: Motion | None = None
            if step is not None or self._is_constant_for(cohort):
                at = cohort.born + 1 if step is None else step
                if isinstance(cohort.method, Remembers):
                    work.memories.append((cohort.method, cohort.method.memory))
                motion = cohort.motion(at, self._lr_of(cohort), self._options.every)
                if motion is None and score is None:
                    continue
                motion = motion or REST
            move = Move(cohort, motion, score)
            if not average.pulls and any(each.coupling.pulls for each in move.motions):
                kind = "average in host memory" if average.hosted else "spectator"
                raise ValueError(f"the {kind} {average.name!r} may only watch, but {cohort.method!r} pulls now")
            moves.append(move)
        work.moves += moves
        if moves and moves[0].lists is average.cohorts[0] and self._options.buffers == "average":
            # buffers have no gradient and no group: they go with the first of the average's parameters
            assert moves[0].motion is not None
            weight, now = buffer_weight(moves[0].motion.coupling), modules.named_buffers(self._model)
            work.buffers += [(own, now[name], weight) for name, own in average.buffers.items() if name in now]

    @property
    def parameters(self) -> list[Tensor]:
        """All that the optimizer holds, in its order; the same list for as long as it holds the same."""
        return self._roster.parameters

    @property
    def work(self) -> Work:
        """The step under way, for an optimizer that was told to expect it."""
        assert self._work is not None
        return self._work

    def carried_along(self) -> None:
        """Told by the optimizer: its own pass has moved everything."""
        self.work.carried = True

    @torch.no_grad()
    def lead(self) -> None:
        """Do what is done before the optimizer steps, except what a step that then raised has done already."""
        work = self.work
        if work.skipped or work.ready is not None:
            return
        keep, done = work.keep, self._ahead
        if done is not None:
            keep = 1 - done if keep is None else keep * (1 - done)
        work.ready = self.around.prepare(work.moves, self.clock)
        if self._guard is not None:
            leading = [move.lists for move in work.moves if any(each.leads for each in move.motions)]
            if leading:
                self.settle()
            self._guard.keep((w2 for lists in leading for w2 in lists.w2), done)
        work.ready.before(keep)
        if work.keep is None:
            self._ahead = torch.ones(())
        else:
            self._ahead = work.keep if done is None else torch.maximum(work.keep, done.to(work.keep))

    @torch.no_grad()
    def after(self) -> None:
        """Move everything, now that the optimizer has stepped."""
        work, self._work = self._work, None
        assert work is not None
        self.carried = work.carried
        if work.skipped:
            return
        good = self._look_at_the_weights(work)
        if work.retried and work.keep is not None and self._ahead is not None:
            self._ahead = self._ahead * (1 - work.keep)  # still ahead if this one, too, came to nothing
            if good is not None:
                self._ahead = self._ahead * good.to(self._ahead)
        else:
            self._ahead = None
        if good is not None:
            work.keep = good if work.keep is None else work.keep * good.to(work.keep)
        if not work.carried:
            if work.ready is None:
                raise RuntimeError(
                    f"{type(self._optimizer).__name__} stepped without its averages: a subclass that has a step of its "
                    "own must call super().step()"
                )
            work.ready.after(work.keep)
        for own, buffer, weight in work.buffers:
            if own.is_floating_point() or own.is_complex():
                arithmetic.lerp_([local(own)], [local(buffer)], weight, work.keep)
            else:
                arithmetic.overwrite_(local(own), local(buffer), work.keep)
        if self._options.buffers == "copy":
            self._forget_buffers(work.keep)
        self.clock.tick(work.keep, there=work.carried)
        if not self.began and self.clock.count >= self._options.start:
            self._begin_when_finite()

    def _look_at_the_weights(self, work: Work) -> Tensor | None:
        """1 if they are finite, else 0, or an error; None if they are known to be finite, or nobody asked."""
        if self._guard is None or not work.moves:
            return None
        followed = {id(e.w1): (e.name, e.w1) for average in self.averages.values() for e in average.entries.values()}
        step = self.clock.count + 1 if self._guard.raises else None
        try:
            good = self._guard.look(list(followed.values()), step)
        except FloatingPointError:
            self._ahead = None
            work.forget()
            raise
        if work.memories and good is not None and not bool(good):  # such methods wait for every step anyway
            work.forget()
        if not (work.retried and work.keep is not None):
            self._guard.forget()
        return good

    def _begin_when_finite(self) -> None:
        """Begin, or wait for better weights, or raise, as `on_nonfinite` says."""
        if self._guard is not None:
            found = _distinct(self.wanted())
            if self._guard.raises:
                self._guard.look(found, self.clock.count)
            elif not self._guard.is_good(found):
                return
        self.begin()

    def _forget_buffers(self, keep: Tensor | None) -> None:
        """A step has passed: what `update_bn` had found for an average is out of date, unless the step was skipped."""
        for average in self.averages.values():
            if keep is None:
                average.buffers = {}
            elif average.buffers:
                now = modules.named_buffers(self._model)
                for name, own in average.buffers.items():
                    arithmetic.overwrite_(local(own), local(now.get(name, own)), keep)

    def _is_constant(self) -> bool:
        """Whether every step is like every other, so that nobody need know its number."""
        cohorts = [cohort for average in self.averages.values() for cohort in average.cohorts]
        return self.began and self._options.every == 1 and all(cohort.varies == "never" for cohort in cohorts)

    def _is_constant_for(self, cohort: Cohort) -> bool:
        return self._options.every == 1 and cohort.varies == "never"

    def _must_ask(self) -> bool:
        """Whether the host has to know the number of the step, and so whether the last one took place."""
        if not self.began:
            return True
        cohorts = [cohort for average in self.averages.values() for cohort in average.cohorts]
        asking = [cohort for cohort in cohorts if not self._is_constant_for(cohort)]
        if self._options.buffers == "average" and any(average.buffers for average in self.averages.values()):
            return bool(asking)
        return any(not self.around.counts(c) or c.score(self._options.every) is None for c in asking)

    def _is_capturing(self) -> bool:
        cohorts = (cohort for average in self.averages.values() for cohort in average.cohorts)
        return any(is_capturing(cohort.w1[0].device) for cohort in cohorts)

    def path(self) -> str:
        """Which code moves the averages."""
        cohorts = [cohort for average in self.averages.values() for cohort in average.cohorts]
        names = dict.fromkeys(map(self.around.used_for, cohorts)) or [self.around.name]
        return ", ".join(names) + (" in one pass with the optimizer" if self.carried else "")

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
        wanted = self.wanted()
        if self._guard is not None:
            self._guard.check(_distinct(wanted))
        for name, found in wanted.items():
            self.averages[name].adopt(found, born=self.clock.count, dtype=self._options.dtype)
        self.began = True
        self._copy_buffers()

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again at the weights as they are, if the averages have begun."""
        if self._guard is not None and self.began:
            entries = [e for average in self.averages.values() for e in average.entries.values()]
            self._guard.check([(e.name, e.w1) for e in entries])
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
        self.settle()
        checkpoint.check(state, self._options, expected, {n: self._buffers(a) for n, a in self.averages.items()})
        self._roster, self._work = roster, None
        self.clock.set(state["step"])
        self._ahead = torch.ones(()) if state["ahead"] else None
        for name, average in self.averages.items():
            saved = state["averages"][name]
            self.began = bool(state["began"])
            if not self.began:
                average.clear()
                continue
            if _follows(average, wanted[name]):
                average.regrouped(roster.groups())
            else:
                average.clear()
                average.adopt(wanted[name], born=0, dtype=self._options.dtype)
            checkpoint.restore(average, saved, state["step"])

    def _expected(self, average: Average, wanted: list[Found]) -> dict[str, Entry]:
        """The entries that a state must fit: those there are, or those there would be."""
        if _follows(average, wanted):
            return average.entries
        return self._blank(average, wanted, device="meta").entries

    @torch.no_grad()
    def saved(self, swap: checkpoint.Swapped | None) -> dict[str, Any]:
        """The averages as a checkpoint has them; those that have not begun are the weights as they are."""
        averages = self.averages
        if not self.began:
            averages = {name: self._blank(averages[name], found) for name, found in self.wanted().items()}
        # a step that is under way, or raised, has asked for its numbers already
        memories = {} if self._work is None else {id(method): memory for method, memory in self._work.memories}
        return {
            name: checkpoint.saved(average, self._buffers(average), swap, self.clock.count, memories)
            for name, average in averages.items()
        }

    def _buffers(self, average: Average) -> dict[str, Tensor]:
        """The buffers that a checkpoint has of an average; the model's where it has none of its own."""
        now = modules.named_buffers(self._model)
        if self._options.buffers == "average":
            return dict(average.buffers) or now
        stay = modules.persistent_buffers(self._model) if self._options.buffers == "copy" else {}
        return {name: average.buffers.get(name, now[name]) for name in stay if name in now}

    def _blank(self, average: Average, wanted: list[Found], device: str | None = None) -> Average:
        """What an average would be if it began now."""
        blank = Average(average.name, average.rule, pulls=average.pulls, hosted=average.hosted)
        blank.adopt(wanted, born=self.clock.count, dtype=self._options.dtype, device=device)
        return blank

    def forget_the_step(self) -> None:
        """Drop a step that was begun."""
        self._work, self._ahead = None, None
        if self._guard is not None:
            self._guard.forget()

    def settle(self) -> None:
        """Wait until the averages are what the last step made of them: those in host memory may still be under way."""
        if self._host is not None:
            self._host.wait()

    def _copy_buffers(self) -> None:
        for average in self.averages.values() if self._options.buffers == "average" else ():
            average.buffers = {name: b.detach().clone() for name, b in modules.named_buffers(self._model).items()}

    def _adopt_changes(self, roster: Roster) -> None:
        wanted = roster.wanted(self.averages.values(), every=self._options.every)
        if self._guard is not None and self.began:
            followed = {id(e.w1) for average in self.averages.values() for e in average.entries.values()}
            late = [(name, w1) for name, w1 in _distinct(wanted) if id(w1) not in followed]
            if late:
                self._guard.check(late)
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
                warn_of_feedback(new, self._optimizer, rounding=self._options.rounding)

    def refresh_names(self) -> None:
        """Call every entry by the name that the model has for its parameter now."""
        names = {id(p): name for name, p in modules.named_parameters(self._model).items()}
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


def _distinct(wanted: Mapping[str, list[Found]]) -> list[tuple[str, Tensor]]:
    """Names and parameters, each once whatever number of averages wants it."""
    return list({id(p): (name, p) for found in wanted.values() for name, p, _, _ in found}.values())


def _follows(average: Average, wanted: list[Found]) -> bool:
    """Whether the average has these very parameters, under these names."""
    return {e.name: id(e.w1) for e in average.entries.values()} == {name: id(p) for name, p, _, _ in wanted}


def _tell(what: str, first: str, so: str) -> None:
    warn(f"{what} the optimizer, {first!r} first: {so}")


def _waits(number: Tensor) -> bool:
    """Whether to read a number is to wait for a device."""
    return number.device.type != "cpu"
