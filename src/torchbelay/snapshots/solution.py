"""Solve for the weights of the snapshots that make a target, from what the snapshots say of themselves.

Tensors with the same stories share one solution. Usually all tensors do. With a method per parameter, or parameters
that joined the optimizer later, there are several.
"""

import math
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchbelay.physics.identity import describe, same
from torchbelay.physics.methods import power_ema
from torchbelay.physics.warnings import warn

from .dynamics import Dynamics, Stories, method_of
from .folder import Folder, Snapshot, Story
from .least_squares import Column, Combination, Norm, combine, combine_powers, combine_profiles, matrix
from .profiles import profile
from .targets import Aim, Target, aim_at, decay, label, window

_ROUNDING = 1e-11  # relative to the norm of a profile
_UPDATE = 1e-3  # the size of an update relative to that of a weight, by which rounding errors of snapshots are judged
_UNITS = 2.5  # an average's rounding error in units of the last place: those of many steps add up


class Solution(NamedTuple):
    """The solution for tensors that share their stories."""

    names: tuple[str, ...]
    snapshots: tuple[Snapshot, ...]
    columns: tuple[Column, ...]  # the profiles of the snapshots
    target: Column
    weights: Tensor
    predicted_error: float
    condition: float

    def profiles(self) -> tuple[Tensor, Tensor]:
        """Return P of the target and of what is made of the snapshots, for every update up to the step."""
        made = torch.zeros(self.target.step, dtype=torch.float64)
        for column, weight in zip(self.columns, self.weights.tolist(), strict=True):
            made[: column.step] += weight * _profile(column)
        return _profile(self.target), made


class Known(NamedTuple):
    """A snapshot of some tensors, how these came about (None: it holds the weights), and the profile that follows."""

    snapshot: Snapshot
    story: Story | None
    column: Column
    dtype: torch.dtype
    begin: int = 0  # the steps that were taken before the averages began, or last began again

    @property
    def rounding(self) -> float:
        """The rounding error of an average, in updates. Weights are what the run had, and so have none."""
        return 0.0 if self.story is None else _UNITS * torch.finfo(self.dtype).eps / _UPDATE

    @property
    def power(self) -> tuple[float, float] | None:
        """The time and the exponent of a power function that began with its part; None for anything else."""
        story, age = self.story, self.column.step - self.begin
        if story is None or (story.born, story.every, story.table) != (self.begin, 1, None) or not age:
            return None
        method = method_of(story)
        return (float(age), method.exponent) if isinstance(method, power_ema) else None


