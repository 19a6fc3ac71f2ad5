"""A warning if another optimizer trains the weights after the last step that was seen, and none in any other case."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.optim.optimizer import _global_optimizer_post_hooks

import torchbelay as tb
from helpers.small import BELAY, EMA, mlp, train
from torchbelay.belay import takeover

WARNED = r"another optimizer \(\w+\) has stepped the weights \d+ times since the last step of the SGD"


def trained(method: tb.methods.Method = EMA) -> tuple[nn.Module, torch.optim.Optimizer, tb.Belay]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, method)
    train(model, optimizer, 3)
    return model, optimizer, belay


USES: dict[str, Callable[[tb.Belay], object]] = {
    "export": lambda belay: belay.average_state_dict(),
    "state": lambda belay: belay.state_dict(),
    "block": lambda belay: belay.averaged().__enter__(),
}
OTHERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "some weights": lambda model: torch.optim.SGD([*model.parameters()][-1:], lr=0.01),
    "ours": lambda model: tb.optim.SGD(model.parameters(), lr=0.01),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("other", OTHERS)
def test_another_optimizer_that_takes_over_is_noticed_once(use: str, other: str) -> None:
    model, _, belay = trained()
    train(model, OTHERS[other](model), 20)
    with pytest.warns(tb.BelayWarning, match=WARNED):
        USES[use](belay)
    if use != "block":
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            USES[use](belay)


@pytest.mark.filterwarnings("error")
def test_a_belay_for_the_other_optimizer_is_the_cure() -> None:
    model, _, belay = trained()
    other = torch.optim.SGD(model.parameters(), lr=0.01)
    second = tb.Belay(model, other, EMA)
    second.load_state_dict(belay.state_dict())
    train(model, other, 20)
    assert second.step == 23
    second.average_state_dict()


def test_a_parameter_that_the_other_optimizer_gets_later_counts() -> None:
    model, _, belay = trained()
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.01)
    train(model, other, 20)
    belay.state_dict()
    other.add_param_group({"params": list(model.parameters())})
    train(model, other, 20)
    with pytest.warns(tb.BelayWarning, match=WARNED):
        belay.state_dict()


def test_a_list_of_parameters_that_is_replaced_counts() -> None:
    model, _, belay = trained()
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.01)
    train(model, other, 1)
    other.param_groups[0]["params"] = list(model.parameters())
    train(model, other, 20)
    with pytest.warns(tb.BelayWarning, match=WARNED):
        belay.state_dict()


# No reason to warn ----------------------------------------------------------------------------------------------------


def blocks(model: nn.Module, belay: tb.Belay) -> None:
    for _ in range(30):
        with belay.averaged():
            pass


def other_network(model: nn.Module, belay: tb.Belay) -> None:
    other = mlp()
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), 20)


def many_writes(model: nn.Module, belay: tb.Belay) -> None:
    with torch.no_grad():
        for p in model.parameters():
            for _ in range(600):
                p.mul_(1)


def reset(model: nn.Module, belay: tb.Belay) -> None:
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), 20)
    belay.reset()


def loaded(model: nn.Module, belay: tb.Belay) -> None:
    state = belay.state_dict()
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), 20)
    belay.load_state_dict(state)


def copied(model: nn.Module, belay: tb.Belay) -> None:
    belay.copy_to_model()


LIVES: dict[str, Callable[[nn.Module, tb.Belay], object]] = {
    "nothing": lambda model, belay: None,
    "many blocks": blocks,
    "another network": other_network,
    "many writes": many_writes,
    "a few steps of another": lambda model, belay: train(model, torch.optim.SGD(model.parameters(), lr=0.01), 3),
    "reset": reset,
    "a state loaded": loaded,
    "the average copied": copied,
    "a cast and back": lambda model, belay: model.double().float(),
    "weights loaded": lambda model, belay: model.load_state_dict(model.state_dict()),
}


@pytest.mark.parametrize("method", [EMA, BELAY], ids=["ema", "belay"])
@pytest.mark.parametrize("life", LIVES)
@pytest.mark.filterwarnings("error")
def test_ordinary_life_is_no_reason_to_warn(life: str, method: tb.methods.Method) -> None:
    model, optimizer, belay = trained(method)
    for _ in range(5):
        LIVES[life](model, belay)
        belay.average_state_dict()
        train(model, optimizer, 1)


@pytest.mark.filterwarnings("error")
def test_two_optimizers_that_take_turns_are_usual_from_the_second_turn_on() -> None:
    model, optimizer, belay = trained()
    other = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        train(model, other, 20)
        train(model, optimizer, 1)
    train(model, other, 20)
    belay.average_state_dict()


@pytest.mark.filterwarnings("error")
def test_an_optimizer_that_holds_frozen_weights_does_not_step_them() -> None:
    model, _, belay = trained()
    head = nn.Linear(1, 1)
    other = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)
    for p in model.parameters():
        p.grad = None
    for _ in range(20):
        head(torch.ones(2, 1)).sum().backward()
        other.step()
    belay.average_state_dict()


class Wrapping(torch.optim.SGD):
    """A step of this optimizer is many of another one's, which has the same weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.inner = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(self, closure: Any = None) -> None:
        for _ in range(20):
            self.inner.step()


