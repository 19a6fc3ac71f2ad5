"""The rarer settings of a Belay, checked once."""

from dataclasses import dataclass
from typing import Literal, TypedDict

import torch

from .ops.around import check
from .physics import _check

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Buffers = Literal["copy", "average", "ignore"]
Rounding = Literal["nearest", "stochastic"]


class OptionArguments(TypedDict, total=False):
    """The keyword arguments that `Belay` passes on to `Options`."""

    dtype: torch.dtype | None
    buffers: Buffers
    every: int
    start: int
    impl: str
    rounding: Rounding


@dataclass(frozen=True)
class Options:
    """How the averages are kept.

    Args:
        dtype: of the averages. None: float32 for float32, bfloat16 and float16 weights, else the weights' own.
        buffers: what the average has for buffers (BatchNorm's statistics, say). "copy": the model's own, until
            `torch.optim.swa_utils.update_bn` is run inside `averaged()`, whose result it keeps until the next step;
            "average": averaged like weights, integers copied; "ignore": model and average share them.
        every: couple at every N-th step only, as strongly as N steps would.
        start: let the averages begin after this many steps, as copies of the weights then; 0: at construction.
        impl: "foreach", "triton" or "reference"; "auto" is the fastest that runs where the weights are.
        rounding: of bfloat16 weights that the average pulls. "nearest"; or "stochastic", up or down by chance so that
            the mean is right and a pull too small for a bit still counts. That is done by the Triton kernels alone.

    >>> Options(every=4).impl
    'auto'
    """

    dtype: torch.dtype | None = None
    buffers: Buffers = "copy"
    every: int = 1
    start: int = 0
    impl: str = "auto"
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        if self.dtype not in (None, *DTYPES):
            raise ValueError(f"dtype={self.dtype!r} cannot hold an average; use one of {', '.join(map(str, DTYPES))}")
        _check.one_of("buffers", self.buffers, ("copy", "average", "ignore"))
        _check.whole("every", self.every, low=1)
        _check.whole("start", self.start, low=0)
        check(self.impl)
        _check.one_of("rounding", self.rounding, ("nearest", "stochastic"))

    def saved(self) -> dict[str, int | str]:
        """What a checkpoint must agree about."""
        return {"every": self.every, "start": self.start, "buffers": self.buffers}