class Solver:
    """Solves for one or several targets at one step of a run."""

    def __init__(self, folder: Folder, at: int) -> None:
        self.folder, self.at = folder, at
        self._stories: dict[int, Stories] = {}
        self.begin, self.usable, _ = folder.part(at)
        if all(each.step == self.begin for each in self.usable):
            raise ValueError(_why_nothing(folder, at, self.begin))
        contents = [_dtypes(snapshot) for snapshot in self.usable]
        last = [i for i, each in enumerate(self.usable) if each.step == self.usable[-1].step]
        # buffers are not averaged: those of the last snapshot count
        self.copied: Mapping[str, Snapshot] = {name: self.usable[i] for i in last for name in self.usable[i].copied}
        born = [story.born for each in self.usable for story in each.told.stories]
        # When the first averages began; None if optimizers count their own steps, which cannot be compared.
        self._first_birth = None if not born or any(each.counts for each in self.usable) else min(born)
        alike: dict[object, list[str]] = {}
        for name in sorted({name for i in last for name in contents[i]} - self.copied.keys()):
            held = [(i, each) for i, each in enumerate(self.usable) if name in contents[i]]
            now = held[-1][1].origin(name)
            told = tuple(
                (i, e.story(name), e.pull.of(name), e.count(name), contents[i][name], e.origin(name) == now)
                for i, e in held
            )
            alike.setdefault(told, []).append(name)
        self.groups = [self._group(names, contents) for names in alike.values()]

    def _group(self, names: Sequence[str], contents: Sequence[Mapping[str, torch.dtype]]) -> "_Group":
        name = names[0]
        snapshots = {each: held[name] for each, held in zip(self.usable, contents, strict=True) if name in held}
        origin = next(reversed(snapshots)).origin(name)  # earlier, the name may have been that of another parameter
        snapshots = {each: dtype for each, dtype in snapshots.items() if each.origin(name) == origin}
        snapshots = _since_last_birth(name, snapshots, self._first_birth)
        at, part = self._own_step(name, list(snapshots)), self._own_begin(name, list(snapshots))
        born = min((story.born for each in snapshots if (story := each.story(name)) is not None), default=part)
        begin = born if self._joined_late(born, snapshots) else part
        stories = self._stories.setdefault(at, Stories(self.folder, at))
        pulling = (each.pull.of(name) for each in snapshots)
        dynamics = Dynamics(stories, [story for story in pulling if story is not None])
        known = []
        for each, dtype in snapshots.items():
            story, step = each.story(name), each.count(name)
            column = dynamics.weights(step) if story is None else dynamics.average(story, step)
            if column is not None:
                known.append(Known(each, story, column, dtype, begin))
        if not any(each.column.step > begin for each in known):
            raise ValueError(
                f"no snapshot tells how the average of {name!r} came about: its couplings depend on learning rates "
                "that were not recorded; record averages that only watch, as torchbelay.snapshots.defaults()"
            )
        return _Group(tuple(names), tuple(known), dynamics, at, begin, part)

    def _joined_late(self, born: int, snapshots: Container[Snapshot]) -> bool:
        """Whether a tensor of these snapshots joined the optimizer when averages of others had begun."""
        first = self.usable[0]
        if first not in snapshots or first.is_first:
            return first not in snapshots
        return born > min((story.born for each in self.usable for story in each.told.stories), default=born)

    def _own_begin(self, name: str, snapshots: Sequence[Snapshot]) -> int:
        """Return the steps that the optimizer of a tensor had taken when the averages last began again."""
        if self.begin == 0:
            return 0
        for each in snapshots:
            if each.is_first:
                return each.count(name)
        if any(name in each.counts for each in snapshots):  # its averages tell; all of them began again then
            return min(story.born for each in snapshots if (story := each.story(name)) is not None)
        return self.begin

    def _own_step(self, name: str, snapshots: Sequence[Snapshot]) -> int:
        """Return the steps that the optimizer of a tensor had taken at the step that is asked for."""
        if snapshots[-1].step == self.at:
            return snapshots[-1].count(name)
        if any(name in each.counts for each in snapshots):
            raise ValueError(
                f"at={self.at} has no snapshot, and only snapshots tell how often the optimizer of {name!r} had "
                f"stepped; choose at={snapshots[-1].step}, or another step that has snapshots"
            )
        return self.at

    def solve(self, target: Target, norm: Norm) -> tuple[Solution, ...]:
        """Return the solutions of all tensors."""
        found, strange = [], False
        for group in self.groups:
            aim = self._own(target, group)
            if aim is None:
                asked = group.aim(target)
                aim = group.dynamics.target(asked, group.at)
                strange |= asked.pulls
            found.append(_solve(group, target, aim, norm))
        if strange:
            warn(
                f"{label(target)} pulls the weights and was not part of this run: this is the average that it would "
                "make of the same updates, but a run with it would have met other gradients"
            )
        return tuple(found)

    @staticmethod
    def _own(target: Target, group: "_Group") -> Column | None:
        """Return the average that pulled the weights, if the target is that very one."""
        if not isinstance(target, window | decay):
            for story in reversed(group.dynamics.pulling):
                if same(story.method, describe(target)):
                    return group.dynamics.average(story, group.at)
        return None


class _Group(NamedTuple):
    """Tensors that share all of their stories."""

    names: tuple[str, ...]
    known: tuple[Known, ...]
    dynamics: Dynamics
    at: int  # the steps that their optimizer had taken
    begin: int  # those before the averages began, or last began again
    part: int  # those before the averages of the first tensors did; a window may go back to before a tensor joined

    def aim(self, target: Target) -> Aim:
        """Return a target at the step; a method begins with the averages of these tensors."""
        return aim_at(target, self.at, self.part if isinstance(target, window | decay) else self.begin)


