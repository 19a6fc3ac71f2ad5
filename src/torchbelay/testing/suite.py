"""One contract suite for any model and any optimizer: run it on your own before a long training.

It needs no test framework: `check(...)` raises a `ContractError` that says what does not hold, or returns a `Report`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import nn

from torchbelay.belay.options import OptionArguments
from torchbelay.physics.spring import Spring

from .bench import Averaging, Batch, Bench, Loss, Skip, mean_square
from .comparison import Violation
from .contracts import CONTRACTS
from .isolation import isolated

DEFAULT = Spring(k=1.0, m1=10.0, m2=20.0)


class ContractError(AssertionError):
    """The contracts that do not hold, one per line."""


@dataclass(frozen=True)
class Report:
    """The contracts that hold, and those that could not be checked, with the reason.

    >>> print(Report(passed=("one",), skipped={"two": "a reason"}))
      ok  one
      --  two: a reason
    """

    passed: tuple[str, ...]
    skipped: Mapping[str, str]

    def __str__(self) -> str:
        skipped = [f"  --  {name}: {why}" for name, why in self.skipped.items()]
        return "\n".join([*(f"  ok  {name}" for name in self.passed), *skipped])


def check(
    model_factory: Callable[[], nn.Module],
    optimizer_factory: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    batch: Batch | Callable[[int], Batch],
    loss: Loss | None = None,
    method: Averaging = DEFAULT,
    steps: int = 6,
    closure: bool = False,
    **options: Unpack[OptionArguments],
) -> Report:
    """Check on a model and an optimizer of yours all that `Belay` promises; raise `ContractError` if any fails.

    Args:
        model_factory: makes a new model, wrapped or not, at each call.
        optimizer_factory: makes the optimizer of such a model.
        batch: the batch that the loss gets; a function of the step (from 0), or one batch for all steps.
        loss: (model, batch) -> a number to minimise. By default the mean square of what the model returns, when called
            with the batch (with `*batch` for a tuple, `**batch` for a dict), or its `.loss` if it has one.
        method: as for `Belay`.
        steps: the length of each of a dozen short trainings.
        closure: let the optimizer evaluate the loss itself, as LBFGS needs.
        **options: as for `Belay`.

    Randomness (dropout, for instance) is seeded before every step; your own generators are restored afterwards. Some
    contracts need a training that repeats itself bit for bit. If yours does not, they are skipped, and the report says
    so.

    >>> report = check(
    ...     lambda: nn.Linear(3, 1),
    ...     lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    ...     batch=lambda step: torch.linspace(-1, step, 12).reshape(4, 3),
    ... )
    >>> report.skipped
    {}
    >>> print(report)
      ok  every step is the linear map
      ...
    """
    if steps < 2:
        raise ValueError(f"steps={steps!r}: a training that is stopped half-way needs at least 2")
    batches = batch if callable(batch) else lambda step: batch
    with isolated():
        bench = Bench(model_factory, optimizer_factory, batches, loss or mean_square, method, steps, closure, options)
        bench.look()
        passed: list[str] = []
        skipped: dict[str, str] = {}
        broken: dict[str, str] = {}
        cause: Exception | None = None
        for name, contract in CONTRACTS.items():
            try:
                contract(bench)
            except Skip as why:
                skipped[name] = str(why)
            except Exception as why:
                broken[name] = str(why) if isinstance(why, Violation) else f"raised {type(why).__name__}: {why}"
                cause = cause or why
                bench.forget_example()
            else:
                passed.append(name)
    if broken:
        lines = "\n".join(f"  {name}: {why}" for name, why in broken.items())
        raise ContractError(f"{len(broken)} of {len(CONTRACTS)} contracts do not hold:\n{lines}") from cause
    return Report(tuple(passed), skipped)
