"""What happens around an optimizer's step: every average moves exactly when the weights do."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchbelay.ops.backend import choose

from . import company, replicas
from .agreement import agreement
from .averages import Averages
from .clock import Clock
from .departures import EVERY
from .finite import Guard, exchanged
from .hooks import StepHooks, runs
from .options import Options
from .phantom import is_phantom
from .plan import FusingOptimizer, Plan, Update, Work
from .signals import signals_held
from .states import Idle, Skipped, State, UnderWay
from .takeover import Takeover
from .team import warn_if_apart
from .validate import pulled_by


class Stepper:
    """Moves the averages of a model, by `before()` and `after()` around each update of its weights."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        averages: Averages,
        options: Options,
        clock: Clock,
        member: company.Member,
    ) -> None:
        self._model, self.optimizer, self._averages, self._options, self._clock, self._member = (
            model, optimizer, averages, options, clock, member,
        )  # fmt: skip
        member.add(self)
        self._team, self._slices = options.team, averages.slices
        self.exchanges = options.team is not None  # whether look() gives something to other workers
        self.backend = choose(options.impl, rounding=options.rounding, home=options.home, workers=options.team)
        # A guard looks at the weights between their update and the averages', so these cannot be one pass.
        # A slice of the weights is none of the tensors that an optimizer's own pass goes over.
        alone = averages.guard is not None or not self.backend.fuses or self._slices is not None
        fusing: object = None if alone else optimizer
        self._fusing = fusing if isinstance(fusing, FusingOptimizer) else None
        self._state: State = Idle()
        self._plan: Plan | None = None
        self._attached, self._captured, self.steps_seen = False, False, 0  # captured: a graph may move the averages
        self.carried = False  # whether the optimizer took the averages along in the last step
        self.before_the_first: Callable[[], None] | None = None  # called before the first step, unless update() is it
        self.look_at_names: Callable[[Averages], None] | None = None  # called before some of the steps
        self.observers: tuple[Callable[[Work], None], ...] = ()  # called when everything has moved
        self.takeover = Takeover(optimizer, averages)
        self._hooks: StepHooks | None = None
        self.at_detach: list[Callable[[], None]] = []  # what else is to be taken off the optimizer

    def attach(self) -> None:
        """Follow the optimizer's steps, or wait for steps by hand."""
        self._attached = True
        if self.optimizer is not None:
            self._hooks = StepHooks.attach(self.optimizer, self)
        self.takeover.watch()

    def detach(self) -> None:
        """Follow no more steps: the optimizer is as it was."""
        if self._hooks is not None and self.optimizer is not None:
            self._hooks.remove(self.optimizer, self)
        self.takeover.end()
        for remove in self.at_detach:
            remove()
        self._attached, self._hooks, self.at_detach = False, None, []
        self.backend.wait()
        self.backend.release()
        self.forget_the_step()

    @torch.no_grad()
    def before(self, update: Update | None = None) -> None:
        """Decide what the coming step does, and prepare for it; neither weights nor averages are touched."""
        if self._member.swap is not None:
            self._member.refuse_step()
        if company.has_several():
            company.refuse_among(self._member, self._averages.parameters.all, "an optimizer step")
            company.refuse_succeeded(self._member, self)
        if self._member.live.modules:
            self._member.live.prepare()
        if isinstance(self._state, UnderWay):
            self._clear_away()
        if self._is_phantom():
            self._state = Skipped()
            return
        self.takeover.begin_step()
        if not self.steps_seen and update is None and self.before_the_first is not None:
            look, self.before_the_first = self.before_the_first, None
            look()
        if self.look_at_names is not None and not self.steps_seen % EVERY:
            self.look_at_names(self._averages)
        self._start(self._fusing, update)

    def _clear_away(self) -> None:
        """End or drop a step that was stopped, or refuse to build upon it."""
        self.settle()
        if self._state.torn:
            raise RuntimeError(
                "the last step was stopped while weights and averages moved: some have moved and some have not; load a "
                "checkpoint by load_state_dict(), or begin again at the weights as they are by reset()"
            )
        self._drop_the_last()

    def _is_phantom(self) -> bool:
        optimizer = self.optimizer
        return optimizer is not None and not optimizer.state and is_phantom(optimizer, first=not self.steps_seen)

    def _drop_the_last(self) -> None:
        """Drop a step that raised: it has not taken place."""
        if isinstance(self._state, UnderWay):
            self._state.work.forget()
            self._state.work.closed = True
            self._state = Idle()

    def _start(self, fusing: FusingOptimizer | None, update: Update | None) -> None:
        """Make the work of a step, and prepare for it, or hand the work over to an optimizer that takes it."""
        plan = self._current_plan()
        if self._team is not None:
            warn_if_apart(self._team)
        rate = None
        if update is not None:
            rate = update.rate
            plan.check_update(rate)
        numbered, capturing = plan.needs_step_number(), plan.is_capturing()
        if capturing:
            plan.check_capture(numbered)
            self._captured = True
        keep = None
        found_inf = getattr(self.optimizer, "found_inf", None)  # GradScaler's, for optimizers that skip by themselves
        if found_inf is not None:
            if not numbered and (capturing or reading_waits(found_inf)):
                keep = (found_inf.reshape(()) == 0).to(torch.float32)
            elif bool(found_inf):
                self._state = Skipped()
                return
        # needed, or known without waiting: then a step in which nothing moves needs no launch
        known = numbered or (keep is None and not capturing and self._clock.is_certain)
        step = self._clock.count + 1 if known and not plan.constant else None
        held, count = self._averages.parameters.all, self._clock
        work = Work([], held, keep, count, capturing, self.prepare, self.backend.fuse, update=update)
        self._state = UnderWay(work)  # from here on it is known what methods remembered before
        work.moves = plan.moves(step, self._averages.lr, work.memories, rate)
        if update is not None:
            plan.check_following(work.moves)
        if self.pulls and not plan.pulls:  # a method that did not say so in time
            company.refuse_second_pull(self._member, self._averages.names())
        if self._options.buffers == "average":
            work.buffers = plan.buffers(step, self._averages.lr, work.memories, rate)
        if fusing is None or not fusing.take_over(work):
            self._prepare()

    def _current_plan(self) -> Plan:
        """Follow what changed since the last step, and return the plan for the averages as they are now."""
        averages = self._averages
        if self._slices is not None:
            self._slices.follow()
        if not averages.parameters.is_current():
            if self._slices is not None:
                with agreement(self._slices.group) as facts:
                    facts |= replicas.facts([averages.wanted()], self._options)
            averages.adopt_changes(lambda wanted: company.refuse_second_pull(self._member, pulled_by(wanted)))
        if self._options.buffers == "average":
            averages.fit_buffers()
        if self._plan is None or not self._plan.is_current():
            averages.regroup()
            self.backend.remember(cohort for average in averages for cohort in average.cohorts)
            self._plan = Plan(self._model, averages, self.backend, self._options)
        return self._plan

    @torch.no_grad()
    def prepare(self) -> None:
        """Copy what the coming step will need of the weights from before it."""
        self._prepare()

    def _prepare(self) -> None:
        state = self._state
        if not isinstance(state, UnderWay) or state.work.prepared is not None:
            return
        if not self.backend.is_current():  # tensors are elsewhere, or laid out or typed otherwise: make the work anew
            self._plan = None
            self._drop_the_last()
            self._start(None, state.work.update)
            return
        work = state.work
        work.prepared = self.backend.prepare(work.moves, self._clock, capturing=work.capturing)

    def look(self) -> None:
        """Look at the weights that the optimizer has stepped, if asked to: they may not be finite."""
        guard, state, swap = self._averages.guard, self._state, self._member.swap
        if swap is not None and isinstance(state, UnderWay):
            state.work.begun = True
            raise RuntimeError(
                f"averaged({swap.average.name!r}) was entered inside the step and not left: the optimizer has "
                "updated the average. The weights come back when the block is left; then load a checkpoint or reset()"
            )
        if self._team is None and (guard is None or not isinstance(state, UnderWay) or not state.work.moves):
            return
        if isinstance(state, UnderWay):
            self._look_with(guard, state.work)

    @torch.no_grad()
    def _look_with(self, guard: Guard | None, work: Work) -> None:
        try:
            if guard is None or self._team is not None:
                weights = (e.w1 for e in self._averages.entries())
                good = exchanged(work.prepared, guard, weights, self._clock.count + 1)
            else:
                good = guard.look(self._averages.named_weights(), self._clock.count + 1 if guard.raises else None)
        except FloatingPointError:  # the step has taken place; after any other error it may be taken again
            self._drop_the_last()
            raise
        if good is not None:
            work.keep = good if work.keep is None else work.keep * good.to(work.keep)
            # bool() waits for the device, but for a method with a memory the host waits at every step anyway.
            if work.memories and not bool(good):
                work.forget()

    @torch.no_grad()
    def after(self) -> None:
        """Move everything, now that the optimizer has stepped."""
        state, self.carried, self.steps_seen = self._state, False, self.steps_seen + 1
        if not isinstance(state, UnderWay):  # skipped, or attached during the step
            self._state = Idle()
            if self._member.live.modules:
                self._show()
            return
        work = state.work
        work.closed, self.carried = True, work.carried
        if not work.carried and work.prepared is None:
            raise RuntimeError(
                f"{type(self.optimizer).__name__} stepped without its averages: a subclass that has a step of its own "
                "must call super().step()"
            )
        work.begun = True
        if work.prepared is not None and not work.carried:
            if self._slices is not None:
                self._slices.follow()  # an optimizer may have put other memory in the place of the weights
            work.prepared.finish(work.keep)
            if self._slices is not None:
                self._slices.spread_pulled(work.moves)
        for buffers in work.buffers:
            buffers.take(work.keep)
        if self._options.buffers == "copy" and any(average.buffers for average in self._averages.each.values()):
            self._averages.forget_buffers(work.keep)
        self._clock.tick(work.keep, counted=work.carried, captured=work.capturing)
        self._state = Idle()
        if not self._averages.began:
            self._averages.begin_when_due()  # if that is stopped, they begin after the next step
        if self._member.live.modules:
            self._show()
        for observe in self.observers:
            observe(work)

    def update(self, rate: float | None) -> None:
        """Let averages that only follow take in the weights as they are, with this share of them if it is given."""
        try:
            self.before(Update(rate))
        except BaseException:
            if not self.torn:
                self._drop_the_last()
            raise
        self.look()
        with signals_held():
            self.after()

    def _show(self) -> None:
        """Let live modules follow. After a step of the first optimizer they look at everything."""
        self.backend.wait()  # for averages in host memory, which the modules read at any time
        part = None if self._member.is_first(self) else self._averages.each
        self._member.live.follow(moved=True, part=part)

    # What others ask of it ---------------------------------------------------------------------------------------

    def settle(self) -> None:
        """End a step in which the optimizer took the averages along and was stopped before its hook."""
        if isinstance(self._state, UnderWay) and self._state.work.carried and not self._state.torn:
            self.after()

    @property
    def under_way(self) -> bool:
        """Whether `before()` has been called and `after()` not yet."""
        return isinstance(self._state, UnderWay | Skipped)

    @property
    def pulls(self) -> bool:
        """Whether the coming or present step may change the weights."""
        if self._plan is None or self._plan.constant or self._plan.pulls:
            return self._plan is not None and self._plan.pulls
        return isinstance(self._state, UnderWay) and any(move.pulls for move in self._state.work.moves)

    @property
    def attached(self) -> bool:
        """Whether steps are followed: `detach()` has not been called."""
        return self._attached

    @property
    def is_inside(self) -> bool:
        """Whether a step of the optimizer is running right now, as in its closure."""
        return self._hooks is not None and self._hooks.is_inside()

    def pulled(self) -> dict[int, str]:
        """Return the names of the parameters that the average pulls, by their ids; none after `detach()`."""
        return self._averages.pulled() if self._attached else {}

    def is_of_use(self) -> bool:
        """Whether it does more than to move averages which nobody holds."""
        live = self._member.live
        held = any(live.holds(average) for average in self._averages) or bool(live.modules)
        bound = self.exchanges or self._slices is not None or self._captured
        return bool(held or bound or self.observers or self.pulled())

    @property
    def torn(self) -> bool:
        """Whether the last step was stopped in the middle, or another thread is in the middle of one."""
        return self._state.torn

    def is_stopped(self) -> bool:
        """Whether the last step was stopped in the middle, and no thread goes on with it."""
        state = self._state
        return state.torn and not runs(self, "after") and self._state is state

    @property
    def memories(self) -> dict[int, tuple[float, ...]]:
        """What methods (by id) remembered before the step that is under way, or raised: it may not have taken place."""
        work = self._state.work if isinstance(self._state, UnderWay) else None
        return {} if work is None else {id(method): memory for method, memory in work.memories}

    def forget_the_step(self) -> None:
        """Drop a step that was begun, and what other optimizers did since the last one."""
        if isinstance(self._state, UnderWay):
            self._state.work.closed = True
        self._state = Idle()
        self.takeover.forget()

    def path(self) -> str:
        """Return the names of the code that moves the averages."""
        cohorts = [cohort for average in self._averages for cohort in average.cohorts]
        names = dict.fromkeys(map(self.backend.used_for, cohorts)) or [self.backend.name]
        return ", ".join(names) + (" in one pass with the optimizer" if self.carried else "")


def reading_waits(number: Tensor) -> bool:
    """Whether reading a number means to wait for a device."""
    return number.device.type != "cpu"