@pytest.mark.parametrize("follow", ["outer", "inner"])
@pytest.mark.filterwarnings("error")
def test_steps_inside_a_step_belong_to_it(follow: str) -> None:
    model = mlp()
    outer = Wrapping(model)
    belay = tb.Belay(model, outer if follow == "outer" else outer.inner, EMA)
    train(model, outer, 3)
    assert belay.step == (3 if follow == "outer" else 60)
    belay.average_state_dict()


@pytest.mark.filterwarnings("error")
def test_who_steps_by_hand_may_do_so_now_and_then() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, None, EMA)
    train(model, optimizer, 1)
    belay.update()
    train(model, optimizer, 20)
    belay.average_state_dict()


@pytest.mark.filterwarnings("error")
def test_a_detached_belay_does_not_look() -> None:
    model, optimizer, belay = trained()
    belay.detach()
    train(model, optimizer, 20)
    belay.average_state_dict()


# The hook -------------------------------------------------------------------------------------------------------------


def test_without_a_belay_torch_has_no_hook_of_ours() -> None:
    ours = [hook for hook in _global_optimizer_post_hooks.values() if hook.__module__ == "torchbelay.belay.takeover"]
    belays = [trained()[2], trained()[2]]
    for left in (2, 1, 0):
        now = [hook for hook in _global_optimizer_post_hooks.values() if hook.__module__ == "torchbelay.belay.takeover"]
        assert len(now) == (1 if left or ours else 0)
        if left:
            belays.pop().detach()


def test_optimizers_that_share_nothing_are_not_counted_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one optimizer per parameter, each step would ask all others."""
    model = mlp()
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    belay = tb.Belay(model, optimizers, EMA)
    asked: list[object] = []
    monkeypatch.setattr(takeover.Takeover, "count", lambda self, optimizer: asked.append(optimizer))
    for p, optimizer in zip(model.parameters(), optimizers, strict=True):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert asked == []
    belay.detach()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_another_optimizer_is_compiled_as_without_a_belay(backend: str) -> None:
    breaks = []
    for with_belay in (False, True):
        belay = trained()[2] if with_belay else None
        model = mlp()
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        expected = [p.detach() - 0.1 for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        torch._dynamo.reset()
        counters.clear()
        torch.compile(other.step, backend=backend)()
        breaks.append((dict(counters["graph_break"]), counters["stats"]["unique_graphs"]))
        for p, e in zip(model.parameters(), expected, strict=True):
            assert torch.equal(p, e)
        if belay is not None:
            belay.detach()
    assert breaks[0] == breaks[1]
