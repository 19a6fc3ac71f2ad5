"""The rarer settings of a Belay, checked when it is constructed."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, Self, TypedDict

import torch

from torchbelay.ops.backend import check
from torchbelay.physics import arguments

from .planes import check_bits
from .team import Team

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Bits = Literal[24]
Buffers = Literal["copy", "average", "ignore"]
Rounding = Literal["nearest", "stochastic"]
OnNonfinite = Literal["ignore", "skip", "raise"]


def check_dtype(dtype: object) -> None:
    """Refuse what cannot be the dtype of an average."""
    if dtype not in (None, *DTYPES):
        raise ValueError(f"dtype={dtype!r} cannot hold an average; use one of {', '.join(map(str, DTYPES))}")


class OptionArguments(TypedDict, total=False):
    """The keyword arguments that `Belay` passes on to `Options`."""

    dtype: torch.dtype | None
    bits: Bits | None
    buffers: Buffers
    every: int
    start: int
    impl: str
    rounding: Rounding
    on_nonfinite: OnNonfinite
    device: str | torch.device | None
    keep_initial: bool
    workers: Any


class Kept(TypedDict):
    """The options that every average has of its own."""

    bits: int | None
    home: torch.device | None
    every: int
    workers: int


@dataclass(frozen=True)
class Options:
    """How averages are kept and moved.

    Args:
        dtype: of the averages. None: float32 for float32, bfloat16 and float16 weights, else the weights' own.
        bits: 24: averages of float32, bfloat16 and float16 weights are the upper 24 bits of a float32, in 3 bytes per
            weight, rounded at random so that their mean is right (see `docs/memory.md`). Velocities, averaged buffers
            and initial weights stay float32. Not together with `dtype`; `module()` and `tensors()` refuse it.
        buffers: the buffers (such as BatchNorm's statistics) that go with the average. "copy": the model's own, until
            `torch.optim.swa_utils.update_bn` is run inside `averaged()`; that result is kept until the next step.
            "average": averaged in float32 or wider, as weights are, each by the method that `method` returns for its
            name (at the learning rate of the first optimizer's first group); integers, and those for which it returns
            None, are copied. A buffer is never pulled. "ignore": model and average share them.
        every: couple at every N-th step only, as strongly as N steps would.
        start: begin the averages after N steps of their optimizer, as copies of the weights at that step; 0: at
            construction.
        impl: "foreach", "triton" or "reference"; "auto" is the fastest one that runs on the weights' device.
        rounding: how to round bfloat16 weights that the average pulls. "nearest"; or "stochastic": up or down at
            random, so that the mean is right and a pull smaller than a bit still counts. Only Triton kernels do that.
        on_nonfinite: what to do if an averaged weight is nan or inf after the optimizer's step. "ignore": the weights
            are not looked at. "skip": averages ignore the step, it is not counted, and the weights stay as the
            optimizer left them. "raise": the same, and a FloatingPointError names the first bad parameter.
            Costs of "skip" and "raise": the weights are read once more at every coupling; optimizers of
            `torchbelay.optim` do not take the averages along; sharded models exchange one number; "raise" waits for
            the device. Averages begin (at construction, `start` or `reset()`) at finite weights only.
        device: None: averages are beside their parameters. Any other device, for averages that only watch: they are
            kept there, as "cpu" (pinned host memory, for weights on a GPU) or "cuda:1"; averaged buffers stay beside
            the model's. Averages are copied to the weights' device and back, piece by piece; on a GPU beside the next
            forward and backward, and code that writes to weights by hand between two steps must synchronise first.
        keep_initial: keep a copy of the weights at which the averages began, per parameter, in the dtype of the
            averages and beside them. Readouts such as `torchbelay.readouts.bema` need it.
        workers: a process group, or a DeviceMesh of one dimension. Each of its ranks is a worker that trains weights of
            its own, without exchanging gradients, and all share one average: each hangs on it by a spring
            (`methods.easgd`, `belay`), or their mean takes the place of the weights at a sync (`methods.diloco`,
            `lookahead`). One sum over all workers per sync; see docs/workers.md.

    >>> Options(every=4).impl
    'auto'
    """

    dtype: torch.dtype | None = None
    bits: Bits | None = None
    buffers: Buffers = "copy"
    every: int = 1
    start: int = 0
    impl: str = "auto"
    rounding: Rounding = "nearest"
    on_nonfinite: OnNonfinite = "ignore"
    device: str | torch.device | None = None
    keep_initial: bool = False
    workers: Any = None

    @classmethod
    def given(cls, options: OptionArguments) -> Self:
        """Return the options that `Belay` was given by name; a name that it does not have is refused.

        >>> Options.given({"every": 4}).every
        4
        """
        known = [each.name for each in fields(cls)]
        for name, value in options.items():
            if name not in known:
                raise TypeError(
                    f"{name}={value!r} is not an option of Belay; choose from {', '.join(known)}. What belongs to a "
                    "method is given to the method, as the decay in methods.ema(0.999)"
                )
        return cls(**options)

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        check_bits(self.bits, self.dtype)
        arguments.one_of("buffers", self.buffers, ("copy", "average", "ignore"))
        arguments.whole("every", self.every, low=1)
        arguments.whole("start", self.start, low=0)
        check(self.impl)
        arguments.one_of("rounding", self.rounding, ("nearest", "stochastic"))
        arguments.one_of("on_nonfinite", self.on_nonfinite, ("ignore", "skip", "raise"))
        if self.home is not None and self.home.type == "meta":
            raise ValueError(
                "device='meta' holds no numbers; use None, for averages beside their parameters, or a real device"
            )

        if not isinstance(self.keep_initial, bool):
            raise TypeError(f"keep_initial={self.keep_initial!r} is neither True nor False")
        if self.team is not None:
            self._check_with_workers()

    @property
    def number_of_workers(self) -> int:
        """The workers that share the average."""
        return 1 if self.team is None else self.team.count

    @property
    def kept(self) -> Kept:
        """Return what an average must know: where and how it is kept, how often it moves, for how many workers."""
        return {"home": self.home, "every": self.every, "workers": self.number_of_workers, "bits": self.bits}

    @cached_property
    def team(self) -> Team | None:
        """The workers that share the average; None if there is one alone."""
        return None if self.workers is None else Team(self.workers)

    @cached_property
    def home(self) -> torch.device | None:
        """The device that averages are kept on, with its number; None if they are beside their parameters."""
        if self.device is None:
            return None
        if not isinstance(self.device, str | torch.device):
            raise TypeError(f"device={self.device!r} is not a device; give its name, as 'cpu' or 'cuda:1', or None")
        try:
            return torch.empty(0, device=self.device).device
        except (RuntimeError, AssertionError, NotImplementedError) as problem:
            reason = str(problem).partition("\n")[0]
            raise ValueError(
                f"device={self.device!r} cannot be used here ({reason}); use None, for averages beside their "
                "parameters, or 'cpu'"
            ) from problem

    def _check_with_workers(self) -> None:
        """Refuse options that do not go with workers."""
        apart = (
            "workers that train apart first have no common weights to begin at; make the Belay when they are to begin"
        )
        foreach = "workers are moved by foreach; leave it out"
        reasons = {
            "start": (self.start > 0, apart),
            "buffers": (self.buffers == "average", "buffers are each worker's own; use buffers='copy'"),
            "impl": (self.impl not in ("auto", "foreach"), foreach),
            "rounding": (self.rounding != "nearest", foreach),
            "device": (self.device is not None, "the average pulls the weights; leave it out"),
            "bits": (self.bits is not None, "workers exchange what averages hold in a dtype; leave it out"),
        }
        for name, (holds, why) in reasons.items():
            if holds:
                raise ValueError(f"{name}={getattr(self, name)!r} does not go with workers=: {why}")

    def common(self) -> dict[str, object]:
        """Return the options that workers must have in common."""
        return {**self.saved(), "dtype": self.dtype, "on_nonfinite": self.on_nonfinite}

    def saved(self) -> dict[str, int | str]:
        """Return the options that a checkpoint must agree about; the rare ones and `workers` only if they are on."""
        workers: dict[str, int | str] = {} if self.team is None else {"workers": self.team.count}
        return {"every": self.every, "start": self.start, "buffers": self.buffers, **self._rare(), **workers}

    def _rare(self) -> dict[str, int]:
        """Return the options that change which tensors a checkpoint has, if they are on."""
        kept: dict[str, int] = {"keep_initial": True} if self.keep_initial else {}
        return kept if self.bits is None else kept | {"bits": self.bits}

    def facts(self) -> list[str]:
        """Return these options as names. None of them is also a name without the rare options that are on."""
        kept = "".join(f", {name}={value}" for name, value in self._rare().items())
        return [f"{name}={value}{kept}" for name, value in self.saved().items()]