def _solve(group: _Group, target: Target, aim: Column, norm: Norm) -> Solution:
    columns = tuple(each.column for each in group.known)
    own = -1 if aim.life is None else aim.life.filter.own
    beside = Column(aim.life, aim.step, own) if own >= 0 else group.dynamics.weights(aim.step)
    rows = matrix([*columns, aim, beside])
    away = rows[:, -2] - rows[:, -1]
    # large weights that cancel would blow up the rounding errors of snapshots, which count as updates of their own
    rounding = torch.tensor([each.rounding for each in group.known], dtype=torch.float64)
    given = torch.cat([rows[:, :-2], torch.diag(rounding)])
    wanted = torch.cat([rows[:, -2], torch.zeros_like(rounding)])
    found = combine(given, wanted) if norm == "updates" else _combine_profiles(group, target)
    error = float((given @ found.weights - wanted).norm())
    snapshots = tuple(each.snapshot for each in group.known)
    relative = _relative(error, float(away.norm()), _ROUNDING * float(wanted.norm()))
    return Solution(group.names, snapshots, columns, aim, found.weights, relative, found.condition)


def _relative(error: float, distance: float, rounding: float) -> float:
    """Return error ÷ distance; an average that is the weights themselves has no distance, and is found or not."""
    if distance > rounding:
        return error / distance
    return 0.0 if error <= rounding else math.inf


def _combine_profiles(group: _Group, target: Target) -> Combination:
    """Return EDM2's solution if all are power functions, else that of the same problem with the steps of this run.

    Points are the weights wherever they were, so that it does not matter what pulled them. An average that pulled is no
    average of points, and gets the weight 0.
    """
    at, begin = group.at, group.begin
    powers = [each.power for each in group.known if each.column.step > begin]
    if isinstance(target, power_ema) and all(power is not None for power in powers):
        chosen = [each.column.step > begin for each in group.known]  # the first weights are no power function
        found = combine_powers([power for power in powers if power is not None], (float(at - begin), target.exponent))
    else:
        asked = group.aim(target)
        if asked.pulls:
            raise ValueError(f"{label(target)} pulls the weights: norm='profile' is not defined; use norm='updates'")
        stories = group.dynamics.stories
        free = Dynamics(stories, ())
        chosen = [each.story is None or not stories.pulls(each.story) for each in group.known]
        columns = [
            free.weights(each.column.step) if each.story is None else free.average(each.story, each.column.step)
            for each, use in zip(group.known, chosen, strict=True)
            if use
        ]
        rows = matrix([*(column for column in columns if column is not None), free.target(asked, at)], "profile")
        found = combine_profiles(rows[:, :-1], rows[:, -1])
    weights = torch.zeros(len(chosen), dtype=torch.float64)
    weights[torch.tensor(chosen)] = found.weights
    return Combination(weights, found.condition)


def _since_last_birth(
    name: str, snapshots: Mapping[Snapshot, torch.dtype], first: int | None
) -> dict[Snapshot, torch.dtype]:
    """Return the snapshots since the averages of a tensor last began: it may have left the optimizer and joined again.

    No update leads there from the snapshots before, for nothing tells what happened to the tensor in the meantime.
    `first` is when averages of the first tensors began: one that began later has no use of anything before.
    """
    births: dict[str | None, int] = {}
    born = min((story.born for each in snapshots if (story := each.story(name)) is not None), default=-1)
    last = born if first is not None and born > first else -1
    for each in snapshots:
        if (story := each.story(name)) is not None and story.born > births.setdefault(each.average, story.born):
            births[each.average] = last = story.born
    ends = {each: each.count(name) if (story := each.story(name)) is None else story.born + 1 for each in snapshots}
    return {each: dtype for each, dtype in snapshots.items() if ends[each] > last}


def _why_nothing(folder: Folder, at: int, begin: int) -> str:
    """Return why no average can be made at a step before which only first weights were recorded, and the cure."""
    later = [each.step for each in folder.snapshots if each.step > at]
    cure = f"choose at={min(later)}, or another step that has snapshots" if later else "let the Recorder see more steps"
    began = f"begun again by reset() at step {begin}" if begin else "begun at step 0"
    return f"at={at}: the averages had {began}, and none was recorded since then; {cure}"


def _dtypes(snapshot: Snapshot) -> dict[str, torch.dtype]:
    with snapshot.open() as file:
        return {name: info.dtype for name, info in file.tensors.items()}


def _profile(column: Column) -> Tensor:
    if column.life is None:
        return profile(None, 0, column.step)
    return profile(column.life.filter, column.life.born, column.step, column.state)
