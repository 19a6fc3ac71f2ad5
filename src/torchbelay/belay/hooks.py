"""Hooks around every step of an optimizer, called exactly once per step, for all Belays that are attached to it."""

import sys
from types import FrameType
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from .signals import signals_held

_NAME = "_torchbelay_hooks"  # the attribute of an optimizer that holds its hooks


class Follower(Protocol):
    """What follows the steps of an optimizer."""

    @property
    def under_way(self) -> bool:
        """Whether `before()` has been called for the present step."""

    @property
    def torn(self) -> bool:
        """Whether `after()` was stopped in the middle."""

    @property
    def pulls(self) -> bool:
        """Whether it may change the weights."""

    @property
    def exchanges(self) -> bool:
        """Whether `look()` gives something to workers that train weights of their own."""

    def before(self) -> None:
        """Refuse the step, or prepare for it; nothing moves."""

    def look(self) -> None:
        """Look at what the optimizer has done, and maybe raise; nothing moves."""

    def after(self) -> None:
        """Move; signals wait until all have moved."""


class StepHooks:
    """Calls its followers around each step of an optimizer, by torch's own step hooks.

    All of them check before any of them moves. Those that pull the weights move first, so that the others see the
    weights after the pull, whatever the order in which they were attached. Those that exchange look last: other workers
    move by what they got, so that nothing here may refuse the step any more.

    A subclass whose `step` calls `super().step()` fires the hooks of both classes once the parent class has been
    instantiated. Only the outermost step counts. Steps are told apart by their frames on the stack, not by counting,
    because a step that raises never fires its second hook.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._followers: list[Follower] = []
        self._open = False
        self._step: FrameType | None = None  # the outermost step under way
        # Hooks stay out of compiled graphs, because they decide, count and allocate.
        self._handles = [
            optimizer.register_step_pre_hook(torch.compiler.disable(self._pre)),  # type: ignore[no-untyped-call]
            optimizer.register_step_post_hook(torch.compiler.disable(self._post)),  # type: ignore[no-untyped-call]
        ]

    def _pre(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.is_inside():
            return
        for each in self._followers:
            each.before()
        self._open, self._step = True, _step_frame()

    def _post(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._open and _step_frame() is self._step:
            self._open, self._step = False, None
            followers = looking = self._followers
            if len(followers) > 1:
                followers = sorted((each for each in followers if each.under_way), key=lambda one: not one.pulls)
                looking = sorted(followers, key=lambda one: one.exchanges)
            for each in looking:
                each.look()
            with signals_held():
                self._move(followers)

    @staticmethod
    def _move(followers: list[Follower]) -> None:
        """Let all move. If an exception comes when some have moved, the others do so too, but one that is torn."""
        try:
            for each in followers:
                each.after()
        except BaseException:
            if not all(each.under_way for each in followers):
                for each in followers:
                    if each.under_way and not each.torn:
                        each.after()
            raise

    def is_inside(self) -> bool:
        """Whether a step is under way, and not only begun and left by an exception."""
        if not self._open:
            return False
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self._step:
            frame = frame.f_back
        return frame is not None

    @staticmethod
    def attach(optimizer: Optimizer, follower: Follower) -> "StepHooks":
        """Let a follower follow an optimizer, by hooks that all followers of the optimizer share."""
        hooks: StepHooks = vars(optimizer).get(_NAME) or StepHooks(optimizer)
        setattr(optimizer, _NAME, hooks)
        hooks._followers = [*hooks._followers, follower]
        return hooks

    def remove(self, optimizer: Optimizer, follower: Follower) -> None:
        """Let a follower follow no more; the last one takes the hooks off."""
        self._followers = [each for each in self._followers if each is not follower]
        if not self._followers:
            for handle in self._handles:
                handle.remove()
            vars(optimizer).pop(_NAME, None)
            self._handles, self._open, self._step = [], False, None


def is_stepping(optimizer: Optimizer) -> bool:
    """Whether this code runs inside a step of an optimizer that is followed."""
    hooks: StepHooks | None = vars(optimizer).get(_NAME)
    return hooks is not None and hooks.is_inside()


def in_a_step() -> bool:
    """Whether this code runs inside the step of any optimizer, as in its closure."""
    return _step_frame() is not None


def runs(one: object, method: str) -> bool:
    """Whether a method of an object runs now, in any thread."""
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            if at.f_code.co_name == method and at.f_locals.get("self") is one:
                return True
            at = at.f_back
    return False


def _step_frame() -> FrameType | None:
    """Return the innermost frame of torch's wrapper around `step`, which calls the hooks."""
    torch_file = Optimizer.profile_hook_step.__code__.co_filename
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame.f_code.co_name, frame.f_code.co_filename) != ("wrapper", torch_file):
        frame = frame.f_back
    return frame
