"""`torch_ema` with one import changed: the same class, arguments and checkpoints."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from . import tensors
from .tensors import Device

Parameters = Iterable[Tensor]

_STATE = ("decay", "num_updates", "shadow_params", "collected_params")


class _Reference:
    """A reference that keeps no parameter alive. A deep copy refers to the same parameter, a pickled one to none."""

    def __init__(self, parameter: Tensor | None = None) -> None:
        self.find: Callable[[], Tensor | None] = weakref.ref(parameter) if parameter is not None else _nothing

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


def _nothing() -> None:
    return None


class ExponentialMovingAverage:
    """Keeps an exponential moving average of parameters, as the class of this name in torch-ema does.

    Arguments, attributes and `state_dict` are torch-ema's, and checkpoints of either class load into the other.

        parameters         any tensors; all are averaged, also those without `requires_grad`. No reference is kept that
                           would keep them alive
        decay              from 0 (the average is a copy) to 1 (it stands still)
        use_num_updates    lower the decay of update t to at most (1 + t)/(10 + t)

    Every method takes parameters of the same shapes, of this model or another; by default those given here.

    It differs from torch-ema's class in this:

    - The average of 16-bit weights is float32, because at decay 0.999 a bfloat16 average hardly moves. `copy_to` rounds
      it to the parameters' dtype. `to(dtype=…)` makes it 16-bit if you ask for it.
    - Integer and boolean tensors are copied; torch-ema fails on them.
    - Averages may be on another device than the parameters.
    - It can be pickled. What is unpickled has no parameters of its own: give them to each method.
    - Parameters of other shapes are refused before anything moves; torch-ema broadcasts what it can.
    - A state dict is checked before anything changes.

    >>> weight = torch.zeros(1)
    >>> ema = ExponentialMovingAverage([weight], decay=0.75, use_num_updates=False)
    >>> _ = weight.fill_(4.0)
    >>> ema.update()
    >>> with ema.average_parameters():
    ...     print(weight)
    tensor([1.])
    >>> weight
    tensor([4.])
    """

    decay: float
    num_updates: int | None
    shadow_params: list[Tensor]
    collected_params: list[Tensor] | None

    def __init__(self, parameters: Parameters, decay: float, use_num_updates: bool = True) -> None:
        self.decay = tensors.check_decay("decay", decay)
        self.num_updates = 0 if use_num_updates else None
        parameters = list(parameters)
        self.shadow_params = tensors.start(parameters)
        self.collected_params = None
        self._params_refs = [_Reference(p) for p in parameters]

    def update(self, parameters: Parameters | None = None) -> None:
        """Move the average by 1 − decay of its way to the parameters. Call it after `optimizer.step()`."""
        weights = self._given(parameters)
        decay, count = self.decay, self.num_updates
        if count is not None:
            count += 1
            decay = min(decay, (1 + count) / (10 + count))
        tensors.follow_(self.shadow_params, weights, 1.0 - decay)
        self.num_updates = count

    def copy_to(self, parameters: Parameters | None = None) -> None:
        """Overwrite the parameters with the average."""
        tensors.copy_(self._given(parameters), self.shadow_params)

    def store(self, parameters: Parameters | None = None) -> None:
        """Keep a copy of the parameters, for `restore`."""
        self.collected_params = [p.detach().clone() for p in self._given(parameters)]

    def restore(self, parameters: Parameters | None = None) -> None:
        """Overwrite the parameters with what `store` kept. It is kept on, so that this can be done again."""
        if self.collected_params is None:
            raise RuntimeError("restore() has nothing to restore; call store() first")
        tensors.copy_(self._given(parameters), self.collected_params)

    @contextmanager
    def average_parameters(self, parameters: Parameters | None = None) -> Iterator[None]:
        """Let the parameters be the average inside a `with` block, and what they were after it."""
        weights = self._given(parameters)
        self.store(weights)
        self.copy_to(weights)
        try:
            yield
        finally:
            self.restore(weights)

    def to(self, device: Device = None, dtype: torch.dtype | None = None) -> None:
        """Move the average, and what `store` kept, to a device or a dtype. Integers keep their dtype."""
        self.shadow_params = tensors.relocated(self.shadow_params, device, dtype)
        if self.collected_params is not None:
            self.collected_params = tensors.relocated(self.collected_params, device, dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Its tensors are the average itself, not copies."""
        return {
            "decay": self.decay,
            "num_updates": self.num_updates,
            "shadow_params": self.shadow_params,
            "collected_params": self.collected_params,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a copy of a state, of this class or torch-ema's, on the devices of the parameters if they exist."""
        tensors.check_state(state_dict, "an ExponentialMovingAverage")
        if missing := [name for name in _STATE if name not in state_dict]:
            raise ValueError(
                f"state_dict lacks {', '.join(map(repr, missing))}; give what state_dict() of an "
                "ExponentialMovingAverage returned"
            )
        decay, count = tensors.check_decay("decay", state_dict["decay"]), state_dict["num_updates"]
        if count is not None and not isinstance(count, int):
            raise ValueError(f"num_updates={count!r} must be a whole number or None; this is another kind of state")
        shadow, stored = state_dict["shadow_params"], state_dict["collected_params"]
        for name, given in (("shadow_params", shadow), ("collected_params", stored)):
            if given is None and name == "collected_params":
                continue
            tensors.check_list(name, given)
            tensors.check_alike(name, given, self.shadow_params, tensors.OF_THESE)
        own = [ref.find() for ref in self._params_refs]
        like = [s if p is None else p for s, p in zip(shadow, own, strict=True)]
        self.decay, self.num_updates = decay, count
        self.shadow_params = [
            s.detach().to(p.device, tensors.wide(p.dtype), copy=True) for s, p in zip(shadow, like, strict=True)
        ]
        self.collected_params = stored and [
            s.detach().to(p.device, p.dtype, copy=True) for s, p in zip(stored, like, strict=True)
        ]

    def _given(self, parameters: Parameters | None) -> list[Tensor]:
        """Return the parameters given, or those that this average was made of; refuse other shapes."""
        weights = self._own() if parameters is None else list(parameters)
        tensors.check_alike("parameters", weights, self.shadow_params, "give some like those that were averaged")
        return weights

    def _own(self) -> list[Tensor]:
        own = [p for ref in self._params_refs if (p := ref.find()) is not None]
        if len(own) < len(self._params_refs):
            raise ValueError(
                "parameters=None stands for the parameters that this average was made of, and some of them no longer "
                "exist; give parameters, or keep their model alive"
            )
        return own
