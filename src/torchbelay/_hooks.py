"""Around every step of an optimizer, exactly once, whoever takes it."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer


class StepHooks:
    """Calls `before()` and `after()` around each step of an optimizer, by its own hooks.

    A subclass whose `step` calls `super().step()` fires the hooks of both once the parent class has been instantiated,
    so they are counted by depth. A step that raised never fires the second hook; the next one finds its frame gone
    from the stack and starts anew.
    """

    def __init__(self, optimizer: Optimizer, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._before, self._after = before, after
        self._depth = 0
        self._step: FrameType | None = None  # the outermost step under way
        # Hooks stay out of compiled graphs: they may decide, count and allocate.
        self._handles = [
            optimizer.register_step_pre_hook(torch.compiler.disable(self._pre)),  # type: ignore[no-untyped-call]
            optimizer.register_step_post_hook(torch.compiler.disable(self._post)),  # type: ignore[no-untyped-call]
        ]

    def _pre(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._depth and self._under_way():
            self._depth += 1
            return
        self._depth = 0  # whatever was under way has been abandoned
        self._before()
        self._depth, self._step = 1, _step_frame()

    def _post(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._step = None
            self._after()

    def _under_way(self) -> bool:
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
    """The frame of torch's wrapper around `step`, from which hooks are called."""
    torch_file = Optimizer.profile_hook_step.__code__.co_filename
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != torch_file:
        frame = frame.f_back
    return frame
