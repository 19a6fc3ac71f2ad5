"""torch.distributed.checkpoint makes an optimizer's state by a step that is none; it must not count or pull."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import torchbelay as tb
from helpers.problems import copies, different, everything, same
from helpers.small import BELAY, EMA, WHERE, mlp, train
from torchbelay import optim

MAKERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.02),
    "AdamW, rate in a tensor": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.02)),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "our AdamW": lambda ps: optim.AdamW(ps, lr=0.02),
}
every_optimizer = pytest.mark.parametrize("kind", MAKERS)
METHODS = {"belay": BELAY, "ema": EMA, "schedule-free": tb.methods.schedule_free(0.9)}


class Run:
    def __init__(self, kind: str, method: Any, **options: Any) -> None:
        self.model = mlp().to(WHERE)
        self.optimizer = MAKERS[kind](self.model.parameters())
        self.belay = tb.Belay(self.model, self.optimizer, method, **options)

    def numbers(self) -> dict[str, Any]:
        return everything(model=self.model, optimizer=self.optimizer, belay=self.belay)


@every_optimizer
@pytest.mark.parametrize("how", METHODS)
@pytest.mark.parametrize("order", ["the average first", "the optimizer first"])
def test_both_orders_of_loading_give_what_was_saved(kind: str, how: str, order: str) -> None:
    saved, resumed = Run(kind, METHODS[how]), Run(kind, METHODS[how])
    train(saved.model, saved.optimizer, 4)
    weights, states = saved.model.state_dict(), get_optimizer_state_dict(saved.model, saved.optimizer)
    states = copy.deepcopy(states)
    resumed.model.load_state_dict(weights)
    for part in ("belay", "optimizer") if order == "the average first" else ("optimizer", "belay"):
        if part == "belay":
            resumed.belay.load_state_dict(saved.belay.state_dict())
        else:
            set_optimizer_state_dict(resumed.model, resumed.optimizer, states)
    assert different(resumed.numbers(), saved.numbers()) == []
    for run in (saved, resumed):
        train(run.model, run.optimizer, 2, first=4)
    assert different(resumed.numbers(), saved.numbers()) == []


@every_optimizer
@pytest.mark.filterwarnings("ignore:the weights have changed, but no step was seen")
def test_asking_for_the_state_of_a_new_optimizer_counts_nothing(kind: str) -> None:
    run = Run(kind, BELAY)
    with torch.no_grad():
        for p in run.model.parameters():
            p += 1  # weights loaded after construction, so that the average is elsewhere
    weights, average = copies(run.model.parameters()), run.belay.average_state_dict()
    get_optimizer_state_dict(run.model, run.optimizer)
    assert run.belay.step == 0
    assert all(map(same, copies(run.model.parameters()), weights))
    assert different(run.belay.average_state_dict(), average) == []


@pytest.mark.parametrize("options", [{"start": 1}, {"on_nonfinite": "raise"}, {"impl": "triton"}], ids=str)
def test_it_does_not_begin_an_average_either(options: dict[str, Any]) -> None:
    run = Run("our AdamW", BELAY, **options)
    get_optimizer_state_dict(run.model, run.optimizer)
    assert run.belay.step == 0
    train(run.model, run.optimizer, 3)
    assert run.belay.step == 3


@every_optimizer
def test_a_warm_up_step_at_rate_zero_counts(kind: str) -> None:
    run = Run(kind, BELAY)
    rate = run.optimizer.param_groups[0]["lr"]
    run.optimizer.param_groups[0]["lr"] = 0 * rate
    train(run.model, run.optimizer, 1)
    run.optimizer.param_groups[0]["lr"] = rate
    train(run.model, run.optimizer, 1, first=1)
    assert run.belay.step == 2


def test_zero_gradients_at_a_rate_or_with_a_state_count() -> None:
    run = Run("AdamW", BELAY)
    for p in run.model.parameters():
        p.grad = torch.zeros_like(p)
    run.optimizer.step()  # a rate that is not 0
    run.optimizer.param_groups[0]["lr"] = 0.0
    run.optimizer.step()  # a state that is there already
    assert run.belay.step == 2


def test_one_group_with_a_rate_counts() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.0}, {"params": model[1].parameters()}])
    belay = tb.Belay(model, optimizer, EMA)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert belay.step == 1
