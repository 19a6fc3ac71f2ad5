"""Hooks around every step of an optimizer, called exactly once per step."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer


class StepHooks:
    """Calls `before()` and `after()` around each step of an optimizer, by torch's own step hooks.

    A subclass whose `step` calls `super().step()` fires the hooks of both classes once the parent class has been
    instantiated. Only the outermost step counts. Steps are told apart by their frames on the stack, not by counting,
    because a step that raises never fires its second hook.
    """

    def __init__(self, optimizer: Optimizer, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._before, self._after = before, after
        self._open = False
        self._step: FrameType | None = None  # the outermost step under way
        # Hooks stay out of compiled graphs, because they decide, count and allocate.
        self._handles = [
            optimizer.register_step_pre_hook(torch.compiler.disable(self._pre)),  # type: ignore[no-untyped-call]
            optimizer.register_step_post_hook(torch.compiler.disable(self._post)),  # type: ignore[no-untyped-call]
        ]

    def _pre(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._open and self._is_under_way():
            return
        self._before()
        self._open, self._step = True, _step_frame()

    def _post(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._open and _step_frame() is self._step:
            self._open, self._step = False, None
            self._after()

    def _is_under_way(self) -> bool:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self._step:
            frame = frame.f_back
        return frame is not None

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._step = [], None


def _step_frame() -> FrameType | None:
    """Return the innermost frame of torch's wrapper around `step`, which calls the hooks."""
    torch_file = Optimizer.profile_hook_step.__code__.co_filename
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame.f_code.co_name, frame.f_code.co_filename) != ("wrapper", torch_file):
        frame = frame.f_back
    return frame
