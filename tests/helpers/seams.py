"""Every place where tests of Belay and of its steps reach behind the public surface. If insides move, mend this file.

Two kinds of test name their seams themselves: `tests/testing/test_suite.py` breaks the library on purpose, and tests of
the laboratory replace what a part of it would train or download.

A test asks for behaviour first: `state_dict()`, `stats()`, `repr()`, warnings, the operations that torch is asked for.
It comes here only for what the CPU of a test machine cannot show (a device that must be waited for, a captured graph),
for a limit that is too large for small tensors, and for a count of work that leaves no other trace.

Functions that change the library take pytest's `MonkeyPatch`, which undoes the change.
"""

from typing import Any

import pytest
from torch import Tensor, nn

from torchbelay.belay import live_module, modules, plan, stepper, swap
from torchbelay.belay.cohort import Cohort
from torchbelay.ops import arithmetic

# The vocabulary of one step, as the tests of ops use it.
from torchbelay.ops.backend import choose
from torchbelay.ops.step import Motion, Move, Schedule, Swing
from torchbelay.physics.method import Method

__all__ = ["Motion", "Move", "Schedule", "Swing", "choose"]


# Waiting for a device -----------------------------------------------------------------------------------------------

# Of a 0-dim tensor: whether to read its number is to wait for a device. `set_waiting()` does not change it.
waits_for = stepper.reading_waits


def set_waiting(patch: pytest.MonkeyPatch, waits: bool) -> None:
    """Let Belay believe that to read a number is to wait for a device, or that it is not."""
    patch.setattr(stepper, "reading_waits", lambda number: waits)


def set_capturing(patch: pytest.MonkeyPatch) -> None:
    """Let Belay believe that a graph is being captured."""
    patch.setattr(plan.Plan, "is_capturing", lambda plan: True)


# Limits and parts that a test takes away ----------------------------------------------------------------------------


def limit_scratch(patch: pytest.MonkeyPatch, elements: int) -> None:
    """Let a scratch buffer of the operations on lists hold at most this number of elements."""
    patch.setattr(arithmetic, "SCRATCH", elements)


def drop_resharding(patch: pytest.MonkeyPatch) -> None:
    """Let a swap leave what FSDP has gathered as it is."""
    patch.setattr(swap, "reshard", lambda model: None)


def drop_fsdp_registry(patch: pytest.MonkeyPatch) -> None:
    """Let torch not tell which modules it shards, as another version of it may."""
    from torch.distributed import _composable_state

    patch.delattr(_composable_state, "_module_state_mapping")


# Work that leaves no other trace ------------------------------------------------------------------------------------


def forbid_one_pass(patch: pytest.MonkeyPatch) -> None:
    """Let the test fail if a pass that fuses the averages with an optimizer is asked for from now on."""
    from torchbelay.ops.triton.backend import Triton

    patch.setattr(Triton, "fuse", lambda *_: pytest.fail("a fused pass was asked for"))


class Calls:
    """The number of calls of a function."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.count = 0
        function = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return function(*args, **kwargs)

        patch.setattr(owner, name, counted)


def launches(patch: pytest.MonkeyPatch) -> Calls:
    """Launches of the kernel that moves a whole model."""
    from torchbelay.ops.triton import launch

    return Calls(patch, launch, "move")


def tables(patch: pytest.MonkeyPatch) -> Calls:
    """Tables of addresses that are written for the kernels."""
    from torchbelay.ops.triton.table import Table

    return Calls(patch, Table, "__init__")


def looks(patch: pytest.MonkeyPatch) -> Calls:
    """Looks of live modules at all of their tensors, which a step can usually do without."""
    return Calls(patch, live_module.LiveModule, "_look")


# Values -------------------------------------------------------------------------------------------------------------


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters by the names that Belay gives them, whatever wraps the model."""
    return modules.named_parameters(model)


def schedule_of(method: Method) -> Schedule | None:
    """All motions of a method in advance, or None if the host must ask the method at every step."""
    return Cohort(method, 0, 0, every=1).schedule


def live_modules(belay: Any) -> list[Any]:
    """The modules that follow an average of this Belay."""
    return list(belay._parts.live.modules)
