"""The launches, one function a kernel, and a way to repeat them without Triton's search for the right binary."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.graph import increment_version

from . import kernels
from .numbers import Numbers
from .table import Follower, Table

WARPS = 4  # 8 elements a thread: the fastest of what was tried on an H200
TILE = 256

_binaries: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, blocks: int, args: tuple[Any, ...], constants: dict[str, Any], warps: int) -> None:
    """Launch a kernel, whose constants come last and in this order.

    Triton binds and specialises some thirty arguments anew at every launch, and compares every constant of the module,
    which takes longer than many a model's pass. What it found is kept by all that it depends on.
    """
    device = args[0].device
    key = (kernel, device, warps, *constants.values(), *map(_kind, args))
    found = _binaries.get(key)
    with _on(device):
        if found is not None:
            found[(blocks, 1, 1)](*args, *constants.values())
            return
        binary = kernel[(blocks,)](*args, **constants, num_warps=warps)
        if binary is not None:  # the interpreter has none
            _binaries[key] = binary


def _kind(argument: Any) -> Any:
    """All that a binary knows of an argument."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return argument.bit_length() > 31, argument % 16 == 0, argument == 1


def _on(device: torch.device) -> Any:
    """As the current device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def look(numbers: Numbers, count: Tensor) -> None:
    """Find the numbers of the coming step, where they are not the same as always."""
    if numbers.varies:
        none = numbers.rows
        args = (count, numbers.plans, numbers.laws, none, numbers.current, none, 0, none, none, none, none, none)
        launch(kernels.look, 1, args, _looks(numbers, columns=0, rule=kernels.STEPPED, keep=False), 1)


def look_and_count(
    numbers: Numbers, count: Tensor, table: Table, rule: Any, *,
    hyper: Tensor, rates: Tensor, shares: Tensor, keep: Tensor | None, grads: Tensor,
) -> None:  # fmt: skip
    """The same, and what the optimizer's groups mean for every tensor; the step counts from now on."""
    tensors = len(table.w1)
    args = (
        count, numbers.plans, numbers.laws, numbers.rows, numbers.current,
        table.rows, tensors, hyper, rates, shares, hyper if keep is None else keep, grads,
    )  # fmt: skip
    constants = _looks(numbers, columns=table.columns, rule=rule, keep=keep is not None)
    launch(kernels.look, 1 + -(-tensors // TILE), args, constants, 4)


def _looks(numbers: Numbers, *, columns: int, rule: Any, keep: bool) -> dict[str, Any]:
    return {
        "COHORTS": numbers.cohorts if numbers.varies else 0,
        "WIDTH": triton.next_power_of_2(numbers.cohorts),
        "COLUMNS": columns,
        "RULE": rule.value,
        "KEEP": keep,
        "TILE": TILE,
    }


def move(
    table: Table,
    numbers: Numbers,
    *,
    keep: Tensor | None,
    count: Tensor,
    copy: Tensor | None = None,
    rule: Any = kernels.STEPPED,
    pulls: bool = False,
    swings: tuple[bool, bool] = (False, False),
    stochastic: bool = False,
    grads: Tensor | None = None,
    shares: Tensor | None = None,
    scale: Tensor | None = None,
    holes: bool = False,
) -> None:
    """Move everything; not where `keep` is 0."""
    if not table.blocks:
        return
    none = table.rows
    args = (
        table.rows, table.map, numbers.current, 0 if copy is None else copy.data_ptr(),
        none if grads is None else grads, none if shares is None else shares,
        none if keep is None else keep.to(table.device, non_blocking=True), none if scale is None else scale, count,
    )  # fmt: skip
    constants = {
        "COLUMNS": table.columns,
        "KINDS": table.kinds,
        "AVERAGES": table.averages,
        "RULE": rule.value,
        "PULLS": pulls,
        "SWING1": swings[0],
        "SWING2": swings[1],
        "RESTS": numbers.rests or table.gaps,
        "KEEP": keep is not None,
        "SCALED": scale is not None,
        "HOLES": holes,
        "STOCHASTIC": stochastic,
        "BLOCK": table.block,
    }
    launch(kernels.move, table.blocks, args, constants, WARPS)
    if pulls or grads is not None:
        increment_version(table.w1)  # so that autograd notices, as it does where torch itself writes


def copy(table: Table, to: Tensor) -> None:
    """Copy all of w1."""
    if table.blocks:
        launch(kernels.copy, table.blocks, (table.rows, table.map, to.data_ptr()), _shape(table), WARPS)


def exchange_table(pairs: Sequence[tuple[Tensor, Tensor]]) -> Table:
    """For tensors that are to trade places with others of their dtype."""
    return Table([x for x, _ in pairs], [[Follower(y, None, None, 0)] for _, y in pairs])


def exchange(table: Table) -> None:
    """Let the tensors of such a table trade their contents."""
    if table.blocks:
        launch(kernels.exchange, table.blocks, (table.rows, table.map), _shape(table), WARPS)
        increment_version(table.w1)


def _shape(table: Table) -> dict[str, Any]:
    return {"COLUMNS": table.columns, "KINDS": table.kinds, "BLOCK": table.block}
