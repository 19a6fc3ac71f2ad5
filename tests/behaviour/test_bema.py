"""The readout `bema`, against TRL's BEMACallback and against a program written from the paper."""

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchbelay as tb
from helpers.one_class import class_alone
from helpers.small import batch, train, values

STEPS = 24
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-6}


@dataclass(frozen=True)
class Decay:
    """The decays of BEMA's EMA: 1 − (lag + multiplier·t)^(−power) at every `every`-th step, and 1 between."""

    power: float = 0.5
    lag: float = 10.0
    multiplier: float = 1.0
    floor: float = 0.0
    every: int = 1

    def __call__(self, step: int) -> float:
        if step % self.every:
            return 1.0
        return 1 - max(self.floor, (self.lag + self.multiplier * step) ** -self.power)


def ema(**settings: float) -> tb.Method:
    return tb.methods.ema(Decay(**settings))


class Net(nn.Sequential):
    """A model that TRL's callback can make again from its config."""

    def __init__(self, config: dict[str, Any]) -> None:
        torch.manual_seed(config["seed"])
        super().__init__(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        self.to(config["dtype"])
        self.config = config


# Settings of TRL, by its own names, and the method and options that are the same here.
SETTINGS: dict[str, tuple[dict[str, Any], tb.Method, tb.readouts.bema, dict[str, Any]]] = {
    "TRL's defaults, at every step": ({"update_freq": 1}, ema(), tb.readouts.bema(), {}),
    "every third step": ({"update_freq": 3}, ema(every=3), tb.readouts.bema(), {}),
    "all settings": (
        {"ema_power": 0.7, "bias_power": 0.4, "lag": 3, "multiplier": 0.5, "min_ema_multiplier": 0.2, "update_freq": 2},
        ema(power=0.7, lag=3.0, multiplier=0.5, floor=0.2, every=2),
        tb.readouts.bema(bias_power=0.4, lag=3.0, multiplier=0.5),
        {},
    ),
    "after a burn-in": (
        {"update_freq": 2, "update_after": 6, "lag": 4, "multiplier": 2.0},
        ema(lag=4 + 2 * 6, multiplier=2.0, every=2),
        tb.readouts.bema(lag=4 + 2 * 6, multiplier=2.0),
        {"start": 6},
    ),
    "a warm-up that methods.ema has": (
        {"update_freq": 1, "lag": 1, "min_ema_multiplier": 1e-4},
        tb.methods.ema(1 - 1e-4, warmup="inverse-power", power=0.5),
        tb.readouts.bema(lag=1.0),
        {},
    ),
    "no EMA": ({"update_freq": 1, "ema_power": 0.0}, ema(power=0.0), tb.readouts.bema(), {}),
    "no decay of the correction": (
        {"update_freq": 1, "bias_power": 0.0},
        ema(),
        tb.readouts.bema(bias_power=0.0),
        {},
    ),
}
every_setting = pytest.mark.parametrize(("theirs", "method", "readout", "options"), SETTINGS.values(), ids=SETTINGS)
every_dtype = pytest.mark.parametrize("dtype", CLOSE, ids=str)


class Trl:
    """TRL's callback, called as its Trainer calls it."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        anything = dict.fromkeys(("TrainerCallback", "TrainingArguments", "TrainerState", "TrainerControl"), object)
        kind = class_alone(
            "trl",
            "trainer/callbacks.py",
            "BEMACallback",
            torch=torch,
            logger=logging.getLogger("trl"),
            PreTrainedModel=object,
            **anything,
        )
        self.model, self.callback, self.updates = model, kind(**settings), settings["update_freq"]
        self.after = settings.get("update_after", 0)
        self.callback.on_train_begin(None, SimpleNamespace(global_step=0), None, model=model)

    def step(self, step: int) -> dict[str, Tensor] | None:
        """Take a step; return its weights if they have just been updated."""
        self.callback.on_step_end(None, SimpleNamespace(global_step=step), None, model=self.model)
        updated = step > self.after and (step - self.after) % self.updates == 0
        return values(self.callback.running_model) if updated else None


class Paper:
    """The paper's two averages, in float64: μ_EMA' = (1 − β)·μ_EMA + β·θ and μ = μ_EMA + α·(θ − θ0)."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        defaults = {"ema_power": 0.5, "bias_power": 0.2, "lag": 10, "multiplier": 1.0, "min_ema_multiplier": 0.0}
        self.model, self.set = model, SimpleNamespace(**defaults, update_after=0)
        vars(self.set).update(settings)
        self.first = self.ema = self.now()

    def now(self) -> dict[str, Tensor]:
        return {key: t.double() for key, t in values(self.model).items()}

    def step(self, step: int) -> dict[str, Tensor] | None:
        if step <= self.set.update_after:
            self.first = self.ema = self.now()
            return None
        if (step - self.set.update_after) % self.set.update_freq:
            return None
        time, theta = self.set.lag + self.set.multiplier * step, self.now()
        beta, alpha = max(time**-self.set.ema_power, self.set.min_ema_multiplier), time**-self.set.bias_power
        self.ema = {key: t + beta * (theta[key] - t) for key, t in self.ema.items()}
        return {key: t + alpha * (theta[key] - self.first[key]) for key, t in self.ema.items()}


@pytest.mark.parametrize("other", [Trl, Paper], ids=["TRL", "the paper"])
@every_dtype
@every_setting
def test_at_every_update_it_is_the_same_point(
    other: Any, dtype: torch.dtype, theirs: Any, method: Any, readout: Any, options: Any
) -> None:
    model = Net({"seed": 0, "dtype": dtype})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    belay = tb.Belay(model, optimizer, method, keep_initial=True, **options)
    reference = other(model, **theirs)
    compared = 0
    for step in range(1, STEPS + 1):
        train(model, optimizer, 1, first=step)
        wanted = reference.step(step)
        if wanted is None:
            continue
        compared += 1
        found = belay.average_state_dict(readout=readout)
        for key, t in found.items():
            torch.testing.assert_close(t.double(), wanted[key].double(), rtol=0, atol=CLOSE[dtype])
        with belay.averaged(readout=readout), torch.no_grad():
            inside = model(batch(99, dtype))
        again = Net({"seed": 1, "dtype": dtype})
        again.load_state_dict({key: t.to(dtype) for key, t in wanted.items()})
        torch.testing.assert_close(inside, again(batch(99, dtype)).detach(), rtol=0, atol=10 * CLOSE[dtype])
    assert compared == (STEPS - options.get("start", 0)) // theirs["update_freq"]


def test_between_two_updates_it_has_the_present_weights() -> None:
    model = Net({"seed": 0, "dtype": torch.float64})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, ema(every=4), keep_initial=True)
    w0 = values(model)
    train(model, optimizer, 6)
    w1, w2 = values(model), belay.average_state_dict()
    found = belay.average_state_dict(readout=tb.readouts.bema())
    for key, t in found.items():
        torch.testing.assert_close(t, w2[key] + 16**-0.2 * (w1[key] - w0[key]), rtol=0, atol=1e-14)
