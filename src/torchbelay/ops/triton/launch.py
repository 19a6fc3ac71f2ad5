"""The launches, one function per kernel, and a way to repeat them without Triton's search for the right binary."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.graph import increment_version

from . import kernels, layout
from .numbers import Numbers
from .table import Follower, Table

WARPS = 4  # 8 elements per thread: the fastest of what was tried on an H200
TILE = 256

_binaries: dict[tuple[Any, ...], Any] = {}


class Form(NamedTuple):
    """Which variant of the kernel `move` a pass needs."""

    rule: Any = layout.STEPPED
    pulls: bool = False
    swings: tuple[bool, bool] = (False, False)
    stochastic: bool = False


class Update(NamedTuple):
    """What an optimizer's own update reads, if the kernel takes the step."""

    grads: Tensor  # addresses; 0 for a tensor without a gradient
    shares: Tensor
    scale: Tensor | None  # GradScaler's
    holes: bool  # whether some gradient is missing


def launch(kernel: Any, blocks: int, args: tuple[Any, ...], constants: dict[str, Any], warps: int) -> None:
    """Launch a kernel, whose constants come last and in this order.

    Triton binds and specialises some thirty arguments anew at every launch, and compares every constant of the module,
    which takes longer than the pass of many a model. The binary is kept, by all that it depends on: the constants, and
    the dtype and alignment of every argument.
    """
    device = args[0].device
    kinds = [
        (x.dtype, x.data_ptr() % 16 == 0)
        if isinstance(x, Tensor)
        else (x.bit_length() > 31, x % 16 == 0, x == 1)
        for x in args
    ]  # fmt: skip
    key = (kernel, device, warps, *constants.values(), *kinds)
    found = _binaries.get(key)
    here = device.type != "cuda" or device.index == torch.cuda.current_device()
    if not here:
        with torch.cuda.device(device):
            launch(kernel, blocks, args, constants, warps)
    # No line follows a launch: an interrupted caller can tell whether it took place.
    elif found is not None:
        found[(blocks, 1, 1)](*args, *constants.values())
    else:
        _binaries[key] = kernel[(blocks,)](*args, **constants, num_warps=warps)  # the interpreter has none


def look(numbers: Numbers, count: Tensor) -> None:
    """Find the numbers of the coming step, if they are not the same at every step."""
    if numbers.varies:
        none = numbers.rows
        args = (count, numbers.plans, numbers.laws, none, numbers.current, none, 0, none, none, none, none, none)
        launch(kernels.look, 1, args, _look_constants(numbers, columns=0, rule=layout.STEPPED, keep=False), 1)


def look_and_count(
    numbers: Numbers, count: Tensor, table: Table, rule: Any, *,
    hyper: Tensor, rates: Tensor, update: Update, keep: Tensor | None,
) -> None:  # fmt: skip
    """Find the numbers of the step, and every tensor's share of its optimizer group's; then count the step."""
    tensors = len(table.w1)
    args = (
        count, numbers.plans, numbers.laws, numbers.rows, numbers.current, table.rows, tensors, hyper, rates,
        update.shares, hyper if keep is None else keep, update.grads,
    )  # fmt: skip
    constants = _look_constants(numbers, columns=table.columns, rule=rule, keep=keep is not None)
    launch(kernels.look, 1 + -(-tensors // TILE), args, constants, 4)


def _look_constants(numbers: Numbers, *, columns: int, rule: Any, keep: bool) -> dict[str, Any]:
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
    form: Form = Form(),  # noqa: B008  # a constant
    *,
    keep: Tensor | None,
    count: Tensor,
    copy: Tensor | None = None,
    update: Update | None = None,
) -> None:
    """Move everything, unless `keep` is 0."""
    if not table.blocks:
        return
    none = table.rows
    grads, shares, scale, holes = (none, none, None, False) if update is None else update
    args = (
        table.rows, table.map, numbers.current, 0 if copy is None else copy.data_ptr(), grads, shares,
        none if keep is None else keep.to(table.device, non_blocking=True), none if scale is None else scale, count,
    )  # fmt: skip
    constants = {
        "COLUMNS": table.columns,
        "KINDS": table.kinds,
        "AVERAGES": table.averages,
        "RULE": form.rule.value,
        "PULLS": form.pulls,
        "SWING1": form.swings[0],
        "SWING2": form.swings[1],
        "RESTS": numbers.rests or table.gaps,
        "KEEP": keep is not None,
        "SCALED": scale is not None,
        "HOLES": holes,
        "STOCHASTIC": form.stochastic,
        "MAPPED": table.mapped,
        "BLOCK": table.block,
    }
    launch(kernels.move, table.blocks, args, constants, WARPS)
    if form.pulls or update is not None:
        increment_version(table.w1)  # so that autograd notices the write, as it notices torch's own


def copy(table: Table, to: Tensor) -> None:
    """Copy all of w1."""
    if table.blocks:
        launch(kernels.copy, table.blocks, (table.rows, table.map, to.data_ptr()), _shape(table), WARPS)


def exchange_table(pairs: Sequence[tuple[Tensor, Tensor]]) -> Table:
    """Make the table for tensors that trade places with others of their dtype."""
    return Table([x for x, _ in pairs], [[Follower(y, None, None, 0)] for _, y in pairs])


def exchange(table: Table) -> Any:
    """Let the tensors of such a table trade their contents; what is returned means nothing."""
    if table.blocks:
        increment_version(table.w1)
        launch(kernels.exchange, table.blocks, (table.rows, table.map), _shape(table), WARPS)


def _shape(table: Table) -> dict[str, Any]:
    return {"COLUMNS": table.columns, "KINDS": table.kinds, "BLOCK": table.block}
