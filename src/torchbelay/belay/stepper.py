"""What happens around an optimizer's step: every average moves exactly when the weights do."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchbelay.ops import arithmetic
from torchbelay.ops.backend import choose

from .averages import Averages
from .clock import Clock
from .options import Options
from .plan import Memories, Plan, Work
from .shard import local
from .states import Ahead, Idle, Skipped, State, UnderWay
from .swap import Swap

_DONE = torch.ones((), device="cpu")


@runtime_checkable
class FusingOptimizer(Protocol):
    """An optimizer that may take the averages along in its own pass over memory."""

    def take_over(self, work: Work) -> bool:
        """Whether the optimizer will, in its coming step, either carry this work out or call its `lead()`."""


class Stepper:
    """Moves the averages of a model, by `before()` and `after()` around each update of its weights."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, averages: Averages, options: Options, clock: Clock
    ) -> None:
        self._model, self._optimizer, self._averages, self._options, self._clock = (
            model, optimizer, averages, options, clock,
        )  # fmt: skip
        self.backend = choose(options.impl, rounding=options.rounding, hosted=options.hosted)
        # A guard looks at the weights between their update and the averages', so these cannot be one pass.
        alone = averages.guard is not None or not self.backend.fuses
        fusing: object = None if alone else optimizer
        self._fusing = fusing if isinstance(fusing, FusingOptimizer) else None
        self._state: State = Idle()
        self._plan: Plan | None = None
        self.swap: Swap | None = None  # the model holds an average at present
        self.carried = False  # whether the optimizer took the averages along in the last step

    @torch.no_grad()
    def before(self) -> None:
        """Decide what the coming step does, and do what must be done before it; w1 is never touched."""
        if self.swap is not None:
            raise RuntimeError(
                f"an optimizer step inside averaged({self.swap.average.name!r}) would train the average and lose the "
                "weights; leave the block first"
            )
        self._start(self._fusing)

    def _start(self, fusing: FusingOptimizer | None) -> None:
        """Make the work of a step, and do its first part, or hand the work over to an optimizer that takes it."""
        plan, state = self._current_plan(), self._state
        if isinstance(state, UnderWay):  # its step raised, or its tensors have moved since
            state.work.forget()
            state.work.closed = True
        numbered, capturing = plan.needs_step_number(), plan.is_capturing()
        if capturing:
            plan.check_capture(numbered)
        keep = None
        found_inf = getattr(self._optimizer, "found_inf", None)  # GradScaler's, for optimizers that skip by themselves
        if found_inf is not None:
            if not numbered and (capturing or reading_waits(found_inf)):
                keep = (found_inf.reshape(()) == 0).to(torch.float32)
            elif bool(found_inf):
                self._state = Skipped(state.led)
                return
        step = None
        if not plan.constant and (numbered or (keep is None and not capturing and self._clock.is_certain)):
            # needed, or known without waiting: then a step in which nothing moves needs no launch
            step = self._clock.count + 1
        memories: Memories = []
        work = Work(
            plan.moves(step, self._averages.lr, memories),
            self._averages.parameters.all,
            keep,
            self._clock,
            capturing,
            self.lead,
            self.backend.fuse,
            memories=memories,
            led=state.led,
        )
        if self._options.buffers == "average":
            work.buffers = plan.buffers(work.moves)
        self._state = UnderWay(work, state.led)
        if fusing is None or work.led is not None or not fusing.take_over(work):
            self.lead()

    def _current_plan(self) -> Plan:
        """Follow what changed since the last step, and return the plan for the averages as they are now."""
        averages = self._averages
        if not averages.parameters.is_current():
            averages.adopt_changes()
        if self._plan is None or not self._plan.is_current():
            averages.regroup()
            self.backend.forget()
            self._plan = Plan(self._model, averages, self.backend, self._options)
        return self._plan

    @torch.no_grad()
    def lead(self) -> None:
        """Do what is done before the optimizer steps, except what a step that then raised has done already."""
        state = self._state
        if not isinstance(state, UnderWay) or state.work.prepared is not None:
            return
        if self.backend.remembers_addresses and not self.backend.is_current():
            self._plan = None  # tensors are in other memory, maybe laid out or typed otherwise: make the work anew
            self._start(None)
            return
        work, led, guard = state.work, state.work.led, self._averages.guard
        keep = work.keep
        if led is not None:
            keep = 1 - led if keep is None else keep * (1 - led)
        work.prepared = self.backend.prepare(work.moves, self._clock, capturing=work.capturing)
        if guard is not None:
            leading = [move.group for move in work.moves if any(motion.leads for motion in move.motions)]
            if leading:
                self.backend.wait()
            guard.copy((w2 for group in leading for w2 in group.w2), led)
        work.prepared.before(keep)
        now = _DONE
        if work.keep is not None:
            now = work.keep if led is None else torch.maximum(work.keep, led.to(work.keep))
        self._state = UnderWay(work, now)

    @torch.no_grad()
    def after(self) -> None:
        """Move everything, now that the optimizer has stepped."""
        state, self.carried = self._state, False
        if isinstance(state, Skipped):
            self._state = Idle() if state.led is None else Ahead(state.led)
            return
        assert isinstance(state, UnderWay)
        work = state.work
        work.closed, self.carried = True, work.carried
        good = None if self._averages.guard is None else self._look_at_the_weights(work)
        self._state = Idle()
        if work.led is not None and work.keep is not None and state.led is not None:
            led = state.led * (1 - work.keep)  # still ahead if GradScaler skipped the retry
            self._state = Ahead(led if good is None else led * good.to(led))
        if good is not None:
            work.keep = good if work.keep is None else work.keep * good.to(work.keep)
        if not work.carried:
            if work.prepared is None:
                raise RuntimeError(
                    f"{type(self._optimizer).__name__} stepped without its averages: a subclass that has a step of its "
                    "own must call super().step()"
                )
            work.prepared.after(work.keep)
        for own, buffer, weight in work.buffers:
            if own.is_floating_point() or own.is_complex():
                arithmetic.lerp_([local(own)], [local(buffer)], weight, work.keep)
            else:
                arithmetic.overwrite_(local(own), local(buffer), work.keep)
        if self._options.buffers == "copy" and any(average.buffers for average in self._averages.each.values()):
            self._averages.forget_buffers(work.keep)
        self._clock.tick(work.keep, counted=work.carried, captured=work.capturing)
        if not self._averages.began:
            self._averages.begin_when_due()

    def _look_at_the_weights(self, work: Work) -> Tensor | None:
        """Return 1 if they are finite and 0 if not, or raise; None if they are known to be finite."""
        guard = self._averages.guard
        if guard is None or not work.moves:
            return None
        step = self._clock.count + 1 if guard.raises else None
        try:
            good = guard.look(self._averages.named_weights(), step)
        except FloatingPointError:  # the step has taken place; after any other error it may be taken again
            work.forget()
            self._state = Idle()
            raise
        # bool() waits for the device, but for a method with a memory the host waits at every step anyway.
        if work.memories and good is not None and not bool(good):
            work.forget()
        if work.led is None or work.keep is None:  # else this retry may be skipped, and the next needs the copies
            guard.forget()
        return good

    # What others ask of it ---------------------------------------------------------------------------------------

    @property
    def under_way(self) -> bool:
        """Whether `before()` has been called and `after()` not yet."""
        return isinstance(self._state, UnderWay | Skipped)

    @property
    def ahead(self) -> int:
        """1 if `lead()` was done for a step that then raised; a checkpoint must know."""
        return 0 if self._state.led is None else int(self._state.led)

    @property
    def memories(self) -> dict[int, tuple[float, ...]]:
        """What methods (by id) remembered before the step that is under way, or raised: it may not have taken place."""
        work = self._state.work if isinstance(self._state, UnderWay) else None
        return {} if work is None else {id(method): memory for method, memory in work.memories}

    def resume(self, *, ahead: bool) -> None:
        """Go on from a checkpoint: no step is under way."""
        self._close()
        self._state = Ahead(_DONE) if ahead else Idle()

    def forget_the_step(self) -> None:
        """Drop a step that was begun."""
        self._close()
        if self._averages.guard is not None:
            self._averages.guard.forget()

    def _close(self) -> None:
        if isinstance(self._state, UnderWay):
            self._state.work.closed = True
        self._state = Idle()

    def path(self) -> str:
        """Return the names of the code that moves the averages."""
        cohorts = [cohort for average in self._averages for cohort in average.cohorts]
        names = dict.fromkeys(map(self.backend.used_for, cohorts)) or [self.backend.name]
        return ", ".join(names) + (" in one pass with the optimizer" if self.carried else "")


def reading_waits(number: Tensor) -> bool:
    """Whether reading a number means to wait for a device."""
    return number.device.type != "cpu"
