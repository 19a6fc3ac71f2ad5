"""The rarer settings of a Belay, checked once."""

from dataclasses import dataclass
from typing import Literal, TypedDict

import torch

from torchbelay.ops.backend import check
from torchbelay.physics import arguments

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Buffers = Literal["copy", "average", "ignore"]
Rounding = Literal["nearest", "stochastic"]
OnNonfinite = Literal["ignore", "skip", "raise"]


class OptionArguments(TypedDict, total=False):
    """The keyword arguments that `Belay` passes on to `Options`."""

    dtype: torch.dtype | None
    buffers: Buffers
    every: int
    start: int
    impl: str
    rounding: Rounding
    on_nonfinite: OnNonfinite
    device: Literal["cpu"] | None


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
        on_nonfinite: what to do when an averaged weight is nan or inf after the optimizer's step. "ignore": nothing is
            looked at. "skip": for the averages the step has not been: none of them moves, none pulls, and it is not
            counted; the weights stay as the optimizer left them. "raise": the same, and a FloatingPointError names the
            first bad parameter. Either reads the weights once more at every coupling, keeps a copy of an average that
            moves before the step, has optimizers of `torchbelay.optim` step on their own, and, where weights are
            sharded, has the ranks agree on one number; "raise" waits for the device. Averages then begin, at
            construction, `start` or `reset()`, at finite weights only.
        device: None: averages are where their parameters are. "cpu": in host memory (pinned, for a GPU), for averages
            that only watch. On a GPU they are copied there and back, piece by piece, beside the next forward and
            backward; whoever writes to weights by hand between two steps must synchronise first.

    >>> Options(every=4).impl
    'auto'
    """

    dtype: torch.dtype | None = None
    buffers: Buffers = "copy"
    every: int = 1
    start: int = 0
    impl: str = "auto"
    rounding: Rounding = "nearest"
    on_nonfinite: OnNonfinite = "ignore"
    device: Literal["cpu"] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (None, *DTYPES):
            raise ValueError(f"dtype={self.dtype!r} cannot hold an average; use one of {', '.join(map(str, DTYPES))}")
        arguments.one_of("buffers", self.buffers, ("copy", "average", "ignore"))
        arguments.whole("every", self.every, low=1)
        arguments.whole("start", self.start, low=0)
        check(self.impl)
        arguments.one_of("rounding", self.rounding, ("nearest", "stochastic"))
        arguments.one_of("on_nonfinite", self.on_nonfinite, ("ignore", "skip", "raise"))
        if self.device not in (None, "cpu"):
            raise ValueError(
                f"device={self.device!r} is unknown; use None, where averages are with their parameters, or 'cpu'"
            )

    @property
    def hosted(self) -> bool:
        """Whether averages are kept in host memory."""
        return self.device is not None

    def saved(self) -> dict[str, int | str]:
        """What a checkpoint must agree about."""
        return {"every": self.every, "start": self.start, "buffers": self.buffers}
