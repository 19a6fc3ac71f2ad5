"""`torch.optim.swa_utils` with one import changed: the same names, arguments and checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.optim.swa_utils import SWALR, update_bn

from torchbelay.ops.step import Tensors

from . import tensors
from .fractions import Fractions
from .tensors import follow_

__all__ = [
    "SWALR",
    "AveragedModel",
    "get_ema_avg_fn",
    "get_ema_multi_avg_fn",
    "get_swa_avg_fn",
    "get_swa_multi_avg_fn",
    "update_bn",
]

AverageOne = Callable[[Tensor, Tensor, Tensor | int], Tensor]
AverageMany = Callable[[Tensors, Tensors, Tensor | int], None]

_kind = attrgetter("device", "dtype")


# Classes, because torch's closures cannot be pickled -----------------------------------------------------------------


class _Many:
    """Moves lists of averages by a share of their way to the weights."""

    def share(self, count: Tensor | int) -> float:
        raise NotImplementedError

    def __call__(self, averages: Tensors, weights: Tensors, count: Tensor | int) -> None:
        follow_(averages, weights, self.share(count))


@dataclass(frozen=True)
class _EMA:
    decay: float

    def __post_init__(self) -> None:
        tensors.check_decay("decay", self.decay)


class _ManyEMA(_EMA, _Many):
    def share(self, count: Tensor | int) -> float:
        return 1 - self.decay


class _ManySWA(_Many):
    def share(self, count: Tensor | int) -> float:
        return 1 / (int(count) + 1)


class _OneEMA(_EMA):
    def share(self, count: int) -> float:
        return 1 - self.decay

    @torch.no_grad()
    def __call__(self, average: Tensor, weight: Tensor, count: Tensor | int) -> Tensor:
        return self.decay * average + (1 - self.decay) * weight


class _OneSWA:
    def share(self, count: int) -> float:
        return 1 / (count + 1)

    @torch.no_grad()
    def __call__(self, average: Tensor, weight: Tensor, count: Tensor | int) -> Tensor:
        return average + (weight - average) / (count + 1)


def get_ema_multi_avg_fn(decay: float = 0.999) -> AverageMany:
    """Return the function that moves lists of averages by `w2' = decay·w2 + (1 − decay)·w1`, in place.

    >>> averages = [torch.tensor([0.0])]
    >>> get_ema_multi_avg_fn(0.75)(averages, [torch.tensor([4.0])], 1)
    >>> averages
    [tensor([1.])]
    """
    return _ManyEMA(decay)


def get_ema_avg_fn(decay: float = 0.999) -> AverageOne:
    """Return the function that computes `decay·w2 + (1 − decay)·w1` for one tensor.

    >>> get_ema_avg_fn(0.75)(torch.tensor([0.0]), torch.tensor([4.0]), 1)
    tensor([1.])
    """
    return _OneEMA(decay)


def get_swa_multi_avg_fn() -> AverageMany:
    """Return the function that adds weights to equal means of `count` earlier ones, for lists of tensors in place.

    >>> averages = [torch.tensor([0.0])]
    >>> get_swa_multi_avg_fn()(averages, [torch.tensor([4.0])], 3)
    >>> averages
    [tensor([1.])]
    """
    return _ManySWA()


def get_swa_avg_fn() -> AverageOne:
    """Return the function that adds a weight to the equal mean of `count` earlier ones, for one tensor.

    >>> get_swa_avg_fn()(torch.tensor([0.0]), torch.tensor([4.0]), 3)
    tensor([1.])
    """
    return _OneSWA()


class AveragedModel(swa_utils.AveragedModel):
    """Holds an average of a model's weights in `module`, a deep copy of the model, as torch's class of this name does.

    Arguments, attributes and `state_dict` are torch's, and checkpoints of either class load into the other. The first
    `update_parameters(model)` copies the weights; every further one averages them, by default equally (SWA).

        device          where the average is kept; None: with the model
        avg_fn          any function of an average, a weight and `n_averaged` that returns the new average
        multi_avg_fn    any function of lists of averages and weights (of one device and dtype) and `n_averaged`, that
                        moves the averages in place
        use_buffers     average the buffers too; else they are copied at every update

    It differs from torch's class in this:

    - 16-bit weights are averaged in float32, because at decay 0.999 a bfloat16 average hardly moves. `module` holds
      the rounded average, so that it runs as the model does, and `avg_fn` sees float32 tensors. This takes 4 more bytes
      per 16-bit weight. A state dict has the rounded average alone, as torch's: a resumed run begins with that.
    - Integer and boolean tensors are copied, not averaged, and no function sees them. torch lets integer buffers stand
      still, or fails.
    - A model with another number of parameters or buffers, or with other shapes, is refused before anything moves.
      torch broadcasts what it can.
    - The host does not wait for a GPU: it reads `n_averaged` only if somebody has written it.
    - The functions of `get_ema_multi_avg_fn` and its relatives can be pickled.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    >>> for value in (0.0, 4.0, 6.0):
    ...     _ = nn.init.constant_(model.weight, value)
    ...     average.update_parameters(model)
    >>> average.module.weight.item(), int(average.n_averaged)
    (4.0, 3)
    """

    _last_count: tuple[Tensor, int, int] | None = None  # `n_averaged`, its version and its value after the last update
    _fractions: Fractions | None = None

    def update_parameters(self, model: nn.Module) -> None:
        """Add the weights of `model` to the average. It may be any model with parameters of the same shapes."""
        averages: list[Tensor] = list(self.module.parameters())
        weights: list[Tensor] = list(model.parameters())
        copies, sources = list(self.module.buffers()), list(model.buffers())
        cure = "give a model with the parameters and buffers of the first one"
        tensors.check_alike("model.parameters()", weights, averages, cure)
        tensors.check_alike("model.buffers()", sources, copies, cure)
        if self.use_buffers:
            averages, weights, copies, sources = [*averages, *copies], [*weights, *sources], [], []
        count = self._count()
        if count:
            self._average(averages, weights, count)
        else:
            self._fractions = None
            tensors.copy_(averages, weights)
        tensors.copy_(copies, sources)
        self.n_averaged.add_(1)
        if not self.n_averaged.is_inference():
            self._last_count = (self.n_averaged, self.n_averaged._version, count + 1)

    def _count(self) -> int:
        """`n_averaged` as a number. The host waits for a GPU only if the tensor is not as the last update left it."""
        counter, last = self.n_averaged, self._last_count
        if counter.device.type == "cpu" or last is None or counter is not last[0] or counter._version != last[1]:
            return int(counter)
        return last[2]

    def _average(self, averages: list[Tensor], weights: list[Tensor], count: int) -> None:
        """Move the averages, of 16-bit ones their float32 copies, by the function that was given."""
        function = self.multi_avg_fn or self.avg_fn or _ManySWA()
        fractions = self._fractions = self._fractions or Fractions()
        known = _Many if tensors.any_wide(averages) else (_Many, _OneEMA, _OneSWA)
        if isinstance(function, known):  # its share is a number that the host knows
            fractions.follow(averages, weights, function.share(count))
            return
        moving = fractions.widen(averages)
        (moving, weights), (integers, origins) = tensors.part(moving, weights, tensors.are_averaged(moving))
        self._call([a.detach() for a in moving], [w.detach() for w in weights])
        tensors.copy_(integers, origins)
        fractions.round_into(averages)

    def _call(self, averages: list[Tensor], weights: list[Tensor]) -> None:
        """Call `avg_fn` for every tensor, or `multi_avg_fn` for the tensors of every device and dtype."""
        kinds = list(map(_kind, averages))
        if kinds != list(map(_kind, weights)):
            weights = [w.to(device, dtype) for w, (device, dtype) in zip(weights, kinds, strict=True)]
        groups: dict[tuple[torch.device, torch.dtype], tensors.Pair] = {kind: ([], []) for kind in kinds}
        for kind, a, w in zip(kinds, averages, weights, strict=True):
            groups[kind][0].append(a)
            groups[kind][1].append(w)
        for (device, _), (some, ends) in groups.items():
            counter = self.n_averaged.to(device)
            if self.multi_avg_fn is not None:
                self.multi_avg_fn(some, ends, counter)
            elif self.avg_fn is not None:
                for a, w in zip(some, ends, strict=True):
                    a.copy_(self.avg_fn(a, w, counter))
