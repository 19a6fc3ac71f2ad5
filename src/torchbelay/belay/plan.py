"""What steps do to the averages as they are grouped now, and whether the host must know a step's number for it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from torchbelay.ops.backend import Backend, PreparedStep
from torchbelay.ops.step import REST, Motion, Move, Schedule
from torchbelay.physics.coupling import watch
from torchbelay.physics.method import Method, Remembers

from .average import MAIN, Average
from .averages import Averages
from .buffers import BufferStep, share
from .clock import Clock
from .cohort import Cohort
from .options import Options
from .validate import only_follows, pulls_weights

Memories = list[tuple[Remembers, tuple[float, ...]]]


class Update(NamedTuple):
    """A step that is made known after it: averages may only follow the weights as they are."""

    rate: float | None  # the share of the new weights in the average, if it is given for this step


@dataclass
class Work:
    """The work of one step. An optimizer that can take the averages along in its own pass gets it handed over.

    Such an optimizer does one of two things: it moves everything by `moves` and sets `carried`, or it calls `prepare()`
    before it steps and leaves the rest to be done after its step.
    """

    moves: list[Move]
    parameters: list[Tensor]  # all that the optimizer holds, in its order
    keep: Tensor | None  # 1 on the device if the step counts, 0 if GradScaler skips it or it leaves bad weights
    count: Clock
    capturing: bool  # the step is being recorded in a CUDA graph
    prepare: Callable[[], None]
    fuse: Callable[..., Any]  # Backend.fuse
    buffers: list[BufferStep] = field(default_factory=list)
    memories: Memories = field(default_factory=list)  # methods that remember, with their memories before this step
    update: Update | None = None  # nothing is known of the weights from before the step
    prepared: PreparedStep | None = None  # set by `prepare()`
    begun: bool = False  # weights or averages have begun to move, and not all have moved
    carried: bool = False  # set by the optimizer
    closed: bool = False  # the step has ended, or another one has taken its place

    def forget(self) -> None:
        """Restore what methods remembered before this step: it has not taken place."""
        for method, memory in self.memories:
            method.remember(memory)


@runtime_checkable
class FusingOptimizer(Protocol):
    """An optimizer that may take the averages along in its own pass over memory."""

    def take_over(self, work: Work) -> bool:
        """Whether the optimizer will, in its coming step, either carry this work out or call its `prepare()`."""


class Plan:
    """What any step does to the averages, for as long as they have the same cohorts."""

    def __init__(self, model: nn.Module, averages: Averages, backend: Backend, options: Options) -> None:
        self._model, self._averages, self._options = model, averages, options
        self._known = [(average, average.cohorts) for average in averages]
        self._followers = [(average, average.followers) for average in averages]
        self._began = averages.began
        self._rows: list[tuple[Average, Cohort, Schedule | None]] = [
            (average, cohort, cohort.schedule if backend.follows_schedule(cohort) else None)
            for average, cohorts in self._known
            for cohort in cohorts
        ]
        self._on_gpu = any(cohort.w1[0].is_cuda for _, cohort, _ in self._rows)
        followers = [cohort for _, found in self._followers for cohort in found.values()]
        moving = [cohort for _, cohort, _ in self._rows] + followers
        self.constant = averages.began and all(cohort.constant for cohort in moving)
        self._numbered = any(not cohort.constant and schedule is None for _, cohort, schedule in self._rows)
        self._numbered |= any(not cohort.constant for cohort in followers)
        self._numbered |= averages.team is not None  # only the host knows whether a step is a sync
        self._unnumbered: list[Move] | None = None
        self.pulls = any(average.pulls and pulls_weights(cohort.method, 1e-12) for average, cohort, _ in self._rows)

    def is_current(self) -> bool:
        """Whether the averages have the cohorts that this plan was made for."""
        for average, cohorts in self._known:
            if average.cohorts is not cohorts or not average.is_current():
                return False
        for average, followers in self._followers:
            if average.followers is not followers:
                return False
        return self._averages.began == self._began

    def needs_step_number(self) -> bool:
        """Whether the host must know the step's number. It then waits to learn whether the last step was skipped."""
        return not self._began or self._numbered

    def is_capturing(self) -> bool:
        """Whether a step now would be recorded in a CUDA graph."""
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    def check_capture(self, numbered: bool) -> None:
        """Refuse what a replayed graph cannot do: ask the host."""
        if self._options.home is not None or self._options.on_nonfinite == "raise":
            raise RuntimeError(
                "a captured graph cannot replay averages with a device of their own or on_nonfinite='raise', which "
                "need the host at every step; take the step outside the graph"
            )
        if self.pulls and self._averages.slices is not None:
            raise RuntimeError(
                "a captured graph cannot replay an average that pulls and that replicas share (shard): they gather the "
                "weights at every step; take the step outside the graph"
            )
        if numbered:
            raise RuntimeError(
                "a captured graph cannot replay this average: its numbers come from the host at every step (a method "
                "that needs the learning rate or has no attribute `varies`, averages that have not begun, averaged "
                "buffers, or weights that the kernels cannot take); take the step outside the graph"
            )

    def moves(
        self, step: int | None, lr: Callable[[Cohort], float], memories: Memories, rate: float | None = None
    ) -> list[Move]:
        """Return the moves of a step; `step` is its number, or None if the host need not know it.

        The memory of each method that remembers is noted in `memories` before the method is asked. With a `rate` the
        main average's method is not asked.
        """
        if step is None:
            if self._unnumbered is None:
                self._unnumbered = [
                    self._checked(average, Move(cohort, cohort.motion(0, 0.0) if cohort.constant else None, schedule))
                    for average, cohort, schedule in self._rows
                ]
            if rate is None:
                return self._unnumbered
            pairs = zip(self._rows, self._unnumbered, strict=True)
            return [Move(row[1], Motion(watch(rate))) if row[0].name == MAIN else move for row, move in pairs]
        found = []
        for average, cohort, schedule in self._rows:
            if rate is not None and average.name == MAIN:
                found.append(Move(cohort, Motion(watch(rate))))
                continue
            if isinstance(cohort.method, Remembers):
                memories.append((cohort.method, cohort.method.memory))
            motion = cohort.motion(step, 0.0 if cohort.group is None else lr(cohort))
            if motion is not None or schedule is not None:
                # a backend that follows schedules gets the same groups at every step, moving or not
                found.append(self._checked(average, Move(cohort, motion or REST, schedule)))
        return found

    def _checked(self, average: Average, move: Move) -> Move:
        """Refuse a pull by an average that may only watch."""
        if not average.pulls and move.pulls:
            kind = "spectator" if average.home is None else f"average on {average.home}"
            raise ValueError(
                f"the {kind} {average.name!r} may only watch, but {move.group.method!r} pulls now"  # type: ignore[attr-defined]
            )
        return move

    def check_update(self, rate: float | None) -> None:
        """Refuse a step without weights from before it, if an average does more than follow those after it."""
        for name, method, follows in self._methods:
            if not follows:
                self._refuse_to_follow(name, method)
            if rate is not None and name == MAIN and isinstance(method, Remembers):
                raise ValueError(
                    f"rate={rate!r} would be missing from what {method!r} remembers; call before_step(lr=...) and "
                    "after_step() around the update of the weights"
                )

    def check_following(self, moves: list[Move]) -> None:
        """Refuse the moves of such a step, if a method that only followed at its first step does more now."""
        for average, cohort, _ in self._rows:
            if any(move.group is cohort and (move.pulls or move.needs_copy) for move in moves):
                self._refuse_to_follow(average.name, cohort.method)

    @cached_property
    def _methods(self) -> list[tuple[str, Method, bool]]:
        """The methods of each average, by its name, and whether they only follow; asked once, for they may count."""
        rows = [(average.name, cohort.method) for average, cohort, _ in self._rows]
        if not self._began:
            rows = [(name, each.method) for name, found in self._averages.wanted().items() for each in found]
        distinct = {(name, id(method)): (name, method) for name, method in rows}
        return [(name, method, only_follows(method)) for name, method in distinct.values()]

    def _refuse_to_follow(self, name: str, method: Method) -> NoReturn:
        raise ValueError(
            f"update() is for averages that only follow the weights after a step (a = 0, follow='after'), and {name!r} "
            f"by {method!r} does more; call before_step() right before you update the weights and after_step() right "
            "after it"
        )

    def buffers(
        self, step: int | None, lr: Callable[[Cohort], float], memories: Memories, rate: float | None = None
    ) -> list[BufferStep]:
        """Return what the step does to averaged buffers; asks their methods as `moves` does those of the weights."""
        found = []
        for average, followers in self._followers:
            shares: dict[int, float | None] = {}
            for cohort in followers.values():
                if rate is not None and average.name == MAIN:
                    shares[id(cohort)] = rate
                if id(cohort) in shares:
                    continue
                if isinstance(cohort.method, Remembers):
                    memories.append((cohort.method, cohort.method.memory))
                motion = cohort.motion(step or 0, 0.0 if cohort.group is None else lr(cohort))
                shares[id(cohort)] = None if motion is None else share(motion.coupling)
            now = {name: weight for name, cohort in followers.items() if (weight := shares[id(cohort)]) is not None}
            found.append(BufferStep(average, self._averages.buffer_slots, now, self._options.dtype))
        return found
