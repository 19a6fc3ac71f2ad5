"""diffusers' `EMAModel` with one import changed: the same class, arguments and checkpoints."""

import os
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn

from . import tensors
from .tensors import Device

Parameters = Iterable[Tensor]

_CURE = "give the parameters that the average was made of"

_NUMBERS = {  # of a state dict, and what they may be
    "decay": (float, int),
    "min_decay": (float, int),
    "optimization_step": (int,),
    "update_after_step": (int,),
    "use_ema_warmup": (bool,),
    "inv_gamma": (float, int),
    "power": (float, int),
}


class EMAModel:
    """Keeps an exponential moving average of parameters, as the class of this name in `diffusers.training_utils` does.

    Arguments, attributes and `state_dict` are diffusers', and checkpoints of either class load into the other, also
    those of `save_pretrained`. Call `step(model.parameters())` after every optimizer step. Step t has the decay

        s = t − update_after_step − 1
        s ≤ 0    0: the average is a copy of the weights
        s > 0    (1 + s)/(10 + s), or with `use_ema_warmup` 1 − (1 + s/inv_gamma)^(−power),
                 but at most `decay` and at least `min_decay`

    Parameters without `requires_grad` are copied at every step. `model_cls` and `model_config` are for
    `save_pretrained`.

    It differs from diffusers' class in this:

    - The average of 16-bit weights is float32, because at decay 0.999 a bfloat16 average hardly moves. `copy_to` rounds
      it to the parameters' dtype. `to(dtype=…)` makes it 16-bit if you ask for it.
    - Tensors move together with either value of `foreach`, in one interpolation; results differ from diffusers' in
      the last bits.
    - Averages may be on another device than the parameters: each step brings the weights there.
    - A list with another number of tensors, or with other shapes, is refused before anything moves. diffusers leaves
      out the rest of the longer list, and broadcasts what it can.
    - A state dict is checked before anything changes: its averages must have the shapes of those that they replace, and
      take their dtype. An average of no tensors takes any.

    >>> weight = nn.Parameter(torch.zeros(1))
    >>> ema = EMAModel([weight], decay=0.75, min_decay=0.75)
    >>> for value in (0.0, 4.0):
    ...     _ = nn.init.constant_(weight, value)
    ...     ema.step([weight])
    >>> ema.shadow_params, ema.cur_decay_value
    ([tensor([1.])], 0.75)
    """

    def __init__(
        self,
        parameters: Parameters | nn.Module,
        decay: float = 0.9999,
        min_decay: float = 0.0,
        update_after_step: int = 0,
        use_ema_warmup: bool = False,
        inv_gamma: float = 1.0,
        power: float = 2 / 3,
        foreach: bool = False,
        model_cls: Any = None,
        model_config: Any = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(parameters, nn.Module):
            use_ema_warmup = True  # as diffusers does, for code that is older than the argument
        if kwargs.get("max_value") is not None:
            decay = _outdated("max_value", kwargs["max_value"], "decay")
        if kwargs.get("min_value") is not None:
            min_decay = _outdated("min_value", kwargs["min_value"], "min_decay")
        self.decay = tensors.check_decay("decay", decay)
        self.min_decay = tensors.check_decay("min_decay", min_decay)
        self.update_after_step = update_after_step
        self.use_ema_warmup = use_ema_warmup
        self.inv_gamma = inv_gamma
        self.power = power
        self.foreach = foreach
        self.model_cls = model_cls
        self.model_config = model_config
        self.optimization_step = 0
        self.cur_decay_value: float | None = None
        self.temp_stored_params: list[Tensor] | None = None
        self.shadow_params = tensors.start(_listed(parameters))
        if kwargs.get("device") is not None:
            self.to(device=_outdated("device", kwargs["device"], "to()"))

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], model_cls: Any, foreach: bool = False) -> Self:
        """Load what `save_pretrained` wrote. `model_cls` is the class of the model, such as `UNet2DModel`."""
        config = model_cls.load_config(path)
        model = model_cls.from_pretrained(path)
        average = cls(model.parameters(), model_cls=model_cls, model_config=model.config, foreach=foreach)
        average.load_state_dict({name: config[name] for name in _NUMBERS if name in config})
        return average

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """Write the average as a model of `model_cls`, with the numbers of this class in its configuration."""
        for name in ("model_cls", "model_config"):
            if getattr(self, name) is None:
                raise ValueError(f"{name}=None, and save_pretrained() needs it; give it to the constructor")
        model = self.model_cls.from_config(self.model_config)
        model.register_to_config(**{name: getattr(self, name) for name in _NUMBERS})
        self.copy_to(model.parameters())
        model.save_pretrained(path)

    def get_decay(self, optimization_step: int) -> float:
        """Return the decay of a step."""
        step = max(0, optimization_step - self.update_after_step - 1)
        if step == 0:
            return 0.0
        warm = 1 - (1 + step / self.inv_gamma) ** -self.power if self.use_ema_warmup else (1 + step) / (10 + step)
        return max(min(warm, self.decay), self.min_decay)

    @torch.no_grad()
    def step(self, parameters: Parameters | nn.Module) -> None:
        """Move the average by 1 − decay of its way to the parameters, and copy those without `requires_grad`."""
        weights = _listed(parameters)
        tensors.check_count("parameters", len(weights), len(self.shadow_params), _CURE)
        decay = self.get_decay(self.optimization_step + 1)
        with _gathered(weights):
            tensors.check_shapes("parameters", weights, self.shadow_params, _CURE)
            trained = [w.requires_grad for w in weights]
            (averages, weights), (frozen, sources) = tensors.part(self.shadow_params, weights, trained)
            tensors.follow_(averages, weights, 1 - decay)
            tensors.copy_(frozen, sources)
        self.optimization_step += 1
        self.cur_decay_value = decay

    def copy_to(self, parameters: Parameters) -> None:
        """Overwrite the parameters with the average."""
        weights = _listed(parameters)
        tensors.check_alike("parameters", weights, self.shadow_params, _CURE)
        tensors.copy_(weights, self.shadow_params)

    def store(self, parameters: Parameters) -> None:
        """Keep a copy of the parameters in host memory, for `restore`. They may be any tensors."""
        self.temp_stored_params = [p.detach().to("cpu", copy=True) for p in parameters]

    def restore(self, parameters: Parameters) -> None:
        """Overwrite the parameters with what `store` kept, and drop that."""
        if self.temp_stored_params is None:
            raise RuntimeError("restore() has nothing to restore; call store() first")
        weights, stored, cure = list(parameters), self.temp_stored_params, "give those that were stored"
        tensors.check_count("parameters", len(weights), len(stored), cure)
        tensors.check_shapes("parameters", weights, stored, cure, "what was stored")
        tensors.copy_(weights, self.temp_stored_params)
        self.temp_stored_params = None

    def pin_memory(self) -> None:
        """Move the average to pinned host memory, from which copies to a GPU need not wait."""
        self.shadow_params = [p.pin_memory() for p in self.shadow_params]

    def to(self, device: Device = None, dtype: torch.dtype | None = None, non_blocking: bool = False) -> None:
        """Move the average to a device or a dtype. Integers keep their dtype."""
        self.shadow_params = tensors.relocated(self.shadow_params, device, dtype, non_blocking)

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Its tensors are the average itself, not copies."""
        return {**{name: getattr(self, name) for name in _NUMBERS}, "shadow_params": self.shadow_params}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a copy of a state, of this class or diffusers'. What it lacks stays as it is."""
        tensors.check_state(state_dict, "an EMAModel")
        numbers = {name: state_dict[name] for name in _NUMBERS if name in state_dict}
        for name, value in numbers.items():
            if not isinstance(value, _NUMBERS[name]):
                raise ValueError(f"{name}={value!r} is a {type(value).__name__}; this is another kind of state")
        for name in numbers.keys() & {"decay", "min_decay"}:
            tensors.check_decay(name, numbers[name])
        given = state_dict.get("shadow_params")
        if given is not None:
            tensors.check_list("shadow_params", given)
            like = self.shadow_params or given
            tensors.check_alike("shadow_params", given, like, tensors.OF_THESE)
            self.shadow_params = [g.detach().to(s.dtype, copy=True) for g, s in zip(given, like, strict=True)]
        vars(self).update(numbers)


def _listed(parameters: Parameters | nn.Module) -> list[Tensor]:
    if isinstance(parameters, nn.Module):
        return list(_outdated("a module", parameters, "its parameters()").parameters())
    return list(parameters)


def _outdated(name: str, value: Any, better: str) -> Any:
    """Take what diffusers still takes, with the warning that diffusers gives."""
    warnings.warn(f"{name} is deprecated in diffusers; give {better} instead", FutureWarning, stacklevel=3)
    return value


def _gathered(weights: list[Tensor]) -> AbstractContextManager[Any]:
    """Under DeepSpeed's ZeRO-3 a rank holds a part of each parameter: gather the whole ones for a step."""
    if weights and hasattr(weights[0], "ds_id"):
        gather: Callable[..., AbstractContextManager[Any]] = sys.modules["deepspeed"].zero.GatheredParameters
        return gather(weights, modifier_rank=None)
    return nullcontext()
